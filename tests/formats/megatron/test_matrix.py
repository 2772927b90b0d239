"""`converters/megatron/write.py`, `optimizer_write.py`, `dist/write.py`, `dist/read.py`: all conversions.

Megatron's formats convert to each other, the Hub and other engines, by architecture and layout. Results match
megatron-core's gathered state, and unmodified megatron-core loads them. tests/names/test_megatron.py compares logits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.plan.checkpoint import BUFFER, HUB, MASTER, MEGATRON, TRANSFORMERS, WEIGHT, Checkpoint, Key, Layout
from ckpt.state.naming import to_namespace
from tests.support import sampling
from tests.support.describing import content
from tests.support.engines import Truth
from tests.support.megatron_runs import (
    ALL_RUNS,
    BY_NAME,
    COUNTED,
    ETP1,
    PLAIN,
    RUNS,
    SEQUENCE,
    UNEVEN,
    Run,
    check_read,
    launch,
    sample,
    scratch,
    truth,
    without_padding,
    without_rounded,
)
from train.config import ARCHITECTURES

pytestmark = pytest.mark.slow

Raw = tuple[str, tuple[int, ...], bytes]

READ = "Megatron, read: tensors equal to what megatron-core held, by (TP,PP,EP,VPP)"
WRITTEN = "Megatron, written: tensors equal to what megatron-core held, after the target's engine has loaded them"
SAVED = [(run.name, form) for run in RUNS for form in run.forms if form != "shifted"]


# -- read ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "form"), SAVED, ids=[f"{name} as {form}" for name, form in SAVED])
def test_reads_what_the_engine_held(name: str, form: str, tables: Any) -> None:
    run, folder = BY_NAME[name], sample(name, form)
    checkpoint, expected = ckpt.open(folder), truth(folder)
    assert checkpoint.format == ("megatron" if form == "megatron" else "megatron-dist")
    check_read(checkpoint, without_rounded(expected) if form == "fsdp" else expected)
    ckpt.verify(checkpoint, checkpoint)  # compares replicas
    tables[READ][f"{run.model:<11} {run.layout}"][form] = str(len(expected.tensors))


# -- to the Hub ----------------------------------------------------------------------------------------------
def described(folder: Path, namespace: str, layout: Layout | None = None) -> Checkpoint:
    """Return the truth of a run under the names of `namespace`."""
    path = next(path for path in (folder / "truth").iterdir() if "logits" not in path.name)
    file, held = ckpt.open(path), Truth.load(path)
    tensors = {}
    for (name, _), tensor in file.tensors.items():
        role, _, fqn = name.partition("/")
        tensors[fqn, role] = tensor._replace(fqn=fqn, role=role)
    own = MEGATRON if held.metadata["strategy"] == "megatron" else TRANSFORMERS
    found = replace(file, tensors=tensors, ties=held.ties, namespace=own, config=ckpt.open(folder).config)
    return to_namespace(found, namespace, layout)


def contents(checkpoint: Checkpoint) -> dict[Key, Raw]:
    return {key: content(tensor, checkpoint.computed) for key, tensor in checkpoint.tensors.items()}


@functools.cache
def on_the_hub(name: str, form: str) -> Path:
    folder = scratch() / "hub" / f"{name}-{form}"
    ckpt.plan(ckpt.open(sample(name, form)), "hf").run(folder)
    return folder


#: megatron-core adds multi-token prediction layers to any model, but only one model has them on the Hub.
TO_HUB = sampling.sample(
    [(name, form) for name, form in SAVED if name != "llama-mtp"], lambda saved: (BY_NAME[saved[0]].model, saved[1])
)


@pytest.mark.parametrize(("name", "form"), TO_HUB, ids=[f"{name} as {form}" for name, form in TO_HUB])
def test_the_hub_gets_what_the_engine_held(name: str, form: str, tables: Any) -> None:
    """Includes NVIDIA-NeMo/Megatron-Bridge#1716: experts on four ranks keep their numbers in the whole model."""
    written = {fqn: value for (fqn, _), value in contents(ckpt.open(on_the_hub(name, form), "hf")).items()}
    expected = contents(described(sample(name, form), HUB))
    assert written == {fqn: value for (fqn, role), value in expected.items() if role in (WEIGHT, BUFFER)}
    run = BY_NAME[name]
    tables[READ][f"{run.model:<11} {run.layout}"][f"{form} to hf"] = str(len(written))


# -- written, and loaded by megatron-core --------------------------------------------------------------------
@dataclass(frozen=True)
class Load:
    """A source run, its formats from first to last, and the run that loads the last format."""

    source: str
    way: tuple[str, ...]
    run: Run

    @property
    def form(self) -> str:
        forms = BY_NAME[self.source].forms
        return self.way[0] if self.way[0] in forms else next(form for form in ("buckets", "fsdp") if form in forms)

    @property
    def weights_only(self) -> bool:
        return "hf" in self.way

    @property
    def title(self) -> str:
        return f"{self.run.model:<11} {' -> '.join(self.way)}: {BY_NAME[self.source].layout} to {self.run.layout}"

    def write(self, folder: Path) -> Path:
        """Convert, and return the iteration folder to load."""
        path, before = sample(self.source, self.form), self.way[0]
        for number, format in enumerate(self.way[1:], 1):
            if number == 1 and format == "hf":
                path, before = on_the_hub(self.source, self.form), "hf"
                continue
            last = number == len(self.way) - 1
            layout = layout_of(self.run, before) if last else BETWEEN.get(format, Layout())
            ckpt.plan(ckpt.open(path), format, layout).run(folder / str(number))
            path, before = folder / str(number), format
        return next(one for one in path.iterdir() if one.is_dir())


#: Models that megatron-core builds only from Transformer Engine's layers. The trainer has stand-ins.
HYBRIDS = ("qwen3_next",)
#: Layouts of intermediate formats.
BETWEEN = {"zero3": Layout(world_size=3), "dcp": Layout(world_size=2), "megatron": Layout(tp=1, pp=2, vpp=1)}
STAGES = {
    "decoder_first_pipeline_num_layers": "first_stage_layers",
    "decoder_last_pipeline_num_layers": "last_stage_layers",
    "account_for_embedding_in_pipeline_split": "count_embedding",
    "account_for_loss_in_pipeline_split": "count_loss",
}


def layout_of(run: Run, before: str) -> Layout:
    """Return a layout that `run` can load. Only Megatron's own formats record the layer implementation."""
    stages = {name: run.options[option] for name, option in STAGES.items() if option in run.options}
    impl = None if before.startswith("megatron") or run.model in HYBRIDS else "local"
    etp = run.options.get("etp", run.tp)
    return Layout(tp=run.tp, pp=run.pp, ep=run.ep, vpp=run.vpp, etp=etp, transformer_impl=impl, **stages)


MODELS = {run.name: run.model for run in ALL_RUNS}


def _to(source: str, way: str, tp: int = 1, pp: int = 1, ep: int = 1, vpp: int = 1, **options: Any) -> Load:
    formats = tuple({"m": "megatron", "d": "megatron-dist"}.get(name, name) for name in way.split())
    if any(not name.startswith("megatron") for name in formats):
        options["vocab_multiple"] = 128  # Megatron's default
    return Load(source, formats, Run("loaded", MODELS[source], tp, pp, ep, vpp, options))


MTP = {"mtp_layers": 1}
TWO_CHUNKS = {"pp": 2, "vpp": 2}
ALL_LOADS = [
    # Same format.
    _to("llama", "m m", pp=4),
    _to("llama", "m m", tp=4),
    _to("llama-vpp", "m m", tp=2, pp=2),
    _to("llama-plain", "m m", **TWO_CHUNKS, **PLAIN),
    _to("llama-fp32", "m m", pp=4, **PLAIN, dtype="fp32"),
    _to("llama-buckets", "m m", pp=2, bucket_size=3000),
    _to("llama-uneven", "m m", tp=2, layers=5),
    _to("llama-uneven-vpp", "m m", tp=2, pp=2, layers=10, first_stage_layers=7),
    # A pipeline without chunks between two with chunks.
    _to("llama-uneven-vpp", "m m m", pp=4, vpp=2, layers=10, **UNEVEN),
    _to("llama-counted", "m m", tp=2, **TWO_CHUNKS, **COUNTED),
    _to("llama-mtp", "m m", pp=4, **MTP),
    _to("mistral", "m m", tp=2, pp=2),
    _to("qwen2", "m m"),
    _to("qwen2", "m m", tp=4),
    _to("qwen3", "m m", tp=2),
    _to("qwen3_moe", "m m", tp=2, ep=4, **ETP1),
    _to("qwen3_moe-ep4", "m m", **TWO_CHUNKS, ep=2),
    _to("mixtral", "m m", pp=2, ep=2),
    _to("mixtral-plain", "m m", tp=2, ep=2, **PLAIN, **SEQUENCE),
    _to("gpt2", "m m", tp=2, pp=2),
    _to("gpt_neox", "m m", pp=4, **PLAIN),
    _to("gpt_oss", "m m", tp=2, ep=2, **ETP1),
    _to("deepseek_v3", "m m", pp=2, ep=2, **MTP),
    _to("qwen3_next", "m m", pp=2, ep=2),
    _to("qwen3_next", "d d", tp=2, ep=4, **ETP1),
    _to("deepseek_v3", "d d", pp=2, ep=2, **MTP),
    _to("llama-mtp", "d d", tp=2, **MTP),
    _to("llama", "d d", pp=4),
    _to("llama-vpp", "d d", tp=2, pp=2),
    _to("llama-plain", "d d", **TWO_CHUNKS, **PLAIN),
    _to("llama-fp32-tp4", "d d", pp=2, dtype="fp32"),
    _to("llama-buckets", "d d", tp=4),
    _to("llama-uneven-vpp", "d d", tp=2, pp=2, layers=10, first_stage_layers=7),
    _to("mistral", "d d", tp=2, pp=2),
    _to("qwen2", "d d", tp=4),
    _to("qwen3", "d d", tp=2),
    _to("qwen3_moe", "d d", tp=2, ep=4, **ETP1),
    _to("mixtral", "d d", pp=2, ep=2),
    _to("gpt2", "d d", tp=2, pp=2),
    _to("gpt_neox", "d d", pp=4, **PLAIN),
    _to("gpt_oss", "d d", tp=2, ep=2, **ETP1),
    # Between the two formats.
    _to("llama-uneven-vpp", "m d", pp=2, layers=10),
    _to("mixtral", "m d", tp=2, pp=2, ep=2, **ETP1),
    _to("llama-counted", "d m", tp=2, layers=6),
    _to("qwen3_moe", "d m", **TWO_CHUNKS, ep=2),
    _to("llama-fsdp", "d m", tp=2, pp=2, layers=2),
    _to("mixtral-fsdp", "d d", pp=2, ep=2, layers=2),
    # Through the Hub, with weights only.
    _to("mistral", "m hf m", **TWO_CHUNKS),
    _to("qwen2", "m hf m", tp=2, pp=2),
    _to("qwen3", "m hf m", tp=4),
    _to("qwen3_moe-ep4", "m hf m", tp=2, pp=2, ep=2, **ETP1),
    _to("mixtral", "m hf m", tp=2, ep=2, **SEQUENCE),
    _to("gpt2", "m hf m", tp=4),
    _to("gpt_neox", "m hf m", tp=2, pp=2),
    _to("gpt_oss", "m hf m", pp=2, ep=2),
    _to("deepseek_v3", "m hf m", pp=2, ep=2, **MTP),
    _to("llama-uneven", "m hf m", tp=2, pp=2, layers=5, first_stage_layers=2),
    _to("llama", "d hf d", tp=2, pp=2),
    _to("mistral", "d hf d", **TWO_CHUNKS),
    _to("qwen2", "d hf d", tp=2),
    _to("qwen3", "d hf d", tp=4),
    _to("qwen3_moe", "d hf d", pp=2, ep=2),
    _to("mixtral", "d hf d", tp=2, ep=2, **SEQUENCE),
    _to("gpt2", "d hf d", tp=4),
    _to("gpt_neox", "d hf d", tp=2, pp=2),
    _to("gpt_oss", "d hf d", pp=2, ep=2),
    _to("deepseek_v3", "d hf d", pp=2, ep=2, **MTP),
    _to("qwen3_next", "m hf m", tp=2, ep=2, **SEQUENCE),
    _to("qwen3_next", "d hf d", **TWO_CHUNKS, ep=2),
    # Through another engine, with the optimizer.
    _to("llama", "m zero3 m", tp=2),
    _to("qwen3_moe-ep4", "d zero3 d", pp=2, ep=2),
]


def facets(load: Load) -> Iterator[object]:
    """Yield a load's model, its way, and the options of both runs by their format."""
    yield load.run.model
    yield load.way, load.run.ep > 1, load.run.model in HYBRIDS and load.weights_only
    options = {**BY_NAME[load.source].options, **load.run.options}
    yield load.way[0], options.get("dtype"), options.get("no_distributed_optimizer"), load.run.ep > 1
    yield from ((load.way[0], option) for option in [*options, *(["vpp"] if load.run.vpp > 1 else [])])


LOADS = sampling.sample([load for load in ALL_LOADS if load.source in BY_NAME], facets)
DIRECTIONS = {("megatron", "megatron"), ("megatron-dist", "megatron-dist")}
DIRECTIONS |= {("megatron", "hf", "megatron"), ("megatron-dist", "hf", "megatron-dist")}


def test_every_architecture_goes_in_every_direction() -> None:
    """With ALL=1, every architecture of the trainer. `tests/names` compares names, shapes and logits for all."""
    assert {(load.run.model, load.way) for load in ALL_LOADS} >= {(a, way) for a in ARCHITECTURES for way in DIRECTIONS}


# -- from and to other engines -------------------------------------------------------------------------------
@dataclass(frozen=True)
class Foreign:
    """A run of another engine, on all ranks."""

    name: str
    strategy: str
    model: str
    format: str
    options: dict[str, Any] = field(default_factory=dict)

    def job(self, output: Path, **more: Any) -> dict[str, Any]:
        job = {"strategy": self.strategy, "model": f"{self.model}_wide", "batch": 8, "length": 8, **self.options}
        return {**job, "output": str(output), **more}


FOREIGN = {
    run.name: run
    for run in (
        Foreign("zero3-experts", "zero3", "qwen3_moe", "zero3"),
        Foreign("zero3", "zero3", "llama", "zero3"),
        Foreign("fsdp2", "fsdp2", "llama", "dcp", {"dtype": "fp32"}),
    )
}
#: From another engine into megatron-core.
ALL_ARRIVALS = [
    ("zero3", "megatron", Run("loaded", "llama", 2, 2, options={"vocab_multiple": 128})),
    ("zero3-experts", "megatron-dist", Run("loaded", "qwen3_moe", 1, 2, 2, options={"vocab_multiple": 128})),
    ("fsdp2", "megatron", Run("loaded", "llama", 1, 2, 1, 2, {"dtype": "fp32", "vocab_multiple": 128})),
    ("zero3-experts", "megatron", Run("loaded", "qwen3_moe", 2, 2, 2, options={**ETP1, "vocab_multiple": 128})),
    ("fsdp2", "megatron-dist", Run("loaded", "llama", 2, 2, options={"dtype": "fp32", "vocab_multiple": 128})),
]
#: From megatron-core into another engine.
ALL_DEPARTURES = [
    ("llama", "megatron", "zero3"),
    ("qwen3_moe-ep4", "megatron-dist", "zero3-experts"),  # DeepSpeed puts experts into the other groups
    ("llama-fp32-tp4", "megatron", "fsdp2"),
    ("llama-vpp", "megatron-dist", "zero3"),
    ("llama-fp32-tp4", "megatron-dist", "fsdp2"),
]
ARRIVALS = sampling.sample(ALL_ARRIVALS, lambda one: [one[0], (one[1], one[2].options.get("dtype"))])
DEPARTURES = sampling.sample(ALL_DEPARTURES, lambda one: one[1:])


@pytest.fixture(scope="module")
def loaded() -> Path:
    """Convert everything, then load and gather it in the target's engine, in one launch. Folders are named by index."""
    folder = scratch() / "loads"
    sample("llama")
    launch(
        [run.job(folder / "foreign" / name, steps=2, truth=True) for name, run in FOREIGN.items()], folder / "foreign"
    )
    jobs = []
    for number, load in enumerate(LOADS):
        written = load.write(folder / f"{number}-written")
        jobs.append(load.run.job(folder / str(number), resume=str(written), steps=0))
    for number, (name, format, run) in enumerate(ARRIVALS):
        written = folder / f"arrival-{number}-written"
        ckpt.plan(ckpt.open(folder / "foreign" / name), format, layout_of(run, "")).run(written)
        iteration = next(path for path in written.iterdir() if path.is_dir())
        jobs.append(run.job(folder / f"arrival-{number}", resume=str(iteration), steps=0))
    for number, (name, form, engine) in enumerate(DEPARTURES):
        foreign, written = FOREIGN[engine], folder / f"departure-{number}"
        ckpt.plan(ckpt.open(sample(name, form)), foreign.format, Layout(world_size=4)).run(written)
        loader = {"zero3": "zero", "dcp": "dcp"}[foreign.format]
        jobs.append(foreign.job(written, resume=str(written), loader=loader))
    launch(jobs, folder)
    return folder


@pytest.mark.parametrize("number", range(len(LOADS)), ids=[load.title for load in LOADS])
def test_megatron_core_loads_what_is_written(number: int, loaded: Path, tables: Any) -> None:
    load, found = LOADS[number], truth(loaded / str(number))
    expected = truth(sample(load.source, load.form))
    ours, theirs = without_padding(found), without_padding(expected)
    if load.weights_only:  # then the masters are upcast weights
        ours, theirs = ({k: v for k, v in one.items() if k[1] in (WEIGHT, BUFFER)} for one in (ours, theirs))
        theirs = {key: by_way_of_hub(key, value) for key, value in theirs.items()}
    assert ours.keys() == theirs.keys()
    assert {key for key, value in ours.items() if value != theirs[key]} == set()
    assert found.ties == expected.ties
    for name in () if load.weights_only else ("step", "adam_step"):
        assert found.metadata[name] == expected.metadata[name]
    tables[WRITTEN][load.title]["equal"] = str(len(ours))


def by_way_of_hub(key: Key, value: Raw) -> Raw:
    """Return `value` after a round trip. On the Hub, gated norms are larger by 1, and both ways round to bfloat16."""
    if not key[0].endswith(".self_attention.out_norm.weight"):
        return value
    dtype, shape, content = value
    assert dtype == "bfloat16"
    there = (torch.frombuffer(bytearray(content), dtype=torch.bfloat16).float() + 1).bfloat16()
    return dtype, shape, (there.float() - 1).bfloat16().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "number", range(len(ARRIVALS)), ids=[f"{name} to {format} {run.layout}" for name, format, run in ARRIVALS]
)
def test_megatron_core_loads_other_engines_states(number: int, loaded: Path, tables: Any) -> None:
    name, format, run = ARRIVALS[number]
    home = loaded / "foreign" / name
    expected = contents(described(home, MEGATRON, layout_of(run, "")))
    found = truth(loaded / f"arrival-{number}")
    for key, value in dict(expected).items():
        if value[0] == "float32" and key[1] == WEIGHT:
            expected.setdefault((key[0], MASTER), value)  # the fp32 weight that FSDP steps
    assert found.tensors.keys() == expected.keys()
    assert {key for key, value in found.tensors.items() if value != expected[key]} == set()
    title = f"{run.model:<11} {FOREIGN[name].format} -> {format}: 4 ranks to {run.layout}"
    tables[WRITTEN][title]["equal"] = str(len(expected))


@pytest.mark.parametrize("number", range(len(DEPARTURES)), ids=[" to ".join(one) for one in DEPARTURES])
def test_other_engines_load_megatrons_states(number: int, loaded: Path, tables: Any) -> None:
    name, form, engine = DEPARTURES[number]
    expected = contents(described(sample(name, form), TRANSFORMERS))
    found = Truth.load(loaded / f"departure-{number}" / "truth.safetensors")
    if engine == "fsdp2":  # its masters are its weights
        expected = {key: value for key, value in expected.items() if key[1] != MASTER}
    assert found.tensors.keys() == expected.keys()
    assert {key for key, value in found.tensors.items() if value != expected[key]} == set()
    assert found.metadata["adam_step"] == truth(sample(name, form)).metadata["adam_step"]
    run = BY_NAME[name]
    title = f"{run.model:<11} {form} -> {FOREIGN[engine].format}: {run.layout} to 4 ranks"
    tables[WRITTEN][title]["equal"] = str(len(expected))
