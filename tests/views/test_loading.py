"""`ckpt/views/loading.py`: `ckpt.load_into` against the live engine's truth and against `from_pretrained`."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import ckpt
from ckpt.errors import LossError, UsageError
from tests.support.engines import raw

#: Masters replace the weights that ZeRO-3 does not store; frozen parameters have no master.
KINDS = ("weight", "master", "buffer")


@pytest.fixture
def moe(fixtures: Path) -> Path:
    """Return a Qwen3-MoE run under ZeRO-3: its experts are stacked in memory, but not on the Hub."""
    return fixtures / "moe-zero3"


def fresh(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_checkpoint(moe: Path, dtype: torch.dtype) -> None:
    """A float32 parameter gets the master, a bf16 parameter the rounded master, like in the engine."""
    model = fresh(moe, dtype)
    assert ckpt.load_into(model, moe) == []
    truth = load_file(moe / "truth" / "global_step2.safetensors")
    for fqn, tensor in model.state_dict().items():
        assert raw(tensor) == raw(truth[f"master/{fqn}"].to(dtype)), fqn


@pytest.mark.parametrize("target", ["hf", "megatron"])
def test_other_names_are_related(moe: Path, tmp_path: Path, target: str) -> None:
    ckpt.plan(ckpt.open(moe), target).run(tmp_path / "out")
    model, direct = fresh(moe, torch.bfloat16), fresh(moe, torch.bfloat16)
    assert ckpt.load_into(model, tmp_path / "out") == ckpt.load_into(direct, ckpt.open(moe)) == []
    expected = direct.state_dict()
    assert all(raw(tensor) == raw(expected[fqn]) for fqn, tensor in model.state_dict().items())


def test_what_does_not_match_is_refused_before_anything_is_filled(moe: Path) -> None:
    model = fresh(moe, torch.float32)
    model.added = torch.nn.Linear(2, 2)
    before = {fqn: raw(tensor) for fqn, tensor in model.state_dict().items()}
    with pytest.raises(LossError, match=r"not in the checkpoint: added.weight, added.bias"):
        ckpt.load_into(model, moe)
    assert {fqn: raw(tensor) for fqn, tensor in model.state_dict().items()} == before
    assert ckpt.load_into(model, moe, strict=False) == ["added.weight", "added.bias"]
    model.lm_head = torch.nn.Linear(3, 3, bias=False)
    with pytest.raises(LossError, match="does not fit the model") as error:
        ckpt.load_into(model, moe, strict=False)
    assert "lm_head.weight" in str(error.value)
    with pytest.raises(LossError, match="is it the same model"):
        ckpt.load_into(torch.nn.Linear(2, 2), moe, strict=False)
    with torch.device("meta"), pytest.raises(UsageError, match="to_empty"):
        ckpt.load_into(fresh(moe, torch.float32), moe)


def test_a_module_of_ones_own(fixtures: Path) -> None:
    """The custom toy has ties and buffers."""
    run = fixtures / "toy-zero3"
    truth = load_file(run / "truth" / "global_step2.safetensors")
    named = {fqn.partition("/")[2]: tensor for fqn, tensor in truth.items() if fqn.split("/")[0] in KINDS}
    model = torch.nn.Module()
    for fqn, tensor in named.items():
        *path, leaf = fqn.split(".")
        module = model
        for part in path:
            module = module._modules.setdefault(part, torch.nn.Module())
        if f"buffer/{fqn}" in truth:
            module.register_buffer(leaf, torch.zeros_like(tensor))
        else:
            module.register_parameter(leaf, torch.nn.Parameter(torch.zeros_like(tensor)))
    assert ckpt.load_into(model, run) == []
    assert {fqn: raw(tensor) for fqn, tensor in model.state_dict().items()} == {f: raw(t) for f, t in named.items()}


def test_an_untied_model_that_is_filled_from_a_tied_checkpoint_says_so(tmp_path: Path) -> None:
    """Its output layer and optimizer states are copies, and are trained separately from then on."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 11, "hidden_size": 6, "intermediate_size": 7, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    tied, untied = (
        Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=is_tied)) for is_tied in (True, False)
    )

    def trained(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.tensor([[1, 2]])).logits.sum().backward()
        optimizer.step()
        return optimizer

    weights, states = get_state_dict(tied, trained(tied))
    tied.save_pretrained(tmp_path / "model")
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "step", no_dist=True)
    tied.config.save_pretrained(tmp_path / "step")
    with pytest.warns(UserWarning, match=r"lm_head\.weight: tied to model\.embed_tokens\.weight"):
        ckpt.load_into(untied, tmp_path / "model")
    assert torch.equal(untied.lm_head.weight, tied.model.embed_tokens.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckpt.load_into(Qwen2ForCausalLM(tied.config), tmp_path / "model")

    wanted, asked = get_state_dict(untied, trained(untied))
    with pytest.warns(UserWarning, match=r"lm_head\.weight: tied in the checkpoint, and not in the model"):
        reader = ckpt.StorageReader(tmp_path / "step")
        dcp.load({"model": wanted, "optimizer": asked}, storage_reader=reader, no_dist=True)
    given = asked["state"]
    assert torch.equal(given["lm_head.weight"]["exp_avg"], given["model.embed_tokens.weight"]["exp_avg"])


def test_a_number_too_large_for_the_parameter_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.tensor([[1.0, 1e30], [float("inf"), 0.0]])}, tmp_path / "model.safetensors")
    ckpt.load_into(torch.nn.Linear(2, 2, bias=False).bfloat16(), tmp_path)
    narrow = torch.nn.Linear(2, 2, bias=False).half()
    with pytest.raises(LossError, match="too large for float16"):
        ckpt.load_into(narrow, tmp_path)
    assert not narrow.weight.isinf().any()
    with pytest.raises(dcp.api.CheckpointException, match="too large for float16"):
        dcp.load({"weight": torch.zeros(2, 2).half()}, storage_reader=ckpt.StorageReader(tmp_path), no_dist=True)
