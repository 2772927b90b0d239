"""`ckpt/containers/dcp/metadata.py`: a flipped bit in DCP's `.metadata` changes nothing or is refused."""

from __future__ import annotations

import pickle
import pickletools
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt import api
from ckpt.errors import CkptError
from ckpt.plan.checkpoint import Layout
from tests.support.commands import ckpt

FLIPS = 400


def outcome(step: Path) -> tuple[Any, ...]:
    """Return every copy that a conversion would make, and all other content it would write."""
    checkpoint = api.open(step)
    plan = api.plan(checkpoint, "full", Layout(world_size=1)).plan
    copies = [(t.fqn, t.role, t.dtype, t.shape, [(str(f.region), f.extent) for f in t.fragments()])
              for _, t in sorted(checkpoint.tensors.items())]  # fmt: skip
    groups = [(group.fqns, repr(group.options)) for group in checkpoint.state.param_groups]
    literals = [file.literals for file in plan.target.files]
    return copies, checkpoint.ties, checkpoint.state.scalars, groups, checkpoint.state.step, literals


@pytest.mark.parametrize("name", ["dcp-torch21-fsdp1", "dcp-torch23-fsdp1", "dcp-fsdp2"])
def test_flipped_bits_are_refused_or_change_nothing(fixtures: Path, tmp_path: Path, name: str) -> None:
    step = Path(shutil.copytree(fixtures / name / "step-2", tmp_path / "step"))
    expected = outcome(step)
    metadata = step / ".metadata"
    content = metadata.read_bytes()
    draw = random.Random(6)
    outcomes: Counter[str] = Counter()
    for _ in range(FLIPS):
        at, bit = draw.randrange(len(content)), draw.randrange(8)
        flipped = bytearray(content)
        flipped[at] ^= 1 << bit
        metadata.write_bytes(flipped)
        try:
            assert outcome(step) == expected, (at, bit)
            outcomes["the same"] += 1
        except CkptError as error:
            assert error.exit_code in (3, 4, 5, 6), (at, bit, str(error))
            outcomes["refused"] += 1
    assert outcomes["refused"] > 0.9 * FLIPS


@pytest.mark.parametrize("name", ["dcp-torch21-fsdp1", "dcp-fsdp2"])
def test_other_numbers_are_refused_or_change_nothing(fixtures: Path, tmp_path: Path, name: str) -> None:
    """Zero sizes would make tensors empty, and an offset of 0 would turn foreign bytes into values."""
    step = Path(shutil.copytree(fixtures / name / "step-2", tmp_path / "step"))
    expected = outcome(step)
    metadata = step / ".metadata"
    content = metadata.read_bytes()
    sizes = {"BININT1": 1, "BININT2": 2, "BININT": 4}
    num_refused = num_same = 0
    for opcode, number, at in pickletools.genops(content):
        assert at is not None
        if (size := sizes.get(opcode.name)) is None or number is None:
            continue
        for other in {0, 1, number + 1, (1 << (8 * size - 1)) - 1} - {number}:
            metadata.write_bytes(content[: at + 1] + other.to_bytes(size, "little") + content[at + 1 + size :])
            try:
                assert outcome(step) == expected, (at, number, other)
                num_same += 1
            except CkptError as error:
                assert error.exit_code in (3, 4, 5, 6), (at, number, other, str(error))
                num_refused += 1
    assert num_refused > 9 * num_same > 0


def renamed(metadata: Any, old: str, new: str, path: tuple[str, ...]) -> None:
    """Rename a tensor everywhere. No single flipped bit does this, only another kind of save."""
    from dataclasses import replace

    metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop(old)
    for index in [index for index in metadata.storage_data if index.fqn == old]:
        metadata.storage_data[replace(index, fqn=new)] = metadata.storage_data.pop(index)
    del metadata.planner_data[old]
    metadata.planner_data[new] = path


MEANINGLESS: dict[str, tuple[Callable[[Any], None], str]] = {
    "a state that is gone": (
        lambda m: [d.pop("optimizer.state.gain.exp_avg") for d in (m.state_dict_metadata, m.planner_data)][-1],
        "lacks a state of torch's Adam",
    ),
    "a state beside the states": (
        lambda m: renamed(
            m, "optimizer.state.gain.exp_avg", "optimizer.stats.gain.exp_avg", ("optimizer", "stats", "gain", "exp_avg")
        ),
        "lacks a state of torch's Adam",
    ),
    "states of no parameter": (
        lambda m: [
            renamed(m, f"optimizer.state.gain.{n}", f"optimizer.state.gaim.{n}", ("optimizer", "state", "gaim", n))
            for n in ("exp_avg", "exp_avg_sq", "step")
        ][-1],
        "states for a parameter missing from the model",
    ),
    "a path of another key": (
        lambda m: m.planner_data.__setitem__("model.gain", ("model", "frozen")),
        "path contradicts its key",
    ),
    "no path": (lambda m: m.planner_data.pop("model.gain"), "has no path in the state dict"),
}


@pytest.mark.parametrize("what", MEANINGLESS)
def test_what_is_not_understood_stops_the_conversion(fixtures: Path, tmp_path: Path, what: str) -> None:
    step = Path(shutil.copytree(fixtures / "dcp-fsdp2" / "step-2", tmp_path / "step"))
    change, message = MEANINGLESS[what]
    metadata = pickle.loads((step / ".metadata").read_bytes())
    change(metadata)
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    result = ckpt("convert", "dcp", "hf", step, "-o", tmp_path / "out")
    assert (result.code, result.out) == (4, ""), result.err
    assert message in result.err
    assert not (tmp_path / "out").exists()
