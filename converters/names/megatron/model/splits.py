"""Tensor-parallel sharding, by tensor name."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ckpt.base.errors import CorruptError, LossError, UsageError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.plan.tensors import Box, Shape, whole
from converters.names.megatron.model.spelling import is_expert, is_outside_language_model


@dataclass(frozen=True, slots=True)
class Split:
    """Sharding of a tensor over tensor-parallel ranks along `dim`.

    Each rank has a part of every section, in these proportions. With `block` the sections alternate within a rank's
    part, in blocks of that many rows: gate, up, gate, up.
    """

    dim: int | None = None
    sections: tuple[int, ...] = (1,)
    block: int | None = None


WHOLE, ROWS, COLUMNS = Split(), Split(0), Split(1)
#: A gated MLP's first layer: gate and up rows.
GATED = (1, 1)

#: Sections in packed layers' rows: a gated delta net's, and a Mamba-2 mixer's.
SECTIONS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("self_attention", "in_proj"): ("query", "key", "value", "z", "beta", "alpha"),
    ("self_attention", "conv1d"): ("query", "key", "value"),
    ("mixer", "in_proj"): ("z", "x", "B", "C", "dt"),
    ("mixer", "conv1d"): ("x", "B", "C"),
}
_PACKED = re.compile(r"(?P<before>.*\.(?P<module>self_attention|mixer)\.)(?P<layer>in_proj|conv1d)\.(?:weight|bias)")

_ROWS = re.compile(
    r"embedding\.word_embeddings\.weight|output_layer\.(weight|bias)"
    r"|.*\.(linear_qkv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|linear_fc1|eh_proj)\.(weight|bias)"
    r"|.*\.core_attention\.softmax_offset|.*\.(in_proj|conv1d)\.(weight|bias)|.*\.(A_log|D|dt_bias)|.*\.mixer\.norm\.weight"
)
_COLUMNS = re.compile(r".*\.(linear_proj|linear_fc2|out_proj)\.weight")
_DOWN = re.compile(r".*\.(linear_q_down_proj|linear_kv_down_proj)\.weight")
_WHOLE = re.compile(
    r".*\.(linear_proj|linear_fc2|out_proj)\.bias|.*\.layer_norm_(weight|bias)|(.*\.)?\w*norm\.(weight|bias)"
    r"|.*\.router\.(weight|bias|expert_bias)|.*\.shared_experts\.gate_weight"
    r"|embedding\.(position|tokentype)_embeddings\.weight|(lm_head\.dense|pooler\.dense|binary_head)\.(weight|bias)"
)
_FIRST_LINEAR = re.compile(r"(.*\.)linear_fc1\.(weight|bias)(\d*)")


#: Settings that alternate gate and up rows in blocks, for routed and for shared experts.
ROUTED_BLOCK, SHARED_BLOCK = "moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"
#: Required settings; megatron-core otherwise ignores the blocks.
GROUPED, SHARED_GROUPED = "moe_grouped_gemm", "use_grouped_gemm_for_shared_expert"
#: Arguments for a gated MLP. Megatron-Bridge records the last one.
GATED_ARGS = ("swiglu", "quick_geglu", "gated_linear_unit")


@dataclass(frozen=True, slots=True)
class GateBlocks:
    """Rows per block if gate and up of a rank's experts alternate.

    megatron-core 0.18.2, transformer/moe/experts.py (`_remove_glu_interleaving`); 0.19.2, moe/shared_experts.py.
    """

    routed: int | None = None
    shared: int | None = None

    @classmethod
    def of_args(cls, args: Mapping[str, Any], accepted: Collection[str] = ()) -> GateBlocks:
        """Ignore settings that the user `accepted`."""
        if not any(args.get(name) for name in GATED_ARGS):
            return cls()
        sizes = {name: args.get(name) for name in (ROUTED_BLOCK, SHARED_BLOCK) if name not in accepted}
        for name, size in sizes.items():
            if size and (type(size) is not int or size < 1):
                raise CorruptError(
                    f"the argument {name} is not a row count",
                    expected="a positive integer, or nothing",
                    found=repr(size),
                    hint=Message("{accept_settings} ignores it: all gate rows come first then", accept_settings=[name]),
                )
        return cls(sizes.get(ROUTED_BLOCK), sizes.get(SHARED_BLOCK))

    def of(self, name: str) -> int | None:
        if not (self.routed or self.shared) or not _FIRST_LINEAR.fullmatch(name):
            return None
        return self.routed if is_expert(name) else self.shared if ".mlp.shared_experts." in name else None


def split_of(
    name: str, *, sections: tuple[int, ...] = (), local_spec: bool = False, block: int | None = None
) -> Split | None:
    """Return the sharding, or None for a name without a rule.

    With `local_spec` the model has megatron-core's own layers, with sharded down projections in latent attention.
    """
    if is_outside_language_model(name):
        return WHOLE
    if _ROWS.fullmatch(name):
        return Split(0, sections, block) if sections else ROWS
    if _COLUMNS.fullmatch(name):
        return COLUMNS
    if _DOWN.fullmatch(name):
        return ROWS if local_spec else WHOLE
    return WHOLE if _WHOLE.fullmatch(name) else None


def known_split(
    name: str, *, sections: tuple[int, ...] = (), local_spec: bool = False, block: int | None = None, **where: Any
) -> Split:
    """Return the sharding. Raise LossError for a name without a rule."""
    split = split_of(name, sections=sections, local_spec=local_spec, block=block)
    if split is None:
        what = "tensor parallel sharding is unknown for this tensor"
        raise LossError(what, **{"fqn": name, **where})
    return split


def packed(name: str) -> tuple[str, ...]:
    match = _PACKED.fullmatch(name)
    return SECTIONS[match["module"], match["layer"]] if match else ()


def sections_of(name: str, shape_of: Callable[[str], Shape | None], *, gated: bool = False) -> tuple[int, ...]:
    """Infer the sections of a tensor's rows.

    `gated` decides for an MLP whose second layer is missing.
    """
    second = second_linear(name)
    if second is None:
        return _packed_sections(name, shape_of)
    first, other = shape_of(name), shape_of(second)
    return GATED if (is_gated(first, other) if first and other and len(other) == 2 else gated) else ()


def _packed_sections(name: str, shape_of: Callable[[str], Shape | None]) -> tuple[int, ...]:
    """Infer the rows of each section.

    The output layer has a column per value, the convolution two further sections of equal size, and `A_log` a number
    per head.
    """
    match = _PACKED.fullmatch(name)
    if match is None:
        return ()
    beside = [match["before"] + rest for rest in ("out_proj.weight", "conv1d.weight", "A_log")]
    out, conv, heads = map(shape_of, beside)
    if not (out and len(out) == 2 and conv and heads) or conv[0] <= out[1] or (conv[0] - out[1]) % 2:
        raise LossError(
            "a packed layer's row sections depend on nearby tensors, but they are missing or don't fit",
            fqn=name,
            expected=", ".join(beside),
            found=[list(shape) if shape else None for shape in (out, conv, heads)],
        )
    inner, each = out[1], (conv[0] - out[1]) // 2
    if match["module"] == "mixer":
        return (inner, inner, each, each, heads[0]) if match["layer"] == "in_proj" else (inner, each, each)
    return (each, each, inner, inner, heads[0], heads[0]) if match["layer"] == "in_proj" else (each, each, inner)


def second_linear(name: str) -> str | None:
    """Name the second layer's weight. Its shape shows if the MLP is gated."""
    match = _FIRST_LINEAR.fullmatch(name)
    return f"{match[1]}linear_fc2.weight{match[3]}" if match else None


def is_gated(first: Shape, second: Shape) -> bool:
    return first[0] == 2 * second[1]


@lru_cache(8192)  # thousands of experts share few shapes
def rank_boxes(split: Split, shape: Shape, size: int, rank: int) -> tuple[Box, ...]:
    """Return a tensor's parts on one rank, laid end to end along the first dim.

    Raise UsageError if the tensor does not divide.
    """
    if split.dim is None or (size == 1 and not split.block):
        return (whole(shape),)
    dim, parts = split.dim, sum(split.sections)
    unit = shape[dim] // parts if len(shape) > dim else 0
    if not unit or shape[dim] % parts or any(unit * section % size for section in split.sections):
        raise UsageError(
            f"a tensor with shape {list(shape)} does not divide among {size} tensor parallel ranks",
            expected=f"dim {dim} divisible by {parts * size}"
            if set(split.sections) == {1}
            else f"sections in dim {dim} divisible by {size}: {[unit * section for section in split.sections]}",
        )
    boxes, start = [], 0
    for section in split.sections:
        each = unit * section // size
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = start + rank * each, each
        boxes.append(Box(tuple(offsets), tuple(sizes)))
        start += unit * section
    return tuple(boxes) if split.block is None else tuple(_alternating(boxes, split.block, size))


def _alternating(sections: Sequence[Box], block: int, size: int) -> Iterator[Box]:
    """Yield row blocks of each section in turn."""
    rows = sections[0].sizes[0]
    if rows % block:
        raise UsageError(
            "a rank's gate and up rows do not divide into alternating blocks",
            expected=f"gate rows on each tensor parallel rank divisible by {block}",
            found=f"{pluralize(rows, 'gate row')}",
            hint=Message("another {etp} (experts) or {tp} (shared experts)") if rows * size % block == 0 else None,
        )
    for start in range(0, rows, block):
        for section in sections:
            offsets, sizes = section.offsets, section.sizes
            yield Box((offsets[0] + start, *offsets[1:]), (block, *sizes[1:]))


@lru_cache(64)
def model_rows(rows: int, size: int, block: int) -> tuple[int, ...]:
    """Return the model's first row for each block of `block` rows in a stored tensor.

    Distributed formats store the first half of each rank's rows as gate and the second half as up, even if the ranks
    alternate them in blocks (megatron-core, transformer/mlp.py, `apply_swiglu_sharded_factory`).
    """
    found: dict[int, int] = {}
    for rank in range(size):
        halves = rank_boxes(Split(0, GATED), (rows,), size, rank)
        stored = (row for half in halves for row in range(half.offsets[0], half.offsets[0] + half.sizes[0], block))
        kept = rank_boxes(Split(0, GATED, block), (rows,), size, rank)
        found.update(zip(stored, (box.offsets[0] for box in kept), strict=True))
    return tuple(found[row] for row in sorted(found))


def in_model_order(box: Box, rows: int, size: int, block: int) -> Iterator[tuple[Box, Box]]:
    """Yield parts of `box` in stored and in model coordinates."""
    first, stop = box.offsets[0], box.offsets[0] + box.sizes[0]
    places = model_rows(rows, size, block)
    for number in range(first // block, -(-stop // block)):
        start, end = max(first, number * block), min(stop, (number + 1) * block)
        sizes = (end - start, *box.sizes[1:])
        own = Box((start - first, *(0 for _ in sizes[1:])), sizes)
        yield own, Box((places[number] + start - number * block, *box.offsets[1:]), sizes)


@lru_cache(8192)
def rank_shape(split: Split, shape: Shape, size: int) -> Shape:
    boxes = rank_boxes(split, shape, size, 0)
    return (sum(box.sizes[0] for box in boxes), *boxes[0].sizes[1:]) if shape else shape


def full_shape(split: Split, shape: Shape, size: int) -> Shape:
    return tuple(n * size if d == split.dim else n for d, n in enumerate(shape))


def padded_vocab_size(size: int, divisible_by: int, tp: int) -> int:
    """Return the embedding's rows: training/tokenizer, `_vocab_size_with_padding`."""
    multiple = divisible_by * tp
    return -(-size // multiple) * multiple


def has_qkv_in_blocks(args: Mapping[str, Any]) -> bool:
    """Return True if Megatron-DeepSpeed divides a rank's query_key_value into three blocks.

    Since commit 676a482c (2024-12-04) megatron/model/transformer.py (`ParallelAttention.forward`) has all heads'
    queries, then keys, then values, instead of head by head. `checkpoint_version` stays 3.0, but an argument from the
    same commit shows it.
    """
    return "ds_sequence_parallel_fpdt" in args
