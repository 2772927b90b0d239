"""The part of a tensor that a tensor parallel rank holds, told by the tensor's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from functools import lru_cache
from typing import Any

from ckpt.base.errors import LossError, UsageError
from ckpt.plan.tensors import Box, Shape, whole
from converters.names.megatron.model.spelling import is_beside


class Split(Enum):
    """How tensor parallel ranks share a tensor: not at all, by rows, by rows of either half, or by columns."""

    WHOLE = "whole"
    ROWS = "rows"
    HALVES = "halves"
    COLUMNS = "columns"


_ROWS = re.compile(
    r"embedding\.word_embeddings\.weight|output_layer\.(weight|bias)"
    r"|.*\.(linear_qkv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|linear_fc1|eh_proj)\.(weight|bias)"
    r"|.*\.core_attention\.softmax_offset"
)
_COLUMNS = re.compile(r".*\.(linear_proj|linear_fc2)\.weight")
_DOWN = re.compile(r".*\.(linear_q_down_proj|linear_kv_down_proj)\.weight")
_WHOLE = re.compile(
    r".*\.(linear_proj|linear_fc2)\.bias|.*\.layer_norm_(weight|bias)|(.*\.)?\w*norm\.(weight|bias)"
    r"|.*\.router\.(weight|bias|expert_bias)|.*\.shared_experts\.gate_weight"
    r"|embedding\.(position|tokentype)_embeddings\.weight"
)
_FIRST_LINEAR = re.compile(r"(.*\.)linear_fc1\.(weight|bias)")


def split_of(name: str, *, gated: bool, local_spec: bool = False) -> Split | None:
    """How `name` is shared; None for a name without a rule.

    `gated`: the MLP's first layer holds gate and up rows.  `local_spec`: the model is made of megatron-core's own
    layers, in which the down projections of latent attention are sharded.
    """
    if is_beside(name):
        return Split.WHOLE
    if _ROWS.fullmatch(name):
        return Split.HALVES if gated and _FIRST_LINEAR.fullmatch(name) else Split.ROWS
    if _COLUMNS.fullmatch(name):
        return Split.COLUMNS
    if _DOWN.fullmatch(name):
        return Split.ROWS if local_spec else Split.WHOLE
    return Split.WHOLE if _WHOLE.fullmatch(name) else None


def known_split(name: str, *, gated: bool, local_spec: bool = False, **where: Any) -> Split:
    """Same as `split_of`; LossError for a name without a rule, with the place that is known (`where`)."""
    split = split_of(name, gated=gated, local_spec=local_spec)
    if split is None:
        what = "nothing is known of how tensor parallel ranks share this tensor"
        raise LossError(what, **{"fqn": name, **where})
    return split


def second_linear(name: str) -> str | None:
    """The weight of an MLP's second layer, for a tensor of its first: its shape tells whether the MLP is gated."""
    match = _FIRST_LINEAR.fullmatch(name)
    return f"{match[1]}linear_fc2.weight" if match else None


def is_gated(first: Shape, second: Shape) -> bool:
    """Whether an MLP has gate and up rows, from the shapes of its first layer and of its second layer's weight."""
    return first[0] == 2 * second[1]


@lru_cache(8192)  # the same few shapes for thousands of experts
def rank_boxes(split: Split, shape: Shape, size: int, rank: int) -> tuple[Box, ...]:
    """The parts of a tensor of `shape` that rank `rank` of `size` holds, one behind the other along the first dim.

    UsageError where the tensor does not divide.
    """
    if split is Split.WHOLE or size == 1:
        return (whole(shape),)
    dim = 1 if split is Split.COLUMNS else 0
    parts = 2 if split is Split.HALVES else 1
    if len(shape) <= dim or shape[dim] % (parts * size):
        raise UsageError(
            f"a tensor of shape {list(shape)} does not divide among {size} tensor parallel ranks",
            expected=f"dim {dim} to be a multiple of {parts * size}",
        )
    length, each = shape[dim] // parts, shape[dim] // (parts * size)
    boxes = []
    for part in range(parts):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = part * length + rank * each, each
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    return tuple(boxes)


@lru_cache(8192)
def rank_shape(split: Split, shape: Shape, size: int) -> Shape:
    """The shape of a rank's part of a tensor of `shape`."""
    boxes = rank_boxes(split, shape, size, 0)
    return (sum(box.sizes[0] for box in boxes), *boxes[0].sizes[1:]) if shape else shape


def full_shape(split: Split, shape: Shape, size: int) -> Shape:
    """The shape of a whole tensor if each of `size` ranks has a part of `shape`."""
    if split is Split.WHOLE:
        return shape
    dim = 1 if split is Split.COLUMNS else 0
    return tuple(n * size if d == dim else n for d, n in enumerate(shape))


def padded_vocab_size(size: int, divisible_by: int, tp: int) -> int:
    """The rows of the embedding for a vocabulary of `size`: training/tokenizer, `_vocab_size_with_padding`."""
    multiple = divisible_by * tp
    return -(-size // multiple) * multiple


def has_qkv_in_blocks(args: Mapping[str, Any]) -> bool:
    """Whether these arguments are of a Megatron-DeepSpeed that takes a rank's rows of query_key_value as three blocks.

    Since commit 676a482c (2024-12-04) megatron/model/transformer.py (`ParallelAttention.forward`) cuts them into
    queries, keys and values of all heads, where it went head by head before.  `checkpoint_version` is 3.0 as ever; what
    tells is an argument that came with the same commit.
    """
    return "ds_sequence_parallel_fpdt" in args
