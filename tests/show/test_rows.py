"""Boxes in the picture, against known layouts and counts.

`ckpt/commands/inspect/rows.py`, `sketch.py`, `ckpt/pictures/canvas.py`, `ckpt/commands/inspect/svg.py`, `summary.py`:
the modules under test.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from math import dist, prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt import api
from ckpt.commands.inspect import inspecting
from ckpt.commands.inspect import rows as picture
from ckpt.commands.inspect.overview import coordinates, describe
from ckpt.commands.inspect.sketch import Patch, Sketcher
from ckpt.commands.inspect.summary import part_of
from ckpt.commands.inspect.svg import draw
from ckpt.pictures.canvas import COLOURS, RED
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint, Key, TrainingState
from ckpt.plan.dtypes import BFLOAT16, FLOAT32, DType
from ckpt.plan.tensors import Box, Extent, FlatRange, Fragment, Pieces, Region, Shape, Tensor, Whole
from converters.deepspeed.flat_groups import InSlots
from tests.support.commands import ckpt as run_ckpt
from tests.support.commands import process, snapshot
from tests.support.drawing import SVG, Drawn, parsed
from tests.support.golden import agrees
from tests.support.places import REPOSITORY
from tests.support.strategies import indices, shapes, tilings


def pieces(
    shape: Shape, regions: Sequence[Region], ranks: Sequence[int] | None = None, dtype: DType = FLOAT32
) -> Pieces:
    """Return one region for each rank."""
    found = []
    for rank, region in zip(ranks or range(len(regions)), regions, strict=True):
        sizes = region.sizes if isinstance(region, Box) else (region.numel,)
        found.append(Fragment(region, Extent.contiguous(f"rank{rank}.bin", 0, FLOAT32, sizes), rank))
    return Pieces(tuple(found))


def tensor(
    fqn: str, shape: Shape, regions: Sequence[Region], role: str = WEIGHT, ranks: Sequence[int] | None = None
) -> Tensor:
    return Tensor(fqn, role, FLOAT32, shape, pieces(shape, regions, ranks))


def checkpoint(*tensors: Tensor) -> Checkpoint:
    keyed: dict[Key, Tensor] = {(one.fqn, one.role): one for one in tensors}
    return Checkpoint("/runs/outputs/step4", "dcp", keyed, (), framework="torch", world_size=4)


def column(shape: Shape, dim: int, rank: int, ranks: int) -> Box:
    """Return a rank's equal part along one dim."""
    offsets, sizes = [0] * len(shape), list(shape)
    sizes[dim] //= ranks
    offsets[dim] = rank * sizes[dim]
    return Box(tuple(offsets), tuple(sizes))


# -- file content ------------------------------------------------------------------------------------------------------
def drawn(*tensors: Tensor, padding: dict[str, Box] | None = None) -> Drawn:
    found = checkpoint(*tensors)
    return parsed(draw(picture.picture(found, padding or {}), found))


def near(*edges: float) -> object:
    return pytest.approx(edges, abs=2e-3)


# -- one tensor --------------------------------------------------------------------------------------------------------
def test_parts_of_the_first_dim_lie_side_by_side() -> None:
    shape = (8, 6)
    row = drawn(tensor("w", shape, [column(shape, 0, rank, 4) for rank in range(4)])).row("w")
    assert row.patches == [(COLOURS[rank], near(rank / 4, (rank + 1) / 4, 0, 1)) for rank in range(4)]
    assert row.about.startswith("[8, 6] · 192 B · weight float32")


def test_parts_of_another_dim_lie_below_each_other() -> None:
    shape = (8, 6)
    row = drawn(tensor("w", shape, [column(shape, 1, rank, 3) for rank in range(3)])).row("w")
    assert row.patches == [(COLOURS[rank], near(0, 1, rank / 3, (rank + 1) / 3)) for rank in range(3)]
    assert "↓ dim 1" in row.notes


def test_gate_and_up_of_a_tensor_parallel_rank_are_two_slices() -> None:
    """In megatron-core's linear_fc1 each rank has part of the gate's rows and part of the up's."""
    regions = [Box((start, 0), (2, 5)) for start in (0, 4, 2, 6)]
    row = drawn(tensor("w", (8, 5), regions, ranks=(0, 0, 1, 1))).row("w")
    slices = sorted((edges, colour) for colour, edges in row.patches)
    assert [colour for _, colour in slices] == [COLOURS[0], COLOURS[1], COLOURS[0], COLOURS[1]]
    assert [edges for edges, _ in slices] == [near(i / 4, (i + 1) / 4, 0, 1) for i in range(4)]


def test_experts_run_to_the_right_and_their_cut_dim_downwards() -> None:
    """Experts [experts, out, in] are split over two ranks, and `in` over two more."""
    regions = [Box((4 * ep, 0, 3 * tp), (4, 5, 3)) for ep in range(2) for tp in range(2)]
    row = drawn(tensor("experts", (8, 5, 6), regions)).row("experts")
    halves = [(0, 0.5), (0.5, 1)]
    assert [edges for _, edges in row.patches] == [near(*across, *down) for across in halves for down in halves]
    assert "↓ dim 2" in row.notes


def test_three_cut_dims_are_nested() -> None:
    regions = [Box((4 * a, 2 * b, 3 * c), (4, 2, 3)) for a in range(2) for b in range(2) for c in range(2)]
    row = drawn(tensor("w", (8, 4, 6), regions)).row("w")
    assert [edges for _, edges in row.patches] == [
        near(a / 2, (a + 1) / 2, b / 2 + c / 4, b / 2 + (c + 1) / 4)
        for a in range(2)
        for b in range(2)
        for c in range(2)
    ]
    assert "↓ dim 1, then dim 2" in row.notes


def test_rows_that_alternate_are_drawn_each() -> None:
    regions = [Box((rank, 0), (3, 2), (2, 1)) for rank in range(2)]
    row = drawn(tensor("w", (6, 2), regions)).row("w")
    assert sorted(edges for _, edges in row.patches) == [near(i / 6, (i + 1) / 6, 0, 1) for i in range(6)]
    assert {edges[0] < 0.01 for colour, edges in row.patches if colour == COLOURS[1]} == {False}


@given(shapes(3, min_size=1), st.data())
def test_areas_are_shares_of_the_tensor(shape: Shape, data: st.DataObject) -> None:
    """For any cut, a rank's patches have the size of its part, and no two overlap."""
    regions = data.draw(tilings(shape))
    ranks = [data.draw(st.integers(0, 3)) for _ in regions]
    sketcher = Sketcher(lambda fragment: fragment.rank or 0)
    sketch = sketcher.sketch(Tensor("w", WEIGHT, FLOAT32, shape, pieces(shape, regions, ranks)), None)
    assert not sketch.faults
    for rank in range(4):
        numel = sum(region.numel for region, holder in zip(regions, ranks, strict=True) if holder == rank)
        area = sum(_area(patch) for patch in sketch.patches if patch.holders == (rank,))
        assert area == pytest.approx(numel / prod(shape))
    assert all(_common(a, b) < 1e-9 for a, b in combinations(sketch.patches, 2))
    assert sum(roles.total() for roles in sketcher.by_role.values()) == 4 * prod(shape)


@given(shapes(3, min_size=1), st.data())
def test_what_is_red_is_what_is_wrong(shape: Shape, data: st.DataObject) -> None:
    """Some pieces are missing, others repeated."""
    found = data.draw(tilings(shape))
    regions = [region for region in found for _ in range(data.draw(st.sampled_from([1, 1, 0, 2])))]
    count = [0] * prod(shape)
    for region in regions:
        for index in indices(region, shape).reshape(-1):
            count[index] += 1
    sketch = Sketcher(lambda fragment: 0).sketch(Tensor("w", WEIGHT, FLOAT32, shape, pieces(shape, regions)), None)
    for kind, numel in (("hole", count.count(0)), ("overlap", sum(number > 1 for number in count))):
        patches = [patch for patch in sketch.patches if patch.kind == kind]
        assert _union(patches) == pytest.approx(numel / prod(shape))
        assert bool(patches) == bool(numel) == any(fault.startswith(kind) for fault in sketch.faults)


def _area(patch: Patch) -> float:
    return (patch.right - patch.left) * (patch.bottom - patch.top)


def _common(a: Patch, b: Patch) -> float:
    width = min(a.right, b.right) - max(a.left, b.left)
    height = min(a.bottom, b.bottom) - max(a.top, b.top)
    return max(0.0, width) * max(0.0, height)


def _union(patches: Sequence[Patch]) -> float:
    """Return the total area covered by patches."""
    xs = sorted({edge for patch in patches for edge in (patch.left, patch.right)})
    ys = sorted({edge for patch in patches for edge in (patch.top, patch.bottom)})
    return sum(
        (right - left) * (bottom - top)
        for left, right in pairwise(xs)
        for top, bottom in pairwise(ys)
        if any(p.left <= left and right <= p.right and p.top <= top and bottom <= p.bottom for p in patches)
    )


def test_copies_are_striped_in_the_colours_of_all_that_hold_them() -> None:
    halves = [FlatRange(0, 3), FlatRange(3, 6)]
    one = tensor("w", (6,), halves)._replace(replicas=(pieces((6,), halves, (2, 3)),))
    found = drawn(one)
    row = found.row("w")
    assert [found.colours(fill) for fill, _ in row.patches] == [[COLOURS[0], COLOURS[2]], [COLOURS[1], COLOURS[3]]]
    assert "2 copies" in row.notes
    assert {"0, 2", "1, 3"} <= set(row.notes) | set(found.texts)


def test_a_copy_that_is_cut_otherwise_is_told() -> None:
    copy = pieces((6,), [FlatRange(0, 2), FlatRange(2, 6)], (2, 3))
    row = drawn(tensor("w", (6,), [FlatRange(0, 3), FlatRange(3, 6)])._replace(replicas=(copy,))).row("w")
    assert "copy 2 is cut otherwise: ranks 2-3" in row.notes


def test_a_copy_with_a_hole_is_damaged() -> None:
    whole_one = Whole(Extent.contiguous("rank0.bin", 0, FLOAT32, (4,)), 0)
    one = Tensor("w", WEIGHT, FLOAT32, (4,), whole_one, replicas=(pieces((4,), [FlatRange(0, 3)], (1,)),))
    assert picture.picture(checkpoint(one), {}).damaged[0].faults == ("copy 2: hole at elements 3:4",)


@pytest.mark.parametrize(
    ("regions", "fault"),
    [
        ([FlatRange(0, 5)], "outside at elements 0:5"),
        ([Box((0, 0), (4, 1))], "outside at [0:4, 0:1]"),
        ([], "hole at elements 0:4"),
    ],
)
def test_descriptions_that_cannot_be(regions: list[Region], fault: str) -> None:
    damaged = picture.picture(checkpoint(tensor("w", (4,), regions)), {}).damaged
    assert damaged[0].faults[0] == fault
    assert drawn(tensor("w", (4,), regions)).row("w").patches[-1][0] == "#ffffff"  # a hole


def test_a_fragment_of_another_size_is_damage() -> None:
    wrong = Fragment(FlatRange(0, 4), Extent.contiguous("rank0.bin", 0, FLOAT32, (3,)), 0)
    damaged = picture.picture(checkpoint(Tensor("w", WEIGHT, FLOAT32, (4,), Pieces((wrong,)))), {}).damaged
    assert damaged[0].faults == ("what should be elements 0:4 has another size or dtype",)


def test_a_fault_is_seen_however_small_it_is() -> None:
    numel = 10**9
    found = drawn(tensor("w", (numel,), [FlatRange(0, 10), FlatRange(11, numel - 5), FlatRange(numel - 6, numel)]))
    red = [(fill, edges) for fill, edges in found.row("w").patches if fill in (RED, "#ffffff")]
    assert [fill for fill, _ in red] == ["#ffffff", RED]
    assert all(edges[1] - edges[0] > 1 / 580 and 0 <= edges[0] <= edges[1] <= 1.001 for _, edges in red)
    assert "Damaged: 1 tensor not stored exactly once" in found.texts
    assert any("hole at elements 10:11; overlap at elements" in text for text in found.texts)


def test_a_tensor_without_elements_and_one_without_dims() -> None:
    found = drawn(tensor("empty", (0, 3), []), tensor("step", (), [Box((), ())]))
    assert found.row("empty").patches == []
    assert "no elements" in found.row("empty").notes
    assert found.row("step").patches == [(COLOURS[0], near(0, 1, 0, 1))]
    assert found.texts.count("No holes and no overlaps: every element of every tensor drawn here is stored.") == 1


# -- padding -----------------------------------------------------------------------------------------------------------
def test_the_padding_of_slots_follows_the_tensor() -> None:
    extents = [Extent.contiguous(f"rank{rank}.bin", 0, FLOAT32, (3,)) for rank in range(3)]
    row = drawn(Tensor("w", MASTER, FLOAT32, (5,), InSlots(extents, 0))).row("w")  # slots with two: 6 elements
    assert row.patches == [
        (COLOURS[0], near(0, 2 / 6, 0, 1)),
        (COLOURS[1], near(2 / 6, 4 / 6, 0, 1)),
        (COLOURS[2], near(4 / 6, 5 / 6, 0, 1)),
        (COLOURS[2], near(5 / 6, 1, 0, 1)),
        ("url(#padding)", near(5 / 6, 1, 0, 1)),
    ]
    assert "padding: 1 element" in row.notes


@pytest.mark.parametrize("name", ["toy-zero1", "toy-zero2", "toy-zero3"])
def test_a_rank_has_as_many_bytes_as_inspect_says(fixtures: Path, name: str) -> None:
    """Padding after tensors belongs to no rank, and neither counts it."""
    found = api.open(fixtures / name)
    sizes = {str(rank): size for rank, size in picture.picture(found).holders.items()}
    assert sizes == describe(found)["bytes_per_rank"]
    assert any(row.sketch.padding for row in picture.picture(found).rows)


def test_padding_within_a_tensor_lies_on_top_of_what_holds_it() -> None:
    shape = (10, 4)
    one = tensor("embedding", shape, [column(shape, 0, rank, 2) for rank in range(2)])
    row = drawn(one, padding={"embedding": Box((7, 0), (3, 4))}).row("embedding")
    assert row.patches[-1] == ("url(#padding)", near(0.7, 1, 0, 1))
    assert "padding: 12 elements" in row.notes


# -- rows --------------------------------------------------------------------------------------------------------------
def layer(number: int, ranks: Iterable[int], name: str = "mlp.weight", role: str = WEIGHT) -> Tensor:
    shape, every = (8, 4), list(ranks)
    regions = [column(shape, 0, index, len(every)) for index in range(len(every))]
    return tensor(f"layers.{number}.{name}", shape, regions, role, ranks=every)


def test_layers_that_look_the_same_are_one_row() -> None:
    roles = (WEIGHT, "exp_avg", "exp_avg_sq")
    found = drawn(*(layer(number, range(2), role=role) for number in range(12) for role in roles))
    assert [row.name for row in found.rows] == ["layers.{0-11}.mlp.weight"]
    assert found.rows[0].about.endswith("weight, exp_avg, exp_avg_sq float32")
    assert "× 12 alike" in found.rows[0].notes
    assert any(text.startswith("36 tensors in 1 row:") for text in found.texts)


def test_layers_of_other_ranks_are_rows_of_their_own() -> None:
    """Pipeline stages hold different layers."""
    found = drawn(*(layer(number, range(2 * (number // 4), 2 * (number // 4) + 2)) for number in range(8)))
    assert [row.name for row in found.rows] == ["layers.{0-3}.mlp.weight", "layers.{4-7}.mlp.weight"]
    assert [fill for row in found.rows for fill, _ in row.patches] == list(COLOURS[:4])


def test_names_that_differ_in_more_than_numbers_are_not_mixed() -> None:
    found = drawn(*(tensor(f"layers.{name}.w", (2,), [FlatRange(0, 2)]) for name in ("0", "00", "1", "x1", "²")))
    assert [row.name for row in found.rows] == ["layers.{0-1}.w", "layers.00.w", "layers.x1.w", "layers.².w"]


def test_many_stages_lie_side_by_side_in_one_row() -> None:
    found = drawn(*(layer(number, [number // 2]) for number in range(16)))
    (row,) = found.rows
    assert row.patches == [(COLOURS[stage], near(stage / 8, (stage + 1) / 8, 0, 1)) for stage in range(8)]
    assert {"16 tensors side by side", "→ layers 0-15"} <= set(row.notes)


def test_experts_of_layers_are_cells() -> None:
    """Two stages with four expert ranks each: every cell shows its place."""
    tensors = [
        layer(number, [4 * (number // 2) + expert // 2], f"experts.{expert}.w")
        for number in range(4)
        for expert in range(8)
    ]
    (row,) = drawn(*tensors).rows
    assert sorted(row.patches) == sorted(
        (COLOURS[4 * stage + part], near(stage / 2, (stage + 1) / 2, part / 4, (part + 1) / 4))
        for stage in range(2)
        for part in range(4)
    )
    assert "↓ experts 0-7" in row.notes


def test_a_damaged_layer_has_a_row_of_its_own() -> None:
    broken = tensor("layers.5.mlp.weight", (8, 4), [Box((0, 0), (7, 4))], ranks=(2,))
    found = drawn(*(layer(number, [number // 2]) for number in range(16) if number != 5), broken)
    assert [row.name for row in found.rows] == ["layers.{0-4, 6-15}.mlp.weight", "layers.5.mlp.weight"]
    assert "hole at elements 28:32" in found.row("layers.5.mlp.weight").notes


def test_too_many_rows_are_fewer_rows_and_none_is_lost() -> None:
    """Every layer has its own cut, in more tensors than there is room for."""
    tensors = [
        tensor(f"layers.{number}.{name}.w", (64,), [FlatRange(0, number + 1), FlatRange(number + 1, 64)])
        for number in range(60)
        for name in ("a", "b", "c")
    ]
    found = picture.picture(checkpoint(*tensors), {})
    assert len(found.rows) <= 100
    assert sorted(fqn for row in found.rows for fqn in row.fqns) == sorted(one.fqn for one in tensors)
    grid = next(row for row in found.rows if row.is_grid)
    edges = sorted({patch.right for patch in grid.sketch.patches if patch.holders == (0,)})
    assert edges == pytest.approx([(number + (number + 1) / 64) / 60 for number in range(60)])


def cut_in_four(number: int, name: str) -> Tensor:
    """Return a tensor with 64 elements and a cut that depends on its number."""
    edges = (0, number % 15 + 1, 20 + number // 15 % 20, 40, 64)
    return tensor(name, (64,), [FlatRange(a, b) for a, b in pairwise(edges)])


def test_too_many_rows_lie_side_by_side_whatever_they_have() -> None:
    tensors = [cut_in_four(number, f"layers.{number}.{name}.w") for number in range(60) for name in "abc"]
    found = picture.picture(checkpoint(*tensors), {})
    assert [row.is_grid for row in found.rows].count(True) == 2  # no more than needed
    assert len(found.rows) == 62
    assert sorted(fqn for row in found.rows for fqn in row.fqns) == sorted(one.fqn for one in tensors)
    for row in (row for row in found.rows if row.is_grid):
        assert len(row.sketch.patches) == 240 and sum(map(_area, row.sketch.patches)) == pytest.approx(1)


def test_cells_too_small_for_slices_are_drawn_as_one() -> None:
    """A thousand experts with different cuts: damage is still visible."""
    experts = [cut_in_four(expert, f"layers.{expert // 100}.experts.{expert % 100}.w") for expert in range(1000)]
    experts[123] = tensor(experts[123].fqn, (64,), [FlatRange(0, 60)])
    grid, damaged = picture.picture(checkpoint(*experts), {}).rows
    assert {(patch.kind, patch.holders) for patch in grid.sketch.patches} == {("several", (0, 1, 2, 3))}
    assert sum(map(_area, grid.sketch.patches)) == pytest.approx(0.999)
    assert (grid.sketch.across, grid.sketch.down) == ("layers 0-9", "experts 0-99")
    assert (len(grid.fqns), damaged.fqns) == (999, ("layers.1.experts.23.w",))
    assert damaged.sketch.faults == ("hole at elements 60:64",)


def test_what_there_is_no_room_for_is_told() -> None:
    names = [f"a{number}" for number in range(450)]
    broken = tensor("broken", (4,), [FlatRange(0, 3)])
    found = drawn(*(tensor(name, (4,), [FlatRange(0, 4)]) for name in names), broken)
    assert len(found.rows) == 400
    assert "Not drawn: 51 tensors in 51 further rows." in found.texts
    assert found.row("broken").notes == ["hole at elements 3:4"]


def test_a_thousand_ranks_are_drawn_together_where_they_are_too_narrow() -> None:
    extents = [Extent.contiguous(f"rank{rank}.bin", 0, FLOAT32, (10**6,)) for rank in range(1024)]
    one = Tensor("w", MASTER, FLOAT32, (1024, 512), InSlots(extents, 0))
    (row,) = picture.picture(checkpoint(one), {}).rows
    assert {patch.kind for patch in row.sketch.patches} == {"several"}
    assert {holder for patch in row.sketch.patches for holder in patch.holders} == set(range(1024))
    assert row.sketch.remarks == ("1024 slices, too many to draw apart",)
    assert sum(map(_area, row.sketch.patches)) == pytest.approx(1)


def test_the_picture_of_a_large_model_is_small() -> None:
    """An 80-layer model's tensors under ZeRO-3 on 64 ranks."""
    extents = [Extent.contiguous(f"rank{rank}.bin", 0, FLOAT32, (10**6,)) for rank in range(64)]
    tensors = [
        Tensor(f"layers.{number}.{name}.weight", role, FLOAT32, (64, 128 + 64 * place), InSlots(extents, 0))
        for number in range(80)
        for place, name in enumerate("abcdefghi")
        for role in (MASTER, "exp_avg", "exp_avg_sq")
    ]
    found = checkpoint(*tensors)
    svg = draw(picture.picture(found, {}), found)
    assert len(svg) < 200_000
    assert len(parsed(svg).rows) == 9


def test_tensors_without_ranks_are_coloured_by_file() -> None:
    def of(name: str, path: str) -> Tensor:
        return Tensor(name, WEIGHT, BFLOAT16, (2,), Whole(Extent.contiguous(path, 0, BFLOAT16, (2,))))

    found = drawn(of("a", "/runs/outputs/step4/one.safetensors"), of("b", "/runs/outputs/step4/two.safetensors"))
    assert [row.patches[0][0] for row in found.rows] == [COLOURS[0], COLOURS[1]]
    assert {"f1: one.safetensors · 4 B", "f2: two.safetensors · 4 B"} <= set(found.texts)
    many = [of(f"layers.{number}.w", f"/runs/outputs/step4/{number}.pt") for number in range(70)]
    assert list(picture.picture(checkpoint(*many), {}).holders) == ["70 files"]


@pytest.mark.parametrize(
    ("only", "keys"),
    [
        ("all", {("a", WEIGHT), ("a", MASTER), ("a", "exp_avg"), ("b", MASTER), ("c", BUFFER)}),
        ("weights", {("a", WEIGHT), ("b", MASTER), ("c", BUFFER)}),
        ("optimizer", {("a", MASTER), ("a", "exp_avg"), ("b", MASTER)}),
    ],
)
def test_a_part_of_the_roles(only: picture.Only, keys: set[Key]) -> None:
    every = [("a", WEIGHT), ("a", MASTER), ("a", "exp_avg"), ("b", MASTER), ("c", BUFFER)]
    found = picture.picture(checkpoint(*(tensor(fqn, (2,), [FlatRange(0, 2)], role) for fqn, role in every)), {}, only)
    assert {(fqn, role) for row in found.rows for fqn in row.fqns for role, _ in row.roles} == keys
    assert found.num_tensors == len(keys)


# -- the file ----------------------------------------------------------------------------------------------------------
EVIL = "</text><script>alert(1)</script>&\x1b[31m\u202e\x00\ud800\"'" + "x" * 5000


def test_hostile_names_are_escaped_and_cut() -> None:
    evil = tensor(EVIL, (4,), [FlatRange(0, 3)], role=EVIL + "role")
    found = replace(checkpoint(evil), format=EVIL, framework=EVIL, path=f"/runs/{EVIL}", config={"model_type": EVIL})
    svg = draw(picture.picture(found, {}), found)
    assert svg.isprintable() or all(c.isprintable() or c == "\n" for c in svg)
    svg.encode()
    assert len(svg) < 20_000
    names = {element.tag.removeprefix(SVG) for element in ET.fromstring(svg).iter()}
    assert names <= {"svg", "title", "style", "defs", "pattern", "rect", "text", "g", "path"}


def test_a_file_name_as_holder_is_escaped() -> None:
    one = Tensor("w", WEIGHT, FLOAT32, (2,), Whole(Extent.contiguous(f"/runs/outputs/step4/{EVIL}", 0, FLOAT32, (2,))))
    assert not [text for text in drawn(one).texts if len(text) > 500 or not text.isprintable()]


def test_it_is_readable_on_any_background() -> None:
    found = checkpoint(tensor("w", (4,), [FlatRange(0, 4)]))
    root = ET.fromstring(draw(picture.picture(found, {}), found))
    (first,) = (element for element in list(root)[:4] if element.tag == f"{SVG}rect")
    assert (first.get("fill"), first.get("width"), first.get("height")) == (
        "#ffffff",
        root.get("width"),
        root.get("height"),
    )


def test_a_dark_page_has_a_dark_picture() -> None:
    """Every light colour has a class with a dark one, and texts are readable on their background."""
    found = checkpoint(tensor("w", (4,), [FlatRange(0, 3)]), layer(0, range(2)))
    svg = draw(picture.picture(found, {}), found)
    light, dark = svg.split("@media(prefers-color-scheme:dark)")
    rules = dict(re.findall(r"([.\w ]+)\{fill:(#\w+)[;}]", dark.split("</style>")[0]))
    assert {"text", ".g", ".r", ".w", ".l", ".p", ".t"} <= set(rules)
    for text in ("text", ".g", ".r"):
        assert contrast(rules[text], rules[".p"]) > 4.5
    for rect in ET.fromstring(svg).iter(f"{SVG}rect"):
        if rect.get("fill") in ("#ffffff", "#f1f1f1") and not rect.get("rx"):
            assert set((rect.get("class") or "").split()) & {"p", "t"}
    for colour in ("#1a1a1a", "#5f5f5f", RED):
        assert colour in light and contrast(colour, "#ffffff") > 4.5


def contrast(a: str, b: str) -> float:
    """Return WCAG 2's luminance contrast, 1 to 21."""

    def luminance(colour: str) -> float:
        parts = [int((colour * 2 if len(colour) == 4 else colour)[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_strips_are_as_long_as_tensors_are_large() -> None:
    found = checkpoint(
        tensor("big", (8, 4), [column((8, 4), 0, r, 2) for r in range(2)]), tensor("w", (4, 2), [FlatRange(0, 8)])
    )
    root = ET.fromstring(draw(picture.picture(found, {}), found))
    strips = {}
    for group in root.iter(f"{SVG}g"):
        if group.get("class") == "row":
            (strip,) = (rect for rect in group.findall(f"{SVG}rect") if rect.get("class") == "k")
            strips[group.findtext(f"{SVG}text/{SVG}title")] = (
                float(strip.get("width", 0)),
                strip.findtext(f"{SVG}title"),
            )
    assert strips["big"] == (580.0, "128 B, 80.0% of all")
    assert strips["w"] == (145.0, "32 B, 20.0% of all")


def whole(name: str, numel: int, file: str = "model.safetensors") -> Tensor:
    extent = Extent.contiguous(f"/runs/outputs/step4/{file}", 0, BFLOAT16, (numel,))
    return Tensor(name, WEIGHT, BFLOAT16, (numel,), Whole(extent))


def test_bars_of_a_model_in_one_file_are_as_long_as_they_are_large() -> None:
    names = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight")
    sizes = (400, 100, 200)
    found = drawn(*map(whole, names, sizes), whole("model.norm.weight", 4))
    assert [found.row(name).patches[0][1][:2] for name in names] == [near(0, size / 400) for size in sizes]
    assert len({found.row(name).patches[0][0] for name in names}) == 3  # by model part
    assert {"embeddings 800 B", "MLP 400 B", "attention 200 B", "norms 8 B"} <= set(found.texts)
    assert any("bar length shows tensor size" in text for text in found.texts)
    several = drawn(*(whole(name, size, f"{size}.safetensors") for name, size in zip(names, sizes, strict=True)))
    assert [several.row(name).patches[0][0] for name in names] == [COLOURS[2], COLOURS[0], COLOURS[1]]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "attention"),
        ("decoder.layers.{0-3}.self_attention.linear_qkv.weight", "attention"),
        ("decoder.layers.{0-3}.self_attention.linear_qkv.layer_norm_weight", "norms"),
        ("model.layers.0.input_layernorm.weight", "norms"),
        ("model.layers.0.self_attn.q_norm.weight", "norms"),
        ("model.layers.0.mlp.experts.3.up_proj.weight", "experts"),
        ("model.layers.0.mlp.gate.weight", "router"),
        ("decoder.layers.0.mlp.router.weight", "router"),
        ("model.layers.0.mlp.gate_proj.weight", "MLP"),
        ("transformer.h.0.mlp.c_fc.weight", "MLP"),
        ("transformer.wte.weight", "embeddings"),
        ("output_layer.weight", "output"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "adapters"),
        ("conv.weight", "other"),
    ],
)
def test_what_a_tensor_is_of(name: str, part: str) -> None:
    assert part_of(name) == part


def test_each_rank_has_a_line_with_what_it_has() -> None:
    shape = (8, 6)
    of_roles = [
        tensor("w", shape, [column(shape, 0, r, 2) for r in range(2)], role) for role in (WEIGHT, MASTER, "exp_avg")
    ]
    found = drawn(*of_roles)
    assert {"rank 0 · 288 B", "rank 1 · 288 B", "weights", "masters", "optimizer states"} <= set(found.texts)
    assert "576 B in tensors, by model part" in found.texts


def megatron(format: str, world_size: int, **args: int | bool) -> Checkpoint:
    names = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "dp": "data_parallel_size"}
    state = TrainingState(args={names.get(axis, axis): size for axis, size in args.items()})
    return replace(checkpoint(layer(0, range(2))), format=format, world_size=world_size, state=state)


def test_the_mesh_is_drawn_where_it_is_recorded() -> None:
    found = megatron("megatron", 8, tp=2, pp=2, dp=2)
    texts = parsed(draw(picture.picture(found, {}), found)).texts
    assert "mesh: TP 2 x PP 2 x DP 2 on 8 ranks" in texts and "mesh: PP from top to bottom, TP side by side" in texts
    assert {"TP 0, PP 0", "TP 1, PP 0"} <= set(texts)
    plain = checkpoint(layer(0, range(2)))
    assert not any("mesh" in text for text in parsed(draw(picture.picture(plain, {}), plain)).texts)


@pytest.mark.parametrize(
    ("found", "rank", "place"),
    [
        (megatron("megatron", 8, tp=2, pp=2, dp=2), 3, {"tp": 1, "cp": 0, "dp": 0, "pp": 1}),
        (megatron("megatron-dist", 8, tp=2, pp=2, dp=2), 3, {"tp": 1, "cp": 0, "dp": 1, "pp": 0}),
        (
            megatron("megatron-dist", 8, tp=2, pp=2, dp=2, use_tp_pp_dp_mapping=True),
            3,
            {"tp": 1, "cp": 0, "pp": 1, "dp": 0},
        ),
    ],
)
def test_where_a_rank_stands(found: Checkpoint, rank: int, place: dict[str, int]) -> None:
    assert coordinates(found)[rank] == place


def test_no_place_is_said_that_is_not_known() -> None:
    assert coordinates(megatron("megatron-dist", 7, tp=2, pp=2, dp=2)) == {}
    assert coordinates(megatron("dcp", 8, tp=2, pp=2, dp=2)) == {}
    assert coordinates(checkpoint(layer(0, range(2)))) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "cp", "dp", "pp"), [(2, 1, 2, 2), (2, 2, 3, 1), (1, 1, 4, 3), (4, 2, 1, 2)])
@pytest.mark.parametrize("swapped", [False, True])
def test_ranks_stand_where_megatron_core_puts_them(tp: int, cp: int, dp: int, pp: int, swapped: bool) -> None:
    from megatron.core.parallel_state import RankGenerator

    sizes = {"tp": tp, "pp": pp, "dp": dp}
    args: dict[str, int | bool] = {**sizes, "context_parallel_size": cp, "use_tp_pp_dp_mapping": swapped}
    found = coordinates(megatron("megatron-dist", tp * cp * dp * pp, **args))
    order = "tp-cp-ep-pp-dp" if swapped else "tp-cp-ep-dp-pp"
    generator = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    for axis in ("tp", "cp", "dp", "pp"):
        for group in generator.get_ranks(axis):
            assert [found[rank][axis] for rank in group] == list(range(len(group)))


def test_names_are_whole_where_there_is_room() -> None:
    name = "model.language_model.layers.0.feed_forward.experts.gate_up_proj.lora_embedding.weight"
    row = drawn(tensor(name, (4,), [FlatRange(0, 4)])).rows[0]
    assert row.name == name and "…" not in draw(
        picture.picture(c := checkpoint(tensor(name, (4,), [FlatRange(0, 4)])), {}), c
    )


def test_columns_of_many_ranks_are_as_high_as_they_have_bytes() -> None:
    regions = [FlatRange(r, r + 1) for r in range(19)] + [FlatRange(19, 39)]
    found = checkpoint(tensor("w", (39,), regions))
    root = ET.fromstring(draw(picture.picture(found, {}), found))
    columns = [rect for rect in root.findall(f"{SVG}rect") if rect.get("class") == "k"]
    heights = [float(rect.get("height", 0)) for rect in columns]
    assert len(heights) == 20 and heights[-1] == pytest.approx(20 * heights[0])


def test_colours_can_be_told_apart() -> None:
    places = [oklab(colour) for colour in COLOURS]
    assert len(set(COLOURS)) == 64
    assert min(dist(a, b) for a, b in combinations(places, 2)) > 0.045
    assert min(dist(a, b) for a, b in combinations(places[:8], 2)) > 0.1
    assert min(dist(a, b) for a, b in pairwise([*places, places[0]])) > 0.1
    for taken in (RED, "#ffffff", "#f1f1f1"):
        assert min(dist(place, oklab(taken)) for place in places) > 0.06


def oklab(colour: str) -> tuple[float, float, float]:
    """Convert a colour to Björn Ottosson's Oklab, a space with perceptual distances."""
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    r, g, b = (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values)
    long, medium, short = (
        (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3),
        (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3),
        (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3),
    )
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


# -- the command -------------------------------------------------------------------------------------------------------
def test_a_run_of_deepspeed(fixtures: Path, tmp_path: Path) -> None:
    """ZeRO-3 on three ranks cuts every parameter into three slots; the last one has the rest."""
    out = tmp_path / "new" / "out.svg"
    done = run_ckpt("inspect", fixtures / "toy-zero3", "--picture", out)
    assert (done.code, done.err) == (0, f"wrote {out}\n")
    assert "format        zero3" in done.out
    found = parsed(out.read_text())
    assert sum(len(row.about.split(" · ")[2].split(", ")) for row in found.rows) == 30
    numel = 259 * 7
    slot = -(-numel // 3)
    edges = [edges for fill, edges in found.row("embed.weight").patches if fill != "url(#padding)"]
    assert edges[:3] == [near(r / 3, min((r + 1) * slot, numel) / (3 * slot), 0, 1) for r in range(3)]
    assert found.row("mask").notes == [], "every rank has its own values of a buffer, and rank 0's are read"


def test_the_padding_of_a_megatron_vocabulary(fixtures: Path, tmp_path: Path) -> None:
    """259 words in 260 rows; flat ranges spread their optimizer state over several ranks."""
    out = tmp_path / "out.svg"
    assert run_ckpt("inspect", fixtures / "megatron-dist-flattened", "--picture", out).code == 0
    found = parsed(out.read_text())
    row = found.row("embedding.word_embeddings.weight", "weight bfloat16")
    fill, (left, right, _, _) = row.patches[-1]
    assert fill == "url(#padding)"
    assert right == pytest.approx(1, abs=2e-3)
    assert left == pytest.approx(1 - 3 / 580, abs=2e-3)  # the row is narrower than the minimum drawn size
    assert "padding: 6 elements" in row.notes


def test_the_example_in_the_docs_is_drawn_as_today(fixtures: Path, tmp_path: Path) -> None:
    """Run the commands in docs/picture.md on torchtitan's output."""
    source, run, out = fixtures / "torchtitan-llama3", tmp_path / "llama-tp2pp2", tmp_path / "out.svg"
    config = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layout = ("--tp", "2", "--pp", "2", "--make-vocab-size-divisible-by", "13")
    made = run_ckpt("convert", "auto", "megatron", source, "--config", tmp_path / "config.json", *layout, "-o", run)
    assert (made.code, run_ckpt("inspect", run, "--picture", out).code) == (0, 0), made.err
    agrees(REPOSITORY / "docs" / "picture.svg", out.read_text())
    row = parsed(out.read_text()).row("decoder.layers.1.mlp.linear_fc1.weight")
    assert [fill for fill, _ in sorted(row.patches, key=lambda patch: patch[1])] == [COLOURS[2], COLOURS[3]] * 2
    assert out.stat().st_size < 30_000


def test_the_same_bytes_every_time(fixtures: Path, tmp_path: Path) -> None:
    contents = set()
    for seed in ("1", "2"):
        out = tmp_path / f"{seed}.svg"
        command = [sys.executable, "-m", "ckpt", "inspect", str(fixtures / "toy-zero3"), "--picture", str(out)]
        subprocess.run(
            command, check=True, capture_output=True, cwd=REPOSITORY, env=os.environ | {"PYTHONHASHSEED": seed}
        )
        contents.add(out.read_bytes())
    assert len(contents) == 1


def test_what_is_damaged_is_drawn_and_then_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = checkpoint(tensor("w", (4,), [FlatRange(0, 3)]), tensor("v", (4,), [FlatRange(0, 4)]))
    monkeypatch.setattr(inspecting, "open_checkpoint", lambda *args, **kwargs: broken)
    out = tmp_path / "out.svg"
    done = run_ckpt("inspect", "anything", "--picture", out)
    assert done.code == 4
    assert "format" in done.out
    for said in ("tensor: w", "found: weight: hole at elements 3:4", f"hint: see the red parts in {out}"):
        assert said in done.err
    assert parsed(out.read_text()).row("w").patches[-1][0] == "#ffffff"


@pytest.mark.parametrize(
    ("given", "out"),
    [
        ("run", "run/latest"),
        ("run", "link/new.svg"),
        ("run", "run/global_step2/mp_rank_00_model_states.pt"),
        ("run", "run"),
        ("run/global_step2", "run/global_step2/new.svg"),
        ("run/global_step2", "run/trainer_state.json"),
        ("run/global_step2", "config/config.json"),
    ],
)
def test_a_picture_goes_neither_over_nor_into_the_source(fixtures: Path, tmp_path: Path, given: str, out: str) -> None:
    run = Path(shutil.copytree(fixtures / "toy-zero2", tmp_path / "run"))
    (run / "trainer_state.json").write_text("{}")
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text('{"model_type": "toy"}')
    before = snapshot(tmp_path)
    for options in ((), ("--overwrite",)):
        done = run_ckpt(
            "inspect", tmp_path / given, "--config", tmp_path / "config", "--picture", tmp_path / out, *options
        )
        assert (done.code, done.out) == (2, ""), done.err
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "options", [("--only", "weights"), ("--overwrite",), ("--picture", "inside.svg"), ("--picture", "folder")]
)
def test_what_is_refused(fixtures: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "folder").mkdir()
    places = {"inside.svg": fixtures / "toy-zero2" / "global_step2" / "out.svg", "folder": tmp_path / "folder"}
    done = run_ckpt("inspect", fixtures / "toy-zero2", *(str(places.get(option, option)) for option in options))
    assert done.code == 2
    assert not places["inside.svg"].exists()


@pytest.mark.parametrize("name", ["toy-zero2", "megatron-dist-flattened"])
def test_drawing_imports_nothing_heavy(fixtures: Path, tmp_path: Path, name: str) -> None:
    script = (
        "import sys\nfrom ckpt.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "print(*{'numpy', 'torch', 'safetensors', 'transformers'} & set(sys.modules), file=sys.stderr)\n"
    )
    done = process("inspect", fixtures / name, "--picture", tmp_path / "out.svg", "-q", script=script)
    assert (done.code, done.err.strip()) == (0, "")
