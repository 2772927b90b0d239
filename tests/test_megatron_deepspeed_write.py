"""Megatron-DeepSpeed's pipelines, written: DeepSpeed's own pipeline engine loads them and holds the same bits.

Each cell of the matrix is a conversion from files that the engine of one layout saved to another layout.  All that are
written for one layout have the same bytes, whichever layout they are from, and the engine has loaded these bytes.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.checkpoint import Layout
from tests.describing import content
from tests.megatron_runs import without_padding
from tests.pipeline_runs import BASE, BY_NAME, LONG, TAG, Run, load_all, loaded_truth, sample, truth

FORMAT = "megatron-deepspeed"
MATRIX = "Megatron-DeepSpeed: (TP,PP,DP) to (TP,PP,DP), files and loaded engine against the truth"
OTHERS = "Megatron-DeepSpeed, written and loaded by DeepSpeed's engine"
RESUMED = "4 steps, resharded, 4 steps (fp32): loss of each, and of the unbroken run"
LAYOUTS = [(1, 1, 1), (1, 1, 2), (1, 2, 1), (1, 2, 2), (2, 1, 1), (2, 1, 2), (2, 2, 1)]
#: Sums in another order, over four steps of fp32.
BOUND = 1e-5


def layout_of(run: Run) -> Layout:
    return Layout(world_size=run.ranks, tp=run.tp, pp=run.pp)


def write(source: Path, target: Path, layout: Layout, to: str = FORMAT, **options: Any) -> Path:
    ckpt.plan(ckpt.open(source, **options), to, layout).run(target)
    return target


@dataclass(frozen=True)
class Load:
    """A run that is written for another layout, by way of the formats `via`, and loaded."""

    source: str
    run: Run
    via: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return " via ".join([self.run.layout, *self.via])


def _to(source: str, tp: int = 1, pp: int = 1, via: tuple[str, ...] = (), **options: Any) -> Load:
    run = BY_NAME[source]
    return Load(source, Run(f"{source}-loaded", run.model, tp, pp, options={**run.options, **options}), via)


LOADS = [
    _to("llama", pp=4),
    _to("llama", tp=4),
    _to("llama-odd", pp=2),
    _to("llama-fp16", pp=4),
    _to("llama-fp16", tp=2, pp=1),
    _to("qwen2-tp"),
    _to("gpt_neox", pp=2),
    # Other formats write a vocabulary that is padded to 128 rows anew.
    _to("qwen2-tp", tp=2, via=("zero3",), vocab_multiple=128),
    _to("llama", pp=2, via=("universal", "zero2"), vocab_multiple=128),
    _to("llama-fp16", pp=2, via=("dcp",), vocab_multiple=128, scheduler="none"),
    _to("gpt_neox", tp=2, pp=2, via=("megatron",)),
]


@dataclass(frozen=True)
class Loaded:
    """Everything that was written, and what came of it: folders by layout or number."""

    written: dict[tuple[int, int, int], Path] = field(default_factory=dict)
    matrix: dict[tuple[int, int, int], Path] = field(default_factory=dict)
    others: list[tuple[Path, Path]] = field(default_factory=list)
    resumed: dict[tuple[int, int, int], Path] = field(default_factory=dict)
    megatron: list[tuple[Path, Path]] = field(default_factory=list)


RESUMES = [(1, 2, 2), (2, 1, 2), (1, 1, 4), (2, 2, 1)]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """One launch per number of ranks for all that is written here."""
    folder = Path(tempfile.mkdtemp(prefix="written-", dir=sample("base").parent))
    found, loads = Loaded(), []
    for sizes in LAYOUTS:
        tp, pp, dp = sizes
        run = replace(BASE, name="matrix", tp=tp, pp=pp, dp=dp)
        found.written[sizes] = write(sample("base"), folder / f"base-{tp}{pp}{dp}", layout_of(run))
        loads.append((run, found.written[sizes], 0))
    for number, load in enumerate(LOADS):
        source = sample(load.source)
        for step, to in enumerate(load.via):
            source = write(source, folder / f"via-{number}-{step}", Layout(), to)
        loads.append((load.run, write(source, folder / f"other-{number}", layout_of(load.run)), 0))
    for sizes in RESUMES:
        run = replace(LONG, tp=sizes[0], pp=sizes[1], dp=sizes[2])
        loads.append((run, write(sample("long"), folder / f"long-{sizes}", layout_of(run), tag="global_step4"), 4))
    outputs = load_all(loads, folder)
    found.matrix.update(zip(LAYOUTS, outputs, strict=False))
    rest = outputs[len(LAYOUTS) :]
    written = [path for _, path, _ in loads[len(LAYOUTS) :]]
    found.others.extend(list(zip(written, rest, strict=True))[: len(LOADS)])
    found.resumed.update(zip(RESUMES, rest[len(LOADS) :], strict=True))
    return found


def digests(folder: Path) -> dict[str, str]:
    """Of the files of the step, by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((folder / TAG).iterdir())}


@pytest.mark.slow
@pytest.mark.parametrize("target", LAYOUTS, ids=str)
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_every_layout_to_every_layout(
    source: tuple[int, int, int], target: tuple[int, int, int], loaded: Loaded, tmp_path: Path, tables: Any
) -> None:
    expected, held = truth("base"), loaded_truth(loaded.matrix[target])
    assert held.tensors == expected.tensors
    assert (held.ties, held.metadata["step"]) == (expected.ties, expected.metadata["step"])
    assert held.metadata["adam_step"] == expected.metadata["adam_step"]
    tp, pp, dp = target
    output = write(loaded.matrix[source], tmp_path / "out", Layout(world_size=tp * pp * dp, tp=tp, pp=pp))
    checkpoint = ckpt.open(output)
    assert {key: content(tensor) for key, tensor in checkpoint.tensors.items()} == expected.tensors
    assert checkpoint.world_size == tp * pp * dp
    assert digests(output) == digests(loaded.written[target])
    tables[MATRIX][f"{source[0]},{source[1]},{source[2]}"][f"{tp},{pp},{dp}"] = f"{len(held.tensors)} equal"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LOADS)), ids=[f"{one.source} to {one.title}" for one in LOADS])
def test_the_engine_loads_what_is_written(number: int, loaded: Loaded, tables: Any) -> None:
    load, expected, held = LOADS[number], truth(LOADS[number].source), loaded_truth(loaded.others[number][1])
    assert without_padding(held) == without_padding(expected)
    assert held.ties == expected.ties
    for name in ("step", "adam_step"):
        assert held.metadata[name] == expected.metadata[name]
    if not load.via:
        assert held.metadata["param_groups"] == expected.metadata["param_groups"]
    run = BY_NAME[load.source]
    tables[OTHERS][f"{run.model} {run.layout}"][f"to {load.title}"] = f"{len(held.tensors)} equal"


@pytest.mark.slow
@pytest.mark.parametrize("sizes", RESUMES, ids=str)
def test_training_goes_on(sizes: tuple[int, int, int], loaded: Loaded, tables: Any) -> None:
    whole, rest = losses(sample("long")), losses(loaded.resumed[sizes])
    assert sorted(rest) == [5, 6, 7, 8]
    apart = max(abs(rest[step] - whole[step]) / whole[step] for step in rest)
    cells = tables[RESUMED][f"{LONG.model} 2,2,1 to {','.join(map(str, sizes))}"]
    for step, loss in rest.items():
        cells[f"step {step}"] = f"{loss:.6f} {whole[step]:.6f}"
    cells["relative"] = f"{apart:.1e}" if apart else "equal"
    assert apart == 0 if sizes == (2, 2, 1) else apart < BOUND


def losses(run: Path) -> dict[int, float]:
    lines = (json.loads(line) for line in (run / "losses.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}
