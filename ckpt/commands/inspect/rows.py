"""Rows for `ckpt inspect --picture`. Similar tensors of all layers share a row."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ckpt.base.text import pluralize
from ckpt.commands.inspect.overview import ranks_text
from ckpt.commands.inspect.sketch import Holder, Kind, Patch, Sketch, Sketcher
from ckpt.plan import registry
from ckpt.plan.checkpoint import BUFFER, WEIGHT, Checkpoint
from ckpt.plan.namespace import OF_THE_MODEL
from ckpt.plan.tensors import Box, Fragment, Shape, Tensor, runs_of
from ckpt.plan.tiling import Damage

Only = Literal["all", "weights", "optimizer"]

_FEW_ROWS, _FEW_PATCHES = 4, 150  # more rows are merged if the result has few patches
_MAX_ROWS = 100  # in total; beyond this, all rows are merged
_MOST_ROWS = 400
_MAX_FILES = 64  # if no ranks are known
_MAX_COLUMNS, _MAX_PATCHES = 300, 1200  # per row
_COARSE_COLUMNS, _COARSE_BANDS = 96, 16


@dataclass(frozen=True, slots=True)
class Row:
    """Tensors drawn as one.

    `name` shows their numbers in braces. `roles` holds pairs of role and dtype. If `is_grid`, the row has one cell per
    tensor.
    """

    name: str
    fqns: tuple[str, ...]
    shape: Shape
    roles: tuple[tuple[str, str], ...]
    nbytes: int
    sketch: Sketch
    is_grid: bool = False

    @property
    def num_tensors(self) -> int:
        return len(self.fqns) * len(self.roles)


@dataclass(frozen=True)
class Picture:
    """All rows in a picture. `by_role` holds each rank's or file's stored bytes by role."""

    rows: tuple[Row, ...]
    by_role: Mapping[Holder, Mapping[str, int]]
    damaged: tuple[Damage, ...]
    num_tensors: int
    rows_left_out: int = 0

    @cached_property
    def holders(self) -> dict[Holder, int]:
        return {holder: sum(roles.values()) for holder, roles in self.by_role.items()}


def picture(checkpoint: Checkpoint, padding: Mapping[str, Box] | None = None, only: Only = "all") -> Picture:
    """Return the picture. `padding` holds padded boxes by name."""
    if padding is None:
        padding = padding_of(checkpoint)
    wanted = selected_tensors(checkpoint, only)
    sketcher = Sketcher(naming(checkpoint, wanted))
    sketches = [(tensor, sketcher.sketch(tensor, padding.get(tensor.fqn))) for tensor in wanted]
    damaged = tuple(Damage(tensor.fqn, tensor.role, sketch.faults) for tensor, sketch in sketches if sketch.faults)
    rows = _fold_layers(_fold(sketches))
    left_out = max(0, len(rows) - _MOST_ROWS)
    if left_out:
        rows = sorted(rows, key=lambda row: not row.sketch.faults)[:_MOST_ROWS]
    found = sketcher.by_role
    return Picture(
        tuple(replace(row, sketch=_coarse(row.sketch)) for row in rows),
        {holder: found[holder] for holder in sorted(found, key=lambda holder: (isinstance(holder, str), holder))},
        damaged,
        len(wanted),
        left_out,
    )


def padding_of(checkpoint: Checkpoint) -> Mapping[str, Box]:
    space = checkpoint.namespace
    return {} if space in OF_THE_MODEL else registry.namespace(space).padding(checkpoint)


def selected_tensors(checkpoint: Checkpoint, only: Only) -> list[Tensor]:
    tensors = list(checkpoint.tensors.values())
    if only == "weights":
        parameters = checkpoint.parameters
        return [tensor for tensor in tensors if tensor.role == BUFFER or parameters.get(tensor.fqn) is tensor]
    return [tensor for tensor in tensors if only == "all" or tensor.role not in (WEIGHT, BUFFER)]


def naming(checkpoint: Checkpoint, tensors: Sequence[Tensor]) -> Callable[[Fragment], Holder]:
    """Return a function that names a fragment's holder: its rank or file, or one name for too many files."""
    first = (_first_place(tensor) for tensor in tensors)
    files = {path for path, rank in first if rank is None}
    common = f"{pluralize(len(files), 'file')}" if len(files) > _MAX_FILES else None

    def name(fragment: Fragment) -> Holder:
        if fragment.rank is not None:
            return fragment.rank
        return common or _relative(fragment.extent.path, checkpoint.path)

    return name


def _first_place(tensor: Tensor) -> tuple[str, int | None]:
    if hasattr(tensor.source, "runs") and (runs := runs_of(tensor.source, tensor.shape, 0, min(1, tensor.numel))):
        return runs[0][2].path, runs[0][4]
    return next(((one.extent.path, one.rank) for one in tensor.fragments()), ("", -1))


def _relative(path: str, folder: str) -> str:
    return path[len(folder) + 1 :] if path.startswith(folder + os.sep) else os.path.basename(path)


def _fold(sketches: Iterable[tuple[Tensor, Sketch]]) -> list[Row]:
    """Put equal-looking tensors into one row if only numbers in their names differ."""
    by_fqn: dict[str, dict[tuple[Shape, Sketch], list[Tensor]]] = {}
    for tensor, sketch in sketches:
        by_fqn.setdefault(tensor.fqn, {}).setdefault((tensor.shape, sketch), []).append(tensor)
    # Rows with the same name pattern stay together.
    rows: dict[tuple[str, ...], dict[tuple[object, Sketch], list[Tensor]]] = {}
    for fqn, looks in by_fqn.items():
        for (shape, sketch), tensors in looks.items():
            roles = tuple((tensor.role, tensor.dtype.name) for tensor in tensors)
            rows.setdefault(_pattern(fqn)[0], {}).setdefault(((shape, roles), sketch), []).extend(tensors)
    return [_row(tensors, sketch) for alike in rows.values() for (_, sketch), tensors in alike.items()]


def _row(tensors: Sequence[Tensor], sketch: Sketch) -> Row:
    fqns = tuple(dict.fromkeys(tensor.fqn for tensor in tensors))
    roles = tuple(dict.fromkeys((tensor.role, tensor.dtype.name) for tensor in tensors))
    return Row(_name(fqns), fqns, tensors[0].shape, roles, sum(tensor.nbytes for tensor in tensors), sketch)


def _pattern(fqn: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return a name's parts, with `*` for numbers, and the numbers."""
    parts = fqn.split(".")
    is_number = [part.isascii() and part.isdigit() and len(part) < 10 and str(int(part)) == part for part in parts]
    pattern = tuple("*" if number else part for part, number in zip(parts, is_number, strict=True))
    return pattern, tuple(int(part) for part, number in zip(parts, is_number, strict=True) if number)


def _name(fqns: Sequence[str]) -> str:
    """Return one name for all: `layers.{0-3}.mlp.weight`."""
    pattern, _ = _pattern(fqns[0])
    columns = zip(*(_pattern(fqn)[1] for fqn in fqns), strict=True)
    texts = iter([str(c[0]) if len(set(c)) == 1 else "{" + ranks_text(set(c)) + "}" for c in columns])
    return ".".join(next(texts) if part == "*" else part for part in pattern)


def _fold_layers(rows: list[Row]) -> list[Row]:
    """Put frequent tensors' layers into one row, with one cell each.

    Damaged tensors keep their rows, unless there are still too many rows.
    """
    families: dict[object, list[Row]] = {}
    for row in rows:
        families.setdefault((_pattern(row.fqns[0])[0], row.shape, row.roles), []).append(row)
    folded = {key: _fold_sound(family) for key, family in families.items()}
    excess = sum(map(len, folded.values())) - _MAX_ROWS
    for key in sorted(folded, key=lambda key: len(folded[key]), reverse=True):
        if excess <= 0 or len(folded[key]) == 1:
            break
        excess -= len(folded[key]) - 1
        folded[key] = [_fold_into_grid(families[key])]
    return [row for family in folded.values() for row in family]


def _fold_sound(family: list[Row]) -> list[Row]:
    sound = [row for row in family if not row.sketch.faults]
    if len(sound) <= _FEW_ROWS:
        return family
    grid = _fold_into_grid(sound)
    if len(grid.sketch.patches) > _FEW_PATCHES:
        return family
    return [grid, *(row for row in family if row.sketch.faults)]


def _fold_into_grid(family: Sequence[Row]) -> Row:
    """Use columns for the first number in the names, lines for the others."""
    looks = {fqn: row.sketch for row in family for fqn in row.fqns}
    pattern, _ = _pattern(family[0].fqns[0])
    numbers = {fqn: _pattern(fqn)[1] for fqn in looks}
    places = [dim for dim, column in enumerate(zip(*numbers.values(), strict=True)) if len(set(column)) > 1]
    columns = {number: i for i, number in enumerate(sorted({numbers[fqn][places[0]] for fqn in looks}))}
    tails = {fqn: tuple(numbers[fqn][place] for place in places[1:]) for fqn in looks}
    bands = {tail: i for i, tail in enumerate(sorted(set(tails.values())))}
    width, height = len(columns), len(bands)
    inner = [next((f"in each {row.sketch.down}" for row in family if row.sketch.down), "")]
    if sum(len(sketch.patches) for sketch in looks.values()) > _MAX_PATCHES:
        looks, inner = {fqn: _as_one(sketch) for fqn, sketch in looks.items()}, [""]
    patches: list[Patch] = []
    for fqn, sketch in looks.items():
        x, y = columns[numbers[fqn][places[0]]], bands[tails[fqn]]
        for patch in sketch.patches:
            left, right = (x + patch.left) / width, (x + patch.right) / width
            top, bottom = (y + patch.top) / height, (y + patch.bottom) / height
            patches.append(Patch(patch.kind, left, top, right, bottom, patch.holders))
    stars = [i for i, part in enumerate(pattern) if part == "*"]
    axes = [pattern[stars[place] - 1] if stars[place] else "number" for place in places]
    texts = [
        f"{axis} {ranks_text({found[place] for found in numbers.values()})}"
        for axis, place in zip(axes, places, strict=True)
    ]
    every = [row.sketch for row in family]
    sketch = Sketch(
        tuple(_joined(patches)),
        texts[0],
        ", ".join(filter(None, texts[1:] + inner)),
        min(len({patch.top for patch in patches}), _COARSE_BANDS),
        max(one.copies for one in every),
        sum(row.sketch.padding * len(row.fqns) for row in family),
        tuple(fault for one in every for fault in one.faults),
        tuple(dict.fromkeys(remark for one in every for remark in one.remarks)),
    )
    fqns = tuple(sorted(looks, key=lambda fqn: numbers[fqn]))
    nbytes = sum(row.nbytes for row in family)
    return Row(_name(fqns), fqns, family[0].shape, family[0].roles, nbytes, sketch, is_grid=True)


def _as_one(sketch: Sketch) -> Sketch:
    groups = dict.fromkeys(patch.holders for patch in sketch.patches if patch.holders)
    holders = tuple(dict.fromkeys(holder for group in groups for holder in group))
    whole = Patch("held" if len(groups) == 1 else "several", 0.0, 0.0, 1.0, 1.0, holders)
    kept = [patch for patch in sketch.patches if patch.kind in ("hole", "overlap")]
    return replace(sketch, patches=((whole,) if holders else ()) + tuple(kept))


def _joined(patches: Iterable[Patch]) -> list[Patch]:
    """Join neighbours with the same holders: first vertically, then horizontally."""
    found = list(patches)
    for across in (False, True):
        found.sort(key=lambda p: (p.top, p.bottom, p.left) if across else (p.left, p.right, p.top))
        joined: list[Patch] = []
        for patch in found:
            last = joined[-1] if joined else None
            if last and (last.kind, last.holders) == (patch.kind, patch.holders) and _touch(last, patch, across):
                joined[-1] = replace(last, right=patch.right, bottom=patch.bottom)
            else:
                joined.append(patch)
        found = joined
    # Patches on top come last.
    return sorted(found, key=lambda p: p.kind in ("padding", "hole", "overlap"))


def _touch(a: Patch, b: Patch, across: bool) -> bool:
    near = 1e-9
    if across:
        return abs(a.right - b.left) < near and (a.top, a.bottom) == (b.top, b.bottom)
    return abs(a.bottom - b.top) < near and (a.left, a.right) == (b.left, b.right)


def _coarse(sketch: Sketch) -> Sketch:
    marks = [patch for patch in sketch.patches if patch.kind in ("padding", "hole", "overlap")]
    held = [patch for patch in sketch.patches if patch.kind not in ("padding", "hole", "overlap")]
    if len({patch.left for patch in held}) <= _MAX_COLUMNS and len(held) <= _MAX_PATCHES:
        return sketch
    width, height = _COARSE_COLUMNS, min(sketch.bands, _COARSE_BANDS)
    cells: dict[tuple[int, int], dict[tuple[Holder, ...], None]] = {}
    for patch in held:
        for x in range(int(patch.left * width), min(width, int(patch.right * width - 1e-9) + 1)):
            for y in range(int(patch.top * height), min(height, int(patch.bottom * height - 1e-9) + 1)):
                cells.setdefault((x, y), {})[patch.holders] = None
    patches = []
    for (x, y), groups in sorted(cells.items()):
        holders = tuple(dict.fromkeys(holder for group in groups for holder in group))
        kind: Kind = "held" if len(groups) == 1 else "several"
        patches.append(Patch(kind, x / width, y / height, (x + 1) / width, (y + 1) / height, holders))
    remark = f"{pluralize(len(held), 'slice')}, too many to draw apart"
    merged = tuple(_joined([*patches, *marks[:_MAX_PATCHES]]))
    return replace(sketch, patches=merged, bands=height, remarks=(*sketch.remarks, remark))
