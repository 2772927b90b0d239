"""Runs with `tests.support.fsdp_worker`."""

from pathlib import Path

from tests.support.engines import fork
from tests.support.kept import make_once


def run_ranks(kind: str, num_ranks: int, folder: Path) -> None:
    """Run all ranks of one run to the end. Raise AssertionError with the output if a rank fails."""
    module = "tests.support.fsdp_worker"

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        fork([(num_ranks, module, [kind, str(folder)])], timeout=300)

    make_once(folder, (module,), f"{num_ranks} {kind}", make)
