"""`ckpt/compare/diff.py`, `changes.py`: changes between two checkpoints, against numpy on the same values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import ckpt
from ckpt.compare.changes import Change, together
from ckpt.compare.diff import Diff, layer_of
from ckpt.errors import UsageError
from tests.support.commands import ckpt as run_ckpt
from tests.support.places import FIXTURES

Arrays = Mapping[str, np.ndarray]


def saved(folder: Path, arrays: Arrays) -> Path:
    """Save a model folder with these tensors."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(dict(arrays), folder / "model.safetensors")
    return folder


def model(seed: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = {"embed.weight": (40, 8), "norm.weight": (8,)}
    shapes |= {f"layers.{layer}.{name}.weight": (16, 8) for layer in (0, 1, 2, 10) for name in ("up", "down")}
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def of(found: Diff, fqn: str) -> Change:
    change = next(one.change for one in found.results if one.fqn == fqn)
    assert change is not None
    return change


def test_numbers_are_those_of_numpy(tmp_path: Path) -> None:
    a, b = model(1), model(1)
    b["layers.2.up.weight"] += np.float32(0.01) * model(2)["layers.2.up.weight"]
    b["layers.2.up.weight"][3, 5] += 2
    found = ckpt.diff(saved(tmp_path / "a", a), saved(tmp_path / "b", b))
    change = of(found, "layers.2.up.weight")
    x, y = (side["layers.2.up.weight"].astype(np.float64).reshape(-1) for side in (a, b))
    assert change.relative == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x))
    assert change.cosine == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
    assert (change.largest, change.index) == (abs(y - x).max(), (3, 5))
    assert change.num_changed == np.count_nonzero(x != y) and change.numel == 128
    assert [one.fqn for one in found.changed] == ["layers.2.up.weight"]
    others = [one.change for one in found.results if one.fqn != "layers.2.up.weight"]
    assert all(one and (one.relative, one.largest, one.num_changed) == (0.0, 0.0, 0) for one in others)
    assert (found.exit_code, found.equal, found.within) == (0, False, None)


def test_a_layer_is_its_tensors_together(tmp_path: Path) -> None:
    a, b = model(1), model(2)
    found = ckpt.diff(saved(tmp_path / "a", a), saved(tmp_path / "b", b))
    assert list(found.layers) == ["embed", "layers.0", "layers.1", "layers.2", "layers.10", "norm"], "2 before 10"
    names = [f"layers.10.{name}.weight" for name in ("up", "down")]
    x, y = (np.concatenate([side[name].reshape(-1) for name in names]).astype(np.float64) for side in (a, b))
    layer = found.to_json()["layers"][4]
    assert (layer["layer"], layer["tensors"]) == ("layers.10", 2)
    assert layer["relative"] == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x))
    assert layer["largest"] == abs(y - x).max()


def test_dtypes_differ_and_nothing_is_rounded(tmp_path: Path) -> None:
    a = model(1)
    b = {name: array.astype(ml_dtypes.bfloat16) for name, array in a.items()}
    found = ckpt.diff(saved(tmp_path / "a", a), saved(tmp_path / "b", b))
    x, y = (side["embed.weight"].astype(np.float64) for side in (a, b))
    assert of(found, "embed.weight").relative == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x))
    assert ckpt.diff(tmp_path / "a", tmp_path / "b", rtol=2**-8).exit_code == 0, "half a unit in the last of 8 bits"
    assert ckpt.diff(tmp_path / "a", tmp_path / "b", rtol=2**-12).exit_code == 1


def test_a_run_of_three_ranks_against_its_model(tmp_path: Path) -> None:
    """Pieces of all ranks are read in place and compared with the live engine's truth."""
    run = FIXTURES / "toy-zero3"
    ckpt.convert(run, "hf", tmp_path / "out", names="own", dtype="bf16")
    truth = load_file(next((run / "truth").glob("*2*.safetensors")))
    found = ckpt.diff(run, tmp_path / "out", only="weights")
    change = of(found, "down.weight")
    x = truth["master/down.weight"]
    y = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    assert change.relative == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x.astype(np.float64)))
    assert found.num_compared > 5 and "across roles: master of A with weight of B" in str(found)


def test_what_is_no_number_is_counted_and_left_out_of_the_sums(tmp_path: Path) -> None:
    a, b = model(1), model(1)
    a["embed.weight"][0, 0] = b["embed.weight"][0, 0] = np.nan
    b["embed.weight"][1, 1], b["embed.weight"][2, 2] = np.inf, 5
    found = ckpt.diff(saved(tmp_path / "a", a), saved(tmp_path / "b", b), atol=100.0)
    change = of(found, "embed.weight")
    assert (change.not_finite, change.num_changed, change.num_beyond) == ((1, 2), 2, 1), "NaN on both sides is the same"
    assert change.largest == pytest.approx(abs(5.0 - model(1)["embed.weight"][2, 2]))
    assert change.relative is not None and change.relative < 1
    assert (found.within, found.exit_code) == (False, 1), "no tolerance is large enough for infinity"
    json.dumps(found.to_json(), allow_nan=False)


def test_zeros_have_neither_a_relative_error_nor_a_direction(tmp_path: Path) -> None:
    a, b = {"x.weight": np.zeros(4, "f4")}, {"x.weight": np.ones(4, "f4")}
    change = of(ckpt.diff(saved(tmp_path / "a", a), saved(tmp_path / "b", b)), "x.weight")
    assert (change.relative, change.cosine, change.largest) == (None, None, 1.0)
    assert of(ckpt.diff(tmp_path / "a", tmp_path / "a"), "x.weight").relative == 0.0


def test_whole_numbers_that_are_one_float_are_apart(tmp_path: Path) -> None:
    a, b = {"x.weight": np.array([2**53, 7])}, {"x.weight": np.array([2**53 + 1, 7])}
    places = saved(tmp_path / "a", a), saved(tmp_path / "b", b)
    found = of(ckpt.diff(*places), "x.weight")
    assert (found.num_changed, found.num_beyond, found.largest, found.index) == (1, 1, 1.0, (0,))
    assert run_ckpt("diff", *places, "--atol", "0").code == 1 and not ckpt.verify(*places).equal


@pytest.mark.parametrize(("a", "b"), [("<f4", "<f4"), (ml_dtypes.bfloat16, "<f4"), ("<f8", "<f2"), ("<c8", "<c8")])
def test_a_zero_with_another_sign_is_changed(tmp_path: Path, a: Any, b: Any) -> None:
    values = np.array([0.0, -0.0, 1.0, np.nan])
    places = [
        saved(tmp_path / name, {"x.weight": array})
        for name, array in (("a", values.astype(a)), ("b", abs(values).astype(b)), ("same", values.astype(b)))
    ]
    change = of(ckpt.diff(*places[:2]), "x.weight")
    assert (change.num_changed, change.num_beyond, change.largest) == (1, 0, 0.0)
    assert "1 of 1 tensor changed" in run_ckpt("diff", *places[:2]).out
    assert not of(ckpt.diff(places[0], places[2]), "x.weight").num_changed


def test_floats_of_eight_bits_are_compared_by_their_bits_alone(tmp_path: Path) -> None:
    a = {"x.weight": np.array([1, 2, 3, 4], ml_dtypes.float8_e4m3fn)}
    b = {"x.weight": np.array([1, 2, 3, 8], ml_dtypes.float8_e4m3fn)}
    c = {"x.weight": np.array([1, 2, 3, 8], np.float32)}
    folders = [saved(tmp_path / name, arrays) for name, arrays in (("a", a), ("b", b), ("c", c))]
    change = of(ckpt.diff(*folders[:2]), "x.weight")
    assert (change.num_changed, change.relative, change.largest) == (1, None, None)
    assert [one.kind for one in ckpt.diff(folders[0], folders[2]).results] == ["dtype"]


@pytest.mark.parametrize(("options", "code"), [({}, 0), ({"atol": 0.5}, 0), ({"rtol": 0.1}, 1), ({"atol": 0.1}, 1)])
def test_exit_codes(tmp_path: Path, options: dict[str, float], code: int) -> None:
    a, b = {"x.weight": np.ones(4, "f4")}, {"x.weight": np.array([1, 1, 1, 1.25], "f4")}
    places = saved(tmp_path / "a", a), saved(tmp_path / "b", b)
    found = ckpt.diff(*places, **options)
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    printed = run_ckpt("diff", *places, *flags)
    assert (found.exit_code, printed.code) == (code, code)
    assert printed.out == f"{found}\n" and printed.out.splitlines()[-1] == found.outcome
    assert json.loads(run_ckpt("diff", *places, *flags, "--json").out) == found.to_json()
    assert repr(found).startswith("<") and "1 of 1 tensor changed" in repr(found)
    assert found._repr_html_().startswith("<pre>")


def test_a_tensor_on_one_side_only_is_within_no_tolerance(tmp_path: Path) -> None:
    a, b = model(1), model(1)
    del b["norm.weight"]
    b["embed.weight"] = b["embed.weight"][:20]
    places = saved(tmp_path / "a", a), saved(tmp_path / "b", b)
    assert run_ckpt("diff", *places).code == 0
    printed = run_ckpt("diff", *places, "--atol", "100")
    assert printed.code == 1 and "- norm.weight (weight)" in printed.out
    assert "* embed.weight (weight): shape [40, 8] in A, [20, 8] in B" in printed.out


def test_what_cannot_be_read_ends_with_its_own_code(tmp_path: Path) -> None:
    places = saved(tmp_path / "a", model(1)), saved(tmp_path / "b", model(1))
    one, other = map(ckpt.open, places)
    (places[1] / "model.safetensors").write_bytes(b"")
    with pytest.raises(ckpt.CkptError, match="replaced") as caught:
        ckpt.diff(one, other)
    assert caught.value.exit_code == 4


def test_a_tolerance_below_zero_or_without_end_is_a_mistake(tmp_path: Path) -> None:
    place = saved(tmp_path / "a", model(1))
    with pytest.raises(UsageError, match=r"^rtol is not a tolerance"):
        ckpt.diff(place, place, rtol=float("nan"))
    assert run_ckpt("diff", place, place, "--atol", "-1").code == 2
    assert run_ckpt("diff", place, place, "--rtol", "inf", "--json").code == 2  # JSON can't represent it


@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1), min_size=1))
def test_parts_together_are_the_whole(parts: list[list[float]]) -> None:
    """The sums do not depend on the cut."""
    changes = [
        Change(len(part), 0, 0, (0, 0), (sum(x * x for x in part), 0.0, 0.0), 0.0, max(map(abs, part)), (n,))
        for n, part in enumerate(parts)
    ]
    whole, every = together(changes), [x for part in parts for x in part]
    assert whole.numel == len(every) and whole.largest == max(map(abs, every))
    assert whole.squares[0] == pytest.approx(sum(x * x for x in every))
    assert max(map(abs, parts[whole.index[0]])) == whole.largest


def test_a_number_of_any_length_in_a_name_is_sorted(tmp_path: Path) -> None:
    place = saved(tmp_path / "a", {f"l.{number}.w": np.ones(2, "f4") for number in ("9" * 5000, "10", "9")})
    assert [name[:4] for name in ckpt.diff(place, place).layers] == ["l.9", "l.10", "l.99"]


def test_states_of_the_optimizer_are_a_layer_each() -> None:
    run = FIXTURES / "trainer-zero2"
    found = ckpt.diff(run, run)
    assert list(found.layers)[-3:] == ["exp_avg", "exp_avg_sq", "master"] and "model.layers.0" in found.layers
    found = ckpt.diff(run / "checkpoint-1", run / "checkpoint-2")
    assert found.changed[0].role == "weight", "the model's come first"
    assert "step: 1.0 in A, 2.0 in B, for 23 parameters" in str(found), "one line for all of them"


@pytest.mark.parametrize(
    ("fqn", "layer"),
    [("model.layers.3.mlp.up.weight", "model.layers.3"), ("lm_head.weight", "lm_head"), ("scale", "scale")],
)
def test_the_layer_of_a_name(fqn: str, layer: str) -> None:
    assert layer_of(fqn) == layer
