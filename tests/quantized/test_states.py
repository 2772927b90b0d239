"""`converters/quantized/states.py`: 8-bit and 4-bit optimizer states by torchao and bitsandbytes."""

from __future__ import annotations

import shutil
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import converters.quantized.states as states_module
from ckpt import api
from ckpt.containers.torchfile.values import Record, StoredTensor
from ckpt.errors import LossError
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint, Layout, OneElement
from ckpt.plan.dtypes import BY_NAME
from ckpt.plan.tensors import Extent
from ckpt.views.lazy import LazyTensor
from tests.faults.kinds import pickles_in
from tests.support.commands import ckpt
from tests.support.engines import raw
from tests.support.model_files import rewriting
from tests.support.places import FIXTURES

METHODS = {
    "ao8": "torchao OptimState8bit",
    "ao4": "torchao OptimState4bit",
    "aofp8": "torchao OptimStateFp8",
    "bnb8": "bitsandbytes",
}
SOURCES = [
    *(f"quantized-full/{kind}.pt" for kind in METHODS),
    *(f"quantized-dcp/{kind}" for kind in ("ao8", "ao4")),
    "quantized-ranks/ao8",
    *(f"quantized-zero{stage}/{kind}" for stage in (2, 3) for kind in ("ao8", "bnb8")),
]
NESTED = "__bnb_optimizer_quant_state__"


def truth(source: str) -> dict[tuple[str, str], torch.Tensor]:
    folder, _, name = source.partition("/")
    tensors = load_file(FIXTURES / folder / "truth" / f"{Path(name).stem}.safetensors")
    return {(name.partition("/")[2], name.partition("/")[0]): tensor for name, tensor in tensors.items()}


def assert_states_equal(checkpoint: Checkpoint, expected: Mapping[tuple[str, str], torch.Tensor]) -> None:
    found = {key: t for key, t in checkpoint.tensors.items() if key[1] not in (WEIGHT, MASTER, BUFFER)}
    assert found.keys() == expected.keys()
    for (fqn, state), tensor in expected.items():
        one = lazy(checkpoint, fqn, state)
        assert (one.dtype, one.shape) == (tensor.dtype, tensor.shape), (fqn, state)
        assert raw(one) == raw(tensor), (fqn, state)


def lazy(checkpoint: Checkpoint, fqn: str, role: str) -> torch.Tensor:
    found: torch.Tensor = LazyTensor(checkpoint.tensors[fqn, role], checkpoint.computed)[...]
    return found


@pytest.mark.parametrize("source", SOURCES)
def test_values_are_those_that_the_library_computes(source: str) -> None:
    checkpoint = api.open(FIXTURES / source)
    assert_states_equal(checkpoint, truth(source))
    assert set(checkpoint.quantized.methods.values()) == {METHODS[Path(source).stem]}
    assert not checkpoint.unread


@pytest.mark.parametrize("source", ["quantized-dcp/ao8", "quantized-zero2/bnb8", "quantized-zero3/bnb8"])
def test_values_that_are_computed_in_many_pieces(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_module, "BLOCK", 512)
    checkpoint = api.open(FIXTURES / source)
    assert len(checkpoint.computed) > 8
    assert_states_equal(checkpoint, truth(source))


@pytest.mark.parametrize("source", SOURCES)
def test_weights_are_converted_whatever_the_optimizer_has(source: str, tmp_path: Path) -> None:
    done = ckpt("convert", "auto", "hf", FIXTURES / source, "-o", tmp_path / "hf")
    assert done.code == 0, done.err
    checkpoint = api.open(FIXTURES / source)
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert written.keys() == {"up.weight", "gain", "shift"}
    for fqn, tensor in written.items():
        role = MASTER if (fqn, MASTER) in checkpoint.tensors else WEIGHT
        assert raw(tensor) == raw(lazy(checkpoint, fqn, role)), fqn


@pytest.mark.parametrize("to", ["full", "dcp", "zero3", "universal"])
@pytest.mark.parametrize("source", ["quantized-zero2/bnb8", "quantized-dcp/ao8"])
def test_states_become_plain_only_where_that_is_asked_for(source: str, to: str, tmp_path: Path) -> None:
    args = ["convert", "auto", to, FIXTURES / source, "-o", tmp_path / "out"]
    if source.endswith("bnb8") or to not in ("full", "dcp"):
        done = ckpt(*args)
        assert done.code == LossError.exit_code and "--optimizer-dtype fp32" in done.err
        assert not (tmp_path / "out").exists()
    done = ckpt(*args, "--optimizer-dtype", "fp32")
    assert done.code == 0, done.err
    assert "dequantized from" in done.err and "not written: optimizer" not in done.err
    assert_states_equal(api.open(tmp_path / "out"), truth(source))


# -- copied bit for bit -------------------------------------------------------------------------------------
def as_stored(checkpoint: Checkpoint) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the bytes of each quantized state in element order: codes, factors and the values of codes."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for key, stored in checkpoint.quantized.blocks.items():
        parts = [stored.parts[box] for box in sorted(stored.parts, key=lambda box: box.offsets)]
        fragments = sorted(stored.plain, key=lambda fragment: fragment.region.offsets)
        found[key] = {
            "codes": b"".join(map(bytes_of, (part.codes for part in parts))),
            "factors": b"".join(map(bytes_of, (part.factors for part in parts))),
            "values": {part.values and bytes_of(part.values) for part in parts},
            "plain": b"".join(map(bytes_of, (fragment.extent for fragment in fragments))),
            "kinds": {(part.method, part.num_bits, part.block_size) for part in parts},
        }
    return found


def bytes_of(extent: Any) -> bytes:
    return Path(extent.path).read_bytes()[extent.offset : extent.offset + extent.nbytes]


CARRIED = [
    *((f"quantized-full/{kind}.pt", "full", None) for kind in METHODS),
    *(("quantized-dcp/ao8", "dcp", ranks) for ranks in (1, 2, 4)),
    ("quantized-dcp/ao4", "dcp", 4),
    ("quantized-dcp/ao8", "full", None),
    ("quantized-full/ao8.pt", "dcp", 2),
    *(("quantized-ranks/ao8", "fsdp-ranks", ranks) for ranks in (1, 2, 4)),
    ("quantized-ranks/ao8", "dcp", 4),
    ("quantized-dcp/ao4", "fsdp-ranks", 2),
]


@pytest.mark.parametrize(("source", "to", "ranks"), CARRIED)
def test_blocks_are_carried_bit_for_bit_where_they_fall_on_the_cuts(
    source: str, to: str, ranks: int | None, tmp_path: Path
) -> None:
    checkpoint = api.open(FIXTURES / source)
    conversion = api.plan(checkpoint, to, Layout(world_size=ranks))
    assert not any("optimizer state" in line for line in conversion.plan.target.not_written)
    conversion.run(tmp_path / "out")
    again = api.open(tmp_path / "out", to)
    assert again.quantized.methods == checkpoint.quantized.methods and again.quantized.methods
    assert as_stored(again) == as_stored(checkpoint)
    assert_states_equal(again, truth(source))


@pytest.mark.parametrize(
    ("source", "to", "ranks", "why"),
    [
        ("quantized-dcp/ao8", "dcp", 3, "blocks of 256 elements do not match the cuts"),
        ("quantized-ranks/ao8", "fsdp-ranks", 3, "blocks of 256 elements do not match the cuts"),
        ("quantized-full/bnb8.pt", "dcp", 2, "bitsandbytes keeps it in several tensors"),
    ],
)
def test_blocks_that_cannot_be_carried_are_refused(source: str, to: str, ranks: int, why: str, tmp_path: Path) -> None:
    done = ckpt("convert", "auto", to, FIXTURES / source, "-o", tmp_path / "out", "--world-size", ranks)
    assert done.code == LossError.exit_code and why in done.err and "--optimizer-dtype fp32" in done.err
    assert not (tmp_path / "out").exists()


def test_parts_with_other_values_of_codes_are_not_put_together(tmp_path: Path) -> None:
    run = Path(shutil.copytree(FIXTURES / "quantized-ranks/ao8", tmp_path / "run"))
    (part,) = (
        one for box, one in api.open(run).quantized.blocks["up.weight", "exp_avg"].parts.items() if box.offsets[0]
    )
    with open(part.values.path, "r+b") as file:
        file.seek(part.values.offset)
        file.write(b"\1")
    with pytest.raises(LossError, match="cannot be copied") as caught:
        api.plan(api.open(run), "fsdp-ranks", Layout(world_size=1))
    assert "stored in different ways" in str(caught.value.found)
    api.plan(api.open(run), "fsdp-ranks")  # parts of different ranks stay separate


def test_zero_for_another_number_of_ranks_holds_plain_values(tmp_path: Path) -> None:
    source = "quantized-zero3/bnb8"
    args = ["--optimizer-dtype", "fp32", "--world-size", "3"]
    done = ckpt("convert", "zero3", "zero2", FIXTURES / source, "-o", tmp_path / "out", *args)
    assert done.code == 0, done.err
    again = api.open(tmp_path / "out")
    assert again.world_size == 3 and not again.quantized.methods
    assert_states_equal(again, truth(source))


def test_a_learning_rate_that_is_a_tensor_stays_one(tmp_path: Path) -> None:
    """Optimizers of torchao refuse to step with a plain number."""
    for source in ("quantized-dcp/ao8", "quantized-full/ao8.pt"):
        args = ["-o", tmp_path / "out", "--optimizer-dtype", "fp32", "--overwrite"]
        assert ckpt("convert", "auto", "full", FIXTURES / source, *args).code == 0
        group = torch.load(tmp_path / "out" / "optimizer.bin")["param_groups"][0]
        assert raw(group["lr"]) == raw(torch.tensor(1e-2))


# -- unknown forms --------------------------------------------------------------------------------
def bundle(path: Path, change: Any) -> Path:
    """Write bitsandbytes' file with edited states for one parameter."""
    content = torch.load(FIXTURES / "quantized-full/bnb8.pt", weights_only=False)
    change(content["optimizer"]["state"][2])  # up.weight
    torch.save(content, path)
    return path


def test_the_flat_form_of_bitsandbytes(tmp_path: Path) -> None:
    def flatten(states: dict[str, Any]) -> None:
        states.update(states.pop(NESTED))

    checkpoint = api.open(bundle(tmp_path / "model.pt", flatten))
    assert_states_equal(checkpoint, truth("quantized-full/bnb8.pt"))


def test_an_unknown_nested_state_is_listed(tmp_path: Path) -> None:
    path = bundle(tmp_path / "model.pt", lambda states: states.update(other={"a": torch.ones(2)}))
    done = ckpt(
        "convert", "full", "zero2", path, "-o", tmp_path / "o", "--world-size", "2", "--optimizer-dtype", "fp32"
    )
    assert done.code == 0, done.err
    assert "not written: optimizer state other of up.weight: it is a dict" in done.err


def test_what_is_quantized_in_an_unknown_way_is_listed(tmp_path: Path) -> None:
    def another_table(states: dict[str, Any]) -> None:
        states[NESTED]["qmap1"] = torch.ones(16)

    checkpoint = api.open(bundle(tmp_path / "model.pt", another_table))
    assert ("up.weight", "state1") not in checkpoint.quantized.methods and (
        "up.weight",
        "state2",
    ) in checkpoint.quantized.methods
    assert any("qmap1 of up.weight" in line for line in checkpoint.unread)


def test_one_ranks_part_is_not_taken_for_the_parameters_state(tmp_path: Path) -> None:
    """FSDP doesn't gather nested states. A full state dict has only states from the rank that wrote it."""

    def halve(states: dict[str, Any]) -> None:
        nested = states[NESTED]
        for number in "12":
            nested[f"state{number}"] = nested[f"state{number}"].flatten()[:4096].clone()
            nested[f"absmax{number}"] = nested[f"absmax{number}"][:16].clone()

    checkpoint = api.open(bundle(tmp_path / "model.pt", halve))
    assert ("up.weight", "state1") not in checkpoint.tensors
    assert any("state1 of up.weight" in line and "one rank" in line for line in checkpoint.unread)


# -- other states under ZeRO ------------------------------------------------------------------------
def zero_with(folder: Path, change: Any) -> Path:
    """Copy bitsandbytes' ZeRO-2 run with edited states on each rank."""
    shutil.copytree(FIXTURES / "quantized-zero2/bnb8", folder)
    for rank, path in enumerate(sorted(folder.rglob("*optim_states.pt"))):
        with rewriting(path) as content:
            change(content["optimizer_state_dict"]["base_optimizer_state"]["state"][0], rank)
    return folder


def test_a_state_of_one_element_is_a_number(tmp_path: Path) -> None:
    """`HybridStateOptimizer` of deepspeed 0.19.8 (tests/unit/simple_model.py) keeps a step as int and as tensor."""
    three = torch.full((1,), 3, dtype=torch.int64)
    run = zero_with(tmp_path / "run", lambda states, rank: states.update(tensor_step=three))
    checkpoint = api.open(run)
    number = checkpoint.state.scalars["tensor_step"]["up.weight"]
    assert isinstance(number, OneElement) and (number.value, number.shape) == (3, (1,))
    args = ["--world-size", "3", "--optimizer-dtype", "fp32"]
    done = ckpt("convert", "zero2", "zero1", run, "-o", tmp_path / "out", *args)
    assert done.code == 0, done.err
    for path in (tmp_path / "out").rglob("*optim_states.pt"):
        state = torch.load(path, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        assert raw(state["tensor_step"]) == raw(three)
        assert state["tensor_step"].shape == (1,)


def test_what_each_rank_has_for_itself_is_listed(tmp_path: Path) -> None:
    """Adafactor in transformers keeps the RMS of each update. Under ZeRO, an update covers one rank's flat buffer."""
    run = zero_with(
        tmp_path / "run", lambda states, rank: states.update(RMS=torch.tensor(0.5 + rank), rows=torch.ones(7))
    )
    done = ckpt("convert", "auto", "full", run, "-o", tmp_path / "out", "--optimizer-dtype", "fp32", "-v")
    assert done.code == 0, done.err
    for state, what in (("RMS", "a separate number on each rank"), ("rows", "a tensor of shape [7] on each rank")):
        assert f"not written: optimizer state {state} of 3 parameters (gain, ...): it is {what}" in done.err


def test_what_each_rank_of_fsdp_has_for_itself_is_listed(tmp_path: Path) -> None:
    """Under FSDP1, bitsandbytes and Adafactor treat a rank's part as the whole parameter."""
    weights = torch.arange(6.0)
    for rank in range(2):
        suffix = f"world_size_2_rank_{rank}.pt"
        states = {NESTED: {"state1": torch.ones(3)}, "RMS": torch.tensor(0.5 + rank), "step": 3}
        group = {"lr": 0.1, "params": [0], "param_names": ["w"]}
        torch.save({"w": weights}, tmp_path / f"model_{suffix}")
        torch.save({"state": {0: states}, "param_groups": [group]}, tmp_path / f"optim_{suffix}")
    done = ckpt("convert", "fsdp-ranks", "full", tmp_path, "-o", tmp_path.with_name("out"), "-v")
    assert done.code == 0, done.err
    assert f"not written: optimizer state {NESTED} of w: each rank has its own dict" in done.err
    assert "not written: optimizer state RMS of w: each rank has its own number" in done.err
    assert api.open(tmp_path.with_name("out")).state.scalars == {"step": {"w": 3}}


def test_ranks_of_different_steps_are_still_refused(tmp_path: Path) -> None:
    run = zero_with(tmp_path / "run", lambda states, rank: states.update(step=3 + rank))
    done = ckpt("convert", "auto", "hf", run, "-o", tmp_path / "out")
    assert done.code == 4 and "different steps" in done.err


def test_numbers_that_are_tensors_stay_tensors(tmp_path: Path) -> None:
    """Adam-mini's `vmean` and NAdam's `mu_product` are updated in place."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.NAdam(model.named_parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "model.pt")
    expected = optimizer.state_dict()["state"][0]["mu_product"]
    for to in ("full", "dcp"):
        assert ckpt("convert", "full", to, tmp_path / "model.pt", "-o", tmp_path / to).code == 0
        number = api.open(tmp_path / to).state.scalars["mu_product"]["weight"]
        assert isinstance(number, OneElement) and number.value == expected.item()
    written = torch.load(tmp_path / "full" / "optimizer.bin")["state"]["weight"]["mu_product"]
    assert raw(written) == raw(expected) and written.shape == expected.shape


@pytest.mark.parametrize("mode", [True, False])
def test_weights_of_a_schedule_free_run_are_told_apart(mode: bool, tmp_path: Path) -> None:
    """Groups of schedulefree 1.4 record which of the two points the parameters hold."""
    group = {"lr": 0.1, "train_mode": mode, "weight_sum": 0.3, "params": [0], "param_names": ["w"]}
    optimizer = {"state": {0: {"z": torch.ones(3), "exp_avg_sq": torch.ones(3)}}, "param_groups": [group]}
    torch.save({"model": {"w": torch.ones(3)}, "optimizer": optimizer}, tmp_path / "model.pt")
    done = ckpt("convert", "full", "hf", tmp_path / "model.pt", "-o", tmp_path / "hf")
    assert done.code == 0 and ("schedule-free optimizer was in training mode" in done.err) is mode


def test_codes_of_no_element_beside_scales_are_no_state() -> None:
    """A damaged shape in the pickle leaves no codes, so the block size is undefined."""
    parts = {"codes": ("uint8", 0), "scale": ("float32", 2), "qmap": ("float32", 256)}
    stored = {name: StoredTensor(Extent.contiguous("file", 0, BY_NAME[d], (n,))) for name, (d, n) in parts.items()}
    assert states_module.torchao(Record("torchao.optim.subclass_8bit", "OptimState8bit", (), None, stored)) is None


def test_a_state_that_has_not_the_shape_of_its_place_is_refused(tmp_path: Path) -> None:
    """A wrong chunk size in `.metadata` must not silently drop one state and keep its siblings."""
    run = Path(shutil.copytree(FIXTURES / "quantized-dcp/ao8", tmp_path / "run"))
    metadata = bytearray((run / ".metadata").read_bytes())
    assert metadata[1639] == 64
    metadata[1639] = 63
    (run / ".metadata").write_bytes(metadata)
    done = ckpt("convert", "dcp", "full", run, "-o", tmp_path / "out")
    assert (done.code, (tmp_path / "out").exists()) == (4, False)
    assert "shape [63, 64]" in done.err and "shape [64, 64]" in done.err and "up.weight" in done.err


@pytest.mark.parametrize(
    ("sample", "format", "name", "at"),
    [
        ("quantized-dcp/ao8", "dcp", "__1_0.distcp", 43820),
        ("quantized-ranks/ao8", "fsdp-ranks", "optim_world_size_2_rank_0.pt", 2615),
    ],
)
def test_a_state_whose_parts_do_not_fit_each_other_is_damaged_where_those_of_others_do(
    sample: str, format: str, name: str, at: int, tmp_path: Path
) -> None:
    """Refuse a torchao object if its size contradicts the others.

    If all of a kind differ, ckpt notes it and moves the weights.
    """
    run = Path(shutil.copytree(FIXTURES / sample, tmp_path / "run"))
    file = run / name
    content = bytearray(file.read_bytes())
    record = next(record for record in pickles_in(bytes(content)) if at in record)
    old = zlib.crc32(content[record.start : record.stop])
    content[at] = 0
    new = zlib.crc32(content[record.start : record.stop])
    file.write_bytes(bytes(content).replace(struct.pack("<I", old), struct.pack("<I", new)))
    done = ckpt("convert", format, "full", run, "-o", tmp_path / "out", "-q")
    assert (done.code, (tmp_path / "out").exists()) == (4, False)
    assert "the parts don't match" in done.err and name in done.err


def test_a_state_that_one_rank_calls_otherwise_is_refused_wherever_it_goes(tmp_path: Path) -> None:
    """Writing such states as plain storages of codes must not raise an AssertionError."""
    run = Path(shutil.copytree(FIXTURES / "quantized-ranks/ao8", tmp_path / "run"))
    file = run / "optim_world_size_2_rank_1.pt"
    content = file.read_bytes()
    at = content.index(b"exp_avgq")
    record = next(record for record in pickles_in(content) if at in record)
    changed = content[:at] + b"another" + content[at + 7 :]
    old, new = (zlib.crc32(one[record.start : record.stop]) for one in (content, changed))
    file.write_bytes(changed.replace(struct.pack("<I", old), struct.pack("<I", new)))
    for options in ((), ("--flat-optimizer",)):
        done = ckpt("convert", "fsdp-ranks", "dcp", run, "-o", tmp_path / "out", "--world-size", "2", *options)
        assert (done.code, (tmp_path / "out").exists()) == (4, False), done.err
        assert "part of a tensor is stored nowhere" in done.err
