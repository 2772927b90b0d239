"""The order of a model's layers, where transformers does not know the model.

What some kinds of adapters have for a layer goes by its number among the adapted ones, in the order in which the model
registers them, and a layer's own tensors do not tell it.  A pickled state dict of the base has that order.  A
safetensors file has none, nor has a state dict whose names somebody has sorted, or that was put together from such
files: an order that is not seen to be a model's is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

from ckpt.base.errors import UsageError
from ckpt.lora.find import Adapter, Factor
from ckpt.plan.checkpoint import WEIGHT, Checkpoint
from ckpt.plan.tensors import Shape
from ckpt.state import adapter as names

if TYPE_CHECKING:
    import torch

TINYLORA, UNILORA, FROD = "TINYLORA", "UNILORA", "FROD"
#: The entry of a kind's config, and what it is if there is none, under which its file has what else goes by the order.
_RECORDED = {TINYLORA: ("save_projection", True), UNILORA: ("save_indices", False), FROD: ("save_projection", True)}
#: Tensors for each step back in the alphabet that shows an order to be a model's.
_PER_STEP = 6


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
    stored = [fqn for fqn, role in base.tensors if role == WEIGHT]
    if base.keeps_order and is_registered(stored):
        places = {fqn: number for number, fqn in enumerate(stored)}
        return sorted(modules, key=lambda module: places.get(f"{module}.weight", len(places)))
    key, _ = _RECORDED[adapter.config.kind]
    raise UsageError(
        "this adapter goes by the order of the model's layers, which the base does not record",
        path=base.path,
        expected="a model that transformers knows, or a torch file, which has the order",
        found=f"{len(adapted)} adapted layers, and names that are sorted, wholly or in part, or in no model's order",
        hint="in Python: torch.save(model.state_dict(), 'base/pytorch_model.bin'), and --base base"
        + ("" if is_recorded(adapter) else f"; or an adapter that was saved with {key}=True"),
    )


def is_registered(fqns: Collection[str]) -> bool:
    """Whether the order of all tensors of a model is seen to be that in which it registers them.

    A state dict has a module's own tensors before those of the modules in it, which stand together, weights before
    biases, numbers counted up, and repeated blocks alike.  That could be of sorted names too.  What proves it is that
    names within modules step back in the alphabet: in lists that were sorted and then joined they do so at most once
    where two of them meet, and files hold more tensors than `_PER_STEP`.
    """
    inside: dict[tuple[str, ...], list[str]] = {}
    for fqn in fqns:
        parts = tuple(fqn.split("."))
        for depth, part in enumerate(parts):
            before = inside.setdefault(parts[:depth], [])
            if part not in before[-1:]:
                before.append(part)
    own, steps, seen = set(fqns), 0, set[tuple[tuple[str, ...], str, str]]()
    for parent, children in inside.items():
        are_own = [".".join((*parent, part)) in own for part in children]
        numbers = [int(part) for part in children if part.isdecimal()]
        named = [part for part in children if not part.isdecimal()]
        if len({*children}) < len(children) or numbers != sorted(numbers) or are_own != sorted(are_own, reverse=True):
            return False
        alike = tuple("" if part.isdecimal() else part for part in parent)
        seen |= {(alike, *pair) for pair in combinations(named, 2)}
        steps += sum(one > other for one, other in pairwise(named)) if parent else 0
    is_turned = any((one, other) == ("bias", "weight") or (alike, other, one) in seen for alike, one, other in seen)
    return not is_turned and steps > 1 and len(own) <= steps * _PER_STEP


def _by_projections(adapter: Adapter, factors: Mapping[str, Factor]) -> list[str] | None:
    """TinyLoRA's layers by the seeds that their projections were drawn from, which count the layers up.

    None where torch draws other ones here (peft 0.21.2, `tuners/tinylora/layer.py`, `_init_projection`).
    """
    import torch

    end = ".tinylora_P"
    saved = {fqn.removeprefix(names.PREFIX).removesuffix(end): one for fqn, one in factors.items() if fqn.endswith(end)}
    left, found = {module: one.load() for module, one in saved.items()}, list[str]()
    if any(projection.dim() != 3 for projection in left.values()):
        return None
    first = adapter.config.raw.get("projection_seed", 42)
    for number in range(len(left)):
        drawn = {shape: _drawn(shape, first + number) for shape in {tuple(one.shape) for one in left.values()}}
        for module, projection in left.items():
            if any(torch.equal(one, projection) for one in _rounded(drawn[tuple(projection.shape)], projection.dtype)):
                found.append(module)
                del left[module]
                break
        else:
            return None
    return found


def _drawn(shape: Shape, seed: int) -> torch.Tensor:
    """A projection as PEFT draws it."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.normal(mean=0.0, std=1.0 / shape[-1] ** 0.5, size=shape, generator=generator)


def _rounded(drawn: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The values as they may have been saved in `dtype`: PEFT rounds them to that of the layer, and may widen it."""
    import torch

    return (drawn.to(of_layer).to(dtype) for of_layer in (torch.float32, torch.bfloat16, torch.float16))
