"""`converters/deepspeed/neox.py`, `sums.py`, `layer_names.py`: GPT-NeoX without a pipeline matches live ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTNeoXForCausalLM

from ckpt import api
from ckpt.errors import CkptError, CorruptError, LossError, NotFoundError
from ckpt.move.reading import Computed, read_box
from ckpt.plan.checkpoint import HUB, MASTER, WEIGHT, Layout
from ckpt.plan.dtypes import BY_NAME
from ckpt.plan.tensors import Extent, Tensor, Whole, whole
from ckpt.state.naming import to_namespace
from converters.deepspeed.sums import added_up
from tests.support import commands
from tests.support.damage import Damage, Fault, copied, edited, removed
from tests.support.engines import Truth, raw
from tests.support.stored import stored

STEP = "global_step2"
BOTH, RANK_0, RANK_1 = (f"{STEP}/mp_rank_{rank}_model_states.pt" for rank in ("*", "00", "01"))
#: Runs: format, ranks, and number of parameters without known states.
RUNS = {"neox-zero1": ("zero1", 4, 4), "neox-zero0": ("zero0", 2, 0), "neox-tp1": ("zero1", 2, 0)}
VOCAB = 22  # padded to 24 rows
PADDED = ("embed_in.weight", "embed_out.weight")


def truth_of(fixtures: Path, name: str) -> dict[tuple[str, str], Any]:
    """Return the ranks' state without vocabulary padding."""
    found = Truth.load(fixtures / name / "truth" / f"{STEP}.safetensors").tensors
    for (fqn, role), (dtype, shape, data) in found.items():
        if fqn.endswith(PADDED):
            found[fqn, role] = (dtype, (VOCAB, *shape[1:]), data[: len(data) // shape[0] * VOCAB])
    return found


def content(tensor: Tensor, computed: Computed) -> tuple[str, tuple[int, ...], bytes]:
    return str(tensor.dtype), tensor.shape, read_box(tensor, whole(tensor.shape), computed).tobytes()


@pytest.mark.parametrize("name", RUNS)
def test_everything_is_what_the_ranks_held(fixtures: Path, name: str) -> None:
    format, num_ranks, unknown = RUNS[name]
    checkpoint = api.open(fixtures / name)
    assert (checkpoint.format, checkpoint.world_size, checkpoint.state.step) == (
        format,
        num_ranks,
        2,
    ) or format == "zero0"
    found = to_namespace(checkpoint, HUB)
    truth = truth_of(fixtures, name)
    assert {role for _, role in truth} == {WEIGHT, "exp_avg", "exp_avg_sq", *([MASTER] if format == "zero1" else [])}
    assert {key: content(tensor, checkpoint.computed) for key, tensor in found.tensors.items()} == truth
    assert (
        len({fqn for fqn, role in truth if role == WEIGHT} - {fqn for fqn, role in truth if role == "exp_avg"})
        == unknown
    )
    assert len(found.unread) == (2 if unknown else 0)
    decay = {group.options["weight_decay"]: group.fqns for group in found.state.param_groups}
    assert all("norm" in fqn or fqn.endswith("bias") for fqn in decay[0.0]) and len(decay[0.1]) > 8
    assert sorted(decay[0.0] + decay[0.1]) == sorted({fqn for fqn, _ in truth})


@pytest.mark.parametrize("name", RUNS)
def test_weights_go_to_the_hub(fixtures: Path, tmp_path: Path, name: str) -> None:
    run = Path(shutil.copytree(fixtures / name, tmp_path / "run"))
    (run / "config.json").rename(tmp_path / "config.json")
    done = commands.ckpt("convert", "auto", "hf", run, "--config", tmp_path / "config.json", "-o", tmp_path / "out")
    assert done.code == 0 and "GPTNeoXForCausalLM.from_pretrained(" in done.err, done.err
    assert stored(tmp_path / "out") == {
        fqn: value for (fqn, role), value in truth_of(fixtures, name).items() if role == WEIGHT
    }
    GPTNeoXForCausalLM.from_pretrained(tmp_path / "out")


def test_own_names_go_on_to_one_tensor_parallel_rank(fixtures: Path, tmp_path: Path) -> None:
    """The output has GPT-NeoX's own names and arguments."""
    api.plan(api.open(fixtures / "neox-zero1"), "zero1", Layout(world_size=2)).run(tmp_path / "out")
    written = api.open(tmp_path / "out")
    assert {key[0] for key in written.tensors} == {key[0] for key in api.open(fixtures / "neox-tp1").tensors}
    client = torch.load(tmp_path / "out" / STEP / "mp_rank_00_model_states.pt", weights_only=False)
    assert client["args"]["model_parallel_size"] == 1 and client["args"]["padded_vocab_size"] == 24


def test_rotary_frequencies_are_left_out(fixtures: Path, tmp_path: Path) -> None:
    """Older GPT-NeoX versions store rotary frequencies in each layer."""
    run = Path(shutil.copytree(fixtures / "neox-zero1", tmp_path / "run"))

    def add(state: dict[str, Any]) -> None:
        names = [f"sequential.{number}.attention.rotary_emb.inv_freq" for number in (2, 3)]
        state["module"] |= {fqn: torch.ones(2) for fqn in names}
        state["buffer_names"] = names

    edited(BOTH, add)(run)
    done = commands.ckpt("convert", "auto", "hf", run, "-o", tmp_path / "out")
    assert done.code == 0 and "rotary frequencies" in done.err
    assert len(stored(tmp_path / "out")) == 28


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sums_are_torchs(tmp_path: Path, dtype: str) -> None:
    torch.manual_seed(1)
    parts = [(torch.randn(999) * 10.0 ** torch.randint(-6, 4, (999,))).to(getattr(torch, dtype)) for _ in range(4)]
    for part in parts:
        part[:3] = torch.tensor([-0.0, 0.0, torch.finfo(part.dtype).max])
    tensors = []
    for rank, part in enumerate(parts):
        path = tmp_path / str(rank)
        path.write_bytes(raw(part)[2])
        extent = Extent.contiguous(str(path), 0, BY_NAME[dtype], (999,))
        tensors.append(Tensor("b", WEIGHT, extent.dtype, extent.shape, Whole(extent)))
    tensor, computed = added_up(tensors, "ranks")
    assert content(tensor, computed) == raw(sum(parts[1:], parts[0] + 0))


# -- faults ------------------------------------------------------------------------------------------------------------
def of_args(**values: int) -> Damage:
    return edited(BOTH, lambda state: state["args"].update(values))


def renamed(old: str, new: str) -> Damage:
    def edit(state: dict[str, Any]) -> None:
        for fqn in [fqn for fqn in state["module"] if old in fqn]:
            state["module"][fqn.replace(old, new)] = state["module"].pop(fqn)

    return edited(BOTH, edit)


def config(run: Path, **values: Any) -> None:
    path = run / "config.json"
    known = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in known.items() if value is not None}))


def halved(state: dict[str, Any]) -> None:
    state["module"]["sequential.2.attention.dense.weight"] = state["module"]["sequential.2.attention.dense.weight"][:8]


def without_a_layer(state: dict[str, Any]) -> None:
    for fqn in [fqn for fqn in state["module"] if ".2." in fqn]:
        del state["module"][fqn]


OTHER_ARGS = "does not match the run's arguments"
FAULTS = {
    "no config": Fault(removed("config.json"), LossError, "use_parallel_residual"),
    "another model's config": Fault(lambda run: config(run, model_type="gpt2"), LossError, "adds up"),
    "nothing told of the residual": Fault(lambda run: config(run, use_parallel_residual=None), LossError, "adds up"),
    "more ranks": Fault(of_args(model_parallel_size=4), CorruptError, "the tensor parallel rank files"),
    "no arguments": Fault(edited(BOTH, lambda state: state.pop("args")), NotFoundError, "mp_rank other than 00"),
    "more layers": Fault(of_args(num_layers=3), CorruptError, "the layers do not match"),
    "another hidden size": Fault(of_args(hidden_size=32), CorruptError, OTHER_ARGS),
    "another vocabulary": Fault(of_args(padded_vocab_size=48), CorruptError, OTHER_ARGS),
    "another name": Fault(renamed("mlp.dense_h_to_4h", "mlp.linear1"), LossError, "this layer entry is unknown"),
    "a name without a layer": Fault(renamed("sequential.2.", "sequential_2."), NotFoundError, "mp_rank other than 00"),
    "a layer gone": Fault(edited(BOTH, without_a_layer), CorruptError, "the layers do not match"),
    "another part": Fault(edited(RANK_1, halved), CorruptError, ""),
    "another step": Fault(edited(RANK_1, lambda state: state.update(global_steps=3)), CorruptError, "different"),
    "rank 1 gone": Fault(removed(RANK_1), CkptError, ""),
    "rank 1 is rank 0": Fault(copied(RANK_0, RANK_1), CorruptError, "another name"),
}


@pytest.mark.parametrize("name", ["neox-zero1", "neox-zero0"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused(fixtures: Path, tmp_path: Path, fault: str, name: str) -> None:
    run = Path(shutil.copytree(fixtures / name, tmp_path / "run"))
    FAULTS[fault].check(run, lambda: api.plan(api.open(run), "dcp", Layout(world_size=2)))
