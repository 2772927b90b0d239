"""Arithmetic of a LoRA merge, with the order and dtypes of `merge_and_unload` of peft 0.21.2 on a CPU.

Sources in peft: `tuners/lora/layer.py` (`merge` with `safe_merge=False`, `get_delta_weight`), `tuners/lora/variants.py`
and `dora.py`, `tuners/trainable_tokens`.

These choices decide the bits:

- PEFT loads an adapter in fp32 (`autocast_adapter_dtype=True`) whatever the file's dtype, or in fp64 over an fp64 base.
  An adapter made by PEFT (`cat`) may have the base's dtype. Then the delta is computed in fp32 and has this dtype too.
- The product is one call, `B @ A`, scaled afterwards. BLAS adds in an order that depends on shapes and strides in
  memory. Stacked experts use one `einsum`, because a product per expert gives other bits.
- A linear layer adds the fp32 delta in place and rounds once. Embeddings, targeted parameters and attention round the
  delta to the weight's dtype, then the sum.
- DoRA divides in fp32 and rounds once. Its norm uses the same views as in PEFT.

Every function may reuse its weight's memory, and keeps its dtype.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import frexp, prod

import torch

#: Elements merged at once: they stay in the processor's cache, and torch's calls cost little.
AT_ONCE = 1 << 19


@dataclass
class _Threads:
    lock: threading.Lock = field(default_factory=threading.Lock)
    num_running: int = 0
    before: int = 1


_THREADS = _Threads()


@contextmanager
def one_thread() -> Iterator[None]:
    with _THREADS.lock:
        number = torch.get_num_threads()  # a new thread takes over the process's number at this first call
        if not _THREADS.num_running:
            _THREADS.before = number
        _THREADS.num_running += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _THREADS.lock:
            _THREADS.num_running -= 1
            torch.set_num_threads(_THREADS.before)  # every thread has its own number


def adapter_dtype(weight: torch.dtype) -> torch.dtype:
    return torch.float64 if weight == torch.float64 else torch.float32


def merge_linear(
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    magnitude: torch.Tensor | None,
    *,
    scaling: float,
    transposed: bool,
) -> torch.Tensor:
    """Merge `a` [r, in] and `b` [out, r] into `weight` [out, in], or [in, out] if `transposed` (Conv1D).

    DoRA's `magnitude` is [out].
    """
    if magnitude is None:
        add_rows(a, b, scaling=scaling, transposed=transposed)(weight, 0)
        return weight
    delta = _linear_delta(a, b, scaling, transposed)
    norm = _row_norms(_transpose(weight, transposed), _transpose(delta, transposed))
    factor = _transpose((magnitude / norm).view(-1, 1), transposed)
    return (factor * (weight + delta)).to(weight.dtype)


def add_rows(
    a: torch.Tensor, b: torch.Tensor, *, scaling: float, transposed: bool = False
) -> Callable[[torch.Tensor, int], None]:
    """Return a function that merges into rows of a weight, from their first row's number.

    No other product may be computed in this thread in the meantime.
    """
    product = _product(a, b, transposed)
    is_exact = b.dtype == product.dtype and _scales_exactly(a, b, scaling)

    def add(rows: torch.Tensor, first: int) -> None:
        _add(rows, product[first : first + len(rows)], scaling, b.dtype, is_exact)

    return add


def merge_experts(
    weight: torch.Tensor,
    *factors: torch.Tensor,
    parts: Sequence[tuple[int | None, int | None]],
    scalings: Sequence[float],
    transposed: bool,
    interleaved: bool,
) -> torch.Tensor:
    """Merge linear layers into experts stacked in `weight`, [experts, in, out] if `transposed`.

    `factors` holds `a` and `b` for each part: an expert and a half of the rows. None means all.
    """
    merged = weight.clone()
    for number, (expert, half) in enumerate(parts):
        a, b = factors[2 * number : 2 * number + 2]
        for one in range(len(weight)) if expert is None else [expert]:
            rows = _transpose(merged[one], transposed)
            if half is not None:
                rows = rows[half::2] if interleaved else rows.chunk(2)[half]
            of_a, of_b = (each if expert is not None else each[one if len(each) > 1 else 0] for each in (a, b))
            rows.copy_(merge_linear(rows, of_a, of_b, None, scaling=scalings[number], transposed=False))
    return merged


def merge_attention(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, scaling: float, is_output: bool
) -> torch.Tensor:
    """Merge `a` [r, in] and `b` [out, r] into a projection of `nn.MultiheadAttention`.

    PEFT adds the delta to the output projection twice, in training too.
    """
    weight += _linear_delta(a, b, scaling, False).to(weight.dtype)
    return merge_linear(weight, a, b, None, scaling=scaling, transposed=False) if is_output else weight


def merge_embedding(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, magnitude: torch.Tensor | None, *, scaling: float
) -> torch.Tensor:
    """Merge `a` [r, num] and `b` [dim, r] into `weight` [num, dim]. DoRA's `magnitude` is [dim]."""
    delta = _linear_delta(a, b, scaling, True)
    if magnitude is None:
        weight += delta.to(weight.dtype)
        return weight
    norm = _row_norms(weight.T, delta.T)
    return ((magnitude / norm).view(1, -1) * (weight + delta)).to(weight.dtype)


def merge_conv(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, magnitude: torch.Tensor | None, *, scaling: float
) -> torch.Tensor:
    """Merge `a` [r, in, *kernel] and `b` [out, r, 1, ...] into `weight` [out, in, *kernel].

    DoRA's `magnitude` is [1, out, 1, ...].
    """
    delta = _conv_delta(weight, a, b, scaling)
    if magnitude is None:
        weight += delta
        return weight
    dims = tuple(range(1, weight.dim()))
    norm = (weight + 1 * delta).norm(p=2, dim=dims, keepdim=True).transpose(1, 0)
    factor = (magnitude / norm).view(-1, *(1,) * (weight.dim() - 1))
    return (factor * (weight + delta)).to(weight.dtype)


def merge_parameter(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, scaling: float, input_last: bool, by_expert: bool
) -> torch.Tensor:
    """Merge into a targeted parameter, `weight` [experts, out, in], [experts, in, out] or [out, in].

    `a` [experts * r, in] groups rows by expert. `b` [out, r * experts] groups columns by rank, or by expert if
    `by_expert`.
    """
    num_experts = weight.shape[0] if weight.dim() == 3 else 1
    if num_experts == 1:
        delta = _linear_delta(a, b, scaling, False)
    else:
        stacked_a = a.reshape(num_experts, -1, a.shape[-1])
        if by_expert:  # change to PEFT's order in memory too: BLAS adds in another order for other strides
            b = b.reshape(b.shape[0], num_experts, -1).transpose(1, 2).reshape(b.shape)
        stacked_b = b.reshape(b.shape[0], -1, num_experts)
        order = "e o i" if input_last else "e i o"
        delta = torch.einsum(f"o r e, e r i -> {order}", stacked_b, stacked_a).mul_(scaling)
    weight += delta.to(weight.dtype)
    return weight


def merge_bias(bias: torch.Tensor, b_bias: torch.Tensor, *, scaling: float) -> torch.Tensor:
    bias += b_bias * scaling
    return bias


def replace_rows(weight: torch.Tensor, rows: torch.Tensor, *, index: list[int]) -> torch.Tensor:
    return weight.index_copy(0, torch.tensor(index), rows.to(weight))


def _transpose(tensor: torch.Tensor, transposed: bool) -> torch.Tensor:
    return tensor.T if transposed else tensor


def _linear_delta(a: torch.Tensor, b: torch.Tensor, scaling: float, transposed: bool) -> torch.Tensor:
    return _product(a, b, transposed).mul_(scaling).to(b.dtype)


def _product(a: torch.Tensor, b: torch.Tensor, transposed: bool) -> torch.Tensor:
    low, high = _wide(a), _wide(b)
    product = torch.mm(high, low, out=_scratch("product", (high.shape[0], low.shape[1]), high.dtype))
    return _transpose(product, transposed)


def _scales_exactly(a: torch.Tensor, b: torch.Tensor, scaling: float) -> bool:
    """Return True if scaling rounds no element of the product: by 1, 2, 4, ... to numbers that are not too large."""
    largest = len(a) * float(a.abs().amax()) * float(b.abs().amax()) * scaling if a.numel() and b.numel() else 0.0
    return scaling >= 1 and frexp(scaling)[0] == 0.5 and largest < torch.finfo(b.dtype).max / 4  # False for NaN


def _add(weight: torch.Tensor, product: torch.Tensor, scaling: float, dtype: torch.dtype, is_exact: bool) -> None:
    """Compute `weight += (product * scaling).to(dtype)` as torch does: add in the wider dtype, round once.

    A few rows at a time stay in the processor's cache. `is_exact` scaling takes no pass of its own.
    """
    wider = torch.promote_types(weight.dtype, dtype)
    number = rows_at_once(weight.shape[1])
    for part, rows in zip(weight.split(number), product.split(number), strict=True):
        delta, alpha = (rows, scaling) if is_exact else (rows.mul_(scaling).to(dtype), 1)
        if weight.dtype == wider:
            part.add_(delta, alpha=alpha)
        else:
            wide = _scratch("sum", tuple(part.shape), wider)
            part.copy_(wide.copy_(part).add_(delta, alpha=alpha))


def rows_at_once(columns: int) -> int:
    return max(1, AT_ONCE // max(1, columns))


def _wide(factor: torch.Tensor) -> torch.Tensor:
    """Return a 16-bit factor in fp32."""
    return factor.float() if factor.dtype in (torch.float16, torch.bfloat16) else factor


class _Scratch(threading.local):
    """A thread's memory for products and sums: fresh pages would take as long as the arithmetic."""

    def __init__(self) -> None:
        self.memory: dict[str, torch.Tensor] = {}


_SCRATCH = _Scratch()


def _scratch(use: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = prod(shape) * dtype.itemsize
    memory = _SCRATCH.memory.get(use)
    if memory is None or len(memory) < size:
        memory = _SCRATCH.memory[use] = torch.empty(size, dtype=torch.uint8)
    return memory[:size].view(dtype).reshape(shape)


def _conv_delta(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    low, high = _wide(a), _wide(b)
    if tuple(weight.shape[2:4]) == (1, 1):
        product = high.squeeze(3).squeeze(2) @ low.squeeze(3).squeeze(2)
        return (product.unsqueeze(2).unsqueeze(3) * scaling).to(a.dtype)
    convolve = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}[weight.dim()]
    return (convolve(low.transpose(0, 1), high).transpose(0, 1) * scaling).to(a.dtype)


def _row_norms(weight: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    total = weight + 1 * delta  # DoRA's code scales by 1: the same bits, but it fixes the order
    return torch.linalg.norm(total, dim=1).to(total.dtype)
