"""A config.json held against the arguments that a run of Megatron recorded: whether both are of one model.

Shapes of tensors tell sizes.  What they do not tell, such as how many heads share them, the base of rotary positions
or how many experts a token has, is compared here: a model with another one computes something else in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isclose
from typing import Any

from ckpt.base.errors import CkptError, CorruptError
from ckpt.plan.checkpoint import Checkpoint
from converters.names.families.rows import Sizes
from converters.names.megatron.table import Table

_ALWAYS = ("num_layers", "hidden_size", "num_attention_heads", "normalization", "norm_epsilon", "swiglu")
_OF_ATTENTION = ("kv_channels",)
_OF_ROTATION = ("rotary_base", "rotary_percent", "use_rope_scaling")
_OF_EXPERTS = ("num_experts", "moe_router_topk", "moe_router_score_function", "moe_router_topk_scaling_factor")
#: For a text the same.
_ROTATING = ("rope", "mrope")
#: Latent attention has its own positions with each of them.
_WITHOUT_LEARNED = (*_ROTATING, "yarn", "none")


def refuse_another_models(checkpoint: Checkpoint, table: Table, sizes: Sizes) -> list[str]:
    """CorruptError where the run's arguments say otherwise than the config; notes where nothing can be compared."""
    recorded = checkpoint.state.args
    if not recorded:
        return []
    try:
        expected = table.args(sizes)
    except CkptError as error:  # the names and shapes do not need all that the arguments are made of
        return [f"the config is not held against the run's arguments: {error.what}"]
    for name in compared(recorded, expected):
        ours, theirs = expected.get(name), recorded.get(name)
        if ours is not None and theirs is not None and not _is_same(ours, theirs):
            raise _another(checkpoint, f"{name} {theirs}", f"{name} {ours}")
    rows = recorded.get("vocab_size")
    if type(rows) is int and rows > sizes.dims["v"]:
        raise _another(
            checkpoint,
            f"a vocabulary of {rows}",
            f"one of {sizes.dims['v']}: tokens would be left out",
            f"if the model has tokens that the config has not, set its vocab_size to {rows}",
        )
    return []


def _is_same(ours: Any, theirs: Any) -> bool:
    """Equality; a number with a fraction may have come through float32, as in some config.json."""
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return isclose(ours, theirs, rel_tol=1e-6)
    return bool(ours == theirs)


def compared(recorded: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """The arguments that mean something in both."""
    yield from _ALWAYS
    both = recorded, expected
    is_latent = any(one.get("multi_latent_attention") for one in both)
    if not is_latent:
        yield from _OF_ATTENTION
    if all(one.get("group_query_attention") for one in both):
        yield "num_query_groups"
    kinds = [_positions(one) for one in both]
    if all(kind in _ROTATING for kind in kinds):
        yield from _OF_ROTATION
        if all(one.get("use_rope_scaling") for one in both):
            yield "rope_scaling_factor"
    elif not (is_latent and all(kind in _WITHOUT_LEARNED for kind in kinds)):
        yield "position_embedding_type"
    if all(one.get("num_experts") for one in both):
        yield from _OF_EXPERTS
        if all(one.get("moe_router_score_function", "softmax") == "softmax" for one in both):
            yield "moe_router_pre_softmax"


def _positions(args: Mapping[str, Any]) -> Any:
    """The kind of positions; older versions have rotary ones by an option of their own."""
    kind = args.get("position_embedding_type")
    return "rope" if kind == "learned_absolute" and args.get("use_rotary_position_embeddings") else kind


def _another(
    checkpoint: Checkpoint, expected: str, found: str, hint: str = "does the config belong to this checkpoint?"
) -> CorruptError:
    return CorruptError(
        "the config is that of another model than the run trained",
        path=checkpoint.path,
        expected=f"{expected}, as the run recorded it",
        found=found,
        hint=hint,
    )
