"""Slots of Megatron-Bridge's MultiLoRA: several adapters trained at once.

    ....linear_qkv.adapters.1.linear_in.weight     slot 1's first factor: [dim, inputs], a row per rank
    ....linear_qkv.adapters.1.linear_out.weight    its second factor: [outputs, dim], a column per rank

A slot is claimed with its own rank and alpha. Neither is saved: the run's config only has the largest rank, `dim`, and
an alpha that no slot has to use. A factor's ranks beyond its slot's rank are zero. An unclaimed slot has a first factor
of full rank, and zeros in the second.

Format facts: Megatron-Bridge, August 2026, peft/multi_lora.py, peft/multi_lora_layers.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt.base.errors import CorruptError, UsageError
from ckpt.base.words import Message
from ckpt.plan.checkpoint import MEGATRON, Checkpoint
from ckpt.plan.relation import Link, Relation, translate
from ckpt.plan.tensors import Box, Shape, Tensor, whole
from converters.names.megatron.adapter import OUT
from converters.names.megatron.facts import AdapterRun

#: Module and class in megatron.bridge.peft.
MULTI, MULTIS_CLASS = "multi_lora", "MultiLoRA"
_SLOT = re.compile(r"\.adapters\.(?P<slot>\d+)\.(?=linear_(?:in|out)\.)")


@dataclass(frozen=True, slots=True)
class AdapterSlot:
    number: int
    rank: int
    alpha: float

    @classmethod
    def parse(cls, text: str) -> AdapterSlot:
        """Return the slot in `text`: `1:8:16` or `1:8:2.5`."""
        if match := re.fullmatch(r"(\d{1,6}):(\d{1,6}):(\d{1,9}(?:\.\d{1,9})?)", text, re.ASCII):
            number, rank, alpha = int(match[1]), int(match[2]), float(match[3])
            if rank and alpha:
                return cls(number, rank, int(alpha) if alpha == int(alpha) else alpha)
        raise UsageError(
            Message("{adapter_slot} takes a slot with its rank and its alpha"),
            expected="SLOT:RANK:ALPHA, for example 1:8:16",
            found=text or "nothing",
        )


def slots_in(fqns: Iterable[str]) -> list[int]:
    return sorted({int(found["slot"]) for fqn in fqns if (found := _SLOT.search(fqn))})


def select_slot(checkpoint: Checkpoint, requested: str | None, folder: Path) -> tuple[Checkpoint, AdapterSlot]:
    """Return the slot's tensors under a single adapter's names, and the slot.

    Raise UsageError, listing all slots, if it is not requested or missing.
    """
    slot = None if requested is None else AdapterSlot.parse(requested)
    known = slots_in(fqn for fqn, _ in checkpoint.tensors)
    if slot is None or slot.number not in known:
        held = {number: _factors(checkpoint, number) for number in known}
        found = ", ".join(_described(number, factors) for number, factors in held.items())
        first = max(known, key=lambda number: _rank(held[number]) > 0)
        example = f"{first}:{_rank(held[first])}:ALPHA"
        raise UsageError(
            "this run holds MultiLoRA adapters, and Megatron-Bridge doesn't save a slot's alpha"
            if slot is None
            else f"the run has no slot {slot.number}",
            path=folder,
            expected="a slot in this run, with its own rank and alpha",
            found=f"{MULTIS_CLASS}, with {found}",
            hint=Message(
                "use {adapter_slot} with convert or merge-lora for slot {}, with the alpha given to "
                "`init_adapter_slot`",
                first,
                adapter_slot=example,
            ),
        )
    tensors = {}
    for (fqn, role), tensor in checkpoint.tensors.items():
        match = _SLOT.search(fqn)
        if match is None or int(match["slot"]) == slot.number:
            name = _SLOT.sub(".adapter.", fqn)
            tensors[name, role] = tensor.renamed(name)
    return replace(checkpoint, tensors=tensors, used_options=frozenset({"adapter_slot"})), slot


def cut_to_rank(checkpoint: Checkpoint, run: AdapterRun, slot: AdapterSlot) -> tuple[Checkpoint, AdapterRun]:
    """Cut an adapter to its rank. Return the run's config for this adapter alone.

    Raise UsageError if the rank is not the slot's.
    """
    if slot.rank > run.dim:
        raise UsageError(
            f"no slot in this run has rank {slot.rank}",
            path=run.path,
            expected=f"a rank up to {run.dim}",
            found=Message("{adapter_slot}", adapter_slot=f"{slot.number}:{slot.rank}:{slot.alpha}"),
        )
    shapes = checkpoint.shapes
    links, padding = [], {}
    for fqn, shape in shapes.items():
        if shape[_axis(fqn)] != run.dim:
            raise CorruptError(
                "a factor's rank doesn't match the run's config",
                path=run.path,
                fqn=fqn,
                expected=f"rank {run.dim}",
                found=f"rank {shape[_axis(fqn)]}",
            )
        kept = _ranks(fqn, shape, 0, slot.rank)
        links.append(Link(fqn, kept, fqn, whole(kept.sizes), tuple(range(len(shape)))))
        if slot.rank < run.dim:
            padding[fqn] = (_ranks(fqn, shape, slot.rank, run.dim),)
    factors = [*checkpoint.parameters.values()]
    if (rank := _rank(factors)) != slot.rank:
        raise UsageError(
            f"slot {slot.number} doesn't have the requested rank",
            path=checkpoint.path,
            expected=f"rank {slot.rank}",
            found=_described(slot.number, factors),
            hint=Message("{adapter_slot}; alpha is divided by the rank", adapter_slot=f"{slot.number}:{rank}:ALPHA"),
        )
    relation = Relation(tuple(links), shapes, {link.b: link.b_box.sizes for link in links}, a_padding=padding)
    alone = replace(run, kind="lora", dim=slot.rank, alpha=slot.alpha)
    return translate(checkpoint, relation, MEGATRON), alone


def _axis(fqn: str) -> int:
    """Return the dim that counts ranks."""
    return 1 if fqn.endswith(OUT) else 0


def _ranks(fqn: str, shape: Shape, start: int, stop: int) -> Box:
    axis = _axis(fqn)
    offsets, sizes = [0] * len(shape), [*shape]
    offsets[axis], sizes[axis] = start, stop - start
    return Box(tuple(offsets), tuple(sizes))


def _factors(checkpoint: Checkpoint, number: int) -> list[Tensor]:
    """Return both factors of one layer. All layers of a slot have its rank."""
    of_slot = [one for one in checkpoint.parameters.values() if slots_in([one.fqn]) == [number]]
    first = of_slot[0].fqn.partition(".linear_in.")[0].partition(".linear_out.")[0]
    return [one for one in of_slot if one.fqn.startswith(f"{first}.")]


def _rank(factors: Iterable[Tensor]) -> int:
    return max(map(_last, factors), default=0)


def _described(number: int, factors: Iterable[Tensor]) -> str:
    held = [*factors]
    is_idle = not any(_last(one) for one in held if one.fqn.endswith(OUT))
    return f"slot {number}: rank {_rank(held)}" + (" (its second factors are zero: not trained)" if is_idle else "")


def _last(factor: Tensor) -> int:
    """Return the number of ranks up to the last nonzero one."""
    import numpy as np  # late: numpy

    from ckpt.move.reading import read_box

    bits = read_box(factor, whole(factor.shape), {})
    others = tuple(dim for dim in range(bits.ndim) if dim != _axis(factor.fqn))
    found = np.flatnonzero((bits << 1).any(axis=others))  # drops the sign of -0.0
    return int(found[-1]) + 1 if found.size else 0
