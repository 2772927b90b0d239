"""Parameters in the distributed optimizer's flat buffers in `distrib_optim.pt`.

A buffer holds a model chunk's parameters with the same dtype, in reverse model order. It is cut into padded buckets.
The file has the buckets without padding, and records neither bucket ends nor parameter positions.

From megatron-core 0.16.1 (distributed/param_and_grad_buffer.py, distributed_data_parallel.py,
optimizer/distrib_optimizer.py `get_parameter_state_dp_zero`) and Megatron-LM's history: parameters start at multiples
of 64 elements since July 2024; before that, without gaps.
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
#: Default bucket size in elements; more for many ranks.
_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000


@dataclass(frozen=True, slots=True)
class Buffer:
    """First element of each parameter in model order, and the stored buffer's length."""

    starts: tuple[int, ...]
    numel: int


def by_buffer(parameters: Iterable[tuple[int, DType, T]]) -> list[tuple[int, DType, list[T]]]:
    buffers: dict[tuple[int, DType], list[T]] = {}
    for vp, dtype, one in parameters:
        buffers.setdefault((vp, dtype), []).append(one)
    return [(*key, ones) for key, ones in sorted(buffers.items(), key=lambda item: item[0][0])]


def stored_buffer(
    numels: Sequence[int], shared: Sequence[bool], bucket_size: int | None, alignment: int = ALIGNMENT
) -> Buffer:
    """Lay out the buffer for parameters in model order.

    `shared` marks an embedding on two pipeline stages; it has its own bucket. `bucket_size` None means one bucket for
    all others.
    """
    starts = [0] * len(numels)
    stored = at = 0  # start in the file, and filled length
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
    """Return a rank's gathered buffers. Raise NotFoundError for older forms."""
    if not isinstance(state, Mapping):
        raise CorruptError("this is not a distributed optimizer's state", **where, found=type(state).__name__)
    if not state.get("buckets_coalesced"):
        raise NotFoundError(
            "the distributed optimizer's state has bucket lists from Megatron-LM before May 2024",
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
                f"distributed optimizer buffer {number} mixes dtypes, or its states differ in length",
                **where,
                found=f"shapes {sorted(shapes)}",
            )
    return found


def bucket_sizes(args: Mapping[str, Any], pp: int, vp: int, numel: int) -> Iterator[int | None]:
    """Yield possible bucket sizes, most likely first.

    Buckets only overlap communication with the backward pass, and only the first chunk of the first stage has several.
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
        # Versions differ in counting context-parallel ranks.
        yield max(_BUCKET, _BUCKET_PER_RANK * ranks * (args.get("context_parallel_size") or 1))


def find_buffer(
    numels: Sequence[int], shared: Sequence[bool], sizes: Sequence[int | None], stored: int
) -> Buffer | None:
    for alignment in (ALIGNMENT, 1):
        for size in sizes:
            buffer = stored_buffer(numels, shared, size, alignment)
            if buffer.numel == stored:
                return buffer
    return None
