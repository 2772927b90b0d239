"""`python -m tests.faults [--seed N] [--cases N]`: the whole campaign; exit code 1 if any case ended wrong."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.faults.campaign import campaigns


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the same seed makes the same cases")
    parser.add_argument("--cases", type=int, default=10_500, help="about how many, in all")
    parser.add_argument("--processes", type=int, default=2, help="how many share them")
    given = parser.parse_args()
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(prefix="faults-", dir=memory if os.path.isdir(memory) else None) as folder:
        report = campaigns(Path(folder), given.seed, given.cases, given.processes)
    print(f"seed {given.seed}, {given.processes} processes", *report.lines(), sep="\n")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
