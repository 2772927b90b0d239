"""Runs of `tests.support.fsdp_worker`."""

from pathlib import Path

from tests.support.engines import fork
from tests.support.kept import make_once


def run_ranks(kind: str, num_ranks: int, folder: Path) -> None:
    """All ranks of one run, to the end.  AssertionError with its output where one fails."""
    module = "tests.support.fsdp_worker"

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        fork([(num_ranks, module, [kind, str(folder)])], timeout=300)

    make_once(folder, (module,), f"{num_ranks} {kind}", make)
