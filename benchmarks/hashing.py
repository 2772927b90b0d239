"""`ckpt hash` against `xxhsum` and `b3sum` on the same files, with digests checked by other readers.

Start-up dominates the smaller checkpoint, so only the larger one has a speed goal. A row names the Python library that
stands in for a missing program.
"""

from __future__ import annotations

from benchmarks.hash_peer import ALGORITHMS, has_library, is_installed
from benchmarks.measure import CKPT, PYTHON, Case, call, run
from benchmarks.models import STEP, num_params
from benchmarks.runner import Bench, Goal, Table

SOURCES = ("zero3", "hf")
_LARGE = "zero3"


def measure(bench: Bench) -> Table:
    missing = [name for name in ALGORITHMS if not is_installed(name)]
    neither = [name for name in missing if not has_library(name)]
    cases, goals, notes = [], [], []
    for kind in SOURCES:
        source = bench.source(kind)
        hashing = Case(f"ckpt hash, {kind}", [*CKPT, "hash", source, "-q"])
        run_by = [PYTHON, "-m", "benchmarks.hash_peer"]
        peers = [Case(f"{_label(name)}, {kind}", [*run_by, name, source]) for name in ALGORITHMS if name not in neither]
        report = bench.scratch(f"hash-{kind}.json")
        run(Case("report", ["sh", "-c", 'exec "$@" >"$0"', report, *hashing.command, "--json"]))
        folder = source / f"global_step{STEP}" if kind == "zero3" else source
        same = call("benchmarks.equal", f"hash-{kind}", report, folder)
        notes.append(f"{kind}: {same} digests are those of the tensors as torch reads them, made by xxhash")
        cases += [hashing, *peers]
        goals += [Goal(hashing.name, peer.name, at_most=2 if kind == _LARGE else None) for peer in peers]
    notes += [
        f"neither {name} nor its library is installed: no comparison with it (pip install {ALGORITHMS[name].library})"
        if name in neither
        else f"{name} is not installed: its algorithm from the library, in one Python process"
        for name in missing
    ]
    return Table(
        f"Digests of ZeRO-3's masters and states and of a model in bf16, {num_params(bench.num_layers) / 1e6:.0f} M"
        " parameters",
        bench.rounds(cases),
        goals,
        notes,
    )


def _label(name: str) -> str:
    return name if is_installed(name) else f"Python {ALGORITHMS[name].library} for {name}"
