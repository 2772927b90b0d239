"""Rules between in-memory names and the Hub's, without transformers or torch.

If one in-memory tensor is several in the files, a rule also tells how to join them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ckpt.base.errors import CorruptError, LossError
from ckpt.base.text import pluralize
from ckpt.plan.relation import Link, Relation
from ckpt.plan.tensors import Box, Shape, whole

Direction = Literal["to_hub", "to_memory"]

#: Rules are matched with `#` in place of numbers.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class NameRule:
    """`memory` in an in-memory name is `hub` in a Hub name. Both are whole words; `^` marks the start.

    `#` is any number, equal on both sides. Several `hub` are joined along `dim` of the in-memory tensor. `*` in them is
    an expert's number, an index in dim 0. If `read`, files may have the name, but `save_pretrained` does not write it.
    `inside` limits the rule to names with this word. If `exchanges`, files may also have the last two of three dims
    exchanged; `dim` is then the hidden dim.
    """

    memory: str
    hub: tuple[str, ...]
    dim: int = 0
    read: bool = False
    inside: str = ""
    exchanges: bool = False

    def within(self, word: str) -> NameRule:
        return replace(self, inside=word)

    def is_about(self, name: str) -> bool:
        return not self.inside or self.inside in name.split(".")

    @property
    def is_stacked(self) -> bool:
        return "*" in self.hub[0]

    @property
    def inserts(self) -> bool:
        """The Hub's name has an extra word, missing if transformers 5 made the model from a config."""
        return not self.read and self.hub[0].startswith(f"{self.memory}.")

    @property
    def is_rename(self) -> bool:
        return len(self.hub) == 1 and not self.is_stacked and not self.exchanges


def rename(memory: str, hub: str) -> NameRule:
    return NameRule(memory, (hub,))


def read_as(memory: str, hub: str) -> NameRule:
    return NameRule(memory, (hub,), read=True)


def stacked(memory: str, *hub: str) -> NameRule:
    """Join gate and up along the stack's dim 1."""
    return NameRule(memory, hub, dim=1)


def joined(memory: str, *hub: str) -> NameRule:
    return NameRule(memory, hub)


def exchanged(memory: str, hidden: int) -> NameRule:
    return NameRule(memory, (memory,), dim=hidden, exchanges=True)


@functools.cache
def _pattern(words: str) -> re.Pattern[str]:
    start, words = ("^", words[1:]) if words.startswith("^") else (r"(?:^|(?<=\.))", words)
    return re.compile(start + re.escape(words.replace("*", "#")) + r"(?=\.|$)")


def _replaced(name: str, old: str, new: str) -> str:
    return _pattern(old).sub(new.removeprefix("^"), name, count=1).removeprefix(".")


@dataclass(frozen=True, slots=True)
class _Renamed:
    """Name on the other side, with `#` for numbers.

    To the Hub, `names` has the parts' names, with `*` for an expert. To memory it has one name. The tensor is then its
    `part`, and the name's number at index `expert` is the expert.
    """

    names: tuple[str, ...]
    rule: NameRule | None = None
    part: int = 0
    expert: int | None = None


@dataclass(frozen=True)
class Rules:
    """Rules for one config, outer models' first.

    Only the first `num_layers` layers have the model's own experts. `hidden_size` is the language model's.
    """

    rules: tuple[NameRule, ...]
    num_layers: int | None = None
    num_experts: int | None = None
    hidden_size: int | None = None
    _known: dict[tuple[str, Direction], _Renamed] = field(default_factory=dict, compare=False)

    def relation(self, shapes: Mapping[str, Shape], direction: Direction) -> Relation | None:
        """Return links, or None if both sides are equal.

        Raise LossError if parts of a tensor do not fit, CorruptError if one is missing.
        """
        links: list[Link] = []
        made: dict[str, Shape] = {}
        stacks: dict[str, _Stack] = {}

        def make(name: str, shape: Shape) -> None:
            if name in made:
                raise LossError("two tensors would get the same name", fqn=name)
            made[name] = shape

        for name, shape in shapes.items():
            numbers = _NUMBER.findall(name)
            new = self._renamed(_NUMBER.sub("#", name) if numbers else name, direction)
            if new.rule is None or self._is_beyond(name):
                other = name if new.rule else _filled(new.names[0], numbers)
                make(other, shape)
                links.append(Link.rename(name, other, shape))
            elif new.rule.exchanges:
                links.append(self._as_in_memory(new.rule, name, shape))
                make(name, links[-1].b_box.sizes)
            elif direction == "to_hub":
                for link in _taken_apart(new.rule, name, shape, [_filled(part, numbers) for part in new.names]):
                    make(link.b, link.b_box.sizes)
                    links.append(link)
            else:
                expert = 0 if new.expert is None else int(numbers.pop(new.expert))
                other = _filled(new.names[0], numbers)
                if other not in stacks:
                    make(other, ())  # at its first part's place; the shape follows
                    stacks[other] = _Stack(new.rule)
                stack = stacks[other]
                if stack.parts.setdefault((expert, new.part), name) != name:
                    raise LossError("two tensors would get the same name", fqn=name)
        for name, stack in stacks.items():
            made[name] = stack.shape(name, shapes, self.num_experts)
            links += stack.links(name, made[name])
        if made == dict(shapes) and all(link.a == link.b and link.keeps_order for link in links):
            return None
        return Relation(tuple(links), dict(shapes), made).check()

    def in_memory(self, name: str) -> str:
        """Return the in-memory name of a Hub name, both with `#` for numbers."""
        return self._renamed(name, "to_memory").names[0]

    def _is_beyond(self, name: str) -> bool:
        layer = _LAYER.search(name)
        return self.num_layers is not None and layer is not None and int(layer[1]) >= self.num_layers

    def _as_in_memory(self, rule: NameRule, name: str, shape: Shape) -> Link:
        hidden = self.hidden_size
        if len(shape) != 3 or hidden is None or shape[rule.dim] == hidden or shape[3 - rule.dim] != hidden:
            return Link.rename(name, name, shape)
        return Link(name, whole(shape), name, whole((shape[0], shape[2], shape[1])), (0, 2, 1))

    def _renamed(self, name: str, direction: Direction) -> _Renamed:
        found = self._known.get((name, direction))
        if found is None:
            found = self._to_hub(name) if direction == "to_hub" else self._to_memory(name)
            self._known[name, direction] = found
        return found

    def _to_hub(self, name: str, *, inserts: bool = True) -> _Renamed:
        names, taken = [name], None
        for rule in self.rules:
            if not (rule.is_rename or rule.exchanges) and rule.is_about(name) and _pattern(rule.memory).search(name):
                names, taken = [_replaced(name, rule.memory, hub) for hub in rule.hub], rule
                break
        for rule in reversed(self.rules):
            if rule.inserts and (not inserts or _pattern(rule.hub[0]).search(names[0])):
                continue
            if rule.is_rename and not rule.read and rule.is_about(names[0]):
                names = [_replaced(part, rule.memory, rule.hub[0]) for part in names]
        return _Renamed(tuple(names), taken)

    def _to_memory(self, name: str) -> _Renamed:
        if self._to_hub(name, inserts=False).names != (name,):
            return _Renamed((name,))  # already an in-memory name
        for rule in self.rules:
            if rule.is_rename and rule.is_about(name):
                name = _replaced(name, rule.hub[0], rule.memory)
        for rule in self.rules:
            for part, hub in enumerate(() if rule.is_rename else rule.hub):
                if rule.is_about(name) and (found := _pattern(hub).search(name)):
                    expert = name.count("#", 0, found.start()) + hub.partition("*")[0].count("#")
                    new = _replaced(name, hub, rule.memory)
                    return _Renamed((new,), rule, part, expert if rule.is_stacked else None)
        return _Renamed((name,))


def _filled(name: str, numbers: list[str]) -> str:
    if not numbers:
        return name
    first, *rest = name.split("#")
    return first + "".join(number + words for number, words in zip(numbers, rest, strict=True))


def _do_not_fit(name: str, expected: object, found: object) -> LossError:
    return LossError(
        "related tensors have incompatible shapes",
        fqn=name,
        expected=expected,
        found=found,
        hint="does the config belong to this checkpoint?",
    )


def config_mismatch(name: str, expected: object, found: object) -> CorruptError:
    return CorruptError(
        "the config expects other tensors here",
        fqn=name,
        expected=expected,
        found=found,
        hint="is a tensor missing, or does the config belong to another checkpoint?",
    )


@functools.cache  # all layers have equal shapes
def _expert_boxes(rule: NameRule, shape: Shape) -> tuple[list[list[Box]], Box, tuple[int | None, ...]]:
    """Return each expert's boxes, a whole part's box, and the kept dims."""
    dims: tuple[int | None, ...] = tuple(range(len(shape)))
    sizes = list(shape)
    sizes[rule.dim] //= len(rule.hub)
    if rule.is_stacked:
        sizes[0] = 1
        dims = (None, *dims[:-1])

    def box(expert: int, part: int) -> Box:
        offsets = [expert] + [0] * (len(shape) - 1)
        offsets[rule.dim] += part * sizes[rule.dim]
        return Box(tuple(offsets), tuple(sizes))

    experts = range(shape[0] if rule.is_stacked else 1)
    boxes = [[box(expert, part) for part in range(len(rule.hub))] for expert in experts]
    return boxes, whole(tuple(sizes[rule.is_stacked :])), dims


def _taken_apart(rule: NameRule, name: str, shape: Shape, parts: list[str]) -> Iterator[Link]:
    least = rule.dim + 2 if rule.is_stacked else rule.dim + 1
    if len(shape) < least or shape[rule.dim] % len(parts):
        expected = f"at least {pluralize(least, 'dim')}, with dim {rule.dim} divisible by {len(parts)}"
        raise _do_not_fit(name, expected, list(shape))
    boxes, target, dims = _expert_boxes(rule, shape)
    for expert, of_expert in enumerate(boxes):
        for part, box in zip(parts, of_expert, strict=True):
            yield Link(name, box, part.replace("*", str(expert)), target, dims)


@dataclass(frozen=True, slots=True)
class _Stack:
    rule: NameRule
    parts: dict[tuple[int, int], str] = field(default_factory=dict)

    def shape(self, name: str, shapes: Mapping[str, Shape], num_experts: int | None) -> Shape:
        rule, number = self.rule, max(expert for expert, _ in self.parts) + 1
        expected = (num_experts if rule.is_stacked and num_experts else number) * len(rule.hub)
        if len(self.parts) != expected or number * len(rule.hub) != expected:
            raise config_mismatch(name, f"{pluralize(expected, 'tensor')}", len(self.parts))
        first = shapes[next(iter(self.parts.values()))]
        for part in self.parts.values():
            if shapes[part] != first:
                raise _do_not_fit(part, list(first), list(shapes[part]))
        dim = rule.dim - rule.is_stacked
        if len(first) <= max(dim, 0):
            raise _do_not_fit(name, f"at least {pluralize(max(dim, 0) + 1, 'dim')}", list(first))
        joined = [*first]
        joined[dim] *= len(rule.hub)
        return (number, *joined) if rule.is_stacked else tuple(joined)

    def links(self, name: str, shape: Shape) -> Iterator[Link]:
        boxes, source, _ = _expert_boxes(self.rule, shape)
        dims = tuple(range(self.rule.is_stacked, len(shape)))
        for (expert, part), other in sorted(self.parts.items()):
            yield Link(other, source, name, boxes[expert][part], dims)
