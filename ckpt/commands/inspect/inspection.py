"""Content of the `ckpt inspect --html` page: every tensor in columns, and each distinct sharding once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from ckpt.base.text import one_line
from ckpt.commands.inspect.overview import UnreadFiles, coordinates, named_facts
from ckpt.commands.inspect.rows import Only, naming, padding_of, selected_tensors
from ckpt.commands.inspect.sketch import Holder, Sketch, Sketcher
from ckpt.commands.inspect.summary import PART_COLOURS, PARTS, by_kind, facts
from ckpt.plan.checkpoint import Checkpoint
from ckpt.plan.tiling import Damage

_MAX_NAME = 400
#: Later tensors only show their holders.
_MAX_PATCHES = 100_000

One = TypeVar("One", bound=Hashable)


@dataclass
class _Table(Generic[One]):
    numbers: dict[One, int] = field(default_factory=dict)

    def __call__(self, value: One) -> int:
        return self.numbers.setdefault(value, len(self.numbers))


def inspection(
    checkpoint: Checkpoint,
    unread: UnreadFiles = (),
    steps: Sequence[Sequence[str]] = (),
    only: Only = "all",
) -> tuple[dict[str, Any], tuple[Damage, ...]]:
    """Return the page's content and the damage."""
    tensors, padding = selected_tensors(checkpoint, only), padding_of(checkpoint)
    sketcher = Sketcher(naming(checkpoint, tensors))
    names, roles, dtypes, shapes = _Table[str](), _Table[str](), _Table[Any](), _Table[Any]()
    looks: dict[int, tuple[int, Sketch]] = {}  # keyed by identity: hashing many slices is slow
    columns: list[list[int]] = [[], [], [], [], []]
    damaged = []
    for tensor in tensors:
        sketch = sketcher.sketch(tensor, padding.get(tensor.fqn))
        if sketch.faults:
            damaged.append(Damage(tensor.fqn, tensor.role, sketch.faults))
        look, _ = looks.setdefault(id(sketch), (len(looks), sketch))
        row = names(tensor.fqn), roles(tensor.role), dtypes(tensor.dtype), shapes(tensor.shape), look
        for column, number in zip(columns, row, strict=True):
            column.append(number)
    by_role = sketcher.by_role
    holders = sorted(by_role, key=lambda holder: (isinstance(holder, str), holder))
    content = {
        "title": one_line("/".join(Path(checkpoint.path).parts[-2:])),
        "summary": [one_line(fact, 100) for fact in facts(checkpoint)],
        "facts": named_facts(checkpoint, unread),
        "steps": [list(map(one_line, row)) for row in steps],
        "holders": _holders(checkpoint, holders, by_role),
        "names": [one_line(name, _MAX_NAME) for name in names.numbers],
        "roles": [one_line(role) for role in roles.numbers],
        "dtypes": [[dtype.name, dtype.itemsize] for dtype in dtypes.numbers],
        "shapes": list(shapes.numbers),
        "looks": _looks([sketch for _, sketch in looks.values()], {one: n for n, one in enumerate(holders)}),
        "tensors": columns,
        "parts": [[part, PARTS.get(part, ""), colour] for part, colour in PART_COLOURS.items()],
    }
    return content, tuple(damaged)


def _holders(
    checkpoint: Checkpoint, holders: Iterable[Holder], by_role: Mapping[Holder, Mapping[str, int]]
) -> list[list[Any]]:
    places = coordinates(checkpoint)
    return [
        [
            one if isinstance(one, int) else one_line(one, _MAX_NAME),
            dict(by_kind(by_role[one])),
            ", ".join(f"{axis.upper()} {at}" for axis, at in places.get(one, {}).items())
            if isinstance(one, int)
            else "",
        ]
        for one in holders
    ]


def _looks(sketches: Sequence[Sketch], numbers: Mapping[Holder, int]) -> list[list[Any]]:
    """Return copies, holders, directions, faults, remarks and patches (None if not drawn) per sketch."""
    groups: dict[tuple[Holder, ...], list[int]] = {}
    found, room = [], _MAX_PATCHES
    for sketch in sketches:
        held = sorted({numbers[one] for patch in sketch.patches if patch.kind != "padding" for one in patch.holders})
        is_plain = len(sketch.patches) == 1 and sketch.patches[0].kind == "held"
        patches: list[Any] | None = None
        if not is_plain and len(sketch.patches) <= room:
            room -= len(sketch.patches)
            patches = []
            for patch in sketch.patches:
                if patch.holders not in groups:
                    groups[patch.holders] = _runs(sorted(numbers[one] for one in patch.holders))
                edges = (round(edge, 6) for edge in (patch.left, patch.top, patch.right, patch.bottom))
                patches.append([patch.kind, *edges, groups[patch.holders]])
        words = [*map(one_line, sketch.faults[:20])], [*map(one_line, sketch.remarks)]
        found.append([sketch.copies, _runs(held), sketch.across, sketch.down, *words, [] if is_plain else patches])
    return found


def _runs(numbers: Sequence[int]) -> list[int]:
    runs: list[int] = []
    for number in numbers:
        if runs and number == runs[-1] + 1:
            runs[-1] = number
        else:
            runs += (number, number)
    return runs
