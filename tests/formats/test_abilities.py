"""`ckpt/plan/checkpoint.py`: formats declare their abilities, and no code asks for format names instead."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

import ckpt
from ckpt.plan import registry
from ckpt.plan.checkpoint import Format

ROOMS = (
    "commands/resume/resuming.py",
    "runs",
    "commands/inspect",
    "commands/check",
    "views",
    "state",
    "move",
    "containers",
)
#: Formats by uncommon ability.
SAID: dict[str, tuple[Callable[[Format], bool], str]] = {
    "no optimizer": (lambda one: not one.carries_optimizer, "gguf hf peft"),
    "blocks": (lambda one: one.carries_blocks, "dcp fsdp-ranks full"),
    "an optimizer always": (lambda one: one.always_has_optimizer, "trainer zero0 zero1 zero2 zero3"),
    "loaded from the run": (
        lambda one: one.loads_from == "run",
        "megatron megatron-deepspeed megatron-dist universal zero0 zero1 zero2 zero3",
    ),
    "these ranks only": (
        lambda one: not one.fits_other_ranks,
        "fsdp-ranks megatron-deepspeed torch-checkpointing zero1 zero2 zero3",
    ),
    "any axes": (lambda one: one.fits_other_axes, "megatron-dist"),
    "ranks are recorded": (lambda one: one.records_ranks, "megatron megatron-dist"),
    "all ranks on axes": (lambda one: one.ranks_on_axes == "all", "megatron-dist"),
    "model ranks on axes": (lambda one: one.ranks_on_axes == "model", "megatron"),
}


@pytest.mark.parametrize("ability", SAID)
def test_a_format_says_what_it_can_do(ability: str) -> None:
    has, names = SAID[ability]
    assert {name for name in registry.FORMATS if has(registry.get(name))} == set(names.split())


def test_every_format_has_the_defaults_of_the_protocol() -> None:
    assert all(isinstance(one, object) and Format in type(one).__mro__ for one in registry.all_formats())


def test_no_module_asks_for_the_name_of_a_format() -> None:
    root, names = Path(ckpt.__file__).parent, set(registry.FORMATS)
    files = [
        file for room in ROOMS for file in ([root / room] if room.endswith(".py") else (root / room).rglob("*.py"))
    ]
    assert len(files) > 40
    asked = [
        f"{file.relative_to(root)}:{node.lineno} {node.value!r}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert asked == []
