"""Comparison of a config.json with a Megatron run's arguments: both must describe one model.

Tensor shapes show sizes. Other facts, such as the number of heads or the rotary base, silently change the output.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import isclose
from typing import Any

from ckpt.base.errors import CkptError, CorruptError
from ckpt.base.text import pluralize
from ckpt.base.words import Message, Note
from ckpt.plan.checkpoint import Checkpoint
from converters.names.families.config import NO_SIZE, of_another_model
from converters.names.families.rows import Sizes
from converters.names.megatron import rotary_settings
from converters.names.megatron.facts import MegatronFacts
from converters.names.megatron.model.splits import ROUTED_BLOCK, SHARED_BLOCK
from converters.names.megatron.rotary_settings import is_same
from converters.names.megatron.settings import changing, check_aliases, notes_on_unknown
from converters.names.megatron.settings import unexpressed as unexpressed_settings
from converters.names.megatron.table import Table

_ALWAYS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "normalization",
    "norm_epsilon",
    "swiglu",
    "bert_binary_head",
)
_OF_ATTENTION = ("kv_channels",)
_OF_ROTATION = ("rotary_base", "rotary_percent", "use_rope_scaling")
_OF_EXPERTS = ("num_experts", "moe_router_topk", "moe_router_score_function")
#: Zero-centered norms, and the MLP's function.
_OF_LAYERS = ("apply_layernorm_1p", "squared_relu", "quick_geglu", "openai_gelu", "glu_linear_offset")
#: Sizes in layers with a state. Tensor shapes only show their products.
_OF_STATES = (
    *("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
)
#: Latent attention's sizes, not determined by tensor shapes.
_OF_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
#: Latent attention's, only used with YaRN positions.
_OF_LATENT_YARN = ("beta_fast", "beta_slow", "original_max_position_embeddings")
#: Defaults. If an architecture has neither a fixed value nor an own entry, no config can express another value.
_CONSTANT: Mapping[str, Any] = {
    "moe_router_topk_scaling_factor": 1.0,
    "moe_router_enable_expert_bias": False,
    "softmax_type": "vanilla",
    "attention_output_gate": False,
    "experimental_attention_variant": None,
    "multi_latent_attention": False,
}
#: ms-swift's setting that contains others, as an object or JSON.
_OVERRIDES = "megatron_extra_kwargs"
#: GPT-NeoX's names for a parallel residual: as an argument, and in a config.json.
_PARALLEL = ("gpt_j_residual", "use_parallel_residual")
#: Layer letters, under the newer and the older name.
_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
_ROTARY = (
    *("rotary_base", "rotary_percent", "use_rope_scaling", "rope_scaling_factor", "position_embedding_type"),
    "rotary_seq_len_interpolation_factor",
)
#: Entries that Megatron may lack values of, and arguments that depend on them.
_SEPARATE = {"rope_scaling": _ROTARY, "rope_parameters": _ROTARY, "hidden_act": ()}
_PLACEHOLDER = 1 << 19
#: YaRN's arguments without latent attention, and the meaning of None (training/argument_utils.py since 0.19).
_OF_YARN: Mapping[str, Any] = {
    "rotary_scaling_factor": 1,
    "yarn_original_max_position_embeddings": 4096,
    "yarn_beta_fast": 32,
    "yarn_beta_slow": 1,
    "yarn_correction_range_round_to_int": True,
    "mscale": 1,
    "mscale_all_dim": 0,
}
_ROTATING = ("rope", "mrope")
#: Latent attention has its own positions with each of these.
_WITHOUT_LEARNED = (*_ROTATING, "yarn", "none")
#: Megatron-LM's arguments named like TransformerConfig's fields since 0.16.
_SINCE_RENAMED = {"norm_epsilon": "layernorm_epsilon", "apply_layernorm_1p": "layernorm_zero_centered_gamma"}


def refuse_another_models(checkpoint: Checkpoint, table: Table, sizes: Sizes) -> list[str]:
    """Compare the run's recorded settings with the config, and return notes on uncompared ones.

    Raise CorruptError for another model's config, LossError for settings that no config can express.
    """
    args = {**checkpoint.facts_of(MegatronFacts).settings, **(checkpoint.state.args or {})}
    if _OVERRIDES not in checkpoint.accepted:
        args |= _overrides(args.get(_OVERRIDES))
    accepted = checkpoint.accepted | {new for old, new in _SINCE_RENAMED.items() if old in checkpoint.accepted}
    recorded = {name: value for name, value in args.items() if name not in accepted}
    if not recorded:
        return []
    expected, notes = _expected(table, sizes)
    unexpressed = {}
    for name, theirs, ours in differences(recorded, expected):
        if name in _CONSTANT and expected.get(name) in (None, _CONSTANT[name]):
            unexpressed[name] = theirs
        else:
            raise of_another_model(checkpoint.path, f"{name} {theirs}", f"{name} {ours}")
    check_aliases(recorded, checkpoint.path)
    for name, theirs, ours in rotary_settings.differences(recorded.get("rope_scaling"), sizes.config.rope):
        raise of_another_model(checkpoint.path, f"{name} {theirs}", f"{name} {ours}")
    if not checkpoint.is_adapter:
        _check_predicted(checkpoint, recorded)
    if not accepted.intersection(_PARALLEL):
        _check_residual(checkpoint, recorded, expected)
    blocks = checkpoint.facts_of(MegatronFacts).blocks
    undone = {name for name, size in ((ROUTED_BLOCK, blocks.routed), (SHARED_BLOCK, blocks.shared)) if size}
    if _is_default_scale(recorded.get("softmax_scale"), expected):
        undone.add("softmax_scale")
    if not recorded.get("mtp_num_layers"):
        undone.add("mtp_hybrid_override_pattern")
    unexpressed |= changing(recorded, expected, undone)
    if unexpressed:
        raise unexpressed_settings(unexpressed, checkpoint.path)
    theirs, ours = (_window(args, recorded.get("seq_length")) for args in (recorded, expected))
    if theirs and ours and theirs != ours:
        notes += [
            f"the run's window ({theirs}) excludes the token itself, and transformers includes it: with transformers "
            "tokens see one token less than in the run"
        ]
    rows = recorded.get("vocab_size")
    if type(rows) is int and rows > sizes.dims["v"]:
        raise of_another_model(
            checkpoint.path,
            f"vocabulary size {rows}",
            f"vocabulary size {sizes.dims['v']}: tokens would be left out",
            f"if the config lacks tokens, set its vocab_size to {rows}",
        )
    if ignored := sorted(accepted & args.keys()):
        notes.append(Note("ignored ({accept_settings}): {}", ", ".join(ignored)))
    return [*notes, *notes_on_unknown(recorded)]


def _overrides(stated: Any) -> Mapping[str, Any]:
    """Return ms-swift's settings for the model's own class. They override all others."""
    with suppress(ValueError):
        stated = json.loads(stated) if isinstance(stated, str) else stated
    return stated if isinstance(stated, Mapping) else {}


def _check_predicted(checkpoint: Checkpoint, recorded: Mapping[str, Any]) -> None:
    count = recorded.get("mtp_num_layers")
    if not count:
        return
    found = {name.split(".")[2] for name in checkpoint.shapes if name.startswith("mtp.layers.")}
    if len(found) != (1 if recorded.get("mtp_use_repeated_layer") else count):
        raise CorruptError(
            "the checkpoint's multi-token prediction layers don't match the run's record",
            path=checkpoint.path,
            expected=f"mtp_num_layers {count}",
            found=pluralize(len(found), "multi-token prediction layer"),
            hint=Message(
                "is the checkpoint complete? {accept_settings} ignores the setting", accept_settings=["mtp_num_layers"]
            ),
        )


def _check_residual(checkpoint: Checkpoint, recorded: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise CorruptError if only one has a parallel residual.

    Megatron has none, so it records none. Readers of GPT-NeoX's files record None if only the config decides.
    """
    known = [recorded[name] for name in _PARALLEL if name in recorded]
    theirs, ours = any(known), bool(expected.get(_PARALLEL[0]))
    if theirs == ours or not _is_complete(expected) or (known and all(one is None for one in known)):
        return
    name = next((name for name in _PARALLEL if name in recorded), None)
    raise of_another_model(
        checkpoint.path,
        f"{name} {recorded[name]}" if name else f"no {_PARALLEL[0]}",
        f"{_PARALLEL[1]} {ours}",
    )


def _is_default_scale(scale: Any, expected: Mapping[str, Any]) -> bool:
    size = expected.get("kv_channels")
    if expected.get("multi_latent_attention") or type(size) is not int or not isinstance(scale, int | float):
        return False
    return isclose(scale, size**-0.5, rel_tol=1e-6)


def _is_complete(expected: Mapping[str, Any]) -> bool:
    """Return True if the arguments follow from the whole config, not only from its sizes."""
    return "normalization" in expected


def _expected(table: Table, sizes: Sizes) -> tuple[dict[str, Any], list[str]]:
    """Return arguments and notes.

    A missing size gets two placeholders in turn. Arguments that depend on it are left out.
    """
    notes: list[str] = []
    missing: dict[str, int] = {}
    separate: list[str] = []
    while True:
        try:
            first, second = (table.args(_with_entries(sizes, missing, times)) for times in (1, 2))
        except CorruptError as error:
            name = str(error.expected)
            if error.what != NO_SIZE or name in missing:
                return _args_from_sizes(sizes), [_partial_check_note(error)]
            missing[name] = _PLACEHOLDER
            notes.append(f"the config has no {name}, so it is not compared with the run")
        except CkptError as error:
            others = ((name, _without(sizes, name)) for name in _SEPARATE if name in sizes.config.values)
            found = next(((name, rest) for name, rest in others if not _fails_alike(table, rest, error)), None)
            if found is None:
                return _args_from_sizes(sizes), [_partial_check_note(error)]
            name, sizes = found
            separate.append(name)
            notes.append(f"the config's {name} is not compared with the run: {error.what} ({error.found})")
        else:
            same = {name: value for name, value in first.items() if second.get(name) == value}
            if "hidden_act" in separate and same.get("swiglu"):
                same["swiglu"] = False
            left_out = {arg for entry in separate for arg in _SEPARATE[entry]}
            return {name: value for name, value in same.items() if name not in left_out}, notes


def _without(sizes: Sizes, entry: str) -> Sizes:
    values = {name: value for name, value in sizes.config.values.items() if name != entry}
    return replace(sizes, config=replace(sizes.config, values=values))


def _fails_alike(table: Table, sizes: Sizes, error: CkptError) -> bool:
    try:
        table.args(sizes)
    except CkptError as again:
        return again.what == error.what
    return False


def _with_entries(sizes: Sizes, missing: Mapping[str, int], times: int) -> Sizes:
    if not missing:
        return sizes
    entries = {name: value * times for name, value in missing.items()}
    return replace(sizes, config=replace(sizes.config, values={**sizes.config.values, **entries}))


def _args_from_sizes(sizes: Sizes) -> dict[str, Any]:
    dims = sizes.dims
    return {"num_layers": sizes.num_layers, "hidden_size": dims["h"], "num_attention_heads": dims["heads"]}


def _partial_check_note(error: CkptError) -> str:
    said = f" ({error.found})" if error.found else ""
    return f"only the config's sizes and names were compared with the run's settings: {error.what}{said}"


def differences(recorded: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    recorded = rotary_settings.with_scaling(rotary_settings.with_yarn(under_older_names(recorded)))
    for name in compared(recorded, expected):
        theirs, ours = recorded.get(name), expected.get(name)
        if ours is not None and theirs is not None and not is_same(ours, theirs):
            yield name, theirs, ours
    for name, (theirs, ours) in _normalized_defaults(recorded, expected).items():
        if not is_same(ours, theirs):
            yield name, theirs, ours


def under_older_names(args: Mapping[str, Any]) -> dict[str, Any]:
    if args.get("rotary_base") is None and "rope_theta" in args:  # Megatron-DeepSpeed
        args = {**args, "rotary_base": args["rope_theta"]}
    if args.get("num_experts") is None and "num_moe_experts" in args:  # megatron-core's config
        args = {**args, "num_experts": args["num_moe_experts"]}
    is_silu = str(args.get("activation_func")).endswith(".silu")
    if args.get("swiglu") is None and args.get("gated_linear_unit") and is_silu:  # megatron-core's config
        args = {**args, "swiglu": True}
    groups = args.get("num_key_value_heads")
    if args.get("num_query_groups") is None and groups is not None:  # Megatron-DeepSpeed, and Hub configs
        is_grouped = groups != args.get("num_attention_heads")
        args = {**args, "num_query_groups": groups, "group_query_attention": is_grouped}
    return {**args, **{old: args[new] for old, new in _SINCE_RENAMED.items() if new in args}}


def compared(recorded: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    yield from (*_ALWAYS, *_OF_LAYERS, *_OF_STATES)
    both = recorded, expected
    is_latent = any(one.get("multi_latent_attention") for one in both)
    yield from _OF_LATENT if is_latent else _OF_ATTENTION
    if all(one.get("group_query_attention") for one in both):
        yield "num_query_groups"
    kinds = [_positions(one) for one in both]
    if all(kind in _ROTATING for kind in kinds):
        yield from _OF_ROTATION
        if not is_latent:
            yield "rotary_interleaved"
        if all(one.get("use_rope_scaling") for one in both):
            yield "rope_scaling_factor"
    elif all(kind == "yarn" for kind in kinds):
        yield "rotary_base"
    elif not (is_latent and all(kind in _WITHOUT_LEARNED for kind in kinds)):
        yield "position_embedding_type"
    if all(one.get("num_experts") for one in both):
        yield from _OF_EXPERTS
        if all(one.get("moe_router_score_function", "softmax") == "softmax" for one in both):
            yield "moe_router_pre_softmax"


def _normalized_defaults(recorded: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return recorded and expected values for arguments with the default None.

    A window as wide as the run's sequences means none, and so do expert groups if all are chosen.
    """
    length, layers = recorded.get("seq_length"), recorded.get("num_layers") or 0
    both = recorded, expected
    found: dict[str, tuple[Any, Any]] = {}

    def put(name: str, means: Callable[[Mapping[str, Any]], Any]) -> None:
        if name in recorded:
            found[name] = (means(recorded), means(expected))

    theirs, ours = (_window(one, length) for one in both)
    if (
        not isinstance(theirs, int) or ours is None or theirs != ours + 1
    ):  # transformers counts the token itself, Megatron does not
        put("window_size", lambda args: _window(args, length))
    if theirs and ours:
        put("window_attn_skip_freq", lambda args: _sliding(args.get("window_attn_skip_freq"), layers))
    if all(_positions(one) in _ROTATING for one in both):
        put("rotary_seq_len_interpolation_factor", lambda args: args.get("rotary_seq_len_interpolation_factor") or 1)
        put("rope_scaling", rotary_settings.other_scaling)
        put("no_rope_freq", lambda args: _unrotated(args.get("no_rope_freq"), layers))
    for name, usual in _CONSTANT.items():
        if not name.startswith("moe_") or all(one.get("num_experts") for one in both):
            put(name, partial(_effective_arg, name, usual))
    if all(_positions(one) == "mrope" for one in both):
        put("mrope_section", _sections)
        put("mrope_interleaved", lambda args: bool(args.get("mrope_interleaved")))
    if all(one.get("multi_latent_attention") for one in both):
        if "rotary_scaling_factor" in recorded or recorded.get("rope_type") not in (None, "yarn"):
            found["rotary_scaling_factor"] = (_latent_scaling(recorded), _latent_scaling(expected))
        if all(_latent_scaling(one) for one in both):
            for name in _OF_LATENT_YARN:
                put(name, partial(_effective_arg, name, None))
    elif all(_positions(one) == "yarn" for one in both):
        for name, usual in _OF_YARN.items():
            put(name, partial(_effective_arg, name, usual))
    else:  # megatron-core scales attention by this without YaRN's positions, too (transformer/attention.py)
        put("yarn_rotary_scaling_factor", partial(_effective_arg, "yarn_rotary_scaling_factor", 1))
    if all(one.get("num_experts") for one in both):
        put("moe_router_num_groups", _groups)
    if _is_complete(expected):
        put("share_embeddings_and_output_weights", _is_tied)
        if recorded.get("is_hybrid_model"):  # megatron-core's config of older hybrid models may have False
            put("is_hybrid_model", lambda args: bool(args.get("is_hybrid_model")))
        for name in filter(recorded.get, _PATTERNS):
            put(name, partial(_pattern, name))
    put("activation_func_clamp_value", lambda args: args.get("activation_func_clamp_value"))
    return found


def _window(args: Mapping[str, Any], length: Any) -> Any:
    """Return how many earlier tokens a token sees. None means all."""
    size = args.get("window_size")
    if size is not None and not isinstance(size, list | tuple):
        return size  # not megatron-core's form
    before = size[0] if size else None
    if type(before) is not int or before < 0 or (type(length) is int and before >= length - 1):
        return None
    return before


def _sliding(often: Any, layers: int) -> Any:
    """Flag the layers with the window, from `window_attn_skip_freq` (transformer/utils.py)."""
    if isinstance(often, list | tuple):
        return [bool(one) for one in often]
    if not isinstance(often, int | None):
        return often
    return [not often or number % often != 0 for number in range(1, layers + 1)]


def _unrotated(often: Any, layers: int) -> Any:
    """Flag the layers without rotary positions: transformer/transformer_config.py, `no_rope_freq`."""
    if isinstance(often, list | tuple):
        return [bool(one) for one in often]
    if not isinstance(often, int | None):
        return often
    return [often is not None and often > 0 and number % often == 0 for number in range(1, layers + 1)]


def _is_tied(args: Mapping[str, Any]) -> bool:
    untied = args.get("untie_embeddings_and_output_weights")
    return bool(args.get("share_embeddings_and_output_weights", not untied))


def _sections(args: Mapping[str, Any]) -> Any:
    found = args.get("mrope_section") or ()
    return list(found) if isinstance(found, list | tuple) else found


def _pattern(name: str, args: Mapping[str, Any]) -> Any:
    found = args.get(name) or next((args[other] for other in _PATTERNS if args.get(other)), None)
    return found.replace("|", "") if isinstance(found, str) else found


def _latent_scaling(args: Mapping[str, Any]) -> Any:
    """Return YaRN's factor and both scales, None without YaRN, or an unknown `rope_type`.

    Latent attention uses YaRN by default.
    """
    kind, factor = args.get("rope_type"), args.get("rotary_scaling_factor")
    if kind not in (None, "rope", "yarn"):
        return kind
    if kind == "rope" or factor in (None, 1):
        return None
    return factor, args.get("mscale") or 1.0, args.get("mscale_all_dim") or 0.0


def _effective_arg(name: str, usual: Any, args: Mapping[str, Any]) -> Any:
    found = args.get(name)
    return usual if found is None else found


def _groups(args: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return how many expert groups there are, and how many a token uses. None means all."""
    groups, chosen = args.get("moe_router_num_groups"), args.get("moe_router_group_topk")
    if not isinstance(groups, int | None) or not isinstance(chosen, int | None):
        return groups, chosen
    return (groups, chosen) if groups and chosen and groups > chosen else None


def _positions(args: Mapping[str, Any]) -> Any:
    """Return the kind of positions. Older versions have a separate option for rotary positions."""
    kind = args.get("position_embedding_type")
    return "rope" if kind == "learned_absolute" and args.get("use_rotary_position_embeddings") else kind
