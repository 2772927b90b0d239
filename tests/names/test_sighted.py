"""`converters/names/megatron/vision.py` and tables for models with images: file names, releases, optimizers, errors.

`test_megatron.py` has the tests for all tables, and the logits.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt import api
from ckpt.errors import LossError, NotFoundError
from ckpt.plan.checkpoint import HUB, MEGATRON, TRANSFORMERS, WEIGHT, Checkpoint, Layout
from ckpt.state.naming import to_namespace
from converters.names.families import composites
from converters.names.families.composites import COMPOSITES
from converters.names.megatron.relation import architectures, table_of
from tests.names.test_megatron import config_of, described, hub_of, refused, saved
from tests.support.engines import raw
from tests.support.images import trained
from tests.support.megatron_logits import random_model
from tests.support.tiny_sizes import even_sizes, tiny_sizes

SEEING = sorted(name for name in architectures() if name in COMPOSITES)
#: Position of a module that CLIP and SigLIP have on the Hub, but not in a model built from a config.
TOWER = re.compile(r"^vision_tower\.(?=embeddings\.\w+_embedding\b|encoder\.layers|p\w+norm|head\.)")
LAYER = "language_model.decoder.layers.0.self_attention"


def written(checkpoint: Checkpoint, target: str, out: Path, **layout: int) -> Path:
    api.plan(checkpoint, target, Layout(**layout)).run(out)
    return out


@pytest.mark.parametrize("model_type", SEEING)
def test_tables_of_both_sides_are_of_the_same_tensors(model_type: str) -> None:
    config = config_of(model_type)
    table, found = table_of(model_type), composites.saved(config)
    sizes = table.family.sizes(config)
    assert found is not None
    assert dict(table.relation(sizes, sizes.dims["v"], {}).a_shapes) == dict(found.required)


@pytest.mark.parametrize("model_type", SEEING)
def test_files_of_ranks_have_the_names_of_megatron_bridges_model(model_type: str, tmp_path: Path) -> None:
    """The language model has a path prefix. Only ranks in the first stage have the tower, and each has all of it."""
    hub = saved(tmp_path / "hub", model_type, **even_sizes(model_type, {}))
    folder = written(api.open(tmp_path / "hub"), "megatron", tmp_path / "out", tp=2, pp=2) / "release"
    ranks = {
        path.name: torch.load(path / "model_optim_rng.pt", weights_only=False)["model"] for path in folder.iterdir()
    }
    assert sorted(ranks) == ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
    beside = [name for name in ranks["mp_rank_00_000"] if not name.startswith("language_model.")]
    count = sum("layers." not in name or "language" not in name for name in hub if _is_beside(name))
    assert len(beside) == count > 20
    assert {name for name in ranks["mp_rank_01_000"] if not name.startswith("language_model.")} == set(beside)
    for last in ("mp_rank_00_001", "mp_rank_01_001"):
        assert all(name.startswith("language_model.") for name in ranks[last])
    assert all(any(name.startswith(f"{LAYER}.") for name in content) for content in ranks.values())
    assert not any(name.endswith("_extra_state") for name in beside)
    back = written(api.open(tmp_path / "out"), "hf", tmp_path / "back")
    after = load_file(back / "model.safetensors")
    renamed = {TOWER.sub("vision_tower.vision_model.", name): name for name in hub}
    assert after.keys() == renamed.keys() and all(raw(after[name]) == raw(hub[renamed[name]]) for name in after)


def _is_beside(name: str) -> bool:
    return "visual." in name or name.startswith(("vision_tower.", "multi_modal_projector.", "image_newline"))


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "glm4v_moe"])
def test_the_way_over_torch_dist_is_bit_for_bit(model_type: str, tmp_path: Path) -> None:
    hub = saved(tmp_path / "hub", model_type)
    folder = written(api.open(tmp_path / "hub"), "megatron-dist", tmp_path / "dist")
    checkpoint = api.open(folder)
    assert ("decoder.layers.0.self_attention.linear_qkv.weight", WEIGHT) in checkpoint.tensors
    after = load_file(written(checkpoint, "hf", tmp_path / "back") / "model.safetensors")
    assert after.keys() == hub.keys() and all(raw(after[name]) == raw(hub[name]) for name in hub)


# -- names and configs of releases -------------------------------------------------------------------------------------
def _moved(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Checkpoint:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return to_namespace(api.open(folder), MEGATRON, Layout())


@pytest.mark.parametrize(
    ("model_type", "renamed"),
    [
        ("llava", {"vision_tower.": "vision_tower.vision_model."}),  # transformers 4
        ("llava", {"language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head"}),
        ("qwen2_5_vl", {"model.": "model.language_model.", "visual.": "model.visual."}),
        ("qwen3_vl", {"model.language_model.": "language_model.model.", "model.visual.": "visual."}),
        ("llava_next", {"image_newline": "model.image_newline", "vision_tower.": "model.vision_tower."}),
    ],
)
def test_names_of_other_releases_are_those_of_the_model(
    model_type: str, renamed: dict[str, str], tmp_path: Path
) -> None:
    hub = saved(tmp_path / "hub", model_type)
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    expected = to_namespace(api.open(tmp_path / "hub"), MEGATRON, Layout())
    other = {}
    for name, tensor in hub.items():
        start = next((start for start in renamed if name.startswith(start)), None)
        other[renamed[start] + name.removeprefix(start) if start else name] = tensor
    assert other.keys() != hub.keys()
    found = _moved(tmp_path / "other", other, config)
    assert found.shapes == expected.shapes
    assert all(torch.equal(found[name][...], expected[name][...]) for name, _ in found.tensors)


def test_two_spellings_of_one_tensor_are_refused(tmp_path: Path) -> None:
    hub = saved(tmp_path / "hub", "qwen2_5_vl")
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    twice = {**hub, "model.visual.merger.ln_q.weight": hub["visual.merger.ln_q.weight"]}
    with pytest.raises(LossError, match="the same name"):
        _moved(tmp_path / "twice", twice, config)


def test_experts_that_a_release_has_with_its_dims_exchanged(tmp_path: Path) -> None:
    """Qwen3-VL's release stores each expert as [in, out], but transformers 5 saves [out, in]."""
    hub = saved(tmp_path / "hub", "qwen3_vl_moe")
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    released = {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in hub.items()}
    found = _moved(tmp_path / "released", released, config)
    expert = "decoder.layers.1.mlp.experts.local_experts.3"
    inside = "model.language_model.layers.1.mlp.experts"
    assert torch.equal(found[f"{expert}.linear_fc1.weight"][...], hub[f"{inside}.gate_up_proj"][3])
    assert torch.equal(found[f"{expert}.linear_fc2.weight"][...], hub[f"{inside}.down_proj"][3])


def test_a_square_stack_among_exchanged_ones_is_refused() -> None:
    """Without the refusal, transformers would load it unchanged and compute with the transposed matrix."""
    config = config_of("qwen3_vl_moe")
    config["text_config"] = {
        **config["text_config"],
        "moe_intermediate_size": config["text_config"]["hidden_size"] // 2,
    }
    found = composites.saved(config)
    assert found is not None
    to_namespace(described(found.required, config), MEGATRON)
    exchanged = {n: (s[0], s[2], s[1]) if ".mlp.experts." in n else s for n, s in found.required.items()}
    assert (
        refused(LossError, described(exchanged, config)).fqn == "model.language_model.layers.0.mlp.experts.gate_up_proj"
    )


#: Released configs. They state shapes and omit entries with the class's defaults.
RELEASED: dict[str, dict[str, Any]] = {
    "llava-1.5-7b": {
        "model_type": "llava",
        "ignore_index": -100,
        "image_token_index": 32000,
        "text_config": {
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "rms_norm_eps": 1e-05,
            "torch_dtype": "float16",
            "vocab_size": 32064,
        },
        "vision_config": {
            "hidden_size": 1024,
            "image_size": 336,
            "intermediate_size": 4096,
            "model_type": "clip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "projection_dim": 768,
            "vocab_size": 32000,
        },
    },
    "qwen2-vl-2b": {
        "model_type": "qwen2_vl",
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "sliding_window": 32768,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
        "vision_config": {
            "depth": 32,
            "embed_dim": 1280,
            "mlp_ratio": 4,
            "num_heads": 16,
            "in_chans": 3,
            "hidden_size": 1536,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
        },
    },
    "qwen2.5-vl-7b": {
        "model_type": "qwen2_5_vl",
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 128000,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "sliding_window": 32768,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
    },
}


@pytest.mark.parametrize("release", RELEASED)
def test_a_config_of_a_release_means_what_transformers_reads_in_it(release: str) -> None:
    """Sizes may be flat or left to the class, and entries may come from an earlier release."""
    from transformers import AutoConfig

    config = RELEASED[release]
    model_type = config["model_type"]
    whole = json.loads(json.dumps(AutoConfig.for_model(**config).to_dict()))
    table = table_of(model_type)
    found, expected = table.family.sizes(config), table.family.sizes({**whole, "model_type": model_type})
    assert (found.top, found.layers, found.dims) == (expected.top, expected.layers, expected.dims)
    differing = {name for name, value in table.args(expected).items() if table.args(found).get(name) != value}
    assert differing <= {"params_dtype", "bf16", "fp16"}


@pytest.mark.parametrize("model_type", SEEING)
def test_what_a_config_leaves_out_is_what_its_class_takes(model_type: str) -> None:
    from transformers import AutoConfig

    sizes = tiny_sizes(model_type)
    text = {k: v for k, v in sizes["text_config"].items() if k not in ("rope_parameters", "sliding_window")}
    config = {**sizes, "model_type": model_type, "text_config": text}
    whole = json.loads(json.dumps(AutoConfig.for_model(**config).to_dict()))
    table = table_of(model_type)
    assert table.args(table.family.sizes(config)) == table.args(table.family.sizes(whole))


@pytest.mark.parametrize("model_type", ["mistral3", "internvl"])
def test_an_output_layer_that_is_stored_is_one_where_no_config_says(model_type: str) -> None:
    """The class ties the layer by default, but transformers unties it if files have a separate layer."""
    config = config_of(model_type)
    hub = hub_of(config)
    del config["tie_word_embeddings"]
    there = to_namespace(replace(hub, config=config), MEGATRON, Layout())
    assert ("output_layer.weight", WEIGHT) in there.tensors
    assert {name for name, _ in to_namespace(there, HUB).tensors} == {name for name, _ in hub.tensors}


# -- mcore-bridge, other Megatron models, optimizers -------------------------------------------------------------------
def _file_of(state: dict[str, torch.Tensor], folder: Path) -> Path:
    from argparse import Namespace

    args = Namespace(num_layers=1, tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    (folder / "release/mp_rank_00").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    content = {"args": args, "checkpoint_version": 3.0, "iteration": 0, "model": state}
    torch.save(content, folder / "release/mp_rank_00/model_optim_rng.pt")
    return folder


def test_a_tower_of_megatron_cores_own_layers_is_refused(tmp_path: Path) -> None:
    """Megatron-LM's LLaVAModel and mbridge's models have such a tower, split over tensor parallel ranks."""
    state = {"language_model.embedding.word_embeddings.weight": torch.zeros(4, 2)}
    state |= {f"{LAYER}.linear_qkv.weight": torch.zeros(6, 2)}
    state["vision_model.decoder.layers.0.self_attention.linear_proj.lora.weight"] = torch.zeros(2, 2)
    with pytest.raises(LossError, match="tensor parallel sharding is unknown"):
        api.open(_file_of(state, tmp_path), "megatron")


def test_a_language_model_without_its_other_modules_is_refused(tmp_path: Path) -> None:
    state = {"language_model.embedding.word_embeddings.weight": torch.zeros(4, 2)}
    state |= {f"{LAYER}.linear_qkv.weight": torch.zeros(6, 2)}
    with pytest.raises(LossError, match="belongs to a larger model"):
        api.open(_file_of(state, tmp_path), "megatron")


def test_a_text_model_that_megatron_cannot_compute_is_refused() -> None:
    """Ministral 3 scales queries by position."""
    config = config_of("mistral3", text_config={**tiny_sizes("mistral3")["text_config"], "model_type": "ministral3"})
    found = composites.saved(config)
    assert found is not None
    error = refused(LossError, described(found.required, config))
    assert "ministral3" in str(error.found)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl_moe"])
def test_a_resume_keeps_the_optimizers_states(model_type: str, tmp_path: Path) -> None:
    """From HF Trainer to two ranks' files and back through `torch_dist`, every state stays bit for bit."""
    model = random_model(model_type, even_sizes(model_type, {}))
    source = api.open(trained(model, tmp_path / "run"))
    assert {role for _, role in source.tensors} >= {"exp_avg", "exp_avg_sq"}
    ranks = written(source, "megatron", tmp_path / "ranks", tp=2, pp=2)
    dist = written(api.open(ranks), "megatron-dist", tmp_path / "dist", tp=1, pp=1)
    for folder in (ranks, dist):
        back = to_namespace(api.open(folder), TRANSFORMERS)
        keys = [key for key in source.tensors if key[1].startswith("exp_avg")]
        assert len(keys) > 100
        for fqn, role in keys:
            assert raw(back[fqn, role][...]) == raw(source[fqn, role][...]), (fqn, role)
    with pytest.raises(LossError, match="in a different order"):  # torch_dist keys have no order
        written(api.open(dist), "megatron", tmp_path / "no")


def test_buffers_of_the_distributed_optimizer_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers follow transformers' module order, but the keys don't record it."""
    from converters.megatron.dist import read

    saved(tmp_path / "hub", "qwen2_vl")
    folder = written(api.open(tmp_path / "hub"), "megatron-dist", tmp_path / "dist")
    monkeypatch.setattr(read.DistReading, "sharding", "dp_zero_gather_scatter")
    with pytest.raises(NotFoundError, match="not Megatron's own"):
        api.open(folder)
