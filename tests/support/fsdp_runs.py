"""Runs of `tests.support.fsdp_worker`."""

from pathlib import Path

from tests.support.engines import fork


def run_ranks(kind: str, num_ranks: int, folder: Path) -> None:
    """All ranks of one run, to the end.  AssertionError with its output where one fails."""
    folder.mkdir(parents=True, exist_ok=True)
    fork([(num_ranks, "tests.support.fsdp_worker", [kind, str(folder)])], timeout=300)
