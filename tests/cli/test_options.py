"""`ckpt/cli/parser.py`, `ckpt/plan/options.py`: formats' own options, listed in the help by format."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ckpt
from ckpt.errors import CkptError, UsageError
from ckpt.plan import registry
from ckpt.plan.checkpoint import Layout, ReadRequest
from ckpt.plan.options import OF_FILES, Option, option, options_of
from ckpt.views.lazy import OpenCheckpoint
from converters.names.megatron.options import MegatronOptions
from tests.support.commands import ckpt as run_ckpt
from tests.support.commands import process
from tests.support.places import FIXTURES


@dataclass(frozen=True)
class Marks:
    """Options for a third-party format."""

    mark: str | None = option("A mark.", choices=("red", "blue"))
    depth: int = option("How deep.", default=3, min=1)
    plain: bool = option("Without marks.", default=False)


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Register a module as another package's options."""
    module = ModuleType("marks_of_tests")
    module.Marks = Marks  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entries = {"ckpt.format_options": {"marks": "marks_of_tests:Marks"}}
    monkeypatch.setattr(registry, "entries", lambda group: entries.get(group, {}))
    return module


def section(text: str, title: str) -> str:
    return text.split(f"\n{title}:\n")[1].split("\n\n")[0]


def test_the_options_of_a_format_are_in_the_help_under_its_name(marks: ModuleType) -> None:
    text = run_ckpt("convert", "--help").out
    of_megatron = section(text, "Options of megatron, megatron-dist, megatron-deepspeed")
    for one in options_of(MegatronOptions):
        assert f"--{one.name.replace('_', '-')}" in of_megatron
        assert f"--{one.name.replace('_', '-')}" not in section(text, "Options")
    of_marks = section(text, "Options of marks")
    assert "--mark <red|blue>" in of_marks
    assert "--depth N" in of_marks
    assert "Without marks." in of_marks
    assert "--no-plain" not in of_marks


def test_a_declaration_is_read_from_its_dataclass() -> None:
    assert options_of(Marks) == (
        Option("mark", str, None, "A mark.", choices=("red", "blue")),
        Option("depth", int, 3, "How deep.", min=1),
        Option("plain", bool, False, "Without marks."),
    )


def test_a_layout_gives_a_format_its_own_options() -> None:
    layout = Layout(tp=2, vpp=None, mark="red")
    assert layout.options == {"tp": 2, "mark": "red"}
    assert layout.read(MegatronOptions) == MegatronOptions(tp=2)
    assert layout.read(Marks) == Marks("red")
    assert layout == Layout(options={"tp": 2}, mark="red")
    assert replace(layout, world_size=4).options == layout.options


def test_an_option_for_reading_is_taken_where_it_has_a_meaning(fixtures: Path, marks: ModuleType) -> None:
    """The reader gets the typed value. It is refused elsewhere, and is no option for writing."""
    more = {"applies_to": "a run with shades", "absent": "there are no shades here"}
    shades = {"strategy": option("A shade.", **more, choices=("dark",)), "__annotations__": {"strategy": "str | None"}}
    marks.Marks = dataclass(frozen=True)(type("Shades", (), shades))  # type: ignore[attr-defined]
    assert ReadRequest(options={"strategy": "dark", "adapter_slot": "1:2:3"}).read(marks.Marks) == marks.Marks("dark")
    assert "--strategy <dark>" in section(run_ckpt("convert", "--help").out, "What is read")
    assert "--strategy <dark>" in section(run_ckpt("merge-lora", "--help").out, "What is read")
    assert "--strategy" not in run_ckpt("resume", "--help").out
    run = fixtures / "toy-zero3"
    for function in (ckpt.open, partial(ckpt.plan, to="hf"), partial(ckpt.merge_lora, output=run / "out")):
        with pytest.raises(UsageError, match=r"(?s)no shades here.*expected: a run with shades.*leave strategy out"):
            function(run, strategy="dark")
        with pytest.raises(UsageError, match="strategy cannot be 'light'"):
            function(run, strategy="light")
    with pytest.raises(UsageError, match=r"(?s)ckpt.open takes no 'strategies'.*did you mean strategy?"):
        ckpt.open(run, strategies="dark")
    with pytest.raises(UsageError, match=r"(?s)has no option 'strategies'.*did you mean strategy?"):
        ckpt.plan(run, "hf", strategies="dark")
    with pytest.raises(UsageError, match="has no option 'strategy'"):
        ckpt.plan(run, "hf", Layout(strategy="dark"))


def test_options_of_every_format_are_parameters() -> None:
    for command, functions in {"convert": (ckpt.convert, ckpt.plan, ckpt.mount), "resume": (ckpt.resume,)}.items():
        for function in functions:
            assert {*registry._OF_ALL[command]} <= inspect.signature(function).parameters.keys()


def test_an_option_of_another_format_is_a_mistake(fixtures: Path, marks: ModuleType, tmp_path: Path) -> None:
    run = str(fixtures / "toy-zero3")
    result = run_ckpt("convert", "auto", "hf", run, "--tp", "2", "--dry-run")
    assert result.code == 2
    assert "the format 'hf' does not support Megatron's parallel axes" in result.err
    result = run_ckpt("convert", "auto", "hf", run, "--mark", "red", "--dry-run")
    assert result.code == 2
    assert "the format 'hf' does not support the options of marks" in result.err
    assert "found: --mark" in result.err
    assert run_ckpt("convert", "auto", "hf", run, "--depth", "3", "--dry-run").code == 0  # like a missing option
    with pytest.raises(UsageError, match="has no option 'colour'"):
        ckpt.plan(ckpt.open(run), "hf", Layout(colour="red"))
    with pytest.raises(UsageError, match="did you mean max_shard_size"):
        ckpt.convert(run, "hf", tmp_path / "hf", max_shard_sizes=3)
    with pytest.raises(UsageError, match=r"(?s)no option .max_shard_size.*see help"):  # only `convert` has it
        ckpt.resume(run, format="hf", model_only=True, max_shard_size=3)
    assert run_ckpt("convert", "auto", "hf", run, "--mark", "green").code == 2
    assert run_ckpt("convert", "auto", "hf", run, "--depth", "0").code == 2


def test_two_options_of_one_name_are_a_mistake(fixtures: Path, marks: ModuleType) -> None:
    for name in ("tp", "dtype"):
        other = dataclass(frozen=True)(type("Other", (), {name: option("Another."), "__annotations__": {name: "int"}}))
        marks.Marks = other  # type: ignore[attr-defined]
        result = run_ckpt("convert", "auto", "hf", fixtures / "toy-zero3", "--dry-run")
        assert result.code == 2
        assert f"`ckpt convert` has two options named --{name}" in result.err
        assert "marks" in result.err
        assert run_ckpt("inspect", fixtures / "toy-zero3").code == 0


def test_a_package_that_cannot_be_imported_is_named(fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entries", lambda group: {"gone": "gone_from_here:FORMAT"})
    result = run_ckpt("convert", "auto", "hf", fixtures / "toy-zero3")
    assert result.code == 2
    assert "registers 'gone_from_here:FORMAT', but Python can't import it" in result.err
    assert "hint: update that package, or uninstall it" in result.err


def test_commands_other_than_convert_do_not_look_for_options() -> None:
    code = "import sys; from ckpt.cli import app\ntry: app(sys.argv[1:])\nexcept SystemExit: pass\n"
    code += "print([name for name in sys.modules if name.startswith('converters')])"
    assert process("--help", script=code).out.splitlines()[-1] == "[]"
    known = process("convert", "--help", script=code).out.splitlines()[-1]
    assert "converters.names.megatron.options" in known
    assert "converters.names.megatron.relation" not in known


# -- every target and every option -------------------------------------------------------------------------------------
#: Sources with base options; each tested option is added to them.
SOURCES: dict[str, tuple[dict[str, Any], ...]] = {
    "gguf/llama": ({},),
    "trainer-plain": ({"world_size": 2}, {}, {"tp": 2}),
    "autotp-zero1": (
        {},
        {"pp": 2},
        {"pp": 2, "pipeline_model_parallel_layout": "E|t|t|L"},
        {"pp": 2, "account_for_loss_in_pipeline_split": True},
        {"pp": 2, "account_for_embedding_in_pipeline_split": True},
    ),
    "experts-zero1": ({},),
    "quantized-zero2/bnb8": ({},),
    "lora-zero3": ({},),
    "autoep-full": ({},),
    "verl-fsdp1": ({},),
}
#: A non-default value for each option.
VALUES: dict[str, Any] = {
    "dtype": "fp16",
    "optimizer_dtype": "fp32",
    "server": "vllm",
    "world_size": 8,
    "max_shard_size": "2KB",
    "tp": 2,
    "pp": 2,
    "ep": 2,
    "vpp": 2,
    "etp": 2,
    "decoder_first_pipeline_num_layers": 1,
    "decoder_last_pipeline_num_layers": 1,
    "account_for_embedding_in_pipeline_split": True,
    "account_for_loss_in_pipeline_split": True,
    "pipeline_model_parallel_layout": "Ett|L",
    "transformer_impl": "local",
    "make_vocab_size_divisible_by": 64,
    "ckpt_format": "fsdp_dtensor",
    "names": "own",
    "flat_optimizer": True,
    "strict": True,
    "step_folder": True,
    "ep_size": 2,
    "fsdp_version": 2,
    "mesh_device": "npu",
}
#: Options some sources already satisfy, for example plain states.
HOLDS = {"optimizer_dtype", "names", "fsdp_version", "etp", "tp", "pp", "world_size", "transformer_impl", "ep_size"}
HOLDS |= {"flat_optimizer", "strict", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"}
#: Options a format declares with others but refuses.
OF_OTHERS = {"hf": {"flat_optimizer"}, "megatron-deepspeed": {"ep", "vpp", "etp", "transformer_impl"}}


def planned(source: OpenCheckpoint, target: str, options: dict[str, Any]) -> object:
    conversion = ckpt.plan(source, target, **options)
    return conversion.plan.target.files, conversion.plan.target.not_written, conversion.plan.checkpoint.computed


def outcomes(source: OpenCheckpoint, target: str, base: dict[str, Any], values: dict[str, Any]) -> Iterator[str | None]:
    """Yield whether each option changes the plan, or None if the source can't become the target."""
    try:
        usual = planned(source, target, base)
    except CkptError:
        usual = None
    for name, value in values.items():
        try:
            changed = planned(source, target, base | {name: value})
        except UsageError as error:
            assert error.hint, error
            yield "refused"
        except CkptError:
            yield None
        else:
            yield "none" if changed == usual else "effect"


@pytest.fixture(scope="module")
def sources() -> dict[str, OpenCheckpoint]:
    return {place: ckpt.open(FIXTURES / place) for place in SOURCES}


@pytest.mark.parametrize("target", [one.name for one in registry.all_formats() if one.writes])
def test_every_option_has_an_effect_or_is_refused(sources: dict[str, OpenCheckpoint], target: str) -> None:
    declared = {one.name for owner in registry.declared_options() for one in options_of(owner)}
    declared -= registry.options_for_reading().keys()
    assert VALUES.keys() == declared | {"dtype", "optimizer_dtype", *OF_FILES}
    takes = {"dtype", *registry.get(target).takes}
    for owner, formats in registry.declared_options().items():
        takes |= {one.name for one in options_of(owner) if not one.is_for_reading} if target in formats else set()
    values = VALUES | ({"names": "torchtitan"} if target in ("dcp", "torch-checkpointing") else {})
    found: dict[str, set[str | None]] = {name: set() for name in values}
    for place, bases in SOURCES.items():
        for base in bases:
            for name, seen in zip(values, outcomes(sources[place], target, base, values), strict=True):
                found[name].add(seen)
    assert {name for name, seen in found.items() if "none" in seen} <= HOLDS
    taken = {name for name, seen in found.items() if seen & {"effect", "none"}}
    assert taken - {"optimizer_dtype"} == takes - OF_OTHERS.get(target, set())
    assert {name for name, seen in found.items() if "refused" in seen} >= VALUES.keys() - taken
