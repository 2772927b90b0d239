"""`converters/deepspeed/pipeline/write.py`: DeepSpeed loads models with a parallel residual."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt.errors import LossError
from ckpt.plan.checkpoint import Layout
from tests.formats.deepspeed.neox_pipeline import INPUT, ROLES
from tests.support import commands
from tests.support.engines import DEEPSPEED, fork_once, raw

transformers = pytest.importorskip("transformers", minversion="5")

FORMAT, LAYERS, VOCABULARY, PADDED = "megatron-deepspeed", 3, 100, 128
SIZES = {
    "hidden": 32,
    "ffn": 64,
    "layers": LAYERS,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 8,
    "vocabulary": PADDED,
    "epsilon": 1e-5,
    "rotary_dim": 2,
    "seed": 0,
    "tied": False,
    "bias": True,
    "qkv_bias": True,
    "layer_norm": True,
    "gated": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=64,
        rotary_pct=0.25,
        use_parallel_residual=True,
        architectures=["GPTNeoXForCausalLM"],
    )
    found = transformers.GPTNeoXForCausalLM(config).eval()
    for parameter in found.parameters():
        parameter.data = torch.randn(parameter.shape) * 0.2
    found.folder = tmp_path_factory.mktemp("pythia") / "model"
    found.save_pretrained(found.folder)
    return found


def in_pipeline(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename like GPT-NeoX's tools/ckpts/convert_hf_to_sequential.py, and pad the vocabulary."""
    found = {}
    for name, tensor in state.items():
        layer, _, rest = name.removeprefix("gpt_neox.layers.").partition(".")
        if layer.isdigit():
            found[f"{int(layer) + 2}.{rest}"] = tensor
        elif name.startswith("gpt_neox.final_layer_norm."):
            found[f"{LAYERS + 3}.norm.{name.rpartition('.')[2]}"] = tensor
        else:
            padded = torch.cat([tensor, torch.zeros(PADDED - VOCABULARY, tensor.shape[1])])
            found["0.word_embeddings.weight" if "embed_in" in name else f"{LAYERS + 4}.final_linear.weight"] = padded
    return found


@pytest.fixture(scope="module")
def trained(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train one step, save a script's file, and return the model with its optimizer states by name."""
    found = transformers.GPTNeoXForCausalLM.from_pretrained(model.folder)
    optimizer = torch.optim.AdamW(found.named_parameters(), lr=1e-3)
    found(INPUT, labels=INPUT).loss.backward()
    optimizer.step()
    found.folder = tmp_path_factory.mktemp("trained") / "run"
    found.folder.mkdir()
    state = {"model": found.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    torch.save(state, found.folder / "model.pt")
    found.config.save_pretrained(found.folder)
    found.states = {
        role: {fqn: optimizer.state[parameter][role] for fqn, parameter in found.named_parameters()} for role in ROLES
    }
    return found.eval()


@pytest.fixture(scope="module")
def held(model: Any, trained: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[Any]]:
    """Return the state of each DeepSpeed rank for both models, on one stage and on two."""
    folder, starts = tmp_path_factory.mktemp("held"), []
    for name, source in (("model", model), ("trained", trained)):
        for stages in (1, 2):
            run, out = folder / f"{name}-{stages}", folder / f"{name}-{stages}-held"
            ckpt.plan(ckpt.open(source.folder), FORMAT, Layout(pp=stages, world_size=stages)).run(run)
            starts.append((stages, "tests.formats.deepspeed.neox_pipeline", [json.dumps(SIZES), str(run), str(out)]))
    fork_once(folder, starts, DEEPSPEED)
    return {
        (name, stages): [torch.load(folder / f"{name}-{stages}-held" / f"{rank}.pt") for rank in range(stages)]
        for name in ("model", "trained")
        for stages in (1, 2)
    }


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", ["model", "trained"])
def test_the_pipeline_engine_loads_it_and_computes_the_same(
    name: str, stages: int, held: dict[tuple[str, int], list[Any]], request: pytest.FixtureRequest
) -> None:
    source, ranks = request.getfixturevalue(name), held[name, stages]
    wanted = {"state": source.state_dict(), **(source.states if name == "trained" else {})}
    for role, state in wanted.items():
        found = {fqn: raw(tensor) for rank in ranks for fqn, tensor in rank[role].items()}
        assert found == {fqn: raw(tensor) for fqn, tensor in in_pipeline(state).items()}, role
    assert ranks[0]["client"]["iteration"] == int(name == "trained")
    assert ranks[0]["client"]["args"] == {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "make_vocab_size_divisible_by": 128,
        "num_layers": 3,
        "padded_vocab_size": 128,
        "model_parallel_size": 1,
    }
    if stages == 1:
        logits = source(INPUT).logits
        torch.testing.assert_close(ranks[0]["logits"][..., :VOCABULARY], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stages", [1, 3])
def test_it_is_read_back_as_the_model_that_it_was(model: Any, tmp_path: Path, stages: int) -> None:
    done = commands.ckpt("convert", "hf", FORMAT, model.folder, "-o", tmp_path / "run", "--pp", stages)
    assert done.code == 0, done.err
    assert "wrote GPT-NeoX's names" in done.err and "finetune" in done.err
    files = sorted(path.name for path in (tmp_path / "run" / "global_step0").glob("layer_*"))
    assert [name.removesuffix("-model_00-model_states.pt") for name in files] == [
        f"layer_0{number}" for number in (0, 2, 3, 4, 6, 7)
    ]
    done = commands.ckpt("convert", FORMAT, "hf", tmp_path / "run", "-o", tmp_path / "hf", "--config", model.folder)
    assert done.code == 0, done.err
    written, saved = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", model.folder))
    assert {n: raw(t) for n, t in written.items()} == {n: raw(t) for n, t in saved.items()}


@pytest.mark.parametrize("target", ["megatron", "megatron-dist"])
def test_megatron_has_no_parallel_residual(model: Any, tmp_path: Path, target: str) -> None:
    ckpt.plan(ckpt.open(model.folder), FORMAT).run(tmp_path / "run")
    for source in (ckpt.open(model.folder), ckpt.open(tmp_path / "run")):
        with pytest.raises(LossError, match="no parallel residual"):
            ckpt.plan(source, target)


def test_biases_that_ranks_would_have_parts_of(model: Any) -> None:
    with pytest.raises(LossError, match="each would need a part") as caught:
        ckpt.plan(ckpt.open(model.folder), FORMAT, Layout(tp=2))
    assert caught.value.hint == "--tp 1"


def test_other_models_keep_megatron_deepspeeds_names(model: Any, tmp_path: Path) -> None:
    config = transformers.GPTNeoXConfig.from_pretrained(model.folder, use_parallel_residual=False)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "model")
    notes = ckpt.plan(ckpt.open(tmp_path / "model"), FORMAT).plan.target.notes
    assert any("query_key_value rows are ordered by head" in note for note in notes)
