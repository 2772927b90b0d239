"""The model of an OLMo-core run, compared with a config.json of transformers.

    step100/model_and_optim/    OLMo-core's checkpoint
    step100/config.json         the run's settings

Equal shapes don't prove heads, rotation or attention windows, so each setting is compared, harmless, or refused.
Format facts: ai2-olmo-core 3.0.0 (nn/hf/config.py, `get_hf_config`; nn/attention, `SlidingWindowAttentionConfig`; the
fields of each `ModuleConfig`), transformers 5.23 (configuration_olmo3.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt.base.errors import UsageError
from ckpt.move.source import read_file
from ckpt.plan.checkpoint import Checkpoint
from converters.names.families.config import Config, nested, of_another_model

_MAX_BYTES = 1 << 24
_FULL, _SLIDING = "full_attention", "sliding_attention"
_NORM_EPS = 1e-5  # nn/layer_norm.py
#: Settings that `_pairs` compares, that tensors show, or that end with the training.
_KNOWN = {
    *("_CLASS_", "d_model", "vocab_size", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_size"),
    *("theta", "eps", "pattern", "force_full_attention_on_first_layer"),
    *("force_full_attention_on_last_layer", "partial_rotary_factor", "activation", "tie_word_embeddings"),
    *("bias", "elementwise_affine", "full_precision", "dtype", "dropout", "use_flash", "backend"),
    *("loss_implementation", "init_method", "init_seed", "init_std", "embedding_init_std", "freeze_params"),
    "use_recompute_qkv_prep",
}
#: Values of other settings that mean what transformers computes, besides None and False. Names are by module.
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "name": ("default",),
    "block.name": ("reordered_norm",),
    "sequence_mixer.name": ("default", "fused"),
    "attention.name": ("default", "fused"),
    "rope.name": ("default", "fused"),
    "layer_norm.name": ("rms", "fused_rms"),
    "qk_norm.name": ("rms", "fused_rms"),
    "sequence_mixer.type": ("attention",),
    "embed_scale": (1,),
    "block.attention_residual_alpha": (1,),
    "block.feed_forward_residual_alpha": (1,),
}
_HINT = "olmo_core.nn.hf.save_hf_model writes the model with its config"


def check_run(checkpoint: Checkpoint) -> list[str]:
    """Return a note if the step has no settings.

    Raise CorruptError if they describe another model than the config, UsageError if none can.
    """
    path = Path(checkpoint.path).resolve().parent / "config.json"
    model = _settings(path)
    if not model:
        return ["heads, rotation and attention windows are not compared: the step has no config.json of OLMo-core's"]
    config = Config(checkpoint.config or {})
    for name, found in _not_compared(model):
        if found:
            raise UsageError(f"OLMo-core's {name} can't be compared with a config", path=path, hint=_HINT)
    for name, theirs, ours in _pairs(model, config):
        if theirs != ours:
            raise of_another_model(path, f"{name} {theirs}", f"{name} {ours}")
    return []


def _settings(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(read_file(path, _MAX_BYTES)) if path.is_file() else {}
    except ValueError:
        return {}
    return nested(found, "model") if isinstance(found, Mapping) else {}


def _attention(model: Mapping[str, Any]) -> Mapping[str, Any]:
    block = nested(model, "block")
    return nested(block, "sequence_mixer") or nested(block, "attention")


def _not_compared(model: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "block_overrides", model.get("block_overrides")
    yield "RoPE scaling", nested(_attention(model), "rope").get("scaling")
    yield from _settings_without_counterpart(model)


def _settings_without_counterpart(values: Mapping[str, Any], module: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings, also new ones, that may change what the model computes."""
    for name, value in values.items():
        at = f"{module}.{name}" if module else name
        if isinstance(value, Mapping):
            yield from _settings_without_counterpart(value, name)
        elif name not in _KNOWN and value not in (None, False) and value not in _known_values(module, name):
            yield f"{at} {value!r}", True


def _known_values(module: str, name: str) -> tuple[Any, ...]:
    return _HARMLESS.get(f"{module}.{name}" if module else name, _HARMLESS["name"] if name == "name" else ())


def _pairs(model: Mapping[str, Any], config: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yield each setting: its name, the run's value and the config's."""
    block, attention = nested(model, "block"), _attention(model)
    rope, heads = nested(attention, "rope"), attention.get("n_heads")
    own_heads = config.get("num_attention_heads")
    yield "hidden_size", model.get("d_model"), config.get("hidden_size")
    yield "vocab_size", model.get("vocab_size"), config.get("vocab_size")
    yield "num_hidden_layers", model.get("n_layers"), config.get("num_hidden_layers")
    yield "num_attention_heads", heads, own_heads
    yield "num_key_value_heads", attention.get("n_kv_heads") or heads, config.get("num_key_value_heads") or own_heads
    yield "hidden_act", nested(block, "feed_forward").get("activation", "silu"), config.get("hidden_act") or "silu"
    norms = [
        nested(block, "layer_norm"),
        nested(attention, "qk_norm"),
        nested(nested(model, "lm_head"), "layer_norm"),
    ]
    for norm in filter(None, norms):
        yield "rms_norm_eps", norm.get("eps") or _NORM_EPS, config.get("rms_norm_eps")
    yield "tie_word_embeddings", bool(model.get("tie_word_embeddings")), config.flag("tie_word_embeddings")
    yield "block", block.get("name"), "reordered_norm"
    for own in [part for part in config.rope.values() if isinstance(part, Mapping)] or [config.rope]:
        yield "rope_theta", rope.get("theta"), own.get("rope_theta")
        yield "rope_type", "default", own.get("rope_type", "default")
    yield "partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 1.0
    windows = _windows(nested(attention, "sliding_window"), model.get("n_layers"))
    yield "attention windows", windows, _own_windows(config)


def _windows(sliding: Mapping[str, Any], num_layers: Any) -> list[int]:
    """Return each layer's window, or -1 for full attention."""
    pattern, count = sliding.get("pattern"), num_layers if type(num_layers) is int else 0
    if not isinstance(pattern, list) or not pattern:
        return [-1] * count
    first = bool(sliding.get("force_full_attention_on_first_layer", True))
    found = [pattern[(number - first) % len(pattern)] for number in range(count)]
    if first:
        found[:1] = [-1]
    if sliding.get("force_full_attention_on_last_layer", True):
        found[-1:] = [-1]
    return found


def _own_windows(config: Config) -> list[int]:
    count = config.size("num_hidden_layers")
    if config.get("model_type") != "olmo3":
        return [-1] * count
    kinds = config.get("layer_types") or [_FULL if number % 4 == 3 else _SLIDING for number in range(count)]
    window = config.size("sliding_window", default=4096)
    return [window if kind == _SLIDING else -1 for kind in kinds]
