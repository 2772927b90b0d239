"""Starts `tests.support.fsdp_worker` on several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def run_ranks(kind: str, num_ranks: int, folder: Path, timeout: float = 300) -> None:
    """All ranks of one run, to the end.  AssertionError with its output where one fails."""
    folder.mkdir(parents=True, exist_ok=True)
    rendezvous = folder / f"rendezvous-{kind}"
    rendezvous.unlink(missing_ok=True)
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.fsdp_worker", kind]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(num_ranks), str(rendezvous), str(folder)],
            cwd=REPOSITORY,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
