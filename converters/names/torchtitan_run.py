"""The model of a torchtitan run, compared with a config.json.

    <run>/checkpoint/step-100/      torchtitan's checkpoint
    <run>/*.json                    the run's settings, with `--debug.save_config_file`

Format facts: torchtitan 0.3.0, trainer.py (`Trainer.Config.to_dict`), models/common (attention.py, rope.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt.move.source import read_file
from ckpt.plan.checkpoint import Checkpoint
from converters.names.families.config import Config, nested, of_another_model

_SPEC, _MAX_BYTES = "model_spec", 1 << 24
#: Kinds of scaled positions, with transformers' names for the kind and its numbers.
_SCALINGS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "none": ("default", {}),
    "llama": (
        "llama3",
        {
            "scaling_factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_position_embeddings": "original_max_position_embeddings",
        },
    ),
    "yarn": (
        "yarn",
        {
            "rope_factor": "factor",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "original_seq_len": "original_max_position_embeddings",
        },
    ),
}
#: Sizes of latent attention, with the same names in config.json.
_OF_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def check_run(checkpoint: Checkpoint) -> None:
    """Raise CorruptError if the run's settings describe another model than the config.

    One matching file is enough.
    """
    config, first = Config(checkpoint.config or {}), None
    for path, model in _settings(Path(checkpoint.path)):
        different = next(_differences(model, config), None)
        if different is None:
            return
        first = first or (path, *different)
    if first is not None:
        path, name, theirs, ours = first
        raise of_another_model(path, f"{name} {theirs}", f"{name} {ours}")


def _differences(model: Mapping[str, Any], config: Config) -> Iterator[tuple[str, Any, Any]]:
    pairs = _pairs(model, config)
    return (pair for pair in pairs if None not in pair[1:] and pair[1] != pair[2])


def _settings(step: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Yield the settings files of the run that saved `step`, and its model's settings.

    The step may be a link, or a path relative to the working directory.
    """
    for folder in dict.fromkeys((*step.absolute().parents[:2], *step.resolve().parents[:2])):
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
            model = nested(nested(_object(path), _SPEC), "model")
            if model:
                yield path, model


def _object(path: Path) -> Mapping[str, Any]:
    content = read_file(path, _MAX_BYTES) if path.is_file() else b""
    if f'"{_SPEC}"'.encode() not in content:
        return {}
    try:
        found = json.loads(content)
    except ValueError:  # another program's
        return {}
    return found if isinstance(found, Mapping) else {}


def _pairs(model: Mapping[str, Any], config: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yield settings with a meaning in both: config.json's name, the run's value and the config's."""
    layers = model.get("layers")
    layers = [one for one in layers if isinstance(one, Mapping)] if isinstance(layers, list) else []
    yield "hidden_size", model.get("dim"), config.get("hidden_size")
    yield "vocab_size", model.get("vocab_size"), config.get("vocab_size")
    yield "num_hidden_layers", len(layers) or None, config.get("num_hidden_layers")
    for layer in layers:
        attention = nested(layer, "attention")
        projections = nested(attention, "qkv_linear")
        heads, ours = attention.get("n_heads"), config.get("num_attention_heads")
        yield "num_attention_heads", heads, ours
        if "kv_lora_rank" not in attention:
            groups = attention.get("n_kv_heads") or projections.get("n_kv_heads") or heads
            yield "num_key_value_heads", groups, config.get("num_key_value_heads") or ours
            yield "head_dim", attention.get("head_dim") or projections.get("head_dim"), _head_size(config)
        yield from ((name, attention.get(name), config.get(name)) for name in _OF_LATENT if attention.get(name))
        yield "rms_norm_eps", nested(layer, "attention_norm").get("eps"), config.get("rms_norm_eps")
        yield from _of_rope(nested(attention, "rope"), config.rope)


def _head_size(config: Config) -> Any:
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    is_known = type(hidden) is int and type(heads) is int and heads > 0
    return config.get("head_dim") or (hidden // heads if is_known else None)


def _of_rope(stated: Mapping[str, Any], rope: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    yield "rope_theta", stated.get("theta"), rope.get("rope_theta")
    kind, numbers = _SCALINGS.get(str(stated.get("scaling")), (stated.get("scaling"), {}))
    yield "rope_type", kind, rope["rope_type"]
    yield from ((ours, stated.get(theirs), rope.get(ours)) for theirs, ours in numbers.items())
