"""`ckpt check --values` against `cat` of the same files to /dev/null, both from the page cache.

A small model's time is subtracted from a large model's, so program start does not count.
"""

from __future__ import annotations

from statistics import median

from benchmarks.measure import CKPT, Case
from benchmarks.runner import Bench, Goal, Table, verdict

SMALL, LARGE = 4, 60  # layers; the models differ by 1.7 GB
SOURCES = ("hf",)
AT_LEAST, AT_MOST_MB = 0.9, 300


def measure(bench: Bench) -> Table:
    cases = {}
    for size, layers in (("small", SMALL), ("large", LARGE)):
        source = bench.source("hf", layers)
        cases["cat", size] = Case(f"cat, {size}", ["sh", "-c", 'cat "$0"/* > /dev/null', source])
        command = [*CKPT, "check", source, "--values", "-q"]
        cases["values", size] = Case(f"ckpt check --values, {size}", command)
    measured = bench.rounds(list(cases.values()))
    seconds = {key: [run.seconds for run in measured[case.name].runs] for key, case in cases.items()}
    cat, values = (
        [large - small for large, small in zip(seconds[name, "large"], seconds[name, "small"], strict=True)]
        for name in ("cat", "values")
    )
    speeds = [one / other for one, other in zip(cat, values, strict=True)]
    peak = measured[cases["values", "large"].name].peak_mb
    return Table(
        f"Every value of models in bf16 of {SMALL} and of {LARGE} layers, read from the page cache",
        measured,
        [Goal(cases["values", "large"].name, cases["cat", "large"].name)],
        [
            f"without the start, {median(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f}) of cat's speed "
            f"{verdict(median(speeds) >= AT_LEAST, f'>= {AT_LEAST}')}",
            f"peak memory {peak:.0f} MB {verdict(peak <= AT_MOST_MB, f'<= {AT_MOST_MB} MB')}",
        ],
    )
