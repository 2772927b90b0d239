"""`converters/deepspeed/zero.py`, `write.py`: engines of other stages and rank counts load the source's exact bits.

Sources use various DeepSpeed options.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import api
from ckpt.move.run import execute
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint, Layout, TrainingState
from ckpt.plan.dtypes import BFLOAT16
from ckpt.plan.planner import make_plan
from converters.deepspeed.universal import UNIVERSAL
from tests.support.engines import Truth, launch_in_turn
from tests.support.sampling import sample

STAGES = (1, 2, 3)
STEPS = 2

pytestmark = pytest.mark.slow


def zero(**options: Any) -> dict[str, Any]:
    return {"zero_optimization": options}


@dataclass(frozen=True, eq=False)
class Source:
    """A real run: number of ranks, trainer options, and changes to DeepSpeed's config."""

    name: str
    stage: int
    world_size: int
    model: str = "llama"
    options: dict[str, Any] = field(default_factory=dict)
    ds_config: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS

    def job(self, folder: Path) -> dict[str, Any]:
        job = {"strategy": f"zero{self.stage}", "model": self.model, "steps": self.steps, "truth": True}
        return job | {"output": str(folder)} | self.options | written(self.ds_config, folder.with_suffix(".json"))


@dataclass(frozen=True, eq=False)
class Cell:
    """A load: source run, target engine and way."""

    source: Source
    stage: int
    world_size: int
    way: str = "zero"
    load: dict[str, Any] = field(default_factory=dict)
    refused: bool = False
    ds_config: dict[str, Any] | None = None  # defaults to the source's config

    @property
    def name(self) -> str:
        return f"{self.source.name}-{self.way}{self.stage}w{self.world_size}" + ("-refused" if self.refused else "")


def written(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Write a part of DeepSpeed's config and return the trainer's option for it."""
    if not config:
        return {}
    path.write_text(json.dumps(config))
    return {"ds_config": str(path)}


_FP16 = {"dtype": "fp16", "initial_scale_power": 8}
_NEVER = {"dtype": "fp16", "initial_scale_power": 40}
_FROZEN = {"freeze": r"embed|layers\.0\."}
_ROUND_ROBIN = zero(round_robin_gradients=True)
_ALIGNED = zero(parameter_alignment=True)
_BOTH = zero(parameter_alignment=True, round_robin_gradients=True)
_BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}
_OFFLOAD = zero(offload_optimizer={"device": "cpu"})

#: Real runs on 3 ranks with options, and the (stage, ranks) to load them into.
OPTIONS = {
    Source("momentum", 2, 3, options={"optimizer": "momentum"}): [(3, 2), (1, 4)],
    Source("lion", 3, 3, options={"optimizer": "lion"}): [(2, 2)],
    Source("sgd", 1, 3, options={"optimizer": "sgd"}): [(3, 2)],
    **{
        Source(f"muon_{stage}", stage, 3, options={"optimizer": "muon"}): to
        for stage, to in {1: [(1, 2), (3, 4)], 2: [(2, 4)], 3: [(3, 2), (2, 2)]}.items()
    },
    Source("fp16", 2, 3, options=_FP16): [(3, 2), (1, 4)],
    Source("fp32", 3, 3, options={"dtype": "fp32"}): [(2, 2)],
    Source("never_stepped_2", 2, 3, options=_NEVER): [(3, 2)],
    Source("never_stepped_3", 3, 3, options=_NEVER): [(1, 2)],
    Source("round_robin", 2, 3, ds_config=_ROUND_ROBIN): [(2, 2), (1, 4), (3, 2)],
    Source("aligned", 2, 3, "toy", ds_config=_ALIGNED): [(2, 2), (1, 4)],
    Source("aligned_round_robin", 1, 3, "toy", ds_config=_BOTH): [(2, 2), (2, 4)],
    Source("bf16_optimizer", 1, 3, ds_config=_BF16_OPTIMIZER): [(1, 2), (3, 2)],
    Source("cpu_offload", 3, 3, ds_config=_OFFLOAD): [(3, 2), (2, 2)],
    Source("sub_groups", 3, 3, ds_config=zero(sub_group_size=1000)): [(3, 2), (3, 4), (1, 2)],
    Source("frozen_1", 1, 3, "qwen2", options=_FROZEN): [(3, 2), (2, 4)],
    Source("frozen_3", 3, 3, "qwen2", options=_FROZEN): [(2, 2), (3, 4), (1, 1)],
    Source("lora", 3, 3, options={"lora": 3}): [(1, 2), (3, 2)],
    Source("experts", 3, 3, "qwen3_moe"): [(2, 2), (3, 4)],
    Source("torch_scheduler", 2, 3, options={"scheduler": "torch"}): [(3, 2)],
    Source("old_torch_files", 3, 3, ds_config={"checkpoint": {"checkpoint_serialization": False}}): [(3, 2)],
}
ELASTIC = Source("elastic", 2, 3, ds_config=zero(elastic_checkpoint=True))
LLAMA = Source("llama", 3, 3)
NO_SCHEDULE = {"load_lr_scheduler_states": False}
BY_NAME = {"load_optimizer_states": False, **NO_SCHEDULE}

#: Content available in other formats, made from a ZeRO-3 run: weights only, or everything except DeepSpeed's own data.
OTHERS = [
    *(Cell(LLAMA, stage, 2, "weights", BY_NAME) for stage in STAGES),
    *(Cell(LLAMA, stage, 2, "weights", NO_SCHEDULE, refused=True) for stage in STAGES),
    *(Cell(LLAMA, stage, 2, "foreign") for stage in STAGES),
    Cell(ELASTIC, 3, 2, "zero", BY_NAME),
    Cell(ELASTIC, 2, 2, "zero"),
    Cell(ELASTIC, 1, 4, "zero"),
]
UNIVERSALS = [
    *(Cell(LLAMA, stage, 2, "foreign-universal") for stage in STAGES),
    Cell(LLAMA, 2, 2, "weights-universal", NO_SCHEDULE),
    Cell(ELASTIC, 2, 2, "universal"),
    Cell(next(source for source in OPTIONS if source.name == "momentum"), 2, 2, "universal"),
    # If the engine deals parameters round-robin, DeepSpeed loads every universal checkpoint wrongly: its map has the
    # order before dealing.
    Cell(next(source for source in OPTIONS if source.name == "round_robin"), 2, 2, "universal", ds_config={}),
]
#: Each option, and each stage to each stage and number of ranks.
RESHARDED = sample(
    [Cell(s, *to) for s, all_to in OPTIONS.items() for to in all_to],
    lambda cell: [cell.source, (cell.source.stage, cell.stage), (cell.stage, cell.world_size)],
)
CELLS = [*RESHARDED, *OTHERS, *UNIVERSALS]


def foreign(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint as another framework's format would describe it, without DeepSpeed's own data."""
    own = checkpoint.state
    kept = {"lr_scheduler": own.lr_scheduler, "global_samples": own.global_samples}
    state = TrainingState(own.step, own.param_groups, own.scalars, **kept, private={"mine": {"note_of_mine": {"a": 1}}})
    return replace(checkpoint, format="foreign", framework=None, tag=None, state=state)


def weights_only(checkpoint: Checkpoint) -> Checkpoint:
    """Return masters as weights without optimizer or training state, sorted by name like a safetensors header."""
    tensors = {
        (fqn, BUFFER if role == BUFFER else WEIGHT): tensor._replace(role=BUFFER if role == BUFFER else WEIGHT)
        for (fqn, role), tensor in sorted(checkpoint.tensors.items())
        if role in (MASTER, WEIGHT, BUFFER)
    }
    return replace(checkpoint, format="foreign", framework=None, tag=None, tensors=tensors, state=TrainingState())


VIEWS: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "zero": lambda c: c,
    "universal": lambda c: c,
    "foreign": foreign,
    "weights": weights_only,
    "foreign-universal": foreign,
    "weights-universal": weights_only,
}


def convert(cell: Cell, run: Path, output: Path) -> None:
    checkpoint = VIEWS[cell.way](api.open(run, f"zero{cell.source.stage}"))
    if cell.way.endswith("universal"):
        execute(make_plan(checkpoint, UNIVERSAL.lay_out(checkpoint, Layout())), output)
    else:
        dtype = BFLOAT16 if cell.way == "weights" else None
        api.plan(checkpoint, f"zero{cell.stage}", Layout(world_size=cell.world_size, dtype=dtype)).run(output)


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reshard")
    by_ranks: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for cell in CELLS:
        source = cell.source
        by_ranks[source.world_size].setdefault(source.name, source.job(folder / source.name))
    launch_in_turn([(ranks, list(jobs.values())) for ranks, jobs in sorted(by_ranks.items())], folder)
    return folder


@pytest.fixture(scope="session")
def loaded(sources: Path) -> Path:
    """Do all conversions and load them in unmodified engines, in one launch."""
    by_ranks: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for cell in CELLS:
        source, output = cell.source, sources / "converted" / cell.name
        convert(cell, sources / source.name, output)
        config = dict(source.ds_config if cell.ds_config is None else cell.ds_config)
        if cell.way.endswith("universal"):
            config["checkpoint"] = {"load_universal": True}
        job = {"strategy": f"zero{cell.stage}", "model": source.model, "resume": str(output), "output": str(output)}
        job |= source.options | written(config, sources / f"{cell.name}.json")
        by_ranks[cell.world_size].append(job | {"load": cell.load, "refused": cell.refused})
    launch_in_turn(sorted(by_ranks.items()), sources / "converted", "tests.support.zero_gathering")
    return sources


def truths(cell: Cell, folder: Path) -> tuple[Truth, Truth]:
    """Return the truths recorded by the source's engine and the loading engine."""
    before = Truth.load(folder / cell.source.name / "truth" / f"global_step{cell.source.steps}.safetensors")
    return before, Truth.load(folder / "converted" / cell.name / "truth.safetensors")


FACTS = ("param_groups", "adam_step", "step", "ties", "frozen")


def groups_after(cell: Cell, before: Truth, after: Truth) -> list[dict[str, Any]]:
    """Return the loaded engine's groups. Drop Adam options that another framework doesn't record."""
    ours, theirs = after.metadata["param_groups"], before.metadata["param_groups"]
    if not cell.way.startswith("foreign"):
        return list(ours)
    return [{name: a[name] for name in b} for a, b in zip(ours, theirs, strict=True)]


def widened(key: tuple[str, str], tensor: tuple[str, tuple[int, ...], bytes]) -> tuple[str, tuple[int, ...], bytes]:
    """Return Muon's momentum in fp32. ZeRO-3 trains and stores it in bf16, but loads it as fp32."""
    if key[1] != "momentum_buffer" or tensor[0] != "bfloat16":
        return tensor
    wide = torch.frombuffer(bytearray(tensor[2]), dtype=torch.bfloat16).float()
    return "float32", tensor[1], wide.numpy().tobytes()


def assert_equal(cell: Cell, folder: Path) -> int:
    before, after = truths(cell, folder)
    assert set(after.tensors) == set(before.tensors)
    differing = [key for key in before.tensors if widened(key, before.tensors[key]) != widened(key, after.tensors[key])]
    assert not differing
    facts = {fact: after.metadata[fact] for fact in FACTS} | {"param_groups": groups_after(cell, before, after)}
    assert facts == {fact: before.metadata[fact] for fact in FACTS}
    assert after.metadata["sequences"] == 24 * cell.source.steps
    return len(after.tensors)


@pytest.mark.parametrize("cell", RESHARDED, ids=lambda c: c.name)
def test_options(cell: Cell, loaded: Path, tables: Any) -> None:
    row = tables["ZeRO options, from 3 ranks: tensors bit for bit equal in the engine that loaded them"]
    row[f"{cell.source.name} (zero{cell.source.stage})"][f"{cell.stage}w{cell.world_size}"] = str(
        assert_equal(cell, loaded)
    )


def test_weights_alone_are_loaded_by_name_and_never_by_position(loaded: Path) -> None:
    for cell in (cell for cell in OTHERS if cell.way == "weights"):
        if cell.refused:
            said = (loaded / "converted" / cell.name / "refused.txt").read_text()
            assert "parameter group" in said or "disable optimizer-state loading" in said
            continue
        before, after = truths(cell, loaded)
        kept = {key for key in before.tensors if key[1] in (WEIGHT, BUFFER)}
        assert kept and all(after.tensors[key] == before.tensors[key] for key in kept)


def test_a_source_of_no_hyperparameters_is_loaded_by_name(loaded: Path) -> None:
    before, after = truths(next(cell for cell in OTHERS if cell.source is ELASTIC and cell.stage == 3), loaded)
    assert all(after.tensors[key] == before.tensors[key] for key in before.tensors if key[1] == WEIGHT)


@pytest.mark.parametrize("cell", [c for c in OTHERS if c.source is ELASTIC and c.stage < 3], ids=lambda c: c.name)
def test_an_elastic_checkpoint_stays_one_that_loads_with_its_optimizer(cell: Cell, loaded: Path) -> None:
    """The checkpoint has no hyperparameters, so DeepSpeed keeps the engine's. It puts the step into each group."""
    before, after = truths(cell, loaded)
    assert after.tensors == before.tensors and any(role == "exp_avg" for _, role in after.tensors)
    assert after.metadata["adam_step"] == before.metadata["adam_step"]
    for ours, theirs in zip(after.metadata["param_groups"], before.metadata["param_groups"], strict=True):
        assert {name for name in ours | theirs if ours.get(name) != theirs.get(name)} == {"step", "lr"}


@pytest.mark.parametrize("cell", [c for c in OTHERS if c.way == "foreign"], ids=lambda c: c.name)
def test_what_other_frameworks_record(cell: Cell, loaded: Path) -> None:
    assert assert_equal(cell, loaded)
    assert "note_of_mine" in truths(cell, loaded)[1].metadata["client_state"]


@pytest.mark.parametrize("cell", UNIVERSALS, ids=lambda cell: cell.name)
def test_universal(cell: Cell, loaded: Path, tables: Any) -> None:
    """Compare everything DeepSpeed loads from a universal checkpoint. Buffers and frozen parameters don't move."""
    before, after = truths(cell, loaded)
    whole = cell.way != "weights-universal"
    keys = {key for key in before.tensors if key[1] != BUFFER and (whole or key[1] in (WEIGHT, MASTER))}
    assert keys and all(before.tensors[key] == after.tensors[key] for key in keys)
    if whole:
        assert after.metadata["adam_step"] == before.metadata["adam_step"]
    if whole and cell.stage != 3 and cell.source is not ELASTIC:  # stage 3 loads only the first group's
        assert groups_after(cell, before, after) == before.metadata["param_groups"]
    table = tables["Universal: tensors bit for bit equal in the engine that loaded them"]
    table[f"{cell.way} of {cell.source.name}"][f"{cell.stage}w{cell.world_size}"] = str(len(keys))
