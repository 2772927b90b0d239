"""State dict names that differ from the names of parameters and buffers.

A wrapper may override `state_dict()` and drop, add or change parts of the names, like TRL's models with a value head.
DeepSpeed writes such a dict unchanged. It records parameters in `param_shapes`, `frozen_param_shapes` and
`shared_params`, and buffers in `buffer_names`, by module tree names (deepspeed 0.19.8, runtime/engine.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ckpt.base.text import pluralize
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.plan.tensors import Shape
from converters.deepspeed.keys import AUTOEP_EXPERTS, EXPERT

_Parts = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StateDictNames:
    """State dict names matched with recorded names.

    `renamed` maps a dict name to the recorded name.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    unmatched: frozenset[str] = frozenset()

    def copies(self, trained: Container[str]) -> frozenset[str]:
        """Return second copies' names."""
        return self.unmatched.union(fqn for fqn in self.renamed.values() if fqn in trained)

    def notes(self) -> Iterator[str]:
        if self.renamed:
            name, recorded = next(iter(self.renamed.items()))
            yield (
                f"the model's state_dict() renames {pluralize(len(self.renamed), 'tensor')} ({recorded} to {name}); "
                "here parameters and buffers have the module tree's names, and trained parameters take the masters' "
                "values"
            )
        if self.unmatched:
            shown = ", ".join(sorted(self.unmatched)[:4])
            yield (
                f"{pluralize(len(self.unmatched), 'entry')} in the model's state_dict() have unknown names ({shown}"
                "): left out, and the masters are used"
            )


def match(module: Mapping[str, StoredTensor], recorded: Mapping[str, Shape | None]) -> StateDictNames:
    """Match entries of `module` with `recorded` names without an entry. Shape None fits every shape.

    Two names match if one has extra parts in one place and the same last part. The most common place wins.
    """
    lacking = {fqn for fqn in recorded if fqn not in module and not _is_expert(fqn)}
    unknown = {tuple(fqn.split(".")): fqn for fqn in module if fqn not in recorded}
    if not lacking or not unknown:
        return StateDictNames()
    by_parts = {tuple(fqn.split(".")): fqn for fqn in recorded if fqn in lacking}
    found = [
        (block, name, fqn)
        for longer, shorter in ((by_parts, unknown), (unknown, by_parts))
        for parts, one in longer.items()
        for block, rest in _without_a_block(parts)
        if (other := shorter.get(rest)) is not None
        for name, fqn in ([(other, one)] if longer is by_parts else [(one, other)])
        if _fits(module[name].shape, recorded[fqn])
    ]
    votes = Counter(block for block, _, _ in found)
    renamed: dict[str, str] = {}
    for _, name, fqn in sorted(found, key=lambda one: (-votes[one[0]], len(one[0]))):
        if name not in renamed and fqn in lacking:
            renamed[name] = fqn
            lacking.discard(fqn)
    shapes = Counter(recorded[fqn] for fqn in lacking)
    unmatched = (fqn for fqn in unknown.values() if fqn not in renamed)
    return StateDictNames(renamed, frozenset(_as_large(unmatched, module, shapes)))


def _as_large(fqns: Iterable[str], module: Mapping[str, StoredTensor], shapes: Counter[Shape | None]) -> Iterator[str]:
    """Yield each of `fqns` with a shape left in `shapes`; an empty placeholder takes any."""
    left = shapes - Counter({None: shapes[None]})
    for fqn in fqns:
        shape: Shape | None = module[fqn].shape
        if shape == (0,):
            shape = next(iter(left), None)
        if shape in left:
            left = left - Counter([shape])
            yield fqn


def _without_a_block(parts: _Parts) -> Iterator[tuple[_Parts, _Parts]]:
    """Yield runs of parts before the last, and the parts without them."""
    for start in range(len(parts) - 1):
        for stop in range(start + 1, len(parts)):
            yield parts[start:stop], parts[:start] + parts[stop:]


def _fits(shape: Shape, recorded: Shape | None) -> bool:
    return recorded is None or shape in (recorded, (0,))


def _is_expert(fqn: str) -> bool:
    return bool(EXPERT.fullmatch(fqn) or AUTOEP_EXPERTS.fullmatch(fqn))
