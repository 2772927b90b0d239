"""`converters/deepspeed/autoep.py`, `layer_names.py`: DeepSpeed's AutoEP matches the live engines."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeForCausalLM

import ckpt
from ckpt import api
from ckpt.errors import CkptError, CorruptError, IncompleteError, NotFoundError, UsageError
from ckpt.plan.checkpoint import MASTER, WEIGHT, Layout
from tests.support import commands
from tests.support.damage import Damage, Fault, copied, edited, removed
from tests.support.describing import content
from tests.support.engines import Truth, raw
from tests.support.stored import stored

NAME, STEP, MODEL = "autoep-full", "global_step2", "mp_rank_00_model_states.pt"
RUNS = ("autoep-zero0", "autoep-zero1", "autoep-zero2", "autoep-zero3")
LAYER = "model.layers.{}.mlp."
#: Hub names by the names in AutoEP's expert files.
NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@pytest.fixture
def converted(fixtures: Path, tmp_path: Path) -> Path:
    done = commands.ckpt("convert", "full", "hf", fixtures / NAME / "pytorch_model.bin", "-o", tmp_path / "out", "-v")
    assert done.code == 0 and "AutoEP's names" in done.err and "from_pretrained finds every tensor" in done.err
    return tmp_path / "out"


def test_weights_are_those_of_the_run(fixtures: Path, converted: Path) -> None:
    saved = load_file(fixtures / NAME / "truth/experts.safetensors")
    written = load_file(converted / "model.safetensors")
    module = torch.load(fixtures / NAME / "pytorch_model.bin", weights_only=True)
    for layer in range(2):
        for expert in range(4):
            for own, hub in NAMES.items():
                name = LAYER.format(layer) + f"experts.{expert}.{hub}.weight"
                assert raw(written.pop(name)) == raw(saved[LAYER.format(layer) + f"experts.{own}.{expert}"])
        router = module[LAYER.format(layer) + "router.gate.weight"]
        assert raw(written.pop(LAYER.format(layer) + "gate.weight")) == raw(router)
    assert {fqn: raw(tensor) for fqn, tensor in written.items()} == {
        fqn: raw(tensor) for fqn, tensor in module.items() if ".mlp." not in fqn
    }


def test_the_model_computes_what_the_engine_computed(fixtures: Path, converted: Path) -> None:
    """Logits agree within bf16's rounding, but not if gates and ups are swapped."""
    truth = load_file(fixtures / NAME / "truth/experts.safetensors")
    model = Qwen3MoeForCausalLM.from_pretrained(converted, dtype=torch.bfloat16).eval()

    def difference() -> float:
        with torch.no_grad():
            return float((model(input_ids=truth["input_ids"]).logits.float() - truth["logits"].float()).abs().max())

    assert difference() < 0.1
    for layer in model.model.layers:
        both = layer.mlp.experts.gate_up_proj
        both.data = both.data.roll(both.shape[1] // 2, 1)
    assert difference() > 1


def test_another_architecture_is_not_guessed(fixtures: Path, tmp_path: Path) -> None:
    checkpoint = ckpt.open(fixtures / NAME / "pytorch_model.bin")
    assert checkpoint.ties == {
        LAYER.format(n) + "gate.gate.weight": LAYER.format(n) + "router.gate.weight" for n in (0, 1)
    }
    config = (fixtures / NAME / "config.json").read_text().replace('"qwen3_moe"', '"mixtral"')
    (tmp_path / "config.json").write_text(config.replace("Qwen3MoeForCausalLM", "MixtralForCausalLM"))
    done = commands.ckpt(
        *("convert", "full", "hf", fixtures / NAME / "pytorch_model.bin"),
        *("--config", tmp_path, "-o", tmp_path / "out"),
    )
    assert done.code == 6 and not (tmp_path / "out").exists()


# -- unchanged runs --------------------------------------------------------------------------------------------------
def truth_of(fixtures: Path, name: str) -> Truth:
    return Truth.load(fixtures / name / "truth" / f"{STEP}.safetensors")


@pytest.mark.parametrize("name", RUNS)
def test_equals_what_the_ranks_held(fixtures: Path, name: str) -> None:
    truth, checkpoint = truth_of(fixtures, name), api.open(fixtures / name)
    assert (checkpoint.format, checkpoint.state.step) == (name.split("-")[1], 2)
    assert {role for _, role in truth.tensors} == {WEIGHT, MASTER, "exp_avg", "exp_avg_sq"}
    kept = {key: bits for key, bits in truth.tensors.items() if key[1] != WEIGHT or name != "autoep-zero3"}
    assert {key: content(tensor) for key, tensor in checkpoint.tensors.items()} == kept
    grouped = [fqn for group in checkpoint.state.param_groups for fqn in group.fqns]
    assert sorted(grouped) == sorted(fqn for fqn, role in truth.tensors if role == MASTER)
    assert set(checkpoint.state.scalars["step"]) == set(grouped)
    assert checkpoint.ties == {
        f"{LAYER.format(n)}gate.gate.weight": f"{LAYER.format(n)}router.gate.weight" for n in (0, 1)
    }


#: Data parallel ranks with experts 0 and 1.
HOLDERS = {"autoep-zero1": {0, 1}, "autoep-zero2": {0, 2}, "autoep-zero3": {0, 2}}


@pytest.mark.parametrize("name", HOLDERS)
def test_parts_are_of_the_ranks_that_have_the_expert(fixtures: Path, name: str) -> None:
    first, others = set(), set()
    for (fqn, role), tensor in api.open(fixtures / name).tensors.items():
        for fragment in tensor.fragments() if role == MASTER and ".experts." in fqn else ():
            at = getattr(fragment.region, "start", None)
            expert = at // (tensor.numel // 4) if at is not None else fragment.region.offsets[0]
            (first if expert < 2 else others).add(fragment.rank)
    assert first == HOLDERS[name] and others == {0, 1, 2, 3} - first


@pytest.mark.parametrize("name", RUNS)
def test_weights_go_to_the_hub_as_the_ranks_had_them(fixtures: Path, tmp_path: Path, name: str) -> None:
    done = commands.ckpt("convert", "auto", "hf", fixtures / name, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    weights = {fqn: value for (fqn, role), value in truth_of(fixtures, name).tensors.items() if role == WEIGHT}
    expected = {}
    for fqn, value in weights.items():
        beginning, _, matrix = fqn.rpartition(".")
        if matrix not in NAMES:
            expected[fqn.replace(".router.gate.", ".gate.")] = value
            continue
        dtype, (num_experts, *shape), data = value
        for expert in range(num_experts):
            own = data[expert * len(data) // num_experts : (expert + 1) * len(data) // num_experts]
            expected[f"{beginning}.{expert}.{NAMES[matrix]}.weight"] = (dtype, tuple(shape), own)
    assert stored(tmp_path / "out") == expected
    Qwen3MoeForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("name", RUNS)
def test_masters_and_states_go_on_to_dcp(fixtures: Path, tmp_path: Path, name: str) -> None:
    api.plan(api.open(fixtures / name), "dcp", Layout(world_size=2)).run(tmp_path / "out")
    written = api.open(tmp_path / "out", "dcp")
    for (fqn, role), expected in truth_of(fixtures, name).tensors.items():
        if role != WEIGHT:  # DCP stores the masters as weights
            assert content(written.tensors[fqn, WEIGHT if role == MASTER else role]) == expected, (fqn, role)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("target", ["zero1", "zero3", "universal"])
def test_what_its_engine_loads_is_not_written(fixtures: Path, name: str, target: str) -> None:
    with pytest.raises(UsageError, match="loads shared experts"):
        api.plan(api.open(fixtures / name), target, Layout(world_size=None if target == "universal" else 2))


# -- faults ------------------------------------------------------------------------------------------------------------
def layers(edit: Callable[[list[dict[str, Any]]], object], name: str = MODEL) -> Damage:
    """Return a fault that edits the record of AutoEP's layers in each model file named `name`."""
    return edited(name, lambda state: edit(state["ds_autoep_layers"]))


def maps(layer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = layer["affine_maps"]["params"]
    return found


def exchanged(found: list[dict[str, Any]]) -> None:
    """Swap the two ranks' parts of a layer's w1."""
    ranks = maps(found[0])[found[0]["expert_key_prefix"] + ".w1"]["ranks"]
    ranks[0], ranks[1] = ranks[1], ranks[0]


def expert(number: int) -> str:
    return f"layer_1_expert_{number}_mp_rank_00_model_states.pt"


def shared_by(**values: Any) -> Damage:
    """Return a fault that changes rank 0's record of the experts' partition group."""

    def edit(state: dict[str, Any]) -> None:
        groups = state["optimizer_state_dict"]["ds_zero_partition_groups"]
        next(group for group in groups if "autoep_expert" in group["families"]).update(values)

    return edited("*zero_pp_rank_0_mp_rank_00_optim_states.pt", edit)


RANK, ANY_RANK = "zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_?_mp_rank_00_model_states.pt"
SHAPE = {"logical_shape": [4, 8, 16]}
PREFIX = {"expert_key_prefix": "model.layers.1.mlp.experts"}
FAULTS = {
    "autoep-zero2": {
        "ranks exchanged": Fault(layers(exchanged), NotFoundError, "another order"),
        "another version": Fault(
            layers(lambda found: found[0]["affine_maps"].update(version=2)), NotFoundError, "sharding record"
        ),
        "no maps": Fault(layers(lambda found: found[1].pop("affine_maps")), NotFoundError, "sharding record"),
        "a map gone": Fault(layers(lambda found: maps(found[0]).popitem()), CorruptError, "disagree"),
        "another prefix": Fault(layers(lambda found: found[0].update(PREFIX)), CorruptError, "disagree"),
        "another shape": Fault(
            layers(lambda found: maps(found[0])["model.layers.0.mlp.experts.w2"].update(SHAPE)), CkptError, ""
        ),
        "other ranks": Fault(layers(lambda found: [x.update(ep_size=4) for x in found]), CorruptError, "ranks"),
        "ranks of one layer": Fault(layers(lambda found: found[0].update(ep_size=4)), NotFoundError, "each layer"),
        "a layer of another kind": Fault(layers(lambda found: found.pop()), NotFoundError, "only some layers"),
        "no record": Fault(edited(MODEL, lambda state: state.pop("ds_autoep_layers")), CorruptError, "expert file"),
        "tensor parallel": Fault(edited(MODEL, lambda s: s.update(folding={})), NotFoundError, "tensor parallel"),
        "an expert gone": Fault(removed(expert(3)), IncompleteError, "expert files are missing"),
        "an expert too many": Fault(copied(expert(3), expert(4)), CorruptError, "no expert in the model"),
        "another expert's file": Fault(copied(expert(2), expert(3)), CorruptError, "another name"),
        "a matrix gone": Fault(edited(expert(0), dict.popitem), CorruptError, "matrices"),
        "a matrix of another shape": Fault(
            edited(expert(0), lambda s: s.update({k: v.T.contiguous() for k, v in s.items()})),
            CorruptError,
            "does not match its record",
        ),
        "a matrix of another dtype": Fault(
            edited(expert(0), lambda s: s.update({k: s[k].float() for k in s})),
            CorruptError,
            "different dtypes",
        ),
        "experts among others": Fault(
            edited(MODEL, lambda s: s["param_shapes"][1].update(s["param_shapes"][0])),
            NotFoundError,
            "with other parameters",
        ),
    },
    "autoep-zero0": {
        "an optimizer's experts gone": Fault(
            removed("expp_rank_1_mp_rank_00_optim_states.pt"), IncompleteError, "expert parallel ranks are missing"
        ),
    },
    "autoep-zero3": {
        "ranks exchanged": Fault(layers(exchanged, ANY_RANK), NotFoundError, "another order"),
        "other ranks share": Fault(shared_by(partition_ranks=[0, 1]), CorruptError, "disagree"),
        "another place": Fault(shared_by(partition_rank=1), CorruptError, "disagree"),
        "another expert parallel rank": Fault(
            layers(lambda found: [x.update(ep_rank=1) for x in found], RANK),
            CorruptError,
            "differ from the ranks sharing experts",
        ),
        "no record": Fault(
            edited("*_model_states.pt", lambda state: state.pop("ds_autoep_layers")), NotFoundError, "AutoEP"
        ),
    },
}


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, faults in FAULTS.items() for fault in faults])
def test_faults_are_refused(fixtures: Path, tmp_path: Path, name: str, fault: str) -> None:
    run = Path(shutil.copytree(fixtures / name, tmp_path / "run"))
    FAULTS[name][fault].check(run / STEP, lambda: api.plan(api.open(run), "dcp", Layout(world_size=2)))
