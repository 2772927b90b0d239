"""The command line; `tests/golden` has its sessions.

`ckpt/commands/convert/command.py`, `ckpt/commands/inspect/command.py`, `ckpt/commands/verify/command.py`,
`ckpt/options/command.py`, `printing.py`, `ckpt/api.py`: arguments, output and exit codes.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt import api, commands
from ckpt.base.text import show_size
from ckpt.errors import CkptError, UsageError
from ckpt.plan import registry
from ckpt.plan.checkpoint import Layout
from ckpt.plan.dtypes import FLOAT32
from tests.support.building import write_stage2
from tests.support.commands import ckpt as run_ckpt
from tests.support.commands import process, snapshot
from tests.support.engines import Truth, raw
from tests.support.places import FIXTURES, REPOSITORY
from tests.support.sampling import sample


@pytest.fixture
def run(fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy a run to `outputs` in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(fixtures / "toy-zero3", tmp_path / "outputs")
    return Path("outputs")


# -- options ----------------------------------------------------------------------------------------------------------
def test_the_command_of_the_readme(run: Path) -> None:
    result = run_ckpt("convert", "zero3", "hf", "./outputs")
    assert (result.code, result.out) == (0, "outputs-hf\n")
    truth = Truth.load(run / "truth" / "global_step2.safetensors")
    written = {name: raw(tensor) for name, tensor in load_file("outputs-hf/model.safetensors").items()}
    live = {fqn: truth.tensors.get((fqn, "weight")) or truth.tensors[fqn, "buffer"] for fqn in written}
    assert written == live
    assert set(written) == {fqn for fqn, role in truth.tensors if role in ("weight", "buffer")} - set(truth.ties)


# -- stdout, stderr, --json, -q, -v -----------------------------------------------------------------------------------
def test_json_is_all_that_is_on_stdout(run: Path) -> None:
    commands = {
        "dry run": ("convert", "zero3", "hf", run, "--dry-run", "--json"),
        "convert": ("convert", "zero3", "hf", run, "--json"),
        "verify": ("verify", run, run, "--json"),
        "inspect": ("inspect", run, "--json"),
        "tensors": ("inspect", run, "--json", "--tensors"),
        "formats": ("formats", "--json"),
    }
    found = {}
    for name, command in commands.items():
        result = run_ckpt(*command)
        assert result.code == 0, result.err
        found[name] = json.loads(result.out)
    assert found["dry run"] == found["convert"]
    assert found["convert"]["format"] == "zero3"
    assert found["convert"]["total_bytes"] == sum(file["bytes"] for file in found["convert"]["files"])
    assert found["convert"]["files"][0]["bytes"] == Path("outputs-hf/model.safetensors").stat().st_size
    assert found["convert"]["left_out"]
    assert {row["name"] for row in found["formats"]} == set(registry.names())


# -- exit codes -------------------------------------------------------------------------------------------------------
def stop_with(error: BaseException) -> Callable[..., Any]:
    def stop(*args: Any, **options: Any) -> Any:
        raise error

    return stop


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("inspect", "out\0puts"), 2, "null byte"),
        (("inspect", "x" * 5000), 4, "error: "),
        (("convert", "zero3", "zero3", "outputs", "--world-size", "9" * 5000, "--dry-run"), 2, "--world-size"),
    ],
)
def test_arguments_that_nobody_types(run: Path, words: tuple[str, ...], code: int, said: str) -> None:
    before = snapshot(Path())
    result = run_ckpt(*words)
    assert (result.code, result.out) == (code, "") and said in result.err and "Traceback" not in result.err
    assert snapshot(Path()) == before


@pytest.mark.parametrize(
    ("command", "place"),
    [
        ("inspect", "inspect.inspecting.open_checkpoint"),
        ("check", "check.checking.open_checkpoint"),
        ("resume", "resume.resuming.source_of"),
    ],
)
def test_an_interrupted_command_has_its_exit_code(
    run: Path, monkeypatch: pytest.MonkeyPatch, command: str, place: str
) -> None:
    """The interrupt is no finding about the checkpoint."""
    monkeypatch.setattr(f"ckpt.commands.{place}", stop_with(KeyboardInterrupt()))
    result = run_ckpt(command, run)
    assert (result.code, result.out) == (130, "")


def test_the_exit_codes_are_those_of_the_error_classes() -> None:
    codes = {error.__name__: error.exit_code for error in CkptError.__subclasses__()}
    assert codes == {
        "UsageError": 2,
        "NotFoundError": 3,
        "CorruptError": 4,
        "UnsafeError": 5,
        "LossError": 6,
        "StorageError": 7,
    }


@pytest.mark.parametrize("option", [(), ("--resume",)])  # old scripts may have it
def test_what_a_killed_conversion_left_is_gone_on_with(run: Path, option: tuple[str, ...]) -> None:
    source, out = ("convert", "zero3", "hf", run, *option), Path("outputs-hf")
    assert "were there already" not in run_ckpt(*source).err
    written = out / "model.safetensors"
    with pytest.raises(ZeroDivisionError):
        fail_at_the_end(run, out.with_name("again"))
    staging = Path(".again.ckpt-staging")
    gone_on = run_ckpt(*source, "-o", "again")
    assert gone_on.code == 0 and not staging.exists()
    assert re.search(
        r"note: continuing \S+\.again\.ckpt-staging \(\S+ kB\), left by a stopped conversion\n", gone_on.err
    )
    assert f"{show_size(tensor_bytes(written))} were there already" in gone_on.err
    assert snapshot_of_files("again") == snapshot_of_files("outputs-hf")
    staging = Path(".fourth.ckpt-staging")
    staging.mkdir()
    (staging / "model.safetensors").write_bytes(written.read_bytes())  # without a journal nothing can continue
    removed = r"note: removed \S+\.fourth\.ckpt-staging \(\d+\.\d+ kB\), left by a stopped conversion\n"
    assert re.search(removed, run_ckpt(*source, "-o", "fourth").err)


def test_what_another_command_left_is_named_and_cleared_only_when_that_is_asked_for(run: Path) -> None:
    out, staging = ("-o", "out"), Path(".out.ckpt-staging")
    convert = ("convert", "auto", "hf", str(run), *out)
    killed = process(*convert, script=KILLED, cwd=Path.cwd())
    assert killed.code == -9 and staging.is_dir()
    before = snapshot(staging)
    for other in (("convert", "auto", "full", run, *out), (*convert, "--dtype", "fp16", "--names", "own")):
        refused = run_ckpt(*other)
        assert (
            refused.code == 2 and "the stopped conversion there has other options or another source" in refused.err
        ), refused
        assert f"file: {Path.cwd() / staging}\n" in refused.err
        said = r"found: \S+ kB, last written \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, by `\S* ?convert auto hf outputs -o out`\n"
        assert re.search(said, refused.err), refused.err
        hint = "run the same command again to continue it; use --restart to discard it and start over"
        assert f"hint: {hint}\n" in refused.err
        assert snapshot(staging) == before and not Path("out").exists()
    anew = run_ckpt("convert", "auto", "full", run, *out, "--restart")
    assert anew.code == 0 and re.search(r"note: removed \S+ \(\S+ kB\), left by a stopped conversion\n", anew.err)
    assert not staging.exists()


def test_what_a_changed_source_made_stale_is_cleared_only_when_that_is_asked_for(run: Path) -> None:
    convert, staging = ("convert", "auto", "hf", str(run), "-o", "out"), Path(".out.ckpt-staging")
    assert process(*convert, script=KILLED, cwd=Path.cwd()).code == -9
    changed = next(run.rglob("*optim_states.pt"))
    changed.touch()
    refused = run_ckpt(*convert)
    assert refused.code == 4 and "the source has changed since the stopped conversion" in refused.err
    assert changed.name in refused.err and "hint: use --restart to discard it and start over: " in refused.err
    assert staging.is_dir() and not Path("out").exists()
    assert run_ckpt(*convert, "--restart").code == 0 and not staging.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_conversion_says_what_it_keeps_and_the_same_command_goes_on(
    run: Path, number: signal.Signals
) -> None:
    convert = ("convert", "auto", "hf", str(run), "-o", "out")
    stopped = process(*convert, script=KILLED.replace("SIGKILL", number.name), cwd=Path.cwd())
    assert stopped.code == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    kept = rf"kept: \S+ kB in {re.escape(str(Path.cwd() / '.out.ckpt-staging'))}; rerun the command to continue\n"
    assert re.search(r"(interrupted|terminated); the destination is unchanged\n" + kept, stopped.err), stopped.err
    assert not Path("out").exists()
    done = run_ckpt(*convert)
    assert done.code == 0 and "were there already" in done.err and "0 B were" not in done.err
    assert run_ckpt("convert", "auto", "hf", str(run), "-o", "unbroken").code == 0
    assert snapshot_of_files("out") == snapshot_of_files("unbroken")


def test_what_a_stopped_conversion_left_is_read_as_no_checkpoint(run: Path) -> None:
    """Its files have their full size, with zeros in the unwritten places."""
    convert, staging = ("convert", "auto", "hf", str(run), "-o", "out"), Path(".out.ckpt-staging")
    assert process(*convert, script=KILLED, cwd=Path.cwd()).code == -9
    for place in (staging, staging / "model.safetensors"):
        for command in (("inspect", place), ("convert", "auto", "full", place), ("verify", place, place)):
            refused = run_ckpt(*command)
            assert refused.code == 4 and "this conversion has not finished\n" in refused.err, refused
    shutil.rmtree(run)
    missing = run_ckpt("inspect", ".")
    assert missing.code == 3 and "ckpt-staging" not in missing.err, missing


def test_a_newer_step_that_was_saved_meanwhile_is_named(run: Path) -> None:
    shutil.rmtree(run)
    shutil.copytree(FIXTURES / "trainer-zero2", run)
    newer = (run / "checkpoint-2").rename("checkpoint-2")
    convert = ("convert", "auto", "hf", "outputs", "-o", "out")
    assert process(*convert, script=KILLED, cwd=Path.cwd()).code == -9
    newer.rename(run / "checkpoint-2")
    refused = run_ckpt(*convert)
    assert refused.code == 2 and "the stopped conversion there has another source\n" in refused.err
    assert re.search("expected: .*/checkpoint-1/.*\n  found: .*/checkpoint-2/.*\n", refused.err), refused.err
    assert "hint: give that source again to continue (--tag TAG for a step); use --restart" in refused.err
    assert run_ckpt(*convert, "--tag", "checkpoint-1", "--verify").code == 0


def test_who_stops_it_while_what_it_replaced_is_removed_is_told_that_it_is_there(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = ("convert", "auto", "hf", run, "-o", "out")
    assert run_ckpt(*convert).code == 0

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as stopped:
        patch.setattr(shutil, "rmtree", stop)
        ckpt.convert(run, "hf", "out", dtype="fp32", overwrite=True)
    here = Path.cwd()
    said = f"stopped; {here / 'out'} is complete; the replaced output is still in {here / '.out.ckpt-staging'}"
    assert stopped.value.args == (said,)
    assert run_ckpt("verify", run, "out", "--cast").code == 0


def test_a_conversion_that_another_process_is_writing_is_not_called_stopped(run: Path) -> None:
    """The process is alive and its journal is half full."""
    out, said = ("-o", "out"), "another process is writing this destination"
    words = [sys.executable, "-c", KILLED.replace("SIGKILL", "SIGSTOP"), "convert", "auto", "hf", str(run), *out]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    living = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert os.WIFSTOPPED(os.waitpid(living.pid, os.WUNTRACED)[1])
        for other in (("hf",), ("hf", "--restart"), ("full",)):
            refused = run_ckpt("convert", "auto", other[0], run, *out, *other[1:])
            assert refused.code == 7 and said in refused.err, refused
            assert not re.search("stopped|killed|left|removed", refused.err), refused.err
        living.send_signal(signal.SIGCONT)
        assert living.wait(60) == 0
    finally:
        living.kill()
        living.communicate()
    assert run_ckpt("verify", run, "out").code == 0


def test_what_was_written_is_read_back_where_that_is_asked_for(run: Path) -> None:
    done = run_ckpt("convert", "auto", "hf", run, "-o", "out", "--verify", "--dtype", "fp16", "--names", "own")
    model = r"\(model in float16, rounded from bfloat16 and float32\)"
    last = rf"wrote \d files?, \S+ kB {model}, and ckpt-manifest\.json, in \d\.\d s, \S+ \S?B/s, verified\n"
    assert done.code == 0 and re.search(last, done.err), done.err
    told: list[int] = []

    def damage(folder: Path) -> dict[str, bytes]:
        path = folder / "model.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        return {}

    conversion = ckpt.plan(run, "hf")
    with pytest.raises(CkptError, match="what was written is not what the source holds") as caught:
        conversion.run("damaged", verify=True, describe=damage, progress=told.append)
    assert caught.value.exit_code == 1 and "1 differ" in str(caught.value.found)
    assert sum(told) > conversion.plan.moved_bytes, "what is verified is counted, too"
    assert sorted(os.listdir()) == ["out", "outputs"], "nothing is left of it"


#: `ckpt` with a signal after its first journal entry.
KILLED = """
import itertools, os, signal
from ckpt.__main__ import main
from ckpt.move.journal import Journal
add, calls = Journal.add, itertools.count()
def add_and_die(*args):
    add(*args)
    if not next(calls):
        os.kill(os.getpid(), signal.SIGKILL)
Journal.add = add_and_die
main()
"""


def fail_at_the_end(run: Path, out: Path) -> None:
    def describe(_: Path) -> dict[str, bytes]:
        raise ZeroDivisionError

    api.plan(api.open(run, "zero3"), "hf").run(out, describe=describe)


def tensor_bytes(path: Path) -> int:
    content = path.read_bytes()
    return len(content) - 8 - int.from_bytes(content[:8], "little")


def snapshot_of_files(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_any_combination_of_arguments_ends_in_an_exit_code(run: Path) -> None:
    """An exception other than an exit would leave `run_ckpt` and fail the test."""
    words = ["zero1", "zero3", "hf", "auto", "universal", "", "outputs", "outputs/latest", "outputs/global_step2", "/"]
    words += ["nowhere", ".", "--", "-", "\udcff", "é"]
    options = ["--json", "-q", "-v", "--dry-run", "--tensors", "--cast", "--only", "weights", "--tag", "global_step2"]
    options += ["--dtype", "fp16", "keep", "--replica", "1", "--workers", "--config", "--max_memory", "10MB"]
    options += ["-o", "new"]
    draw = random.Random(0)
    codes = set()
    for _ in range(300):
        command = draw.choice(["convert", "verify", "inspect", "formats"])
        arguments = draw.choices(words, k=draw.randrange(4)) + draw.choices(options, k=draw.randrange(4))
        codes.add(run_ckpt(command, *arguments).code)
        shutil.rmtree("new", ignore_errors=True)
    assert codes <= {0, 1, 2, 3, 4, 5, 6, 7}
    assert {0, 2, 3} <= codes


# -- processes: imports, pipes, entry points --------------------------------------------------------------------------
IMPORTED = """
import sys
{code}
print(" ".join(name for name in {heavy} if name in sys.modules), file=sys.stderr)
"""
HEAVY = ("torch", "numpy", "transformers", "deepspeed", "huggingface_hub", "safetensors", "rich")
HEAVY += ("pydantic", "importlib.metadata")  # half the time before the first byte moves


def imported(code: str, *args: str | Path) -> list[str]:
    """Return the heavy packages some code imports in a fresh process."""
    result = process(*args, script=IMPORTED.format(code=code, heavy=HEAVY))
    assert result.code == 0, result.err
    return result.err.splitlines()[-1].split() if result.err.splitlines() else []


MAIN = """
from ckpt.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
"""


def test_help_and_the_package_import_nothing_heavy(fixtures: Path) -> None:
    assert imported("import ckpt") == []
    assert imported("from ckpt import open, plan, verify") == []
    assert imported(MAIN, "--help") == []
    assert imported(MAIN, "convert", "--help") == []
    assert imported(MAIN, "formats") == []


@pytest.mark.parametrize("name", ["toy-zero2", "moe-zero3"])
def test_inspecting_imports_nothing_heavy(fixtures: Path, name: str) -> None:
    assert imported(MAIN, "inspect", fixtures / name, "--tensors") == []


def test_converting_what_is_no_hub_model_imports_no_torch(fixtures: Path, tmp_path: Path) -> None:
    assert imported(MAIN, "convert", "zero3", "hf", fixtures / "toy-zero3", "-o", tmp_path / "out") == ["numpy"]
    ranks = ["--world-size", "3", "-o", tmp_path / "3"]
    assert imported(MAIN, "convert", "zero3", "zero3", fixtures / "toy-zero3", *ranks) == ["numpy"]


def test_planning_a_merge_imports_no_torch(fixtures: Path) -> None:
    folder = fixtures / "mlx-lora"
    adapter = next(path.parent for path in sorted(folder.rglob("adapter_config.json")))
    base = next(path.parent for path in sorted(folder.rglob("config.json")))
    found = imported(MAIN, "merge-lora", adapter, "--base", base, "--dry-run")
    assert not {"torch", "pydantic"} & {*found}


def test_the_module_and_the_command_are_the_same(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for result in (process("--version", cwd=Path.cwd()), process("--help"), process("convert", "-h")):
        assert result.code == 0
        assert result.err == ""
        assert result.out.startswith((f"ckpt {ckpt.__version__}\n", "Usage: ckpt "))
    failed = process("inspect", "nowhere")
    assert (failed.code, failed.out) == (3, "")
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # else typer detects the surrounding shell
    for shell, line in {"bash": "_ckpt_completion ckpt", "zsh": "#compdef ckpt", "fish": "--command ckpt "}.items():
        shown = process("--show-completion", shell)
        assert shown.code == 0 and line in shown.out and "_CKPT_COMPLETE=" in shown.out, shown


def test_a_reader_that_has_seen_enough_ends_it_as_sigpipe_does(fixtures: Path) -> None:
    """`| head -1` closes the pipe before a line is written."""
    command = [sys.executable, "-m", "ckpt", "inspect", str(fixtures / "lora-zero3"), "--tensors"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "wb") as pipe:
        env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, env=env, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (141, b"")


TYPED = ("inspect --tensors", "convert auto hf --dry-run", "convert auto hf")


@pytest.mark.parametrize(("locale", "typed"), sample(product(["C", "C.UTF-8"], TYPED), lambda case: case))
def test_a_terminal_without_unicode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locale: str, typed: str) -> None:
    """Names may hold letters or undecodable bytes that the terminal can't show."""
    for name, value in (("LC_ALL", locale), ("PYTHONUTF8", "0"), ("PYTHONCOERCECLOCALE", "0")):
        monkeypatch.setenv(name, value)
    run = Path(os.fsdecode(os.fsencode(tmp_path) + "/modèle-".encode() + b"\xff\x1b[2J"))
    write_stage2(run, [{"größe": torch.ones(2)}], 1)
    result = process(*typed.split(), run)
    assert result.code == 0, result.err
    assert "\x1b" not in result.out + result.err


def test_no_help_text_is_missing() -> None:
    for command in commands.places():
        text = run_ckpt(command, "--help").out.split("\nExamples:\n")[0]
        options = [part.split("\n\n")[0].split() for part in text.split("\n  -")[1:]]  # a long name fills a line
        assert options
        assert all(len(words) > 2 for words in options)


def test_a_bare_command_shows_the_help() -> None:
    result = run_ckpt()
    assert result.code in (0, 2)
    assert "convert" in result.out + result.err


# -- Python -----------------------------------------------------------------------------------------------------------
def test_the_python_interface(run: Path) -> None:
    checkpoint = ckpt.open("outputs")
    assert checkpoint.format == "zero3"
    progress: list[int] = []
    conversion = ckpt.plan(checkpoint, "hf", Layout(dtype=FLOAT32))
    conversion.run("outputs-hf", progress=progress.append)
    assert sum(progress) == conversion.plan.moved_bytes
    report = ckpt.verify(checkpoint, ckpt.open("outputs-hf"), only="weights", cast=True)
    assert report.equal
    first = checkpoint["embed.weight"][0:8]
    assert torch.equal(first, load_file("outputs-hf/model.safetensors")["embed.weight"][0:8])


def test_mistakes_in_python_raise_the_same_errors(run: Path) -> None:
    checkpoint = ckpt.open(str(run))
    for mistake in (
        lambda: ckpt.open("outputs", "zero9"),
        lambda: ckpt.plan(checkpoint, "ggml"),
        lambda: ckpt.plan(checkpoint, "hf").run("outputs"),
    ):
        with pytest.raises(UsageError):
            mistake()


# -- a new user's commands, and the answers ----------------------------------------------------------------------------
def test_a_value_that_is_no_choice_is_told_in_plain_words() -> None:
    result = process("hash", "outputs", "--dtype", "float64")
    assert result.code == 2 and "expected: one of keep, fp32, bf16, fp16\n  found: float64\n" in result.err
