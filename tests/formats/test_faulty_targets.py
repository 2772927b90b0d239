"""`ckpt/plan/planner.py`, `ckpt/testing/faulty_targets.py`: a target that lacks one tensor is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import ckpt
from ckpt.errors import LossError
from ckpt.plan import registry
from ckpt.plan.checkpoint import Layout, Target
from ckpt.plan.planner import make_plan
from ckpt.testing.faulty_targets import forgotten, tampered
from tests.support.places import FIXTURES

#: Source for each format: a fixture whose tensors fit, with optimizer states.
SOURCES = {
    "gguf": "gguf/llama",
    "megatron": "megatron-dist-flattened",
    "megatron-dist": "megatron-dist-flattened",
    "megatron-deepspeed": "megatron-dist-flattened",
    "peft": "lora-zero3",
    "trainer": "trainer-zero2",
    "zero3": "toy-zero3",
}
WRITABLE = [name for name in registry.names() if registry.get(name).writes]
TITLE = "Targets of forgetful writers: refused for a parameter, a buffer, an optimizer state"


@pytest.mark.parametrize("name", WRITABLE)
def test_a_forgetful_writer_is_refused(name: str, tmp_path: Path, tables: dict[str, dict[str, dict[str, str]]]) -> None:
    source = SOURCES.get(name, "toy-zero2")
    shutil.copytree(FIXTURES / source, tmp_path / source, ignore=shutil.ignore_patterns("truth"))
    layout = Layout(world_size=2 if name in ("zero1", "zero2", "zero3", "dcp") else None)
    plan = ckpt.plan(ckpt.open(tmp_path / source), name, layout).plan
    format, checkpoint = registry.get(name), plan.checkpoint

    def proved(target: Target) -> None:
        make_plan(checkpoint, target, carries_optimizer=format.carries_optimizer)

    def count(way: str) -> None:
        tables[TITLE][name][way] = str(int(tables[TITLE][name].get(way, "0")) + 1)

    proved(plan.target)
    found = list(forgotten(checkpoint, plan.target))
    assert ("optimizer state" in [what for what, _ in found]) == format.carries_optimizer
    for what, keys in found:
        for way, target in tampered(plan.checkpoint, plan.target, keys):
            with pytest.raises((LossError, AssertionError), match=r"goes nowhere|would not be|cover|reason"):
                proved(target)
            count(way)
        if what == "parameter":  # also hide its optimizer states, because some writers would miss them
            keys = frozenset(key for key in checkpoint.tensors if key[0] in {fqn for fqn, _ in keys})
        unseen = {key: tensor for key, tensor in checkpoint.tensors.items() if key not in keys}
        with pytest.raises(LossError):
            proved(format.lay_out(replace(checkpoint, tensors=unseen), layout))
        count("never seen")
        reason = {**plan.target.left_out, **dict.fromkeys(keys, "said to the user")}
        zeroed = replace(next(target for _, target in tampered(plan.checkpoint, plan.target, keys)), left_out=reason)
        proved(zeroed)
        assert "said to the user" in zeroed.not_written
