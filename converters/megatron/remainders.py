"""Masters stored as lower halves: Transformer Engine's Adam with `store_param_remainders`.

A bf16 parameter holds the upper 16 bits of its master, and the optimizer an int16 with the lower bits. If the lower
bits are at least 2 ** 15, negative as int16, the parameter was rounded up by one.

Transformer Engine 2.20, common/multi_tensor/adam.cu (`AdamFunctorMasterParamRemainder`); megatron-core 0.19.2,
optimizer/distrib_optimizer.py (`_get_main_param_and_optimizer_states`): `dp_reshardable` stores the int16. Gathered
states store their values in fp32, which megatron-core itself cannot load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, NotFoundError
from ckpt.plan.checkpoint import MASTER, WEIGHT, Key
from ckpt.plan.dtypes import BFLOAT16, BY_NAME, FLOAT32
from ckpt.plan.tensors import Box, Extent, Fragment, Pieces, Shape, Tensor

_INT16 = BY_NAME["int16"]
#: Elements computed at a time.
_BLOCK = 1 << 23


def are_gathered(args: Mapping[str, Any]) -> bool:
    dtype = str(args.get("main_params_dtype") or FLOAT32)
    is_kept = bool(args.get("store_param_remainders", True)) and dtype.removeprefix("torch.") in ("fp32", "float32")
    return bool(args.get("use_precision_aware_optimizer")) and bool(args.get("bf16")) and is_kept


def refuse_gathered(args: Mapping[str, Any], path: str | Path) -> None:
    if are_gathered(args):
        raise NotFoundError(
            "only 16 bits per master are stored, in fp32; megatron-core itself can't load this",
            path=path,
            expected="a run without --use-precision-aware-optimizer, or saved in torch_dist's dp_reshardable form",
            hint="to read the weights here, save them with --no-save-optim",
        )


def with_masters(
    tensors: Mapping[Key, Tensor], path: Path
) -> tuple[dict[Key, Tensor], dict[str, Callable[[], memoryview]]]:
    """Replace remainders in `tensors` by whole masters. Return their computations by made-up paths, too."""
    found, computed = dict(tensors), dict[str, Callable[[], memoryview]]()
    for (fqn, role), tensor in tensors.items():
        if role != MASTER or tensor.dtype != _INT16:
            continue
        weight = tensors.get((fqn, WEIGHT))
        if weight is None or (weight.dtype, weight.shape) != (BFLOAT16, tensor.shape):
            raise CorruptError(
                "a master's lower halves lack the parameter with the upper halves",
                path=path,
                fqn=fqn,
                expected=f"bfloat16 {list(tensor.shape)}",
                found="none" if weight is None else f"{weight.dtype} {list(weight.shape)}",
            )
        pieces = []
        for number, box in enumerate(_blocks(tensor.shape)):
            name = f"master:{path}:{fqn}:{number}"
            computed[name] = partial(_master, weight, tensor, box)
            pieces.append(Fragment(box, Extent.contiguous(name, 0, FLOAT32, box.sizes)))
        found[fqn, role] = tensor._replace(dtype=FLOAT32, source=Pieces(tuple(pieces)), native=BFLOAT16, replicas=())
    return found, computed


def _blocks(shape: Shape) -> Iterator[Box]:
    """Yield boxes of whole rows with about `_BLOCK` elements."""
    rows = shape[0]
    each = max(1, _BLOCK * rows // max(1, prod(shape)))
    for start in range(0, rows, each):
        stop = min(start + each, rows)
        yield Box((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))


def _master(weight: Tensor, remainder: Tensor, box: Box) -> memoryview:
    import numpy as np  # late: numpy

    from ckpt.move.reading import read_box

    upper, lower = (read_box(one, box, {}).view(np.int16) for one in (weight, remainder))
    whole = (upper - (lower < 0)).view(np.uint16).astype(np.uint32) << 16 | lower.view(np.uint16)
    content: memoryview = whole.reshape(-1).view(np.uint8).data
    return content
