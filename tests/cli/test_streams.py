"""`ckpt/base/streams.py`, `ckpt/__main__.py`: closed and full streams, signals, and errors of ckpt itself."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt import commands
from ckpt.adapters.config import read_config
from ckpt.commands.inspect import inspecting
from ckpt.errors import CorruptError
from tests.support.commands import ckpt, process
from tests.support.places import REPOSITORY

FULL = Path("/dev/full")


def shell(command: str, *, prefix: str = "") -> subprocess.CompletedProcess[str]:
    """Run a shell command with `ckpt` as the command line under test."""
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = command.replace("ckpt ", f"{shlex.quote(sys.executable)} -m ckpt ", 1)
    done = ["bash", "-c", prefix + command]
    return subprocess.run(done, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_the_work_is_done_where_nobody_listens(fixtures: Path, tmp_path: Path, closed: str) -> None:
    out = tmp_path / "out"
    done = shell(f"ckpt convert auto hf {fixtures / 'toy-zero2'} -o {out} {closed}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if ">&-" in closed.replace("2>&-", "") else f"{out}\n")
    assert "Traceback" not in done.stderr
    whole = tmp_path / "whole"
    assert ckpt("convert", "auto", "hf", fixtures / "toy-zero2", "-o", whole).code == 0
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {p.name: p.read_bytes() for p in whole.iterdir()}


@pytest.mark.parametrize("command", ["hash {run}", "formats", "--version", "verify {run} {run}", "resume {run}"])
def test_a_result_that_nobody_can_read_is_none(fixtures: Path, command: str) -> None:
    done = shell(f"ckpt {command.format(run=fixtures / 'toy-zero2')} >&-")
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr.endswith("error: standard output could not be written: it is closed\n")
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_nothing_printed_is_nothing_lost(fixtures: Path) -> None:
    run = fixtures / "toy-zero2"
    assert shell(f"ckpt verify {run} {run} -q >&-").returncode == 0
    assert shell(f"ckpt verify {run} {fixtures / 'toy-zero3'} >&-").returncode == 1


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["--version", "formats", "--help", "inspect {run} --tensors", "hash {run}"])
def test_a_full_disk_behind_stdout(fixtures: Path, command: str) -> None:
    done = shell(f"ckpt {command.format(run=fixtures / 'toy-zero2')} >/dev/full")
    assert done.returncode == 7
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("inspect {run} --tensors", 141),
        ("hash {run} --tensors", 141),
        ("convert auto hf {run} -o {out}", 0),  # it exists, but its name can't be printed
    ],
)
def test_a_reader_that_leaves_ends_a_command_as_sigpipe_does(
    fixtures: Path, tmp_path: Path, command: str, code: int
) -> None:
    words = command.format(run=fixtures / "toy-zero2", out=tmp_path / "out")
    done = shell(f"ckpt {words} | true; exit ${{PIPESTATUS[0]}}")
    assert done.returncode == code, done.stderr
    assert "error" not in done.stderr and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert (tmp_path / "out").exists() == (code == 0)


def test_a_pipe_that_breaks_elsewhere_is_an_error(fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(inspecting, "open_checkpoint", broken)
    done = ckpt("inspect", fixtures / "toy-zero2")
    assert done.code == 7 and "error: Broken pipe" in done.err


@pytest.mark.parametrize("error", ["MemoryError()", "RecursionError('deep')", "ImportError('no x')", "KeyError(1)"])
def test_errors_of_its_own_have_a_code_and_a_hint(fixtures: Path, error: str) -> None:
    script = f"""
from ckpt.commands.inspect import inspecting
def fail(*_, **__): raise {error}
inspecting.open_checkpoint = fail
from ckpt.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "inspect", str(fixtures / "toy-zero2")],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    own = error.startswith(("Recursion", "Key"))
    assert done.returncode == (70 if own else 7), done.stderr
    assert done.stderr.startswith("error: ") and "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert ("an error of ckpt itself" in done.stderr) == own


@pytest.mark.parametrize(
    "where",
    ["ckpt.move.files.translate_os_errors", "ckpt.commands.command", "ckpt.options.command.Command"],
)
def test_sigterm_outside_of_a_command_is_said(where: str) -> None:
    """During imports and argument parsing it ended with 143 or 130, without a message."""
    module, _, name = where.rpartition(".")
    script = f"""
import importlib, os, signal
def strike(*_, **__):
    os.kill(os.getpid(), signal.SIGTERM)
setattr(importlib.import_module("{module}"), "{name}", strike)
from ckpt.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "formats"],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (143, "terminated; the destination is unchanged\n")


def test_sigterm_ends_as_ctrl_c_does(fixtures: Path, tmp_path: Path) -> None:
    script = """
import sys, time
import ckpt.move.run as run
def wait(*_, **__):
    print("waiting", flush=True)
    time.sleep(600)
run.batches = wait
from ckpt.__main__ import main
main()
"""
    command = ["convert", "auto", "hf", str(fixtures / "toy-zero2"), "-o", str(tmp_path / "out")]
    child = subprocess.Popen(
        [sys.executable, "-c", script, *command],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "waiting\n"
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 143
    assert "terminated; the destination is unchanged" in said and "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        ("convert", "auto", "zero2", "{run}", "--world-size", "1000000000"),
        ("convert", "auto", "megatron", "{run}", "--pp", "1000000000"),
        ("convert", "auto", "megatron", "{run}", "--make-vocab-size-divisible-by", "1000000000000000000"),
        ("convert", "auto", "hf", "{run}", "--workers", "1000000"),
        ("hash", "{run}", "--workers", "1000000"),
        ("merge-lora", "{adapter}", "--adapter-weights", "nan"),
        ("merge-lora", "{adapter}", "--adapter-weights", "1,inf"),
    ],
)
def test_numbers_without_sense_are_refused(fixtures: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    places = {"run": fixtures / "toy-zero2", "adapter": fixtures / "lora-zero3"}
    result = ckpt(*(option.format(**places) for option in options))
    assert result.code == 2, result.err


@pytest.mark.parametrize("alpha", [str(2**2000), "NaN", "Infinity", "1e300"])
def test_an_alpha_without_sense(tmp_path: Path, alpha: str) -> None:
    (tmp_path / "adapter_config.json").write_text(f'{{"peft_type": "LORA", "r": 4, "lora_alpha": {alpha}}}')
    with pytest.raises(CorruptError, match="lora_alpha"):
        read_config(tmp_path / "adapter_config.json")


# -- errors for programs -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "code", "exit", "where"),
    [
        (("inspect", "nowhere"), "not-found", 3, "nowhere"),
        (("inspect",), "usage", 2, None),
        (("resume", "nowhere"), "not-found", 3, "nowhere"),
        (("convert", "auto", "hff", "outputs"), "unknown-format", 2, None),
        (("convert", "auto", "dcp", "outputs", "--max-shard-size", "1GB"), "option-not-taken", 2, None),
        (("convert", "auto", "hf", "outputs", "-o", "outputs/x"), "destination-overlaps", 2, "outputs/x"),
        (("convert", "auto", "hf", "outputs", "-o", "full"), "destination-exists", 2, "full"),
        (("mount", "hf", "outputs", "full"), None, None, None),
    ],
)
def test_an_error_is_an_object_with_json(
    fixtures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    code: str | None,
    exit: int | None,
    where: str | None,
) -> None:
    shutil.copytree(fixtures / "toy-zero3", tmp_path / "outputs")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ckpt", *words, "--json"])
    done = ckpt(*words, "--json")
    found = json.loads(done.err.splitlines()[-1])
    assert list(found) == ["code", "what", "where", "expected", "found", "hint", "exit"]
    assert done.out == "" and found["exit"] == done.code != 0 and "\n" not in found["what"]
    if code is not None:
        assert (found["code"], found["exit"], done.code) == (code, exit, exit)
        assert where is None or found["where"]["file"].endswith(where)


def test_the_object_on_the_page_is_what_is_printed() -> None:
    shown = (REPOSITORY / "docs" / "errors.md").read_text().split("```json\n")[1].split("\n```")[0]
    assert process("inspect", "nowhere", "--json").err.strip() == shown


def test_every_command_takes_json(fixtures: Path) -> None:
    for name in commands.places():
        assert "  --json " in ckpt(name, "--help").out, name
    found = ckpt("resume", fixtures / "toy-zero3", "--json", "-q")
    assert json.loads(found.out) == {"path": ckpt("resume", fixtures / "toy-zero3", "-q").out.strip()}


def test_quiet_commands_print_nothing_but_errors(fixtures: Path) -> None:
    for words in (("inspect", fixtures / "toy-zero3"), ("formats",)):
        assert ckpt(*words, "-q").out == "" and ckpt(*words).out != ""
    verbose = ckpt("hash", fixtures / "toy-zero3", "-v")
    assert verbose == ckpt("hash", fixtures / "toy-zero3", "--tensors") and "embed.weight" in verbose.out
