"""`converters/names/transformers/relation.py`, `transformers_source.py`, `ties.py`: names in memory and on the Hub.

`save_pretrained` and `from_pretrained` are the oracle.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt.errors import CkptError, CorruptError, LossError, UsageError
from ckpt.move.run import execute
from ckpt.plan.checkpoint import HUB, TRANSFORMERS, Checkpoint, Layout, ReadRequest
from ckpt.plan.planner import make_plan
from ckpt.plan.relation import translate
from converters.huggingface.hf import HF
from converters.names.transformers import relation as relations
from converters.names.transformers import transformers_source
from converters.names.transformers.relation import relation
from converters.names.transformers.ties import kept_names
from tests.support.architectures import tiny_config, tiny_model
from tests.support.loaded import save_loaded

transformers = pytest.importorskip("transformers", minversion="5")

#: True if memory differs from the Hub, and a pattern that Hub files must contain.
MODELS: dict[str, tuple[bool, str]] = {
    "llama": (False, r"model\.layers\.1\.mlp\.gate_proj\.weight"),
    "mistral": (False, r"model\.layers\.1\.mlp\.gate_proj\.weight"),
    "qwen2": (False, r"model\.layers\.1\.self_attn\.q_proj\.bias"),
    "qwen3": (False, r"model\.layers\.1\.self_attn\.q_norm\.weight"),
    "gpt2": (False, r"transformer\.h\.1\.attn\.c_attn\.weight"),
    "gemma3_text": (False, r"model\.embed_tokens\.weight"),
    "gpt_oss": (False, r"model\.layers\.1\.mlp\.experts\.gate_up_proj"),
    "llama4_text": (False, r"model\.layers\.1\.feed_forward\.experts\.gate_up_proj"),
    "qwen3_vl_moe": (False, r"model\.language_model\.layers\.1\.mlp\.experts\.gate_up_proj"),
    "gpt_neox": (True, r"embed_out\.weight"),
    "mixtral": (True, r"model\.layers\.1\.block_sparse_moe\.experts\.11\.w3\.weight"),
    "qwen2_moe": (True, r"model\.layers\.1\.mlp\.experts\.11\.up_proj\.weight"),
    "qwen3_moe": (True, r"model\.layers\.1\.mlp\.experts\.11\.up_proj\.weight"),
    "qwen3_next": (True, r"model\.layers\.1\.mlp\.experts\.11\.up_proj\.weight"),
    "deepseek_v2": (True, r"model\.layers\.1\.mlp\.experts\.11\.up_proj\.weight"),
    "deepseek_v3": (True, r"model\.layers\.1\.mlp\.experts\.11\.up_proj\.weight"),
    "deepseek_v4": (True, r".*experts\.11\..*"),
    "glm4_moe": (True, r"model\.layers\.1\.mlp\.experts\.11\.up_proj\.weight"),
    "olmoe": (True, r"model\.layers\.1\.mlp\.experts\.11\.up_proj\.weight"),
    "flex_olmo": (True, r"model\.layers\.1\.mlp\.experts\.11\.up_proj\.weight"),
    "phimoe": (True, r"model\.layers\.1\.block_sparse_moe\.experts\.11\.w3\.weight"),
    "granitemoe": (True, r"model\.layers\.1\.block_sparse_moe\.input_linear\.weight"),
    "jamba": (True, r"model\.layers\.1\.feed_forward\.experts\.11\.up_proj\.weight"),
    "minimax_m2": (True, r"model\.layers\.1\.block_sparse_moe\.experts\.11\.w3\.weight"),
    "hunyuan_v1_moe": (True, r"model\.layers\.1\.mlp\.experts\.11\.up_proj\.weight"),
    "ernie4_5_moe": (True, r"model\.layers\.1\.mlp\.experts\.11\.up_proj\.weight"),
    "nemotron_h": (True, r"backbone\.layers\..*"),
    # scoped tables, and path prefixes at another place on the Hub
    "llava": (True, r"language_model\.model\.layers\.1\.mlp\.up_proj\.weight"),
    "qwen2_vl": (True, r"visual\.blocks\.0\.norm1\.weight"),
    "qwen2_5_vl": (True, r"visual\.blocks\.0\.norm1\.weight"),
    "gemma3": (True, r"language_model\.model\.layers\.1\.mlp\.up_proj\.weight"),
    # tensors fused in the other direction, permuted by rows, or reshaped
    "mistral_large4": (True, r"vision_encoder\..*\.attention\.wq\.weight"),
    "inkling2_text": (True, r".*experts\.w13_weight"),
    "vit": (True, r".*attention\.attention\.query\.weight"),
    "cohere_asr": (True, r".*"),
}


def without_aliases(model: Any) -> dict[str, torch.Tensor]:
    """Return the state dict as an engine stores it, with tied tensors once."""
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    aliases -= {name for name, _ in model.named_parameters()}
    if aliases:  # `named_parameters` keeps the first name, transformers the undeclared alias
        aliases = set(model.get_expanded_tied_weights_keys(all_submodels=True))
    ignored = aliases | set(model._keys_to_ignore_on_save or ())
    return {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}


class Saved:
    """A tiny model in memory and its files from `save_pretrained`."""

    def __init__(self, model_type: str, folder: Path) -> None:
        model = tiny_model(model_type)
        self.memory = without_aliases(model)
        self.hub = folder / "hub"
        save_loaded(model, self.hub)
        self.config: dict[str, Any] = json.loads((self.hub / "config.json").read_text())
        self.plain = folder / "memory"
        self.plain.mkdir()
        contiguous = {name: tensor.contiguous() for name, tensor in self.memory.items()}
        save_file(contiguous, self.plain / "model.safetensors", metadata={"format": "pt"})

    def in_memory(self) -> Checkpoint:
        """Return the model as a training checkpoint describes it."""
        checkpoint = HF.read(self.plain, ReadRequest())
        folders = (str(self.hub),)
        return replace(checkpoint, config=self.config, namespace=TRANSFORMERS, folders=folders)


def shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {fqn: tensor.shape for (fqn, _), tensor in checkpoint.tensors.items()}


def convert(checkpoint: Checkpoint, out: Path, **options: str) -> Path:
    execute(make_plan(checkpoint, HF.lay_out(checkpoint, Layout(**options)), carries_optimizer=False), out)
    return out


def to_hub(checkpoint: Checkpoint) -> Checkpoint:
    assert checkpoint.config is not None
    found = relation(checkpoint.config, shapes(checkpoint), "to_hub")
    return replace(checkpoint, namespace=HUB) if found is None else translate(checkpoint, found, HUB)


def to_memory(checkpoint: Checkpoint) -> Checkpoint:
    assert checkpoint.config is not None
    found = relation(checkpoint.config, shapes(checkpoint), "to_memory")
    return checkpoint if found is None else translate(checkpoint, found, TRANSFORMERS)


@pytest.fixture
def without_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make only the installed transformers know the model."""
    monkeypatch.setattr(relations, "declared", lambda config: None)


@pytest.mark.parametrize("model_type", MODELS)
def test_what_is_in_memory_becomes_the_file_that_save_pretrained_writes(tmp_path: Path, model_type: str) -> None:
    """The whole safetensors file is equal byte for byte, and reading it back gives the model in memory."""
    differs, pattern = MODELS[model_type]
    saved = Saved(model_type, tmp_path)
    checkpoint = saved.in_memory()
    assert (relation(saved.config, shapes(checkpoint), "to_hub") is not None) == differs
    out = convert(to_hub(checkpoint), tmp_path / "out")
    written = load_file(out / "model.safetensors")
    assert any(re.fullmatch(pattern, name) for name in written), sorted(written)
    assert (out / "model.safetensors").read_bytes() == (saved.hub / "model.safetensors").read_bytes()
    assert (out / "config.json").read_bytes() == (saved.hub / "config.json").read_bytes()

    back = to_memory(HF.read(saved.hub, ReadRequest()))
    with pytest.raises(LossError, match="save_pretrained") if differs else nullcontext():
        convert(replace(back, folders=()), tmp_path / "refused")
    again = convert(replace(back, folders=()), tmp_path / "again", names="own")
    assert (again / "model.safetensors").read_bytes() == (saved.plain / "model.safetensors").read_bytes()


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_neox", "llava", "vit"])
def test_names_that_are_the_hubs_already_pass_unchanged(tmp_path: Path, model_type: str) -> None:
    """A run under transformers 4 has per-expert tensors in memory."""
    saved = Saved(model_type, tmp_path)
    checkpoint = replace(HF.read(saved.hub, ReadRequest()), namespace=TRANSFORMERS)
    assert relation(saved.config, shapes(checkpoint), "to_hub") is None
    stored = HF.read(saved.plain, ReadRequest())
    assert relation(saved.config, shapes(stored), "to_memory") is None


def test_the_written_folder_loads_with_no_key_missing_or_left_over(tmp_path: Path) -> None:
    saved = Saved("qwen3_moe", tmp_path)
    out = convert(to_hub(saved.in_memory()), tmp_path / "out")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved.memory[name]), name


def test_every_role_is_split_alike(tmp_path: Path) -> None:
    saved = Saved("mixtral", tmp_path)
    checkpoint = saved.in_memory()
    roles = {(f, role): t._replace(role=role) for (f, _), t in checkpoint.tensors.items() for role in ("master", "m")}
    hub = to_hub(replace(checkpoint, tensors=roles))
    name = "model.layers.1.block_sparse_moe.experts.7.w1.weight"
    assert hub.get(name, "master") is not None and hub.get(name, "m") is not None


def test_names_of_ones_own_beside_a_models_stay(tmp_path: Path) -> None:
    saved = Saved("qwen3_moe", tmp_path)
    own = {"value_head.weight": (1, 32), "model.layers.9.mlp.experts.gate_up_proj": (12, 32, 32)}
    found = relation(saved.config, shapes(saved.in_memory()) | own, "to_hub")
    assert found is not None and all(found.b_shapes[name] == shape for name, shape in own.items())


def test_the_class_that_was_trained_is_found_by_its_names(tmp_path: Path) -> None:
    """The base model's names lack `model.`, though the config may name the causal model."""
    config = tiny_config("qwen3_moe")
    model = transformers.AutoModel.from_config(config)
    stated = {**config.to_dict(), "architectures": ["Qwen3MoeForCausalLM"]}
    found = relation(stated, {n: tuple(t.shape) for n, t in model.state_dict().items()}, "to_hub")
    assert found is not None and "layers.1.mlp.experts.11.up_proj.weight" in found.b_shapes


@pytest.mark.parametrize("architectures", [None, [], ["NoSuchClass"], ["FSDPQwen3MoeForCausalLM"], [7], ["Trainer"]])
def test_architectures_that_say_nothing(tmp_path: Path, architectures: object) -> None:
    saved = Saved("qwen3_moe", tmp_path)
    config = {**saved.config, "architectures": architectures}
    found = relation(config, shapes(saved.in_memory()), "to_hub")
    assert found is not None and set(found.b_shapes) == set(load_file(saved.hub / "model.safetensors"))


def test_old_names_are_taken_in_but_never_written(tmp_path: Path) -> None:
    """BERT's first files have `LayerNorm.gamma`, but `save_pretrained` writes `LayerNorm.weight`."""
    saved = Saved("bert", tmp_path)
    now = shapes(saved.in_memory())
    assert relation(saved.config, now, "to_hub") is None and relation(saved.config, now, "to_memory") is None
    old = {re.sub(r"LayerNorm\.weight$", "LayerNorm.gamma", n): s for n, s in now.items()}
    found = relation(saved.config, old, "to_memory")
    assert found is not None and dict(found.b_shapes) == now


def test_a_file_of_the_base_model_gets_the_prefix(tmp_path: Path) -> None:
    """The first GPT-2 files lack `transformer.`, but memory and saved files have it."""
    saved = Saved("gpt2", tmp_path)
    now = shapes(saved.in_memory())
    bare = {name.removeprefix("transformer."): shape for name, shape in now.items()}
    found = relation(saved.config, bare, "to_memory")
    assert found is not None and dict(found.b_shapes) == now
    base = {**saved.config, "architectures": ["GPT2Model"]}
    assert relation(base, bare, "to_memory") is None
    found = relation(base, now, "to_memory")
    assert found is not None and dict(found.b_shapes) == bare


@pytest.mark.parametrize(
    ("change", "error"), [("drop an expert", CorruptError), ("another shape", LossError), ("drop up_proj", CkptError)]
)
def test_experts_that_do_not_fit_together_are_refused(tmp_path: Path, change: str, error: type[CkptError]) -> None:
    saved = Saved("qwen3_moe", tmp_path)
    stored = shapes(HF.read(saved.hub, ReadRequest()))
    name = "model.layers.1.mlp.experts.11.up_proj.weight"
    if change == "drop an expert":
        stored = {n: s for n, s in stored.items() if ".experts.11." not in n}
    elif change == "drop up_proj":
        del stored[name]
    else:
        stored[name] = (16, 31)
    with pytest.raises(error):
        relation(saved.config, stored, "to_memory")


class Doubling:
    """Operation of a future transformers release that is not a rearrangement."""

    supports_many_to_many = False

    def convert(self, input_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {name: value[0] * 2 for name, value in input_dict.items()}

    @property
    def reverse_op(self) -> Doubling:
        return self


@pytest.mark.usefixtures("without_tables")
def test_an_operation_that_is_no_rearrangement_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightConverter

    config = tiny_config("qwen3_moe").to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    table = [WeightConverter("self_attn.q_proj.weight", "self_attn.q_proj.weight", [Doubling()])]
    original = conversion_mapping.get_checkpoint_conversion_mapping
    monkeypatch.setattr(
        conversion_mapping,
        "get_checkpoint_conversion_mapping",
        lambda key: table if key == "qwen3_moe" else original(key),
    )
    with pytest.raises(LossError, match="mul") as caught:
        relation(config, {"model.layers.0.self_attn.q_proj.weight": (32, 32)}, "to_hub")
    assert caught.value.fqn == "model.layers.0.self_attn.q_proj.weight"
    # missing source tensor
    assert relation(config, {"model.norm.weight": (32,)}, "to_hub") is None


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (None, "x"),
        ({}, "x"),
        ({"model_type": "no_such_model"}, "x"),
        ({"model_type": "../../etc"}, "x"),
        ({"model_type": 7}, "x"),
        ({"model_type": "mixtral"}, "base_model.model.model.layers.0.mlp.experts.gate_up_proj.lora_A.weight"),
    ],
)
def test_what_has_no_relation_keeps_its_names(config: Mapping[str, Any] | None, name: str) -> None:
    assert relation(config, {name: (2, 2, 2)}, "to_hub") is None
    assert relation(config, {name: (2, 2, 2)}, "to_memory") is None


HOSTILE: list[dict[str, Any]] = [
    {"model_type": "mixtral", "num_hidden_layers": 10**9},
    {"model_type": "mixtral", "num_local_experts": 10**9},
    {"model_type": "mixtral", "hidden_size": "x"},
    {"model_type": "mixtral", "num_attention_heads": 0},
]


@pytest.mark.usefixtures("without_tables")
@pytest.mark.parametrize("config", HOSTILE)
def test_a_hostile_config_is_refused_at_once(config: dict[str, Any]) -> None:
    with pytest.raises(CkptError):
        relation(config, {"model.norm.weight": (4,)}, "to_hub")


@pytest.mark.parametrize("config", HOSTILE)
def test_a_hostile_config_of_a_model_in_the_tables(config: dict[str, Any]) -> None:
    """Tables build no model. Configs with too many layers are refused, and other entries are ignored."""
    if 10**9 in config.values():
        with pytest.raises(CorruptError, match="too many"):
            relation(config, {"model.norm.weight": (4,)}, "to_hub")
    else:
        assert relation(config, {"model.norm.weight": (4,)}, "to_hub") is None


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (transformers_source, relations):
        monkeypatch.setattr(module, "package", lambda: None)
    transformers_source.converted_identifiers.cache_clear()
    yield
    transformers_source.converted_identifiers.cache_clear()


@pytest.mark.usefixtures("without_transformers", "without_tables")
def test_without_any_tables_only_stacked_experts_need_them() -> None:
    stacked = {"model.layers.0.mlp.experts.gate_up_proj": (4, 8, 8)}
    with pytest.raises(UsageError, match="stacked") as caught:
        relation({"model_type": "qwen3_moe"}, stacked, "to_hub")
    assert "pip install 'transformers>=5' torch" in str(caught.value.hint)
    assert relation({"model_type": "gpt_oss"}, stacked, "to_hub") is None
    per_expert = {"model.layers.0.mlp.experts.0.up_proj.weight": (8, 8)}
    assert relation({"model_type": "qwen3_moe"}, per_expert, "to_hub") is None


@pytest.mark.usefixtures("without_transformers")
def test_experts_of_a_model_in_the_tables_need_no_transformers() -> None:
    stacked = {"model.layers.0.mlp.experts.gate_up_proj": (4, 8, 8)}
    found = relation({"model_type": "qwen3_moe"}, stacked, "to_hub")
    assert found is not None
    assert found.b_shapes["model.layers.0.mlp.experts.3.up_proj.weight"] == (4, 8)
    back = relation({"model_type": "qwen3_moe"}, found.b_shapes, "to_memory")
    assert back is not None and back.b_shapes == stacked and set(back.inverse().links) == set(found.links)


def test_transformers_is_imported_only_for_models_that_no_table_has() -> None:
    code = (
        "import sys; from converters.names.transformers.relation import relation\n"
        "for config in {configs!r}:\n"
        "    shapes = {{'model.norm.weight': (4,), 'transformer.ln_f.weight': (4,)}}\n"
        "    assert relation(config, shapes, 'to_hub') is None\n"
        "    assert relation(config, shapes, 'to_memory') is None\n"
        "experts = {{'model.layers.0.mlp.experts.gate_up_proj': (4, 8, 8)}}\n"
        "for model_type in ('qwen3_moe', 'mixtral'):\n"
        "    found = relation({{'model_type': model_type, 'architectures': ['X']}}, experts, 'to_hub')\n"
        "    assert dict(relation({{'model_type': model_type}}, found.b_shapes, 'to_memory').b_shapes) == experts\n"
        "print(sorted({{'torch', 'transformers'}} & set(sys.modules)))\n"
    )
    names = {
        "llama": "LlamaForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "gpt2": "GPT2LMHeadModel",
        "mistral": "MistralForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
    }
    configs = [{"model_type": key, "architectures": [cls]} for key, cls in names.items()]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code.format(configs=configs)], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# -- ties: read from the source code, compared with the classes ----------------------------------------------
@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "MixtralForCausalLM",
        "GPT2LMHeadModel",
        "GPT2DoubleHeadsModel",
        "GPTNeoXForCausalLM",
        "GptOssForCausalLM",
        "DeepseekV3ForCausalLM",
        "Gemma2ForCausalLM",
        "BertForMaskedLM",
        "BertLMHeadModel",
        "BertForPreTraining",
        "T5ForConditionalGeneration",
        "T5EncoderModel",
        "T5Model",
        "OPTForCausalLM",
        "BloomForCausalLM",
        "Gemma3ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlamaForSequenceClassification",
        "Phi3ForCausalLM",
        "OlmoeForCausalLM",
        "PhimoeForCausalLM",
        "BartForConditionalGeneration",
        "WhisperForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "FalconForCausalLM",
        "MambaForCausalLM",
    ],
)
def test_tied_weights_are_those_of_the_class(name: str) -> None:
    cls = getattr(transformers, name)
    config = {"model_type": cls.config_class.model_type, "architectures": [name]}
    assert transformers_source.tied_weights(config) == (cls._tied_weights_keys or {})


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "mixtral",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
        "gemma2",
        "bert",
        "t5",
        "opt",
        "bloom",
        "olmoe",
    ],
)
def test_the_default_of_tying_is_that_of_the_config_class(model_type: str) -> None:
    default = transformers.CONFIG_MAPPING[model_type]()
    assert transformers_source.ties_by_default(model_type) == bool(default.tie_word_embeddings)


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "t5", "gemma2", "bloom", "opt"])
@pytest.mark.parametrize("turned", [False, True])
def test_the_kept_name_is_the_one_that_save_pretrained_keeps(tmp_path: Path, model_type: str, turned: bool) -> None:
    """The kept name doesn't depend on the direction recorded by the engine."""
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    tied = [names for names in groups.values() if len(names) > 1]
    assert tied
    config = json.loads((tmp_path / "config.json").read_text())
    for names in tied:
        owner, *aliases = names[::-1] if turned else names
        checkpoint = Checkpoint("x", "x", {}, (), config=config, ties=dict.fromkeys(aliases, owner))
        (kept,) = kept_names(checkpoint).values()
        assert [name for name in names if name in saved] == [kept]
