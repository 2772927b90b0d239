"""The commands from Python.

`ckpt/api.py`, `ckpt/base/flags.py`, `words.py`, `results.py`, `errors.py`, `ckpt/runs/plan_lines.py`,
`ckpt/commands/formats/formats.py`, `ckpt/commands/inspect/inspecting.py`, `ckpt/commands/estimate/estimating.py`,
`ckpt/commands/merge_lora/merging.py`: functions, arguments and results.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import api
from ckpt.base.results import Returned
from ckpt.base.text import Brief, note_lines
from ckpt.base.words import Message, Note, in_python, joined, on_command_line
from ckpt.compare import manifest
from ckpt.errors import StorageError, UsageError
from ckpt.plan.checkpoint import Layout
from ckpt.processes.messages import dump, load
from tests.support.commands import ckpt as run_ckpt
from tests.support.places import FIXTURES

MODEL = str(FIXTURES / "trainer-zero2")


@pytest.fixture
def run(fixtures: Path) -> str:
    return str(fixtures / "toy-zero3")


def test_a_run_is_converted_and_verified_by_its_path(run: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = ckpt.convert(run, "zero3", out, world_size=2)
    assert done.path == str(out) and ckpt.open(out).world_size == 2
    assert ckpt.verify(run, out).equal and ckpt.verify(run, ckpt.open(out)).equal
    assert ckpt.verify(run, out, run=True).equal
    assert ckpt.verify(out).good
    assert ckpt.hash(run) == ckpt.hash(ckpt.open(out))
    assert ckpt.check(out).whole


def test_no_result_is_true_or_false() -> None:
    """`if ckpt.verify(a, b): rmtree(a)` must not delete different data. Every result class is tried."""
    for module in (
        "commands.check.checking",
        "commands.clean.cleaning",
        "commands.doctor.diagnosis",
        "commands.estimate.estimating",
        "commands.formats.formats",
        "commands.inspect.inspecting",
        "commands.merge_lora.effect",
        "commands.merge_lora.merge_proof",
        "commands.push.push",
        "compare.diff",
        "compare.manifest",
        "compare.transformers_loads",
    ):
        importlib.import_module(f"ckpt.{module}")
    classes, found = [Returned], set()
    while classes:
        one = classes.pop()
        classes += one.__subclasses__()
        found |= {one} if one.__module__.startswith("ckpt.") and one is not Returned else set()
    assert len(found) >= 15
    for one in found:
        with pytest.raises(TypeError, match=re.escape(one.verdict)):
            bool(object.__new__(one))
        assert all(hasattr(one, name.strip(" .")) for name in one.verdict.split(" or ")), one


def test_result_in_a_condition_names_what_to_ask(run: str) -> None:
    with pytest.raises(TypeError, match=r"Report is neither true nor false: ask for its \.equal$"):
        assert ckpt.verify(run, run)
    with pytest.raises(TypeError, match=r"\.whole$"):
        assert not ckpt.check(run)


def without_times(text: str) -> str:
    return re.sub(r"in \S+ s, \S+ \S?B/s", "in time", text)


def test_results_are_what_the_commands_print(run: str, fixtures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--names", "own", "--dtype", "bf16", "-o", str(out))
    planned = ckpt.plan(run, "hf", dtype="bf16", names="own")
    dry = run_ckpt("convert", "auto", "hf", run, *options, "--dry-run", "--json")
    assert planned.to_json(str(out)) == json.loads(dry.out)
    done = ckpt.convert(run, "hf", out, dtype="bf16", names="own")
    printed = run_ckpt("convert", "auto", "hf", run, *options, "--overwrite")
    assert without_times(printed.err).endswith(without_times(f"{done}\n"))
    results: dict[tuple[str, ...], Any] = {
        ("verify", run, str(out)): ckpt.verify(run, out),
        ("verify", run, run, "--run"): ckpt.verify(run, run, run=True),
        ("verify", str(out)): ckpt.verify(out),
        ("diff", run, str(out)): ckpt.diff(run, out),
        ("hash", run): ckpt.hash(run),
        ("check", run): ckpt.check(run),
        ("inspect", run): ckpt.inspect(run),
        ("inspect", run, "--tensors", "--tensor", "*.bias"): ckpt.inspect(run, tensors=True, tensor="*.bias"),
        ("inspect", str(fixtures / "trainer-zero2")): ckpt.inspect(fixtures / "trainer-zero2"),
        ("formats",): ckpt.formats(),
        ("estimate", "-q", MODEL, "--gpus", "4", "--lora-r", "8"): ckpt.estimate(MODEL, gpus=4, lora_r=8),
    }
    for command, result in results.items():
        said = run_ckpt(*command, "--json")
        assert (result.to_json(), result.exit_code) == (json.loads(said.out), said.code), command
        assert run_ckpt(*command).out == f"{result}\n", command
        assert len(repr(result)) < 400 and "\n" not in repr(result)
        assert result._repr_html_().startswith("<pre>") and "<toy" not in result._repr_html_()


def test_an_adapter_is_merged_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(FIXTURES / "trl-lora-zero3/outputs/qwen3-lora", tmp_path / "run")
    shutil.copytree(FIXTURES / "trl-lora-zero3/Qwen", tmp_path / "Qwen")
    monkeypatch.chdir(tmp_path)
    done = ckpt.merge_lora("run", "out", dtype="bf16")
    printed = run_ckpt("merge-lora", "run", "-o", "out", "--dtype", "bf16", "--overwrite", "--json")
    assert done.to_json() == json.loads(printed.out)
    assert ckpt.verify("out").good and ckpt.hash(done.conversion.source, dtype="bf16") != ckpt.hash("out")
    with pytest.raises(UsageError, match=r"adapter_weights needs one weight for each adapter\n"):
        ckpt.merge_lora("run", "other", adapter_weights=[0.5, 0.5])
    with pytest.raises(UsageError, match=r"combination='dare_linear' needs density"):
        ckpt.merge_lora("run", "other", adapter_weights=[0.5], combination="dare_linear")


def test_only_the_same_merge_goes_on_with_one_that_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(FIXTURES / "trl-lora-zero3/outputs/qwen3-lora", tmp_path / "run")
    shutil.copytree(FIXTURES / "trl-lora-zero3/Qwen", tmp_path / "Qwen")
    monkeypatch.chdir(tmp_path)

    def merge(weight: float) -> api.Converted:
        return ckpt.merge_lora(["run", "run"], "out", adapter_weights=[weight, 0.5], combination="linear", verify=True)

    def disk_is_full(*_: object) -> None:
        raise StorageError("no space on the disk")

    with monkeypatch.context() as patch, pytest.raises(StorageError) as caught:
        patch.setattr(manifest, "make_manifest", disk_is_full)
        merge(0.25)
    assert "rerun the command" in vars(caught.value)["__notes__"][0]
    with pytest.raises(UsageError, match="has other options or another source"):
        merge(0.75)
    done = merge(0.25)
    assert done.num_done == done.conversion.plan.moved_bytes and done.verified


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (lambda run: ckpt.plan(run, "hff"), "unknown format 'hff'\n(.|\n)*did you mean hf?"),
        (lambda run: ckpt.plan(run, "hf", dtyp="bf16"), "no option 'dtyp'(.|\n)*did you mean dtype?"),
        (lambda run: ckpt.plan(run, "hf", tp=2), r"found: tp\n\nhint: see help\(ckpt.convert\)"),
        (lambda run: ckpt.plan(run, "megatron", tp="two"), "tp cannot be 'two'\n  expected: int from 1 to"),
        (lambda run: ckpt.plan(run, "hf", names="hubb"), "names cannot be 'hubb'\n  expected: 'hub' or 'own'"),
        (lambda run: ckpt.convert(run, "hf", "out", world_size="two"), "ckpt.convert takes no world_size='two'\n"),
        (lambda run: ckpt.convert(run, "zero3", "out", world_size=0), "world_size cannot be 0\n"),
        (lambda run: ckpt.plan(run, "hf", dtype="bf17"), "no dtype='bf17'\n  expected: 'keep' or 'fp32'"),
        (lambda run: ckpt.plan(run, "hf", workers=True), "no workers=True\n  expected: int"),
        (lambda run: ckpt.plan(ckpt.open(run), "hf", tag="x"), "tag has no effect on an open checkpoint"),
        (lambda run: ckpt.hash(ckpt.open(run), "zero3"), "format has no effect on an open checkpoint"),
        (lambda run: ckpt.plan(run, "hf", Layout(), names="own"), "give a layout or options, not both"),
        (lambda run: ckpt.convert(run, "hf", run), "destination is, holds|overlap|holds files"),
        (lambda run: ckpt.open(run, tag=5), "ckpt.open takes no tag=5\n  expected: str or None"),
        (lambda run: ckpt.open(5), "ckpt.open takes no path=5"),
        (lambda run: ckpt.open(run, tg="x"), "takes no 'tg'\n(.|\n)*did you mean tag?"),
        (lambda run: ckpt.open(), "missing a required argument: 'path'"),
        (lambda run: ckpt.verify(run, only="weights"), "found: only$|found: only\n"),
        (lambda run: ckpt.verify(run, run, loads=True), "loads=?T?r?u?e? takes one folder|loads takes one folder"),
        (lambda run: ckpt.check(run, every=True), "takes no 'every'"),
        (
            lambda run: ckpt.inspect(run, tensor="embd"),
            "no tensor matches 'embd'(.|\n)*(did you mean|tensors=True without tensor lists)",
        ),
        (lambda run: ckpt.estimate(MODEL, gpus=0), "gpus cannot be 0\n  expected: int from 1"),
        (lambda run: ckpt.estimate(MODEL, optimizer="adm"), "takes no optimizer='adm'\n  expected: 'adam' or"),
        (lambda run: ckpt.estimate(MODEL, strategy="zero"), "unknown strategy 'zero'"),
        (lambda run: ckpt.resume(5), "ckpt.resume takes no path=5"),
        (lambda run: ckpt.load_into(5, run), "not a torch module\n  expected: torch.nn.Module\n  found: int"),
        (lambda run: ckpt.load_into(torch.nn.Linear(1, 1), 5), "this is not a path\n"),
        (lambda run: ckpt.plan(run, "hf").run(5), "ckpt.Conversion.run takes no destination=5"),
        (lambda run: ckpt.plan(run, "hf").run("x", overwrit=True), "takes no 'overwrit'(.|\n)*mean overwrite?"),
        (lambda run: ckpt.merge_lora([], "out"), "no adapter to merge"),
        (lambda run: ckpt.resume(run, wrld_size=2), "no option 'wrld_size'(.|\n)*did you mean world_size?"),
        (lambda run: ckpt.resume(run, wrld=2), r"no option 'wrld'(.|\n)*help\(ckpt.resume\)"),
        (
            lambda _: ckpt.plan("/no/such/run", "full", names="own"),
            "does not support the options of hf",
        ),  # it is not read
    ],
)
def test_mistakes_are_told_in_the_words_of_python(run: str, mistake: Callable[[str], object], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        mistake(run)
    assert " --" not in str(caught.value) and " -o" not in str(caught.value)


def test_options_are_said_as_keywords() -> None:
    for message, typed, said in (
        (
            Message("another folder with {output}, or {overwrite=True} to replace it"),
            "another folder with -o, or --overwrite to replace it",
            "another folder with output, or overwrite=True to replace it",
        ),
        (Message("{names=own} keeps {}", "them"), "--names own keeps them", "names='own' keeps them"),
        ("hint: " + Message("{tp=1}") + "!", "hint: --tp 1!", "hint: tp=1!"),
        (Message("pass {world_size=N}"), "pass --world-size N", "pass world_size=N"),
        (Message("{adapter_slot=1:8:ALPHA}: x"), "--adapter-slot 1:8:ALPHA: x", "adapter_slot='1:8:ALPHA': x"),
        (
            joined(" or ", (Message("{tag}", tag=name) for name in ("actor", "a b"))),
            "--tag actor or --tag 'a b'",
            "tag='actor' or tag='a b'",
        ),
        (
            Message("{accept_settings} ignores {!r}", "x", accept_settings=["a", "b"]),
            "--accept-setting a --accept-setting b ignores 'x'",
            "accept_settings=['a', 'b'] ignores 'x'",
        ),
        (Message("{output}", output="/runs/a b"), "-o '/runs/a b'", "output='/runs/a b'"),
        (Message("see {help=merge-lora}"), "see `ckpt merge-lora --help`", "see help(ckpt.merge_lora)"),
        (Message("{}: {{tp}}", Message("{tag} takes it")), "--tag takes it: {tp}", "tag takes it: {tp}"),
    ):
        sent = load(dump(UsageError(message)))
        for one in (message, pickle.loads(pickle.dumps(message)), sent.what):
            assert (str(one), in_python(one)) == (typed, said)
        assert (sent.on_command_line(), str(sent)) == (typed, said)
    assert in_python("a file called run--tag.pt") == "a file called run--tag.pt"


def test_notes_have_options_of_both_surfaces(fixtures: Path, tmp_path: Path) -> None:
    """Python callers read a note as a string. Commands and `--json` print it with the command line's words."""
    note = Brief(Message("{}; use {dtype=fp32}", "rounded"), "in short")
    for one in (note, pickle.loads(pickle.dumps(note))):
        assert (one, on_command_line(one), one.short) == (
            "rounded; use dtype='fp32'",
            "rounded; use --dtype fp32",
            "in short",
        )
    assert ("a " + Note("{tp=1}") + " b", note_lines([Note("{tp=1}")])) == ("a tp=1 b", ["note: --tp 1"])
    plan = ckpt.plan(fixtures / "toy-zero3", "hf")
    (told,) = (one for one in plan.plan.target.notes if "rounded" in one)
    assert told.endswith("use dtype='fp32' for the unrounded masters")
    assert told.replace("dtype='fp32'", "--dtype fp32") in plan.to_json()["notes"]
    assert any(one.endswith("use --dtype fp32 for the unrounded masters") for one in plan.lines())


@pytest.mark.parametrize("name", sorted(set(ckpt.__all__) - {"CkptError", "__version__"}))
def test_every_parameter_has_a_line_in_the_docstring(name: str) -> None:
    public = getattr(ckpt, name)
    signature = inspect.signature(vars(public)["__init__"] if isinstance(public, type) else public)
    described = re.findall(
        r"^    \*{0,2}(\w+): \S", (inspect.getdoc(public) or "").partition("\nArgs:\n")[2], re.MULTILINE
    )
    assert described == [one for one in signature.parameters if one != "self"]
