"""`ckpt check --values` against `cat` of the same files to /dev/null, both from the page cache.

The goal is one of reading: the time that `ckpt check` takes without `--values`, mostly its start, is subtracted.
"""

from __future__ import annotations

from statistics import median

from benchmarks.measure import CKPT, Case
from benchmarks.runner import Bench, Goal, Table, verdict

LAYERS = 50  # 1.5 GB
SOURCES = ("hf",)
AT_LEAST, AT_MOST_MB = 0.9, 300


def measure(bench: Bench) -> Table:
    source = bench.source("hf", LAYERS)
    cat = Case("cat", ["sh", "-c", 'cat "$0"/* > /dev/null', source])
    start = Case("ckpt check", [*CKPT, "check", source, "-q"])
    values = Case("ckpt check --values", [*CKPT, "check", source, "--values", "-q"])
    measured = bench.rounds([cat, start, values])
    runs = (measured[case.name].runs for case in (cat, values, start))
    speeds = [one.seconds / (other.seconds - first.seconds) for one, other, first in zip(*runs, strict=True)]
    peak = measured[values.name].peak_mb
    return Table(
        "Every value of a model in bf16, 1.5 GB, read from the page cache",
        measured,
        [Goal(values.name, cat.name)],
        [
            f"without its start, {median(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f}) of cat's speed "
            f"{verdict(median(speeds) >= AT_LEAST, f'>= {AT_LEAST}')}",
            f"peak memory {peak:.0f} MB {verdict(peak <= AT_MOST_MB, f'<= {AT_MOST_MB} MB')}",
        ],
    )
