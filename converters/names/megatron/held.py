"""A config.json held against the arguments that a run of Megatron recorded: whether both are of one model.

Shapes of tensors tell sizes.  What they do not tell, such as how many heads share them, the base of rotary positions
or how many experts a token has, is compared here: a model with another one computes something else in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpt.base.errors import CorruptError, LossError
from ckpt.plan.checkpoint import Checkpoint
from converters.names.families.rows import Sizes
from converters.names.megatron.table import Table

_ALWAYS = ("num_layers", "hidden_size", "num_attention_heads", "normalization", "norm_epsilon", "swiglu")
_OF_ATTENTION = ("kv_channels",)
_OF_ROTATION = ("rotary_base", "rotary_percent", "use_rope_scaling")
_OF_EXPERTS = ("num_experts", "moe_router_topk", "moe_router_score_function", "moe_router_topk_scaling_factor")
#: For a text the same.
_ROTATING = ("rope", "mrope")


def refuse_another_models(checkpoint: Checkpoint, table: Table, sizes: Sizes) -> list[str]:
    """CorruptError where the run's arguments say otherwise than the config; notes where nothing can be compared."""
    recorded = checkpoint.state.args
    if not recorded:
        return []
    try:
        expected = table.args(sizes)
    except LossError as error:
        return [f"the config is not held against the run's arguments: {error.what}"]
    for name in _compared(recorded, expected):
        ours, theirs = expected.get(name), recorded.get(name)
        if ours is not None and theirs is not None and ours != theirs:
            raise _another(checkpoint, f"{name} {theirs}", f"{name} {ours}")
    rows = recorded.get("vocab_size")
    if type(rows) is int and rows > sizes.dims["v"]:
        raise _another(checkpoint, f"a vocabulary of {rows}", f"one of {sizes.dims['v']}: tokens would be left out")
    return []


def _compared(recorded: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """The arguments that mean something in both."""
    yield from _ALWAYS
    both = recorded, expected
    if not any(one.get("multi_latent_attention") for one in both):
        yield from _OF_ATTENTION
    if all(one.get("group_query_attention") for one in both):
        yield "num_query_groups"
    if all(one.get("position_embedding_type") in _ROTATING for one in both):
        yield from _OF_ROTATION
        if all(one.get("use_rope_scaling") for one in both):
            yield "rope_scaling_factor"
    else:
        yield "position_embedding_type"
    if all(one.get("num_experts") for one in both):
        yield from _OF_EXPERTS
        if all(one.get("moe_router_score_function") == "softmax" for one in both):
            yield "moe_router_pre_softmax"


def _another(checkpoint: Checkpoint, expected: str, found: str) -> CorruptError:
    return CorruptError(
        "the config is that of another model than the run trained",
        path=checkpoint.path,
        expected=f"{expected}, as the run recorded it",
        found=found,
        hint="does the config belong to this checkpoint?",
    )
