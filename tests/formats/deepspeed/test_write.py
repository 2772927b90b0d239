"""`converters/deepspeed/write.py`, `layout.py`, `flat_groups.py`: ZeRO files for other ranks and stages."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt import api
from ckpt.errors import LossError, UsageError
from ckpt.move.run import execute
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint, Layout, ParamGroup, TrainingState
from ckpt.plan.dtypes import BFLOAT16, FLOAT32
from ckpt.plan.planner import make_plan
from converters.deepspeed.flat_groups import slot_size
from converters.deepspeed.layout import before_dealing, dealt, flat_layout, parameter_alignment, slot_layout, sub_groups
from converters.deepspeed.zero import ZERO1, ZERO2, ZERO3
from tests.support.describing import content

ZERO_FIXTURES = ("toy-zero1", "toy-zero2", "toy-zero3", "lora-zero3", "moe-zero3", "trainer-zero2")

numels = st.lists(st.integers(1, 60), min_size=1, max_size=12)
ranks = st.integers(1, 9)


# -- flat layout -------------------------------------------------------------------------------------------------------
@given(numels, ranks, st.sampled_from((1, 4, 8)))
def test_a_flat_group_is_what_deepspeed_flattens(sizes: list[int], num_ranks: int, alignment: int) -> None:
    """As in stage_1_and_2.py: pad to 2 * ranks, cut evenly, strip everything after the parameters."""
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
    assert before_dealing(dealt(items, num_ranks), num_ranks) == items


def test_round_robin_deals_one_to_each_rank_in_turn() -> None:
    assert dealt("abcdefg", 3) == ["a", "d", "g", "b", "e", "c", "f"]


def test_parameters_are_aligned_to_16_bytes() -> None:
    assert [parameter_alignment(size) for size in (1, 2, 4, 8)] == [16, 8, 4, 2]


# -- the same stage and number of ranks: the same files ----------------------------------------------------------------
def convert(source: Checkpoint, to: str, folder: Path, **layout: Any) -> Path:
    api.plan(source, to, Layout(**layout)).run(folder)
    return folder


def loaded(path: Path) -> Any:
    import torch

    return torch.load(path, map_location="cpu", weights_only=False)


def assert_same(ours: Any, theirs: Any, where: str) -> int:
    """Check equal structure, types, values and bits. Return the number of tensors."""
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
    """Replace the padding in a stage 3 file by zeros, because DeepSpeed leaves it uninitialized."""
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


# -- dependence on the source ------------------------------------------------------------------------------------------
ZEROS = {1: ZERO1, 2: ZERO2, 3: ZERO3}


def lay_out(checkpoint: Checkpoint, stage: int, output: Path, **layout: Any) -> Any:
    """Write `checkpoint` unchanged. Return the target for its notes."""
    target = ZEROS[stage].lay_out(checkpoint, Layout(**layout))
    execute(make_plan(checkpoint, target), output)
    return target


def with_config(checkpoint: Checkpoint, ds_config: dict[str, Any]) -> Checkpoint:
    return replace(checkpoint, state=replace(checkpoint.state, ds_config=ds_config))


def foreign(checkpoint: Checkpoint, **state: Any) -> Checkpoint:
    """Return the checkpoint as another framework's format describes it."""
    bare = TrainingState(checkpoint.state.step, checkpoint.state.param_groups, checkpoint.state.scalars)
    return replace(checkpoint, format="other", framework=None, tag=None, state=replace(bare, **state))


def inner(path: Path) -> Any:
    return loaded(path)["optimizer_state_dict"]


def test_round_robin_is_dealt_anew_for_the_new_number_of_ranks(fixtures: Path, tmp_path: Path) -> None:
    source = api.open(fixtures / "trainer-zero2")
    config = dict(source.state.ds_config or {})
    dealing = {**config, "zero_optimization": {**config["zero_optimization"], "round_robin_gradients": True}}
    lay_out(with_config(source, dealing), 1, tmp_path / "out", world_size=3)
    shapes = loaded(tmp_path / "out" / "global_step2" / "mp_rank_00_model_states.pt")["param_shapes"]
    assert [list(group) for group in shapes] == [dealt(g.fqns, 3) for g in source.state.param_groups]
    again = api.open(tmp_path / "out")
    assert all(content(again.tensors[key]) == content(tensor) for key, tensor in source.tensors.items())
    assert [g.fqns for g in again.state.param_groups] == [g.fqns for g in source.state.param_groups]
    mappings = inner(tmp_path / "out" / "global_step2" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    for shape_group, mapping in zip(shapes, mappings["param_slice_mappings"], strict=True):
        here = sorted((address.start, address.numel) for address in mapping.values())
        assert set(mapping) <= set(shape_group)
        assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(here))


def test_parameters_are_aligned_where_the_config_says_so(fixtures: Path, tmp_path: Path) -> None:
    source = api.open(fixtures / "toy-zero3")
    config = dict(source.state.ds_config or {})
    options = {**config["zero_optimization"], "parameter_alignment": True}
    aligned = with_config(source, {**config, "zero_optimization": options})
    lay_out(aligned, 2, tmp_path / "out", world_size=2)
    file = inner(tmp_path / "out" / "global_step2" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert file["param_alignment_paddings"] == [[3, 3, 0], [7, 7, 6, 5, 0]]  # to 8 elements: 16 bytes of bf16
    again = api.open(tmp_path / "out", "zero2")
    assert all(content(again.tensors[key]) == content(tensor) for key, tensor in source.tensors.items())


def test_sub_groups_are_those_of_the_new_number_of_ranks(fixtures: Path, tmp_path: Path) -> None:
    source = api.open(fixtures / "toy-zero3")
    config = dict(source.state.ds_config or {})
    small = with_config(source, {**config, "zero_optimization": {"stage": 3, "sub_group_size": 40}})
    for number, expected in ((1, [1, 1, 1, 5]), (9, [1, 2, 5])):
        output = tmp_path / f"w{number}"
        lay_out(small, 3, output, world_size=number)
        shapes = loaded(output / "global_step2" / "zero_pp_rank_0_mp_rank_00_model_states.pt")["param_shapes"]
        assert [len(group) for group in shapes] == expected
        assert_same_tensors(api.open(output), source)


def test_another_precision_is_in_the_names_and_the_config(fixtures: Path, tmp_path: Path) -> None:
    lay_out(api.open(fixtures / "toy-zero2"), 2, tmp_path / "out", dtype=FLOAT32)
    step = tmp_path / "out" / "global_step2"
    assert (step / "zero_pp_rank_0_mp_rank_00_optim_states.pt").is_file()
    model = loaded(step / "mp_rank_00_model_states.pt")
    assert not model["ds_config"]["bf16"]["enabled"]
    source = api.open(fixtures / "toy-zero2")
    master = content(source.tensors["conv.weight", MASTER])
    assert model["module"]["conv.weight"].numpy().tobytes() == master[2]


def test_tied_parameters_are_one_storage(fixtures: Path, tmp_path: Path) -> None:
    lay_out(api.open(fixtures / "toy-zero3"), 1, tmp_path / "out")
    model = loaded(tmp_path / "out" / "global_step2" / "mp_rank_00_model_states.pt")
    assert model["shared_params"] == {"head.weight": "embed.weight"}
    assert model["module"]["head.weight"].data_ptr() == model["module"]["embed.weight"].data_ptr()
    assert model["frozen_param_shapes"] is None and "frozen.weight" in model["module"]


def test_a_foreign_source_needs_a_number_of_ranks(fixtures: Path) -> None:
    with pytest.raises(UsageError, match="no rank count"):
        ZERO3.lay_out(replace(foreign(api.open(fixtures / "toy-zero3")), world_size=None), Layout())


def test_a_foreign_source_gets_a_loss_scaler_and_keeps_its_own_state(fixtures: Path, tmp_path: Path) -> None:
    source = foreign(
        api.open(fixtures / "lora-zero3"), global_samples=48, private={"mine": {"mine": [1, 2], "module": "?"}}
    )
    target = lay_out(source, 3, tmp_path / "out", world_size=1)
    step = tmp_path / "out" / "global_step2"
    model = loaded(step / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert (model["mine"], model["global_samples"], model["global_steps"]) == ([1, 2], 48, 2)
    assert [line for line in target.not_written if "'module'" in line]
    assert inner(step / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")["loss_scaler"].cur_scale == 1.0


def test_weights_without_groups_are_a_group_each(fixtures: Path, tmp_path: Path) -> None:
    """An optimizer resumed from one group would mix up parameters. With a group each, DeepSpeed refuses."""
    source = api.open(fixtures / "lora-zero3")
    tensors = {key: tensor for key, tensor in source.tensors.items() if key[1] in (WEIGHT, BUFFER)}
    bare = replace(foreign(source), tensors=tensors, state=TrainingState())
    target = lay_out(bare, 2, tmp_path / "out", world_size=2)
    assert any("load_optimizer_states=False" in note for note in target.notes)
    again = api.open(tmp_path / "out")
    assert len(again.state.param_groups) == len([t for t in tensors.values() if t.numel])
    for (fqn, _), tensor in tensors.items():
        assert content(again.tensors[fqn, WEIGHT]) == content(tensor)
        assert again.tensors[fqn, MASTER].dtype == FLOAT32


def test_fsdps_float32_parameters_are_the_masters_of_the_model_that_the_config_names(
    fixtures: Path, tmp_path: Path
) -> None:
    source = api.open(fixtures / "lora-zero3")
    masters = {(fqn, WEIGHT): t._replace(role=WEIGHT) for (fqn, role), t in source.tensors.items() if role == MASTER}
    bare = replace(foreign(source), tensors=masters, state=TrainingState(), config={"dtype": "bfloat16"})
    target = lay_out(bare, 1, tmp_path / "out", world_size=1)
    assert any("so float32 weights became masters" in note for note in target.notes)
    again = api.open(tmp_path / "out")
    for fqn, _ in masters:
        assert again.tensors[fqn, WEIGHT].dtype == BFLOAT16
        assert content(again.tensors[fqn, MASTER]) == content(source.tensors[fqn, MASTER])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_no_optimizer_owns_is_not_rounded_where_it_may_be_a_buffer(
    stage: int, fixtures: Path, tmp_path: Path
) -> None:
    """FSDP's files don't distinguish buffers from frozen parameters. The engine rounds frozen parameters on load."""
    source = api.open(fixtures / "lora-zero3")
    tensors = {(fqn, WEIGHT): t._replace(role=WEIGHT) for (fqn, role), t in source.tensors.items() if role == MASTER}
    (trained, _), spare = tensors.popitem()
    tensors["router.bias", WEIGHT] = spare._replace(fqn="router.bias")
    groups = tuple(replace(g, fqns=tuple(n for n in g.fqns if n != trained)) for g in source.state.param_groups)
    bare = replace(foreign(source, param_groups=groups), tensors=tensors, config={"dtype": "bfloat16"})
    target = lay_out(bare, stage, tmp_path / "out", world_size=2)
    assert any("router.bias kept as stored" in note for note in target.notes)
    again = api.open(tmp_path / "out")
    assert content(again.tensors["router.bias", WEIGHT]) == content(spare)
    assert all(t.dtype == BFLOAT16 for t in again.with_role(WEIGHT) if t.fqn != "router.bias")


def test_different_steps_in_a_group_are_refused(fixtures: Path) -> None:
    source = api.open(fixtures / "toy-zero3")
    steps = {**source.state.scalars["step"], "down.bias": 1.0}
    odd = replace(source, state=replace(source.state, scalars={"step": steps}))
    with pytest.raises(LossError, match="different numbers of steps"):
        make_plan(odd, ZERO1.lay_out(odd, Layout()))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_numbers_that_differ_in_a_group_are_listed(fixtures: Path, tmp_path: Path, stage: int) -> None:
    """Adafactor in transformers keeps an RMS per parameter, but ZeRO files have one number per group."""
    source = api.open(fixtures / "toy-zero3")
    values = {fqn: float(number) for number, fqn in enumerate(source.state.scalars["step"])}
    odd = replace(source, state=replace(source.state, scalars={**source.state.scalars, "RMS": values}))
    target = lay_out(odd, stage, tmp_path / "out", world_size=2)
    assert [line for line in target.not_written if line.startswith("optimizer state RMS: parameters in one group have")]
    assert api.open(tmp_path / "out").state.scalars == source.state.scalars


def test_states_that_are_not_there_are_zeros_and_said_to_be(fixtures: Path, tmp_path: Path) -> None:
    source = api.open(fixtures / "toy-zero3")
    kept = {key: tensor for key, tensor in source.tensors.items() if key != ("down.bias", "exp_avg")}
    target = lay_out(replace(source, tensors=kept), 2, tmp_path / "out", world_size=2)
    assert any("exp_avg of down.bias is missing from the source" in note for note in target.notes)
    _, shape, data = content(api.open(tmp_path / "out").tensors["down.bias", "exp_avg"])
    assert shape == (5,) and not any(data)


def test_states_of_another_shape_are_listed(fixtures: Path, tmp_path: Path) -> None:
    source = api.open(fixtures / "toy-zero3")
    row = source.tensors["down.bias", "exp_avg"]._replace(fqn="down.weight", role="exp_avg_row")
    target = lay_out(
        replace(source, tensors={**source.tensors, ("down.weight", "exp_avg_row"): row}), 2, tmp_path / "o"
    )
    assert [line for line in target.not_written if line.startswith("optimizer state exp_avg_row of down.weight")]


def test_a_group_that_names_what_is_not_there_is_refused(fixtures: Path) -> None:
    source = api.open(fixtures / "toy-zero3")
    groups = (*source.state.param_groups, ParamGroup(("nowhere",), {"lr": 1.0}))
    with pytest.raises(LossError, match="nowhere"):
        ZERO1.lay_out(replace(source, state=replace(source.state, param_groups=groups)), Layout())


@pytest.mark.parametrize(
    ("num_ranks", "names", "word"),
    [
        (1, {"rng_state.pth"}, "random states of rank 1"),
        (2, {"rng_state_0.pth", "rng_state_1.pth"}, ""),
        (4, {"rng_state_0.pth", "rng_state_1.pth"}, "no random states for ranks 2, 3"),
    ],
)
def test_trainer_folder(num_ranks: int, names: set[str], word: str, fixtures: Path, tmp_path: Path) -> None:
    """HF Trainer's files are next to the step folder, with random states for the existing ranks."""
    source = api.open(fixtures / "trainer-zero2")
    target = lay_out(source, 3, tmp_path / "out", world_size=num_ranks)
    home = Path(source.path).parent
    assert {p.name for p in (tmp_path / "out").glob("rng_state*")} == names
    for name in ("trainer_state.json", "config.json", "tokenizer_config.json", "latest"):
        assert (tmp_path / "out" / name).read_bytes() == (home / name).read_bytes()
    assert (tmp_path / "out" / min(names)).read_bytes() == (home / "rng_state_0.pth").read_bytes()
    assert any(word in line for line in (*target.not_written, *target.notes))
