"""Scaled rotary positions that a run records under several names.

    rotary_scaling_factor, mscale, mscale_all_dim     Megatron-LM's options, and fields of latent attention
    beta_fast, beta_slow, original_max_...            fields of latent attention
    yarn_rotary_scaling_factor, yarn_beta_fast, ...   fields of megatron-core's other models, and options
    yarn: {beta_fast, ...}                            the same in one setting
    rope_scaling: {factor, beta_fast, ...}            config.json's, in runs of ms-swift

megatron-core (models/gpt/gpt_model.py, transformer/multi_latent_attention.py) reads one name and ignores the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isclose
from typing import Any

from converters.names.families.config import rope_type

_ORIGINAL = "original_max_position_embeddings"
#: YaRN's fields and defaults. Megatron-LM also records defaults of names that it does not read.
_YARN: Mapping[str, Any] = {
    "rotary_scaling_factor": 1,
    "mscale": 1,
    "mscale_all_dim": 0,
    _ORIGINAL: 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "correction_range_round_to_int": True,
}
#: Entries of `rope_scaling` with another name.
_IN_SCALING = {"rotary_scaling_factor": "factor", "correction_range_round_to_int": "truncate"}
#: Factors in `rope_scaling`, with Megatron-LM's names and defaults.
_FACTORS = {"llama3": ("rope_scaling_factor", 8), "linear": ("rotary_seq_len_interpolation_factor", 1)}
#: Other settings in `rope_scaling`, with Megatron-LM's names.
_SCALED = {"rope_theta": "rotary_base", "mrope_section": "mrope_section", "partial_rotary_factor": "rotary_percent"}
#: Kinds compared through other arguments, or without scaling.
_KINDS = ("default", "linear", "llama3", "yarn")
#: Entries compared as arguments, or under another name.
_COMPARED_APART = ("mrope_section", "partial_rotary_factor", "rope_theta", "rope_type", "type")
#: Defaults in transformers (modeling_rope_utils.py).
_DEFAULTS = {"beta_fast": 32, "beta_slow": 1, "factor": 1, "truncate": True}


def with_yarn(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return YaRN's arguments under Megatron-LM's names.

    megatron-core's fields begin with `yarn_` (models/gpt/gpt_model.py), or are in one `yarn`.
    """
    if isinstance(together := args.get("yarn"), Mapping):
        args = {**args, **{f"yarn_{name}": value for name, value in together.items()}}
    if args.get("position_embedding_type") != "yarn":
        return args
    fields = {name: args.get(f"yarn_{name}") for name in ("rotary_scaling_factor", "mscale", "mscale_all_dim")}
    return {**args, **{name: value for name, value in fields.items() if value is not None}}


def with_scaling(args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add Megatron's arguments for scaled positions.

    ms-swift 3.12, megatron/model/gpt_model.py: `rope_scaling` is config.json's, and Megatron's arguments keep their
    defaults.
    """
    if not isinstance(scaling := args.get("rope_scaling"), Mapping):
        return args
    kind, factor = rope_type(scaling), scaling.get("factor")
    if kind == "llama3":
        return {**args, "use_rope_scaling": True, "rope_scaling_factor": factor}
    if kind == "linear":
        return {**args, "rotary_seq_len_interpolation_factor": factor}
    if kind != "yarn":
        return args
    own = {"rotary_scaling_factor": factor} | {name: scaling.get(name) for name in ("mscale", "mscale_all_dim")}
    if args.get("multi_latent_attention"):
        return {**args, **own, "rope_type": "yarn"}
    own |= {
        f"yarn_{name}": scaling.get(name) for name in ("original_max_position_embeddings", "beta_fast", "beta_slow")
    }
    own |= {"yarn_correction_range_round_to_int": scaling.get("truncate"), "position_embedding_type": "yarn"}
    return {**args, **own}


def other_scaling(args: Mapping[str, Any]) -> Any:
    scaling = args.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        return scaling or None
    kind = rope_type(scaling)
    return None if kind in _KINDS else kind


def contradictions(recorded: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    flat = dict(recorded)
    for nested in ("yarn", "rope_scaling"):
        if isinstance(values := recorded.get(nested), Mapping):
            flat |= {f"{nested}.{name}": value for name, value in values.items()}
    for name, default, others in _same_settings(recorded):
        stated = {other: flat[other] for other in others if flat.get(other) is not None}
        if flat.get(name) not in (None, default):
            stated = {name: flat[name], **stated}
        if any(not is_same(value, next(iter(stated.values()))) for value in stated.values()):
            yield stated


def _same_settings(recorded: Mapping[str, Any]) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield a setting's name, its default, and its other names."""
    scaling, is_latent = recorded.get("rope_scaling"), bool(recorded.get("multi_latent_attention"))
    scaling = scaling if isinstance(scaling, Mapping) else {}
    kind = rope_type(scaling)
    if kind == "yarn" or is_latent or recorded.get("position_embedding_type") == "yarn":
        for name, default in _YARN.items():
            scaled = [f"rope_scaling.{_IN_SCALING.get(name, name)}"] if kind == "yarn" else []
            is_read = is_latent and not scaled
            yield name, None if is_read else default, (f"yarn_{name}", f"yarn.{name}", *scaled)
    for name, arg in _SCALED.items():
        yield arg, None, (f"rope_scaling.{name}",)
    if kind in _FACTORS:
        yield *_FACTORS[kind], ("rope_scaling.factor",)
    if scaling.get("type") is not None and rope_type({"type": scaling["type"]}) != kind:
        yield "rope_scaling.rope_type", None, ("rope_scaling.type",)


def differences(scaling: Any, rope: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield entries that differ from config.json's: name and both values.

    Missing entries have their defaults.
    """
    if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        return
    if rope_type(scaling) != rope_type(rope):
        return  # compared as arguments
    for name in dict.fromkeys((*scaling, *rope)):
        theirs, ours = (one.get(name, _DEFAULTS.get(name)) for one in (scaling, rope))
        is_default = name == _ORIGINAL and None in (theirs, ours)  # of the model's own positions
        if name not in _COMPARED_APART and not is_default and not is_same(ours, theirs):
            yield f"rope_scaling.{name}", theirs, ours


def is_same(ours: Any, theirs: Any) -> bool:
    """Compare values. A fraction may have passed through float32, as in some config.json files."""
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return list(ours) == list(theirs)
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return isclose(ours, theirs, rel_tol=1e-6)
    return bool(ours == theirs)
