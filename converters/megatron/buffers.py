"""The places of parameters in the flat buffers of Megatron's distributed optimizer, as `distrib_optim.pt` stores them.

A buffer holds the parameters of one model chunk that have the same dtype, in the reverse of their order in the
model.  It is cut into buckets whose ends are padded; the file has the buckets one behind the other without that
padding, and says neither where a bucket ends nor which parameter is where.

After megatron-core 0.16.1 (distributed/param_and_grad_buffer.py, distributed_data_parallel.py, optimizer/
distrib_optimizer.py `get_parameter_state_dp_zero`) and Megatron-LM's history: parameters begin at multiples of 64
elements since July 2024; before that, without gaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ckpt.base.errors import CorruptError, NotFoundError
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Extent

T = TypeVar("T")

ALIGNMENT = 64
#: Elements of a bucket where no argument says it: at least this many, and more for many ranks.
_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000


@dataclass(frozen=True, slots=True)
class Buffer:
    """The first element of each parameter, in the model's order, and the elements of the buffer as stored."""

    starts: tuple[int, ...]
    numel: int


def by_buffer(parameters: Iterable[tuple[int, DType, T]]) -> list[tuple[int, DType, list[T]]]:
    """The parameters of each buffer, given with the numbers of their chunks and their dtypes: in order of chunks."""
    buffers: dict[tuple[int, DType], list[T]] = {}
    for vp, dtype, one in parameters:
        buffers.setdefault((vp, dtype), []).append(one)
    return [(*key, ones) for key, ones in sorted(buffers.items(), key=lambda item: item[0][0])]


def stored_buffer(
    numels: Sequence[int], shared: Sequence[bool], bucket_size: int | None, alignment: int = ALIGNMENT
) -> Buffer:
    """The buffer of parameters of `numels` elements, in the model's order.

    `shared` marks an embedding that two pipeline stages hold, which has a bucket of its own.  `bucket_size` None
    means a single bucket for all others.
    """
    starts = [0] * len(numels)
    stored = at = 0  # where this bucket begins in the file, and how far it is filled
    for index in reversed(range(len(numels))):
        at += -at % alignment
        if shared[index] and at:
            stored, at = stored + at, 0
        starts[index] = stored + at
        at += numels[index]
        if shared[index] or (bucket_size is not None and at >= bucket_size):
            stored, at = stored + at, 0
    return Buffer(tuple(starts), stored + at)


def gathered(state: Any, **where: Any) -> dict[int, dict[str, Extent]]:
    """The buffers that a rank has gathered, by number: where the elements of the masters and of each state are.

    `where` is what errors say of the file.  NotFoundError for the form of older versions.
    """
    if not isinstance(state, Mapping):
        raise CorruptError("this is no distributed optimizer's state", **where, found=type(state).__name__)
    if not state.get("buckets_coalesced"):
        raise NotFoundError(
            "the distributed optimizer's state is of Megatron-LM before May 2024: lists of buckets",
            **where,
            expected="buckets_coalesced",
            hint="load and save it with a newer Megatron-LM (--ckpt-convert-update-legacy-dist-opt-format)",
        )
    found: dict[int, dict[str, Extent]] = {}
    for number, by_dtype in ((key, value) for key, value in state.items() if type(key) is int):
        tensors = next(iter(by_dtype.values())) if isinstance(by_dtype, Mapping) and len(by_dtype) == 1 else None
        flat = tensors.items() if isinstance(tensors, Mapping) else ()
        found[number] = {str(name): value.extent for name, value in flat if isinstance(value, StoredTensor)}
        shapes = {extent.shape for extent in found[number].values()}
        if len(shapes) != 1 or any(len(shape) != 1 for shape in shapes):
            raise CorruptError(
                f"buffer {number} of the distributed optimizer has not one dtype, and states of one length",
                **where,
                found=f"shapes {sorted(shapes)}",
            )
    return found


def bucket_sizes(args: Mapping[str, Any], pp: int, vp: int, numel: int) -> Iterator[int | None]:
    """The sizes that a chunk's buckets may have had, likeliest first; `numel` is that of the chunk's parameters.

    Buckets only serve to overlap communication with the backward pass, and only the first chunk of the first stage
    has more than one.
    """
    overlap = args.get("overlap_grad_reduce")
    if not overlap or pp or vp or args.get("overlap_param_gather_with_optimizer_step"):
        yield None
    if overlap is False or pp or vp:
        return
    if args.get("ddp_num_buckets"):
        yield numel // args["ddp_num_buckets"]
    elif args.get("ddp_bucket_size"):
        yield args["ddp_bucket_size"]
    else:
        ranks = args.get("data_parallel_size") or 1
        yield max(_BUCKET, _BUCKET_PER_RANK * ranks)
        # Versions differ in whether context parallel ranks count.
        yield max(_BUCKET, _BUCKET_PER_RANK * ranks * (args.get("context_parallel_size") or 1))


def find_buffer(
    numels: Sequence[int], shared: Sequence[bool], sizes: Sequence[int | None], stored: int
) -> Buffer | None:
    """The buffer of `stored` elements that one of the bucket `sizes` gives; None if no size fits."""
    for alignment in (ALIGNMENT, 1):
        for size in sizes:
            buffer = stored_buffer(numels, shared, size, alignment)
            if buffer.numel == stored:
                return buffer
    return None
