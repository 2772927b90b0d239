"""`ckpt/compare/pairs.py`: tensor pairs, differences, and the report."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.compare.pairs import NotCompared, Only, Report, Result, same_value, verify
from ckpt.errors import CorruptError, UsageError
from ckpt.move.casts import cast_bits
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint, ParamGroup, SourceFile, TrainingState
from ckpt.plan.dtypes import BFLOAT16, BY_NAME, FLOAT16, FLOAT32, INT64, DType
from ckpt.plan.tensors import Box, Extent, FlatRange, Fragment, Pieces, Shape, Source, Tensor, Whole

Spec = tuple[str, str, np.ndarray]
DTYPES = {"<f4": FLOAT32, "<f2": FLOAT16, "<u2": BFLOAT16, "<i8": INT64, "|b1": BY_NAME["bool"]}


def floats(*values: float) -> np.ndarray:
    return np.array(values, "<f4")


def rounded(array: np.ndarray) -> np.ndarray:
    """Return the bfloat16 bits for a float32 array."""
    return cast_bits(array.reshape(-1).view("<u4"), FLOAT32, BFLOAT16).reshape(array.shape)


def one_file(path: Path, specs: Iterable[Spec], **fields: Any) -> Checkpoint:
    """Make a one-file checkpoint with each tensor in one piece."""
    tensors: dict[tuple[str, str], Tensor] = {}
    data = bytearray(b"head")
    for fqn, role, array in specs:
        dtype = DTYPES[array.dtype.str]
        extent = Extent.contiguous(str(path / "data"), len(data), dtype, array.shape)
        tensors[fqn, role] = Tensor(fqn, role, dtype, array.shape, Whole(extent))
        data += array.tobytes()
    return described(path, tensors, {"data": bytes(data)}, **fields)


def sharded(path: Path, specs: Iterable[Spec], num_ranks: int = 3, **fields: Any) -> Checkpoint:
    """Make a checkpoint with a flat part of every tensor in each rank file."""
    files = {f"rank{rank}": bytearray(bytes(rank)) for rank in range(num_ranks)}
    tensors: dict[tuple[str, str], Tensor] = {}
    for fqn, role, array in specs:
        dtype, pieces = DTYPES[array.dtype.str], []
        edges = [array.size * rank // num_ranks for rank in range(num_ranks + 1)]
        for rank, (start, stop) in enumerate(pairwise(edges)):
            data = files[f"rank{rank}"]
            extent = Extent(str(path / f"rank{rank}"), len(data), dtype, (stop - start,), (1,))
            pieces.append(Fragment(FlatRange(start, stop), extent, rank))
            data += array.reshape(-1)[start:stop].tobytes()
        tensors[fqn, role] = Tensor(fqn, role, dtype, array.shape, Pieces(tuple(pieces)))
    return described(path, tensors, files, **fields)


def described(
    path: Path, tensors: Mapping[tuple[str, str], Tensor], files: Mapping[str, bytes | bytearray], **fields: Any
) -> Checkpoint:
    path.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    stats = tuple(SourceFile.stat(str(path / name)) for name in files)
    return Checkpoint(str(path), fields.pop("format", "test"), tensors, stats, **fields)


def statuses(report: Report) -> dict[tuple[str, str], str]:
    return {(result.fqn, result.role): result.status for result in report.results}


def only_result(report: Report) -> Result:
    (result,) = report.results
    return result


def flip_byte(checkpoint: Checkpoint, name: str, offset: int, bit: int = 0) -> Checkpoint:
    """Flip one bit in one file and return the checkpoint."""
    path = Path(checkpoint.path) / name
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)
    return replace(checkpoint, files=tuple(SourceFile.stat(file.path) for file in checkpoint.files))


MODEL: list[Spec] = [
    ("embed.weight", WEIGHT, np.arange(12, dtype="<f4").reshape(4, 3)),
    ("norm.weight", WEIGHT, floats(1.0, float("nan"), -0.0)),
    ("scale", WEIGHT, np.array(2.5, "<f4")),
    ("empty", WEIGHT, np.zeros((0, 3), "<f4")),
    ("mask", BUFFER, np.array([True, False])),
]


def test_the_same_tensors_in_other_pieces_are_equal(tmp_path: Path) -> None:
    report = verify(sharded(tmp_path / "a", MODEL), one_file(tmp_path / "b", MODEL))
    assert report.equal
    assert report.counts == {"=": 5, "*": 0, "-": 0, "+": 0, "!": 0}
    assert report.num_bytes == sum(array.nbytes for _, _, array in MODEL)
    assert list(report.lines()) == ["equal: 5 tensors (66 B), every bit compared"]
    assert list(report.lines(verbose=True))[:2] == ["= embed.weight (weight)", "= norm.weight (weight)"]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_flipped_bit_anywhere_is_found_with_name_index_file_and_rank(tmp_path: Path, data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    specs: list[Spec] = [
        (f"layers.{number}", WEIGHT, rng.integers(0, 2**16, shape, np.uint16).astype("<u2"))
        for number, shape in enumerate(shapes)
    ]
    a = sharded(tmp_path / "a", specs, data.draw(st.integers(1, 5)))
    b = one_file(tmp_path / "b", specs)
    assert verify(a, b).equal
    number = data.draw(st.integers(0, len(specs) - 1))
    fqn, _, array = specs[number]
    position = data.draw(st.integers(0, array.size - 1))
    tensor = a.tensors[fqn, WEIGHT]
    holder = next(f for f in tensor.fragments() if f.region.start <= position < f.region.stop)  # type: ignore[union-attr]
    offset = holder.extent.offset + 2 * (position - holder.region.start)  # type: ignore[union-attr]
    bit = data.draw(st.integers(0, 15))
    broken = flip_byte(a, Path(holder.extent.path).name, offset + bit // 8, bit % 8)

    report = verify(broken, b)

    assert not report.equal, "no error found: the checker is broken"
    (found,) = report.of_kind("values")
    assert found.fqn == fqn
    assert found.difference is not None
    assert found.difference.index == tuple(map(int, np.unravel_index(position, array.shape)))
    assert found.difference.num_different == 1
    assert (found.difference.a.path, found.difference.a.rank) == (holder.extent.path, holder.rank)
    assert found.difference.a.offset == offset
    assert report.counts == {"=": len(specs) - 1, "*": 1, "-": 0, "+": 0, "!": 0}


def test_a_difference_is_told_in_one_line(tmp_path: Path) -> None:
    a = sharded(tmp_path / "a", MODEL)
    other = [(f, r, array.copy()) for f, r, array in MODEL]
    other[0][2][3, 1] += 0.5
    report = verify(a, one_file(tmp_path / "b", other))
    line, outcome = report.lines()
    assert line == (
        "* embed.weight (weight): 1 of 12 elements differ, first [3, 1]: 10.0 and 10.5; largest difference 0.5; "
        "A: rank2 (rank 2) at byte 10; B: data at byte 44"
    )
    assert outcome == "different: 1 differ, 4 equal"


def test_tensors_on_one_side_only_are_named_both_ways(tmp_path: Path) -> None:
    a = one_file(tmp_path / "a", [("x", WEIGHT, floats(1)), ("only.a", WEIGHT, floats(2))])
    b = one_file(tmp_path / "b", [("only.b", WEIGHT, floats(2)), ("x", WEIGHT, floats(1))])
    report = verify(a, b)
    assert statuses(report) == {("x", WEIGHT): "=", ("only.a", WEIGHT): "-", ("only.b", WEIGHT): "+"}
    assert not report.equal
    assert [r.fqn for r in report.of_kind("missing")] == ["only.a"]
    assert [r.fqn for r in report.of_kind("extra")] == ["only.b"]
    assert list(report.lines())[-1] == "different: 1 only in A, 1 only in B, 1 equal"


def test_shapes_that_differ_are_no_comparison_of_values(tmp_path: Path) -> None:
    values = np.arange(6, dtype="<f4")
    a = one_file(tmp_path / "a", [("x", WEIGHT, values.reshape(2, 3))])
    b = one_file(tmp_path / "b", [("x", WEIGHT, values.reshape(3, 2))])
    result = only_result(verify(a, b))
    assert (result.status, result.kind, result.a, result.b) == ("*", "shape", "[2, 3]", "[3, 2]")


def test_a_master_is_rounded_for_a_weight_in_the_models_own_dtype(tmp_path: Path) -> None:
    values = floats(1.1, 2.2, float("nan"))
    a = one_file(tmp_path / "a", [("x", MASTER, values)])
    bfloat16 = a.tensors["x", MASTER]._replace(native=BFLOAT16)
    a = replace(a, tensors={("x", MASTER): bfloat16})
    b = one_file(tmp_path / "b", [("x", WEIGHT, rounded(values))])
    assert verify(a, b).equal
    assert verify(b, a).equal
    assert not verify(a, flip_byte(b, "data", 4)).equal


def test_dtypes_that_differ_need_a_cast(tmp_path: Path) -> None:
    values = floats(1.1, 2.2, float("nan"))
    a = one_file(tmp_path / "a", [("x", MASTER, values)])
    b = one_file(tmp_path / "b", [("x", WEIGHT, rounded(values))])
    assert verify(a, b).equal and verify(b, a).equal, "a master is rounded as `ckpt convert` rounds it"
    report = verify(a, b, exact=True)
    assert not report.equal
    result = only_result(report)
    assert (result.kind, result.a, result.b) == ("dtype", "float32", "bfloat16")
    assert report.num_bytes == 0
    assert any("--cast" in line for line in report.lines())

    cast = verify(a, b, cast=True)
    assert cast.equal
    assert only_result(cast).cast == "bfloat16"
    assert list(cast.lines())[-1] == "equal after rounding: 1 tensor (12 B), every bit compared"
    assert verify(b, a, cast=True).equal

    wrong = verify(a, flip_byte(b, "data", 4 + 2), cast=True)
    assert not wrong.equal, "no error found: the checker is broken"
    difference = only_result(wrong).difference
    assert difference is not None
    assert difference.index == (1,)


def test_no_cast_between_two_floats_of_one_width(tmp_path: Path) -> None:
    a = one_file(tmp_path / "a", [("x", WEIGHT, np.zeros(2, "<f2"))])
    b = one_file(tmp_path / "b", [("x", WEIGHT, np.zeros(2, "<u2"))])
    report = verify(a, b, cast=True)
    assert only_result(report).kind == "dtype"
    assert not any("--cast" in line for line in report.lines())


class TestRoles:
    """A parameter's stand-in in one format is compared with its stand-in in the other."""

    def test_a_master_goes_with_a_weight(self, tmp_path: Path) -> None:
        a = sharded(tmp_path / "a", [("x", MASTER, floats(1, 2)), ("x", "exp_avg", floats(3, 4))])
        b = one_file(tmp_path / "b", [("x", WEIGHT, floats(1, 2))])
        report = verify(a, b)
        assert report.equal
        assert report.not_compared == (NotCompared("A", "exp_avg", 1, "B holds no optimizer states"),)
        assert verify(b, a).not_compared == (NotCompared("B", "exp_avg", 1, "A holds no optimizer states"),)
        assert report.notes == ("1 tensor compared across roles: master of A with weight of B",)
        assert not verify(a, flip_byte(b, "data", 5)).equal, "no error found: the checker is broken"

    def test_a_buffer_goes_with_a_weight(self, tmp_path: Path) -> None:
        a = one_file(tmp_path / "a", [("ids", BUFFER, np.arange(4, dtype="<i8"))])
        b = one_file(tmp_path / "b", [("ids", WEIGHT, np.arange(4, dtype="<i8"))])
        assert verify(a, b).equal
        assert verify(b, a).equal

    def test_weights_and_masters_are_both_compared_where_both_sides_have_them(self, tmp_path: Path) -> None:
        values = floats(1.1, 2.2)
        specs: list[Spec] = [("x", WEIGHT, rounded(values)), ("x", MASTER, values)]
        a, b = sharded(tmp_path / "a", specs), one_file(tmp_path / "b", specs)
        assert statuses(verify(a, b)) == {("x", WEIGHT): "=", ("x", MASTER): "="}
        broken = flip_byte(b, "data", 4 + 4)
        assert statuses(verify(a, broken)) == {("x", WEIGHT): "=", ("x", MASTER): "*"}
        assert verify(a, broken, only="weights").equal
        assert not verify(a, broken, only="optimizer").equal

    def test_masters_against_a_format_without_any_are_listed(self, tmp_path: Path) -> None:
        values = floats(1.1, 2.2)
        a = one_file(tmp_path / "a", [("x", WEIGHT, rounded(values)), ("x", MASTER, values)])
        b = one_file(tmp_path / "b", [("x", WEIGHT, rounded(values))])
        report = verify(a, b)
        assert report.equal
        assert report.not_compared == (NotCompared("A", MASTER, 1, "B holds no masters"),)

    @pytest.mark.parametrize("swap", [False, True])
    def test_weights_in_the_masters_dtype_go_with_the_masters(self, tmp_path: Path, swap: bool) -> None:
        values = floats(1.1, 2.2)
        a = one_file(tmp_path / "a", [("x", WEIGHT, rounded(values)), ("x", MASTER, values)])
        b = one_file(tmp_path / "b", [("x", WEIGHT, values)])
        report = verify(b, a) if swap else verify(a, b)
        assert report.equal
        assert [(n.side, n.role, n.count) for n in report.not_compared] == [("B" if swap else "A", WEIGHT, 1)]
        broken = flip_byte(b, "data", 6)
        assert not (verify(broken, a) if swap else verify(a, broken)).equal, "no error found: the checker is broken"

    @pytest.mark.parametrize("only", ["all", "weights", "optimizer"])
    def test_masters_that_stand_for_the_parameters_are_compared_once(self, tmp_path: Path, only: Only) -> None:
        a = sharded(tmp_path / "a", [("x", MASTER, floats(1, 2))])
        b = one_file(tmp_path / "b", [("x", MASTER, floats(1, 2))])
        assert [(r.status, r.role) for r in verify(a, b, only=only).results] == [("=", MASTER)]

    def test_a_master_against_weight_and_master(self, tmp_path: Path) -> None:
        values = floats(1.1, 2.2)
        a = one_file(tmp_path / "a", [("x", MASTER, values)])
        b = one_file(tmp_path / "b", [("x", WEIGHT, rounded(values)), ("x", MASTER, values)])
        report = verify(a, b)
        assert report.equal
        assert statuses(report) == {("x", MASTER): "="}
        assert [(n.side, n.role) for n in report.not_compared] == [("B", WEIGHT)]

    def test_a_master_that_only_one_parameter_lacks_is_missing(self, tmp_path: Path) -> None:
        both: list[Spec] = [("x", WEIGHT, rounded(floats(1))), ("x", MASTER, floats(1))]
        a = one_file(tmp_path / "a", [*both, ("y", WEIGHT, rounded(floats(2))), ("y", MASTER, floats(2))])
        b = one_file(tmp_path / "b", [*both, ("y", WEIGHT, rounded(floats(2)))])
        assert statuses(verify(a, b))["y", MASTER] == "-"
        assert statuses(verify(b, a))["y", MASTER] == "+"

    def test_a_parameter_of_which_only_the_master_is_stored_can_be_missing(self, tmp_path: Path) -> None:
        a = one_file(tmp_path / "a", [("x", MASTER, floats(1)), ("y", MASTER, floats(1))])
        b = one_file(tmp_path / "b", [("x", WEIGHT, floats(1))])
        assert statuses(verify(a, b)) == {("x", MASTER): "=", ("y", MASTER): "-"}


class TestOptimizer:
    STATES = (("x", WEIGHT, floats(1)), ("x", "exp_avg", floats(2)), ("x", "momentum_buffer", floats(3)))

    def test_states_go_by_their_own_names(self, tmp_path: Path) -> None:
        a, b = sharded(tmp_path / "a", self.STATES), one_file(tmp_path / "b", self.STATES)
        assert verify(a, b).counts["="] == 3
        broken = flip_byte(b, "data", 4 + 8 + 1)
        assert statuses(verify(a, broken))["x", "momentum_buffer"] == "*"
        assert verify(a, broken, only="weights").equal

    def test_a_state_that_another_optimizer_does_not_have_is_missing(self, tmp_path: Path) -> None:
        a = one_file(tmp_path / "a", self.STATES)
        b = one_file(tmp_path / "b", self.STATES[:2])
        report = verify(a, b)
        assert statuses(report)["x", "momentum_buffer"] == "-"
        assert not report.equal

    def test_states_lost_from_a_training_checkpoint_are_missing(self, tmp_path: Path) -> None:
        """The param groups show that there was an optimizer."""
        a = one_file(tmp_path / "a", self.STATES)
        state = TrainingState(param_groups=(ParamGroup(("x",), {"lr": 1.0}),))
        b = one_file(tmp_path / "b", self.STATES[:1], state=state)
        assert [r.role for r in verify(a, b).of_kind("missing")] == ["exp_avg", "momentum_buffer"]

    def test_only_optimizer_looks_at_nothing_else(self, tmp_path: Path) -> None:
        a = one_file(tmp_path / "a", self.STATES)
        b = flip_byte(one_file(tmp_path / "b", self.STATES), "data", 4)
        report = verify(a, b, only="optimizer")
        assert report.equal
        assert [r.role for r in report.results] == ["exp_avg", "momentum_buffer"]
        assert not verify(a, b, only="weights").equal

    @pytest.mark.parametrize("swap", [False, True])
    def test_only_optimizer_against_weights_is_refused(self, tmp_path: Path, swap: bool) -> None:
        a = one_file(tmp_path / "a", self.STATES)
        b = one_file(tmp_path / "b", self.STATES[:1], format="hf")
        with pytest.raises(UsageError, match="no optimizer states") as caught:
            verify(*(b, a) if swap else (a, b), only="optimizer")
        assert caught.value.path == b.path

    def test_only_weights_of_an_optimizer_is_refused(self, tmp_path: Path) -> None:
        a = one_file(tmp_path / "a", self.STATES)
        b = one_file(tmp_path / "b", self.STATES[1:])
        with pytest.raises(UsageError, match="no weights"):
            verify(a, b, only="weights")

    def test_an_unknown_choice_is_refused(self, tmp_path: Path) -> None:
        a = one_file(tmp_path / "a", self.STATES)
        with pytest.raises(UsageError):
            verify(a, a, only="everything")  # type: ignore[arg-type]


class TestScalars:
    STATES = (("x", WEIGHT, floats(1)), ("x", "exp_avg", floats(2)))

    def with_step(self, path: Path, value: Any, name: str = "step") -> Checkpoint:
        return one_file(path, self.STATES, state=TrainingState(scalars={name: {"x": value}}))

    @pytest.mark.parametrize(("a", "b"), [(4, 4), (4, 4.0), (float("nan"), float("nan")), (None, None), ("a", "a")])
    def test_the_same_number_is_equal(self, tmp_path: Path, a: Any, b: Any) -> None:
        report = verify(self.with_step(tmp_path / "a", a), self.with_step(tmp_path / "b", b))
        assert report.equal
        assert statuses(report)["x", "step"] == "="
        assert list(report.lines())[-1] == "equal: 2 tensors (8 B) and 1 scalar, every bit compared"

    def test_another_number_is_a_difference(self, tmp_path: Path) -> None:
        report = verify(self.with_step(tmp_path / "a", 4), self.with_step(tmp_path / "b", 5))
        (result,) = report.of_kind("scalar")
        assert (result.status, result.fqn, result.role, result.a, result.b) == ("*", "x", "step", "4", "5")
        assert "* x (step): scalar 4 in A, 5 in B" in report.lines()
        assert not verify(self.with_step(tmp_path / "a", 4), self.with_step(tmp_path / "b", 5), only="optimizer").equal
        assert verify(self.with_step(tmp_path / "a", 4), self.with_step(tmp_path / "b", 5), only="weights").equal

    @pytest.mark.parametrize(("stored", "equal"), [(4.0, True), (5.0, False)])
    def test_a_number_may_be_a_tensor_on_the_other_side(self, tmp_path: Path, stored: float, equal: bool) -> None:
        a = self.with_step(tmp_path / "a", 4)
        b = one_file(tmp_path / "b", [*self.STATES, ("x", "step", np.array(stored, "<f4"))])
        assert verify(a, b).equal is equal
        assert verify(b, a).equal is equal

    def test_a_number_that_the_other_format_does_not_record_is_listed(self, tmp_path: Path) -> None:
        a = self.with_step(tmp_path / "a", 4, "weight_sum")
        report = verify(a, one_file(tmp_path / "b", self.STATES, format="another"))
        assert report.equal
        assert report.not_compared == (NotCompared("A", "weight_sum", 1, "B does not record it"),)
        assert not verify(a, one_file(tmp_path / "c", self.STATES)).equal, "one format, which has a place for it"

    def test_a_step_has_a_place_in_every_format(self, tmp_path: Path) -> None:
        a, b = self.with_step(tmp_path / "a", 4), one_file(tmp_path / "b", self.STATES, format="another")
        assert statuses(verify(a, b))["x", "step"] == "-"
        assert statuses(verify(b, a))["x", "step"] == "+"
        weights = one_file(tmp_path / "c", self.STATES[:1], format="another")
        assert verify(a, weights).equal, "weights alone have no place for it"

    def test_a_value_that_is_no_plain_one_is_listed(self, tmp_path: Path) -> None:
        report = verify(self.with_step(tmp_path / "a", object()), self.with_step(tmp_path / "b", object()))
        assert [(n.role, n.count) for n in report.not_compared] == [("step", 1)]

    def test_scalars_alone_are_no_equal_checkpoints(self, tmp_path: Path) -> None:
        state = TrainingState(scalars={"step": {"x": 1}})
        report = verify(one_file(tmp_path / "a", [], state=state), one_file(tmp_path / "b", [], state=state))
        assert not report.equal
        assert list(report.lines())[-1] == "different: no tensor was compared"


class TestTies:
    EMBED = np.arange(6, dtype="<f4").reshape(3, 2)

    def test_an_alias_stored_on_one_side_goes_with_the_owner(self, tmp_path: Path) -> None:
        a = sharded(tmp_path / "a", [("embed", WEIGHT, self.EMBED)], ties={"lm_head": "embed"})
        b = one_file(tmp_path / "b", [("embed", WEIGHT, self.EMBED), ("lm_head", WEIGHT, self.EMBED)])
        for one, other in ((a, b), (b, a)):
            report = verify(one, other)
            assert report.equal
            assert report.counts["="] == 2
        broken = flip_byte(b, "data", 4 + 24)
        report = verify(a, broken)
        assert not report.equal, "no error found: the checker is broken"
        (result,) = report.of_kind("values")
        assert (result.fqn, result.b_fqn) == ("embed", "lm_head")
        assert "* embed (weight), in B lm_head: 1 of 6" in next(report.lines())

    def test_either_side_may_own_the_tensor(self, tmp_path: Path) -> None:
        a = one_file(tmp_path / "a", [("embed", WEIGHT, self.EMBED)], ties={"lm_head": "embed"})
        b = one_file(tmp_path / "b", [("lm_head", WEIGHT, self.EMBED)], ties={"embed": "lm_head"})
        assert only_result(verify(a, b)).status == "="
        assert only_result(verify(b, a)).status == "="

    def test_states_of_the_owner_are_not_missing_for_an_alias(self, tmp_path: Path) -> None:
        owner: list[Spec] = [("embed", WEIGHT, self.EMBED), ("embed", "exp_avg", self.EMBED)]
        a = one_file(tmp_path / "a", owner, ties={"lm_head": "embed"})
        b = one_file(tmp_path / "b", [*owner, ("lm_head", WEIGHT, self.EMBED)])
        assert verify(a, b).equal
        assert verify(b, a).equal

    def test_without_a_record_nothing_is_taken_for_tied(self, tmp_path: Path) -> None:
        a = one_file(tmp_path / "a", [("embed", WEIGHT, self.EMBED)])
        b = one_file(tmp_path / "b", [("embed", WEIGHT, self.EMBED), ("lm_head", WEIGHT, self.EMBED)])
        assert statuses(verify(a, b)) == {("embed", WEIGHT): "=", ("lm_head", WEIGHT): "+"}

    def test_ties_in_a_circle_end(self, tmp_path: Path) -> None:
        a = one_file(tmp_path / "a", [("x", WEIGHT, self.EMBED)], ties={"y": "z", "z": "y"})
        b = one_file(tmp_path / "b", [("y", WEIGHT, self.EMBED)])
        assert statuses(verify(a, b)) == {("x", WEIGHT): "-", ("y", WEIGHT): "+"}


def with_source(checkpoint: Checkpoint, fqn: str, source: Source, replicas: tuple[Source, ...] = ()) -> Checkpoint:
    tensor = checkpoint.tensors[fqn, WEIGHT]._replace(source=source, replicas=replicas)
    return replace(checkpoint, tensors={**checkpoint.tensors, (fqn, WEIGHT): tensor})


class TestUnreadable:
    """A damaged side is a result of its own, and the other tensors are still compared."""

    SPECS = (("x", WEIGHT, floats(1, 2, 3, 4)), ("y", WEIGHT, floats(5)))

    def pieces(self, checkpoint: Checkpoint, *ranges: tuple[int, int]) -> Pieces:
        (fragment,) = checkpoint.tensors["x", WEIGHT].fragments()
        return Pieces(tuple(Fragment(FlatRange(a, b), fragment.extent.flat(a, b), 0) for a, b in ranges))

    @pytest.mark.parametrize(
        ("ranges", "message"),
        [
            ([(0, 2), (3, 4)], "part of a tensor is stored nowhere"),
            ([(0, 3), (2, 4)], "part of a tensor is stored twice"),
            ([(0, 4), (4, 5)], "a stored part exceeds its tensor"),
        ],
    )
    @pytest.mark.parametrize("swap", [False, True])
    def test_fragments_that_do_not_tile(
        self, tmp_path: Path, ranges: list[tuple[int, int]], message: str, swap: bool
    ) -> None:
        a, good = one_file(tmp_path / "a", self.SPECS), one_file(tmp_path / "b", self.SPECS)
        bad = with_source(a, "x", self.pieces(a, *ranges))
        report = verify(*(good, bad) if swap else (bad, good))
        assert not report.equal, "no error found: the checker is broken"
        assert statuses(report) == {("x", WEIGHT): "!", ("y", WEIGHT): "="}
        (result,) = report.of_kind("unreadable")
        assert result.error is not None
        assert message in result.error

    def test_a_file_that_is_cut_off(self, tmp_path: Path) -> None:
        a, b = one_file(tmp_path / "a", self.SPECS), one_file(tmp_path / "b", self.SPECS)
        os.truncate(tmp_path / "b" / "data", 4 + 9)
        b = replace(b, files=(SourceFile.stat(str(tmp_path / "b" / "data")),))
        report = verify(a, b)
        assert report.counts["!"] == 2
        assert not report.equal
        line = next(report.lines())
        assert line.startswith("! x (weight): the file ends inside a tensor; file: ")
        assert list(report.lines())[-1] == "not verified: 2 could not be read"

    def test_replicas_that_disagree(self, tmp_path: Path) -> None:
        a = one_file(tmp_path / "a", [*self.SPECS, ("x2", WEIGHT, floats(1, 2, 3, 4))])
        replica = a.tensors["x2", WEIGHT].source
        a = with_source(a, "x", a.tensors["x", WEIGHT].source, (replica,))
        a = replace(a, tensors={key: t for key, t in a.tensors.items() if key[0] != "x2"})
        b = one_file(tmp_path / "b", self.SPECS)
        assert verify(a, b).equal
        report = verify(flip_byte(a, "data", 4 + 16 + 4 + 12), b)
        assert not report.equal, "no error found: the checker is broken"
        (result,) = report.of_kind("unreadable")
        assert result.error is not None
        assert "disagree" in result.error
        assert "element [3]" in result.error

    def test_a_file_replaced_meanwhile_stops_it(self, tmp_path: Path) -> None:
        a, b = one_file(tmp_path / "a", self.SPECS), one_file(tmp_path / "b", self.SPECS)
        one_file(tmp_path / "b", [*self.SPECS, ("z", WEIGHT, floats(1))])
        with pytest.raises(CorruptError, match="replaced"):
            verify(a, b)


class TestNothingIsNeverEqual:
    def test_two_empty_checkpoints(self, tmp_path: Path) -> None:
        report = verify(one_file(tmp_path / "a", []), one_file(tmp_path / "b", []))
        assert not report.equal
        assert "nothing was compared" in report.notes[0]

    def test_no_name_in_common(self, tmp_path: Path) -> None:
        a = one_file(tmp_path / "a", [("x", WEIGHT, floats(1))], namespace="hub")
        b = one_file(tmp_path / "b", [("model.x", WEIGHT, floats(1))])
        report = verify(a, b)
        assert report.counts == {"=": 0, "*": 0, "-": 1, "+": 1, "!": 0}
        assert "A and B share no names (A hub, B own)" in report.notes[0]

    def test_two_different_halves(self, tmp_path: Path) -> None:
        a = one_file(tmp_path / "a", [("x", WEIGHT, floats(1))])
        b = one_file(tmp_path / "b", [("x", "exp_avg", floats(1))])
        report = verify(a, b)
        assert not report.equal
        assert statuses(report) == {("x", WEIGHT): "-"}
        assert [(n.side, n.role) for n in report.not_compared] == [("B", "exp_avg")]


def test_steps_and_hyperparameters_that_differ_are_notes(tmp_path: Path) -> None:
    specs: list[Spec] = [("x", WEIGHT, floats(1)), ("y", WEIGHT, floats(1)), ("z", WEIGHT, floats(1))]

    def state(step: int, lr: float, betas: Any) -> TrainingState:
        groups = (ParamGroup(("x", "y"), {"lr": lr, "betas": betas}), ParamGroup(("z",), {"lr": 1.0, "other": step}))
        return TrainingState(step=step, param_groups=groups)

    a = one_file(tmp_path / "a", specs, state=state(4, 0.1, (0.9, 0.99)))
    report = verify(a, one_file(tmp_path / "b", specs, state=state(8, 0.2, [0.9, 0.99])))
    assert report.equal
    assert report.notes == (
        "the training steps differ: 4 in A, 8 in B",
        "hyperparameter lr is 0.1 in A, 0.2 in B, for 2 parameters",
        "hyperparameter other is 4 in A, 8 in B, for 1 parameter",
    )


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1, True, True),
        (2**80, 2.0**80, True),
        ((0.9, 0.99), [0.9, 0.99], True),
        ((0.9, 0.99), [0.9, 0.999], False),
        ([1], [1, 2], False),
        ({"a": [1]}, {"a": [1.0]}, True),
        ({"a": 1}, {"b": 1}, False),
        (None, 0, False),
        ("adam", b"adam", False),
        (object(), object(), None),
        ([object(), 1], [object(), 2], False),
        (list(range(10**6)), list(range(10**6)), None),
    ],
)
def test_which_values_are_the_same(a: object, b: object, same: bool | None) -> None:
    assert same_value(a, b) is same


def test_values_that_share_their_parts_end(tmp_path: Path) -> None:
    def bomb() -> Any:
        value: Any = [1]
        for _ in range(200):
            value = [value] * 10
        return value

    assert same_value(bomb(), bomb()) is None


def test_progress_adds_up_to_the_bytes_of_a(tmp_path: Path) -> None:
    seen: list[int] = []
    a = sharded(tmp_path / "a", MODEL)
    total = sum(tensor.nbytes for tensor in a.tensors.values())
    report = verify(a, one_file(tmp_path / "b", MODEL), progress=seen.append)
    assert sum(seen) == report.num_bytes == total

    seen.clear()
    other = [(f, r, array.reshape(1, *array.shape)) for f, r, array in MODEL]
    verify(a, one_file(tmp_path / "b", other), progress=seen.append)
    assert sum(seen) == total


def test_progress_adds_up_to_what_it_is_told_first(tmp_path: Path) -> None:
    """A weights folder can't hold optimizer states, so they are not compared."""
    expected, seen = list[int](), list[int]()
    a = sharded(tmp_path / "a", [*MODEL, (MODEL[0][0], "exp_avg", MODEL[0][2])])
    report = verify(a, one_file(tmp_path / "b", MODEL), progress=seen.append, expected=expected.append)
    assert report.equal and [sum(seen)] == expected == [report.num_bytes]
    assert sum(seen) < sum(tensor.nbytes for tensor in a.tensors.values())


def every_text(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from (*every_text(key), *every_text(member))
    elif isinstance(value, list):
        for member in value:
            yield from every_text(member)


def test_hostile_names_and_odd_numbers_leave_report_and_json_sound(tmp_path: Path) -> None:
    name = "\x1b[2J<script>\n\u202e" + "x" * 10_000
    specs: list[Spec] = [(name, WEIGHT, floats(1)), (name + "y", WEIGHT, floats(1)), ("z", "\x1b[31m", floats(1))]
    a = one_file(tmp_path / "a", specs, state=TrainingState(scalars={"\x07": {"z": float("inf")}}))
    changed: list[Spec] = [(name, WEIGHT, floats(float("inf"))), ("z", "\x1b[31m", floats(float("nan")))]
    b = one_file(tmp_path / "b", changed, state=TrainingState(scalars={"\x07": {"z": "\x1b]0;owned\x07"}}))
    report = verify(a, b)
    text = json.dumps(report.to_json(), allow_nan=False)
    assert json.loads(text)["tensors"][0]["difference"]["b"]["value"] == "inf"
    for line in [*report.lines(verbose=True), *every_text(report.to_json())]:
        assert line.isprintable()
        assert len(line) < 2500


def test_json_says_the_same_as_the_report(tmp_path: Path) -> None:
    other = [(f, r, array.copy()) for f, r, array in MODEL]
    other[0][2][3, 1] += 0.5
    found = verify(sharded(tmp_path / "a", MODEL), one_file(tmp_path / "b", other)).to_json()
    assert found["equal"] is False
    assert found["counts"] == {"=": 4, "*": 1, "-": 0, "+": 0, "!": 0}
    assert found["kinds"] == {"values": 1, "equal": 4}
    assert found["tensors"][0] == {
        "status": "*",
        "kind": "values",
        "fqn": "embed.weight",
        "role": "weight",
        "bytes": 48,
        "difference": {
            "num_different": 1,
            "numel": 12,
            "index": [3, 1],
            "a": {"value": 10.0, "bits": "41200000", "file": f"{tmp_path}/a/rank2", "offset": 10, "rank": 2},
            "b": {"value": 10.5, "bits": "41280000", "file": f"{tmp_path}/b/data", "offset": 44, "rank": None},
            "largest": 0.5,
            "num_nan": 0,
        },
    }


def test_a_long_list_is_cut_unless_asked_for(tmp_path: Path) -> None:
    a = one_file(tmp_path / "a", [(f"x{number}", WEIGHT, floats(1)) for number in range(100)])
    b = one_file(tmp_path / "b", [("y", WEIGHT, floats(1))])
    lines = list(verify(a, b).lines())
    assert sum(line.startswith("- ") for line in lines) == 20
    assert "... and 80 more of the kind missing; -v lists them all" in lines
    assert sum(line.startswith("- ") for line in verify(a, b).lines(verbose=True)) == 100


def test_a_transposed_and_a_boxed_layout_of_one_matrix(tmp_path: Path) -> None:
    matrix = np.arange(24, dtype="<f4").reshape(4, 6)
    a = described(
        tmp_path / "a",
        {("w", WEIGHT): Tensor("w", WEIGHT, FLOAT32, (4, 6), columns(tmp_path / "a" / "t", FLOAT32, (4, 6)))},
        {"t": matrix.T.tobytes()},
    )
    b = sharded(tmp_path / "b", [("w", WEIGHT, matrix)])
    assert verify(a, b).equal
    report = verify(flip_byte(a, "t", 4 * (5 * 4 + 2)), b)
    assert not report.equal, "no error found: the checker is broken"
    difference = only_result(report).difference
    assert difference is not None
    assert (difference.index, difference.a.rank, difference.a.offset) == ((2, 5), 1, 88)


def columns(path: Path, dtype: DType, shape: Shape) -> Pieces:
    """Store a matrix on two ranks, each with half of the columns in column order."""
    rows, half = shape[0], shape[1] // 2
    boxes = [Box((0, 0), (rows, half)), Box((0, half), (rows, shape[1] - half))]
    return Pieces(
        tuple(
            Fragment(box, Extent(str(path), box.offsets[1] * rows * dtype.itemsize, dtype, box.sizes, (1, rows)), rank)
            for rank, box in enumerate(boxes)
        )
    )


@pytest.mark.parametrize("is_replica", [False, True])
def test_two_sides_compute_other_contents_under_one_path(tmp_path: Path, is_replica: bool) -> None:
    def computing(side: str, *values: float) -> Checkpoint:
        source = one_file(tmp_path / side, [("w", WEIGHT, floats(1, 2))])
        made_up = Whole(Extent.contiguous("made up:w", 0, FLOAT32, (2,)))
        tensor = source.tensors["w", WEIGHT]
        tensor = tensor._replace(replicas=(made_up,)) if is_replica else tensor._replace(source=made_up)
        content = floats(*values).data.cast("B")
        return replace(source, tensors={("w", WEIGHT): tensor}, computed={"made up:w": lambda: content})

    report = verify(computing("a", 1, 2), computing("b", 1, 3))
    assert [one.kind for one in report.results] == ["unreadable" if is_replica else "values"]
    assert verify(computing("c", 1, 2), computing("d", 1, 2)).equal
