"""`ckpt/options/completion.py`, `ckpt/cli/values.py`, `parser.py`: help, completion, hints for mistyped commands."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckpt import commands
from ckpt.base.streams import coloured
from ckpt.cli.parser import EXAMPLES as OF_ALL
from ckpt.options import completion as complete
from ckpt.plan import registry
from tests.support.commands import Result, process
from tests.support.commands import ckpt as run_ckpt
from tests.support.golden import agrees
from tests.support.places import REPOSITORY

GOLDEN = Path(__file__).parent / "golden"
COMMANDS = [command.name for command in commands.all_commands()]
EXAMPLES = {"ckpt": OF_ALL} | {command.name: command.examples for command in commands.all_commands()}
#: These need a server, FUSE, torch, a job's nodes or a live run, so they are only parsed.
PARSED = ("mount", "push", "merge-lora", "plot", "preflight", "watch")


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run `outputs` and its model `outputs-hf`."""
    place = tmp_path_factory.mktemp("examples")
    shutil.copytree(REPOSITORY / "fixtures" / "moe-zero3", place / "outputs")
    assert run_ckpt("convert", "auto", "hf", place / "outputs").code == 0
    return place


@pytest.mark.parametrize("name", ["ckpt", "check", "inspect", "verify"])
def test_the_help_at_80_columns(name: str) -> None:
    agrees(GOLDEN / f"help-{name}.txt", run_ckpt(*([] if name == "ckpt" else [name]), "--help").out)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_help_text_has_sections_and_two_examples(command: str) -> None:
    result = run_ckpt(*filter(None, [command]), "--help")
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 80
    assert "..." not in re.sub(r"[],A-Z] ?\.\.\.", "", result.out)  # a list may go on, a sentence may not be cut
    examples = result.out.split("\nExamples:\n")[1]
    assert re.findall("^  (ckpt .*)$", examples, re.MULTILINE) == [line for line, _ in EXAMPLES[command or "ckpt"]]
    assert len(EXAMPLES[command or "ckpt"]) == 2


@pytest.mark.parametrize("line", [line for examples in EXAMPLES.values() for line, _ in examples])
def test_every_example_is_a_command_that_works(runs: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.chdir(runs)
    words = shlex.split(line)[1:]
    for name in ("who-holds-what.svg", "outputs.html"):
        (runs / name).unlink(missing_ok=True)
    more = ["--help"] if words[0] in PARSED else ["--overwrite"] if words[1:3] == ["auto", "hf"] else []
    result = run_ckpt(*words, *more)
    assert result.code == 0, result.err


def test_version_has_a_short_option() -> None:
    assert run_ckpt("-V").out == run_ckpt("--version").out == run_ckpt("version").out != ""


# -- completion -------------------------------------------------------------------------------------------------------
def completed(shell: str, line: str, **env: str) -> list[str]:
    """Return the completions `shell` gets for a partial line, through typer's protocol."""
    words = line.split(" ")
    asked = {
        "_CKPT_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "PYTHONPATH": str(REPOSITORY),
    }
    script = "import sys; sys.argv = ['ckpt']; from ckpt.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | asked | env, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_shells_are_offered_formats_steps_and_tensors(fixtures: Path) -> None:
    run = fixtures / "toy-zero3"
    assert completed("bash", "ckpt convert zero") == ["zero0", "zero1", "zero2", "zero3"]
    assert completed("fish", "ckpt convert auto uni") == ["universal"]
    assert completed("zsh", f"ckpt inspect {run} --tag g") == ["_arguments", "'*:", """:(("global_step2"))'"""]
    assert completed("bash", f"ckpt inspect {run} --tensor embed") == ["embed.weight"]
    assert completed("bash", "ckpt mou") == ["mount"]
    assert completed("bash", "ckpt inspect nowhere --tag g") == []
    assert completed("zsh", "ckpt convert auto hf ") == ["_files"]  # paths are the shell's own
    assert completed("bash", "ckpt verify toy") == []


def test_nothing_is_offered_where_nothing_can_be_read(tmp_path: Path) -> None:
    context = SimpleNamespace(params={"path": str(tmp_path)}, args=[])
    assert complete.tensors(context, "") == complete.tags(context, "") == []


def test_bash_itself_completes() -> None:
    script = f"""
ckpt() {{ {shlex.quote(sys.executable)} -m ckpt "$@"; }}
eval "$(_CKPT_COMPLETE=source_bash {shlex.quote(sys.executable)} -c 'import sys
sys.argv = ["ckpt"]
from ckpt.__main__ import main
main()')"
complete -p ckpt
"""
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(["bash", "--norc", "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "complete -o default -F _ckpt_completion ckpt\n", done.stderr


# -- suggestions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "same"), [(("help",), ("--help",)), (("help", "hash"), ("hash", "--help"))])
def test_help_is_a_command_too(words: tuple[str, ...], same: tuple[str, ...]) -> None:
    assert run_ckpt(*words) == run_ckpt(*same)
    assert run_ckpt(*words).code == 0 and run_ckpt(*words).err == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_what_options_take_in_words_that_people_read(command: str) -> None:
    shown = run_ckpt(command, "--help").out
    assert not re.search(r"<(int|str|float|path|list)\b", shown) and not re.search(r"\{[A-Z]", shown)


@pytest.mark.parametrize(
    "words",
    [("outputs", "hf"), ("outputs", "--to", "hf"), ("zero3", "outputs", "--to", "hf"), ("outputs", "safetensors")],
)
def test_the_format_that_is_read_may_be_left_out(
    runs: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(runs)
    usual = run_ckpt("convert", "auto", "hf", "outputs", "-o", "new", "--dry-run")
    found = run_ckpt("convert", *words, "-o", "new", "--dry-run")
    assert usual.code == 0 and found == usual


def test_a_folder_called_as_a_format_is_a_path_in_its_place(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    (runs / "dcp").symlink_to("outputs")
    assert run_ckpt("convert", "zero3", "hf", "dcp", "-o", "new", "--dry-run").code == 0
    assert run_ckpt("convert", "./dcp", "hf", "-o", "new", "--dry-run").code == 0
    (runs / "dcp").unlink()


def test_a_path_alone_is_recognised_and_the_target_is_asked_for(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    result = run_ckpt("convert", "outputs")
    assert (result.code, result.out) == (2, "")
    agrees(GOLDEN / "convert-path-alone.txt", result.err)
    written = {one.name for one in registry.all_formats() if one.writes}
    assert written == set(re.findall(r"^  (\S+) ", result.err.split("error:")[0], re.MULTILINE))


def test_on_a_terminal_the_target_is_asked_for(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(question: str, **_: object) -> str:
        asked.append(question)
        return "hf"

    monkeypatch.chdir(runs)
    monkeypatch.setattr("typer.prompt", answer)
    monkeypatch.setattr(import_module("ckpt.commands.convert.command"), "is_interactive", lambda: True)
    result = run_ckpt("convert", "outputs", "--dry-run", "-o", "new")
    assert (result.code, asked) == (0, ["to which format?"]), result.err
    assert "would write" in result.out and "to new" in result.out


# -- colours ----------------------------------------------------------------------------------------------------------
class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals_and_no_color_turns_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert coloured(Terminal()) and not coloured(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not coloured(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured(Terminal())


#: Shown, and removed, while a slow command runs: from a hidden cursor to the erased line.
BAR = re.compile(r"\x1b\[\?25l.*?\x1b\[\?25h(?:\r|\x1b\[\d*[AK])*", re.DOTALL)


def on_a_terminal(*words: str, **env: str) -> Result:
    """Run a command with an 80-column terminal as its stdout and stderr."""
    import pty

    script = "import sys; sys.argv = ['ckpt', *sys.argv[1:]]; from ckpt.__main__ import main; main()"
    main, end = pty.openpty()
    variables = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm", "COLUMNS": "80"} | env
    child = subprocess.Popen(
        [sys.executable, "-c", script, *words],
        stdin=subprocess.DEVNULL, stdout=end, stderr=end, env=variables | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    os.close(end)
    found = b""
    with open(main, "rb", buffering=0) as stream:
        try:
            while part := stream.read(4096):
                found += part
        except OSError:  # the other end is closed
            pass
    return Result(child.wait(), BAR.sub("", found.decode().replace("\r\n", "\n")), "")


@pytest.mark.parametrize("columns", [50, 80])
def test_tables_fit_the_terminal(fixtures: Path, columns: int) -> None:
    one, other = str(fixtures / "trainer-zero2"), str(fixtures / "toy-zero3")
    verified = ("verify", one, str(fixtures / "trainer-plain"))
    compared = ("diff", other, str(fixtures / "toy-zero2")) if columns == 50 else verified
    for words in (compared, ("doctor", other)):
        shown = on_a_terminal(*words, COLUMNS=str(columns), NO_COLOR="1").out
        assert all(len(line) <= columns or "/" in line for line in shown.splitlines()), shown
        lines = run_ckpt(*words).out.splitlines()
        assert any(len(line) > columns for line in lines), "a pipe gets whole lines"
    for words in (("formats",), ("inspect", one, "--tensors")):
        shown = on_a_terminal(*words, COLUMNS=str(columns), NO_COLOR="1")
        assert shown.code == 0 and max(map(len, shown.out.splitlines())) <= columns
        whole = process(*words).out
        for name in ("megatron-deepspeed",) if words == ("formats",) else ("exp_avg_sq",):
            assert name in whole
            if columns == 80:  # else it is folded
                assert name in shown.out
        assert "…" not in shown.out


def test_a_terminal_gets_bold_headings_and_red_errors(fixtures: Path) -> None:
    assert "\x1b[1mExamples\x1b[0m:" in on_a_terminal("inspect", "--help").out
    error = on_a_terminal("inspect", str(fixtures / "toy-zero4"))
    assert error.code == 3 and "\x1b[31m\x1b[1merror:\x1b[0m no such file" in error.out
    plain = on_a_terminal("inspect", str(fixtures / "toy-zero4"), NO_COLOR="1")
    assert plain.code == 3 and "\x1b" not in plain.out
    assert "\x1b" not in process("inspect", "--help").out
