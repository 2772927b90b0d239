"""The order of a model's layers, where transformers does not know the model.

What some kinds of adapters have for a layer goes by its number among the adapted ones, in the order in which the model
registers them, and a layer's own tensors do not tell it.  A pickled state dict of the base has that order.  A
safetensors file has none, nor has a state dict whose names somebody has sorted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import TYPE_CHECKING

from ckpt.base.errors import UsageError
from ckpt.lora.find import Adapter, Factor
from ckpt.plan.checkpoint import Checkpoint
from ckpt.state import adapter as names

if TYPE_CHECKING:
    import torch

TINYLORA, UNILORA, FROD = "TINYLORA", "UNILORA", "FROD"
#: The entry of a kind's config, and what it is if there is none, under which its file has what else goes by the order.
_RECORDED = {TINYLORA: ("save_projection", True), UNILORA: ("save_indices", False), FROD: ("save_projection", True)}


def is_recorded(adapter: Adapter) -> bool:
    """Whether the adapter's file has what PEFT makes anew of the order or of all weights where it was not saved."""
    key, usual = _RECORDED.get(adapter.config.kind, ("", True))
    return bool(adapter.config.raw.get(key, usual))


def ordered(
    adapter: Adapter,
    base: Checkpoint,
    modules: Collection[str],
    adapted: Collection[str],
    factors: Mapping[str, Factor],
) -> list[str]:
    """The `modules` of `base` in the order that its model registers them in, as far as this adapter goes by it.

    UsageError where it does, and nothing records the order.
    """
    goes_by_order = adapter.config.kind == TINYLORA or not is_recorded(adapter)
    if len(adapted) < 2 or not goes_by_order:
        return sorted(modules)
    if adapter.config.kind == TINYLORA and is_recorded(adapter) and (found := _by_projections(adapter, factors)):
        return [*found, *sorted(set(modules) - set(found))]
    if base.keeps_order and not _are_sorted(base) and _is_walk(modules):
        return list(modules)
    raise UsageError(
        "this adapter goes by the order of the model's layers, which the base does not record",
        path=base.path,
        expected="a model that transformers knows, or a torch file, which has the order",
        found=f"{len(adapted)} adapted layers, and names that are sorted or in no order of a model's",
        hint="in Python: torch.save(model.state_dict(), 'base/pytorch_model.bin'), and --base base",
    )


def _are_sorted(base: Checkpoint) -> bool:
    """Whether the names are sorted, as in a state dict that was read from a safetensors file.

    No model of modules with a bias is: it registers the weight before the bias.
    """
    by_dtype: dict[str, list[str]] = {}
    for tensor in base.tensors.values():
        by_dtype.setdefault(tensor.dtype.name, []).append(tensor.fqn)
    return all(found == sorted(found) for found in by_dtype.values())


def _is_walk(modules: Iterable[str]) -> bool:
    """Whether a model can have them in this order: each before those in it, and none left and come back to."""
    path: tuple[str, ...] = ()
    left: set[tuple[str, ...]] = set()
    for module in modules:
        parts = tuple(module.split("."))
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(path, parts, strict=False)))
        left |= {path[:depth] for depth in range(shared + 1, len(path) + 1)}
        if shared == len(parts) or parts[: shared + 1] in left:
            return False
        path = parts
    return True


def _by_projections(adapter: Adapter, factors: Mapping[str, Factor]) -> list[str] | None:
    """TinyLoRA's layers by the seeds that their projections were drawn from, which count the layers up.

    None where torch draws other ones here (peft 0.21.2, `tuners/tinylora/layer.py`, `_init_projection`).
    """
    import torch

    end = ".tinylora_P"
    saved = {fqn.removeprefix(names.PREFIX).removesuffix(end): one for fqn, one in factors.items() if fqn.endswith(end)}
    left, found = {module: one.load() for module, one in saved.items()}, list[str]()
    first = adapter.config.raw.get("projection_seed", 42)
    for number in range(len(left)):
        for module, projection in left.items():
            generator = torch.Generator().manual_seed(first + number)
            std = 1.0 / projection.shape[-1] ** 0.5
            drawn = torch.normal(mean=0.0, std=std, size=tuple(projection.shape), generator=generator)
            if any(torch.equal(rounded, projection) for rounded in _rounded(drawn, projection.dtype)):
                found.append(module)
                del left[module]
                break
    return found if not left else None


def _rounded(drawn: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The values as they may have been saved in `dtype`: PEFT rounds them to that of the layer, and may widen it."""
    import torch

    return (drawn.to(of_layer).to(dtype) for of_layer in (torch.float32, torch.bfloat16, torch.float16))
