"""ZeRO files for another number of ranks or another stage, without an engine: arithmetic, and identity on fixtures.

What real engines make of such files is in test_zero_reshard.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt import api
from ckpt.checkpoint import MASTER, WEIGHT, Checkpoint, Layout, SourceFile
from ckpt.dtypes import FLOAT32
from ckpt.errors import LossError, UsageError
from converters.zero_layout import dealt, flat_layout, parameter_alignment, slot_layout, sub_groups, undealt
from converters.zero_partitions import slot_size
from tests.describing import content

ZERO_FIXTURES = ("toy-zero1", "toy-zero2", "toy-zero3", "lora-zero3", "moe-zero3", "trainer-zero2")

numels = st.lists(st.integers(1, 60), min_size=1, max_size=12)
ranks = st.integers(1, 9)


# -- where elements lie ------------------------------------------------------------------------------------------------


@given(numels, ranks, st.sampled_from((1, 4, 8)))
def test_a_flat_group_is_what_deepspeed_flattens(sizes: list[int], num_ranks: int, alignment: int) -> None:
    """Against stage_1_and_2.py's own words: pad to 2 * ranks, cut evenly, strip what lies behind the parameters."""
    layout = flat_layout(sizes, num_ranks, alignment)
    flat: list[tuple[int, int] | None] = []
    for index, size in enumerate(sizes):
        flat += [(index, i) for i in range(size)]
        if index < len(sizes) - 1:
            flat += [None] * (-len(flat) % alignment)
    used = len(flat)
    flat += [None] * (-used % (2 * num_ranks))
    assert layout.partition * num_ranks == len(flat)
    assert layout.used == used
    for rank in range(num_ranks):
        mine = flat[rank * layout.partition : (rank + 1) * layout.partition]
        built: list[tuple[int, int] | None] = [None] * layout.partition
        for part in layout.parts(rank):
            built[part.at : part.at + part.numel] = [(part.index, i) for i in range(part.start, part.stop)]
        assert built == mine
        left = rank * layout.partition
        assert layout.padding(rank) == sum(1 for i in range(left, left + layout.partition) if i >= used)


@given(numels, ranks)
def test_slots_are_what_stage_3_partitions(sizes: list[int], num_ranks: int) -> None:
    layout = slot_layout(sizes, num_ranks)
    found: dict[int, list[int]] = {index: [] for index in range(len(sizes))}
    for rank in range(num_ranks):
        for part in layout.parts(rank):
            assert part.at == sum(slot_size(size, num_ranks) for size in sizes[: part.index])
            assert part.start == rank * slot_size(sizes[part.index], num_ranks)
            found[part.index] += range(part.start, part.stop)
    assert all(found[index] == list(range(size)) for index, size in enumerate(sizes))
    assert layout.length == sum(slot_size(size, num_ranks) for size in sizes)


@given(numels, ranks, st.integers(1, 200))
def test_sub_groups_end_with_the_parameter_that_fills_them(sizes: list[int], num_ranks: int, limit: int) -> None:
    found = sub_groups(sizes, num_ranks, limit)
    assert [index for span in found for index in span] == list(range(len(sizes)))
    for span in found:
        slots = [slot_size(sizes[index], num_ranks) for index in span]
        assert sum(slots[:-1]) < limit
        assert span == found[-1] or sum(slots) >= limit


@given(st.lists(st.integers()), ranks)
def test_dealing_is_undone(items: list[int], num_ranks: int) -> None:
    assert undealt(dealt(items, num_ranks), num_ranks) == items


def test_round_robin_deals_one_to_each_rank_in_turn() -> None:
    assert dealt("abcdefg", 3) == ["a", "d", "g", "b", "e", "c", "f"]


def test_parameters_are_aligned_to_16_bytes() -> None:
    assert [parameter_alignment(size) for size in (1, 2, 4, 8)] == [16, 8, 4, 2]


# -- the same stage and number of ranks: the same files ----------------------------------------------------------------


def convert(source: Checkpoint, to: str, folder: Path, **layout: Any) -> Path:
    api.plan(source, to, Layout(**layout)).run(folder)
    return folder


def loaded(path: Path) -> Any:
    """A file as torch loads it."""
    import torch

    return torch.load(path, map_location="cpu", weights_only=False)


def assert_same(ours: Any, theirs: Any, where: str) -> int:
    """Equal in structure, types, values and bits.  Returns the number of tensors."""
    import torch

    assert type(ours) is type(theirs), where
    if isinstance(theirs, dict):
        assert set(ours) == set(theirs), where
        return sum(assert_same(ours[key], theirs[key], f"{where}/{key}") for key in theirs)
    if isinstance(theirs, list | tuple) and not isinstance(theirs, torch.Size):
        assert len(ours) == len(theirs), where
        return sum(assert_same(a, b, f"{where}/{i}") for i, (a, b) in enumerate(zip(ours, theirs, strict=True)))
    if torch.is_tensor(theirs):
        assert (ours.dtype, ours.shape, ours.requires_grad) == (theirs.dtype, theirs.shape, theirs.requires_grad), where
        bits = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (ours, theirs)]
        assert torch.equal(*bits), where
        return 1
    if hasattr(theirs, "cur_scale"):
        assert vars(ours) == vars(theirs), where
        return 0
    assert ours == theirs, where
    return 0


@pytest.mark.parametrize("name", ZERO_FIXTURES)
def test_the_same_number_of_ranks_gives_the_same_files(name: str, fixtures: Path, tmp_path: Path) -> None:
    source = api.open(fixtures / name)
    output = convert(source, source.format, tmp_path / "out")
    step = Path(source.path)
    assert (output / "latest").read_text() == step.name
    assert sorted(p.name for p in (output / step.name).iterdir()) == sorted(p.name for p in step.iterdir())
    count = 0
    shapes = loaded(next(step.glob("*mp_rank_00_model_states.pt")))["param_shapes"]
    for path in step.iterdir():
        ours, theirs = loaded(output / step.name / path.name), loaded(path)
        if source.format == "zero3":
            rank = re.search(r"pp_rank_(\d+)", path.name)
            assert rank
            with_zeroed_padding(theirs, shapes, int(rank[1]), source.world_size or 0)
        if "module" in theirs and not theirs["frozen_param_shapes"]:  # None and empty mean the same
            for key in ("frozen_param_shapes", "frozen_param_fragments"):
                assert not ours.pop(key)
                del theirs[key]
        count += assert_same(ours, theirs, path.name)
    assert count > 20


def with_zeroed_padding(file: Any, shapes: list[dict[str, Any]], rank: int, num_ranks: int) -> Any:
    """A file of stage 3, whose padding is memory as it was, with zeros there."""
    import torch

    def clear(flat: Any, numels: list[int]) -> None:
        at = 0
        for numel in numels:
            slot = -(-numel // num_ranks)
            kept = min(max(numel - rank * slot, 0), slot)
            with torch.no_grad():
                flat[at + kept : at + slot] = 0
            at += slot

    for fqn, fragment in (file.get("frozen_param_fragments") or {}).items():
        clear(fragment, [file["frozen_param_shapes"][fqn].numel()])
    inner = file.get("optimizer_state_dict") or {}
    for index, flat in enumerate(inner.get("fp32_flat_groups", [])):
        states = inner["optimizer_state_dict"]["state"].get(index, {}).values()
        for one in (flat, *(state for state in states if torch.is_tensor(state) and state.ndim)):
            clear(one, [shape.numel() for shape in shapes[index].values()])
    return file


@pytest.mark.parametrize("name", ZERO_FIXTURES)
@pytest.mark.parametrize("others", [(1,), (4,), (7, 5)])
def test_there_and_back_gives_the_same_files(
    name: str, others: tuple[int, ...], fixtures: Path, tmp_path: Path
) -> None:
    source = api.open(fixtures / name)
    first = convert(source, source.format, tmp_path / "first")
    current = source
    for number in (*others, source.world_size):
        current = api.open(convert(current, source.format, tmp_path / f"w{number}", world_size=number))
        assert current.world_size == number
        assert_same_tensors(current, source)
    step = Path(source.path).name
    for path in (first / step).iterdir():
        assert_same(loaded(tmp_path / f"w{source.world_size}" / step / path.name), loaded(path), path.name)


def assert_same_tensors(a: Checkpoint, b: Checkpoint) -> None:
    assert set(a.tensors) == set(b.tensors)
    for key, tensor in a.tensors.items():
        assert content(tensor) == content(b.tensors[key]), key
    assert a.state.scalars == b.state.scalars
    assert [(g.fqns, g.options) for g in a.state.param_groups] == [(g.fqns, g.options) for g in b.state.param_groups]
    assert a.ties == b.ties and a.state.step == b.state.step
