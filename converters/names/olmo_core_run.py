"""The model of an OLMo-core run, compared with a config.json of transformers.

    step100/model_and_optim/    OLMo-core's checkpoint
    step100/config.json         the run's settings

Equal shapes don't prove heads, rotation or attention windows, so each setting is compared. Format facts: ai2-olmo-core
3.0.0 (nn/hf/config.py, `get_hf_config`; nn/attention, `SlidingWindowAttentionConfig`), transformers 5.23
(configuration_olmo3.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, UsageError
from ckpt.move.source import read_file
from ckpt.plan.checkpoint import Checkpoint
from converters.names.families.config import Config

_MAX_BYTES = 1 << 24
_FULL, _SLIDING = "full_attention", "sliding_attention"
_HINT = "olmo_core.nn.hf.save_hf_model writes the model with its config"


def check_run(checkpoint: Checkpoint) -> None:
    """Raise CorruptError if the step's settings describe another model than the config, UsageError if none can."""
    path = Path(checkpoint.path).resolve().parent / "config.json"
    model = _settings(path)
    config = Config(checkpoint.config or {})
    for name, found in _not_compared(model):
        if found:
            raise UsageError(f"OLMo-core's {name} can't be compared with a config", path=path, hint=_HINT)
    for name, theirs, ours in _pairs(model, config) if model else ():
        if theirs != ours:
            raise CorruptError(
                "the config belongs to another model than the run trained",
                path=path,
                expected=f"{name} {theirs}, recorded by the run",
                found=f"{name} {ours}",
                hint="does the config belong to this checkpoint?",
            )


def _settings(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(read_file(path, _MAX_BYTES)) if path.is_file() else {}
    except ValueError:
        return {}
    return _nested(found, "model") if isinstance(found, Mapping) else {}


def _nested(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def _attention(model: Mapping[str, Any]) -> Mapping[str, Any]:
    block = _nested(model, "block")
    return _nested(block, "sequence_mixer") or _nested(block, "attention")


def _not_compared(model: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "block_overrides", model.get("block_overrides")
    yield "RoPE scaling", _nested(_attention(model), "rope").get("scaling")


def _pairs(model: Mapping[str, Any], config: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yield each setting: its name, the run's value and the config's."""
    block, attention = _nested(model, "block"), _attention(model)
    rope, heads = _nested(attention, "rope"), attention.get("n_heads")
    own_heads = config.get("num_attention_heads")
    yield "hidden_size", model.get("d_model"), config.get("hidden_size")
    yield "vocab_size", model.get("vocab_size"), config.get("vocab_size")
    yield "num_hidden_layers", model.get("n_layers"), config.get("num_hidden_layers")
    yield "num_attention_heads", heads, own_heads
    yield "num_key_value_heads", attention.get("n_kv_heads") or heads, config.get("num_key_value_heads") or own_heads
    yield "hidden_act", _nested(block, "feed_forward").get("activation", "silu"), config.get("hidden_act") or "silu"
    yield "rms_norm_eps", _nested(block, "layer_norm").get("eps"), config.get("rms_norm_eps")
    yield "tie_word_embeddings", bool(model.get("tie_word_embeddings")), config.flag("tie_word_embeddings")
    yield "block", block.get("name"), "reordered_norm"
    for own in [part for part in config.rope.values() if isinstance(part, Mapping)] or [config.rope]:
        yield "rope_theta", rope.get("theta"), own.get("rope_theta")
        yield "rope_type", "default", own.get("rope_type", "default")
    yield "partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 1.0
    windows = _windows(_nested(attention, "sliding_window"), model.get("n_layers"))
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
