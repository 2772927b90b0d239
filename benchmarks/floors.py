"""Floors of missed goals: each goal's reference, beside bare programs that only do what the output needs.

They have no check, plan, proof, journal or manifest. If a bare program misses a goal, ckpt can't reach it by being
simpler. If it reaches the goal, the goal is possible.
"""

from __future__ import annotations

import filecmp
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks import plans, processes, small, stores, universal, zero
from benchmarks.lora import TIMES as LORA_TIMES
from benchmarks.measure import CKPT, PYTHON, Case, Measured, Run, call, copy_of, parallel_copy_of, remove, run
from benchmarks.models import STEP
from benchmarks.runner import Bench, Goal, Table

SOURCES = ()  # each part removes its own
COLD_TIMES = 2  # times the other sections' layers
#: Most rounds of slow parts.
_ROUNDS = {"cold": 3, "small": 3, "lora": 3, "universal": 2, "processes": 2, "plans": 1}
FEW, ONE_CORE = "ckpt, few large tensors", "ckpt, one process on one core"
UNLOCKED = "obstore writes, no lock"


@dataclass(frozen=True)
class Floor(Goal):
    """A bare program and the goal that ckpt misses."""

    def _verdict(self, factor: float, goal: str) -> str:
        return f" {judged(self._reached(factor), goal)}"


def judged(reached: bool, goal: str) -> str:
    """Return the goal, in words that no other verdict uses."""
    return f"(goal {goal}: {'the bare program reaches it' if reached else 'even the bare program misses it'})"


@dataclass(frozen=True)
class Part:
    """The floor of one section's goals."""

    measured: Mapping[str, Measured]
    floors: Sequence[Floor]
    notes: Sequence[str] = ()


def measure(bench: Bench) -> Table:
    found: list[Part] = []
    for name, (part, sources) in PARTS.items():
        found.append(part(replace(bench, num_rounds=min(bench.num_rounds, _ROUNDS.get(name, bench.num_rounds)))))
        bench.clear(sources=sources)
    fewer = ", ".join(f"{most} for {name}" for name, most in _ROUNDS.items() if most < bench.num_rounds)
    return Table(
        f"Bare programs against goals that were missed{f', fewer rounds for some ({fewer})' if fewer else ''}",
        {name: one for part in found for name, one in part.measured.items()},
        [floor for part in found for floor in part.floors],
        [note for part in found for note in part.notes],
    )


def _zero(bench: Bench) -> Part:
    source = bench.source("zero3")
    spans, output, peer = (bench.scratch(f"floors-{name}") for name in ("spans", "output", "peer"))
    call("benchmarks.zero_spans", source / f"global_step{STEP}", spans)
    synced, kept_dirty = "zero: spans copied, synced meanwhile", "zero: spans copied, not synced"
    measured = bench.rounds(
        [
            zero.by_peer(source, peer),
            parallel_copy_of(synced, spans / "spans.json", output, sync="meanwhile"),
            parallel_copy_of(kept_dirty, spans / "spans.json", output, sync="never"),
        ]
    )
    same = call("benchmarks.equal", "safetensors", output, peer)
    floors = [Floor(name, zero.PEER, at_least=5) for name in (synced, kept_dirty)]
    return Part(measured, floors, [f"zero: {same} tensors are those that {zero.PEER} wrote"])


def _universal(bench: Bench) -> Part:
    source = bench.source("zero3")
    peer, copy = bench.scratch("floors-universal"), bench.scratch("floors-copy")
    cp, bare = "universal: cp -r of the output", "universal: output copied, not synced"
    case = parallel_copy_of(bare, peer, copy, sync="never")
    measured = bench.rounds([universal.by_peer(source, peer, (copy,)), copy_of(cp, peer, copy), case])
    run(case)  # the peer's last run may have removed the copy
    same = call("benchmarks.equal", "universal", copy / universal.UNIVERSAL, peer / universal.UNIVERSAL)
    floors = [Floor(name, universal.PEER, at_least=10) for name in (cp, bare)]
    return Part(measured, floors, [f"universal: {same} tensors are those that {universal.PEER} wrote"])


def _cold(bench: Bench) -> Part:
    source, spans, kept, output = (bench.scratch(f"floors-{name}") for name in ("masters", "spans", "kept", "output"))
    call("benchmarks.zero_source", source, bench.num_layers * COLD_TIMES, "masters")
    call("benchmarks.zero_spans", source / f"global_step{STEP}", spans)
    run(parallel_copy_of("first", spans / "spans.json", kept))  # the copies need files
    size = f"{sum(path.stat().st_size for path in kept.iterdir()) / 1e9:.1f} GB"
    cp, bare = f"cp of a cold file, {size}", f"cold: spans copied, synced, {size}"
    measured = bench.rounds(
        [
            copy_of(cp, kept, output, cold=(kept,)),
            parallel_copy_of(bare, spans / "spans.json", output, cold=(source,)),
        ]
    )
    same = call("benchmarks.equal", "zero3-hf", kept, source / f"global_step{STEP}")
    note = f"cold: {same} tensors are the masters, put together by DeepSpeed's rule"
    return Part(measured, [Floor(bare, cp, at_most=1.0)], [note])


def _small(bench: Bench) -> Part:
    sources = small.sources(bench)
    ours, *outputs = (bench.scratch(f"floors-{name}") for name in ("ckpt", "few", "many"))
    bare = ("small: few, copied and hashed", "small: 18,867, copied and hashed")
    command = [PYTHON, "-m", "benchmarks.bare_small"]
    measured = bench.rounds(
        [
            small.converted(FEW, sources[0], ours),
            *(Case(name, [*command, *pair], (pair[1],)) for name, *pair in zip(bare, sources, outputs, strict=True)),
        ]
    )
    same = [call("benchmarks.equal", "safetensors", *pair) for pair in zip(sources, outputs, strict=True)]
    few, many = (measured[name] for name in bare)
    rounds = zip(measured[FEW].runs, few.runs, many.runs, strict=True)
    floor = Floor(bare[1], FEW, at_most=1.2)
    more = floor.said([1 + (b.seconds - a.seconds) / ours.seconds for ours, a, b in rounds])
    cpu = many.cpu_seconds - few.cpu_seconds
    return Part(
        measured,
        [floor],
        [
            f"small: {FEW} and the bare program's {cpu:.2f} s of cpu more for 18,867: {more}",
            f"small: {' and '.join(same)} tensors are those of the source",
        ],
    )


def _lora(bench: Bench) -> Part:
    source = bench.source("lora", LORA_TIMES * bench.num_layers)
    base, adapter = source / "base", source / "adapter"
    ours, output, copy = (bench.scratch(f"floors-{name}") for name in ("ckpt", "merged", "copy"))
    cp, bare = "cp -r of the base", "lora: merged in two threads"
    command = [PYTHON, "-m", "benchmarks.bare_lora", base, adapter, output]
    measured = bench.rounds([copy_of(cp, base, copy), Case(bare, command, (output,))])
    run(Case("ckpt", [*CKPT, "merge-lora", adapter, "--base", base, "-q", "-o", ours]))
    same = call("benchmarks.equal", "safetensors", output, ours)
    return Part(measured, [Floor(bare, cp, at_most=1.6)], [f"lora: {same} tensors are those of ckpt merge-lora"])


def _plans(bench: Bench) -> Part:
    folder = plans.source_of(bench, "fsdp") / "iter_0000002"
    kinds = {"plans: torch's reader, sorted items": "torch", "plans: pickle, sorted items": "plain"}
    command = [PYTHON, "-m", "benchmarks.bare_items", folder]
    measured = bench.rounds([Case(name, [*command, kind]) for name, kind in kinds.items()])
    goal = plans.goals(plans.MILLION)[0]
    return Part(
        measured,
        [],
        [
            f"{name}: {one.cpu_seconds:.1f} s of cpu {judged(one.cpu_seconds <= goal, f'<= {goal:g} s')}"
            for name, one in measured.items()
        ],
    )


def _stores(bench: Bench) -> Part:
    source = bench.source("hf")
    files = sorted(path for path in source.rglob("*") if path.is_file())
    with stores.serving(source.parent):
        seconds = stores.timed_transfers(bench, source.name, ["obstore writes", UNLOCKED])
    same = [filecmp.cmp(stores.OUTPUT / str(number), path, shallow=False) for number, path in enumerate(files)]
    assert all(same), "obstore wrote other bytes"
    remove([stores.OUTPUT])
    share = stores.throughput(seconds, UNLOCKED, "obstore writes")
    verdict = judged(share >= stores.SHARE, f">= {stores.SHARE}")
    return Part({}, [], [f"stores: {UNLOCKED}, at {share:.2f} x the throughput of obstore writes {verdict}"])


def _processes(bench: Bench) -> Part:
    source, output = processes.FOLDER / "source", processes.FOLDER / "out"
    nothing = "processes: torchrun of nothing"
    try:
        call("benchmarks.zero_source", source, bench.num_layers * processes.TIMES, "zeros")
        measured = bench.rounds(
            [
                Case(ONE_CORE, [*processes.ON_ONE_CORE, *processes.converted(source, output)], (output,)),
                Case(nothing, [*processes.BY_TORCHRUN, "--no-python", PYTHON, "-c", "pass"]),
            ]
        )
    finally:
        remove([processes.FOLDER])
    pairs = zip(measured[ONE_CORE].runs, measured[nothing].runs, strict=True)
    said = Floor(nothing, ONE_CORE, at_least=1.6).said([speed_on_two(*pair) for pair in pairs])
    return Part(measured, [], [f"processes: half of one process on one core, and the start of torchrun: {said}"])


def speed_on_two(one: Run, start: Run) -> float:
    """Return the most that two processes can gain if they share all work but their start."""
    return one.seconds / (one.seconds / 2 + start.seconds)


#: Each part, with the sources that no later part needs.
PARTS: dict[str, tuple[Callable[[Bench], Part], Sequence[str]]] = {
    "zero": (_zero, ()),
    "universal": (_universal, ("zero3",)),
    "cold": (_cold, ()),
    "small": (_small, ()),
    "stores": (_stores, ("hf",)),
    "lora": (_lora, ("lora",)),
    "plans": (_plans, ()),
    "processes": (_processes, ()),
}
