"""Tables of times, ratios and peak memory: `python -m benchmarks`.

Conversions are compared with `cp` and `sync` of the output, because ckpt's output is on disk when it returns. Caches
are warm, except in `cold` and `disk`, and ckpt is compiled to bytecode. `plans`, `many` and `huge` run each command
once. In the other sections a time is the median over the rounds, and a ratio the median over the rounds' ratios.
"""

from __future__ import annotations

import argparse
import compileall
import os
import platform
import sys
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path

from benchmarks import (
    cold,
    dcp,
    disk,
    floors,
    hashing,
    huge,
    load,
    lora,
    many,
    megatron,
    plans,
    processes,
    quantized,
    readme,
    release,
    reshard,
    small,
    stores,
    universal,
    values,
    zero,
)
from benchmarks.measure import CKPT, Case, rounds
from benchmarks.runner import Bench
from ckpt.base.text import pluralize

SECTIONS = {
    "zero": zero,
    "cold": cold,
    "reshard": reshard,
    "universal": universal,
    "dcp": dcp,
    "load": load,
    "lora": lora,
    "megatron": megatron,
    "hash": hashing,
    "plans": plans,
    "small": small,
    "values": values,
    "stores": stores,
    "processes": processes,
    "quantized": quantized,
    "floors": floors,
}
NAMED_ONLY = {"disk": disk, "huge": huge, "many": many, "release": release}
ALL = SECTIONS | NAMED_ONLY
#: Sections that run each command once, whatever `--rounds` says.
ONCE = {"plans", "many", "huge"}

_SHORT = readme.RESULTS.relative_to(Path(__file__).parents[1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="SECTION",
        help=f"one of {', '.join(ALL)} (default: all but {', '.join(NAMED_ONLY)})",
    )
    parser.add_argument("--folder", type=Path, default=Path("/tmp/ckpt-benchmarks"), help="folder for checkpoints")
    parser.add_argument("--layers", type=int, default=28, help="28 layers are 0.43 billion parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="keep the source checkpoints for the next run")
    parser.add_argument(
        "--large", action="store_true", help="zero: also measure memory for a checkpoint three times larger"
    )
    parser.add_argument("--record", action="store_true", help=f"also replace these sections in {_SHORT}")
    parser.add_argument("--readme", action="store_true", help=f"copy the figures from {_SHORT} to the pages, then exit")
    options = parser.parse_args()
    if not sys.flags.safe_path and not Path("ckpt").is_dir():
        parser.error("run it from the checkout")
    if options.readme:
        readme.write()
        return
    if unknown := set(options.sections) - set(ALL):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")

    for package in ("ckpt", "converters"):  # like an installer, so no run compiles its imports
        compileall.compile_dir(package, quiet=1)
    chosen = [name for name in ALL if name in (options.sections or SECTIONS)]
    bench = Bench(options.folder, options.layers, options.rounds, options.keep)
    measured: dict[str, str] = {}

    def say(name: str, text: str, day: str) -> None:
        measured[name] = f"{day}\n{text}"
        print(f"\n{readme.headed(name)}\n{measured[name]}", flush=True)

    for position, name in enumerate(chosen):
        measure = partial(zero.measure, large=options.large) if name == "zero" else ALL[name].measure
        later = {kind for other in chosen[position + 1 :] for kind in ALL[other].SOURCES}
        try:
            day = _day(1 if name in ONCE else options.rounds)
            say(name, str(measure(bench)), day)
        finally:
            bench.clear(sources=[kind for kind in ALL[name].SOURCES if kind not in later])
    if "zero" in chosen:
        started = rounds([Case("ckpt --help", [*CKPT, "--help"])], options.rounds)["ckpt --help"]
        told = f"ckpt --help: {started.seconds:.2f} s, {started.cpu_seconds:.2f} s of cpu, {started.peak_mb:.0f} MB"
        say("help", told, _day(options.rounds))
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")
    if options.record:
        readme.RESULTS.write_text(readme.recorded(readme.RESULTS.read_text(), measured))


def _day(num_rounds: int) -> str:
    day = datetime.now(timezone.utc).strftime("%d %B %Y").lstrip("0")
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    load = f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}"
    return f"{day}, {load}, {pluralize(num_rounds, 'round')}, {versions}"


if __name__ == "__main__":
    main()
