"""Hints in the source: every option and command in them exists; `tests.support.hints` tries the hints of errors."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ckpt as package
from ckpt import commands
from ckpt.base.words import FLAGS, in_python, keywords_in
from ckpt.cli.parser import _options_of
from tests.support import advice, hints
from tests.support.keywords import is_message, keyword_of, keywords, messages, rendered
from tests.support.places import FIXTURES, REPOSITORY

NAMES = list(commands.places())


Sources = list[tuple[Path, list[ast.AST]]]


@pytest.fixture(scope="module")
def sources() -> Sources:
    """Return all nodes of the parsed source: the tests would walk it seven times."""
    paths = [path for folder in ("ckpt", "converters") for path in sorted((REPOSITORY / folder).rglob("*.py"))]
    return [(path, [*ast.walk(ast.parse(path.read_text()))]) for path in paths]


def texts(sources: Sources) -> Iterator[tuple[str, str]]:
    """Yield each hint in the source with its place; a computed part is a word to fill in."""
    for path, nodes in sources:
        for node in nodes:
            for keyword in node.keywords if isinstance(node, ast.Call) else ():
                if keyword.arg == "hint":
                    yield from ((f"{path.relative_to(REPOSITORY)}:{keyword.lineno}", one) for one in parts(keyword))


def parts(keyword: ast.AST) -> Iterator[str]:
    outer = [node for node in ast.walk(keyword) if isinstance(node, ast.JoinedStr) or is_message(node)]
    inner = {id(part) for node in outer for part in ast.walk(node) if part is not node}
    for node in ast.walk(keyword):
        if is_message(node) and id(node) not in inner:
            yield rendered(node)
        elif isinstance(node, ast.JoinedStr) and id(node) not in inner:
            yield "".join(str(one.value) if isinstance(one, ast.Constant) else "VALUE" for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.value


_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


#: Options in messages of other programs: Megatron-LM, GPT-NeoX, vLLM, Docker, pip, clouds; and mistyped ones.
OF_OTHERS = """
    --allow-requantize --bert-no-binary-head --bf16 --cap-add --ckpt-convert-update-legacy-dist-opt-format
    --ddp-bucket-size --device --dist-ckpt-optim-fully-reshardable --enable-lora --expert-model-parallel-size
    --force-reinstall --fp16 --fp32 --from --gpt-j-residual --install --install-completion --max-lora-rank --no-load-rng
    --no-save-optim --no-such-option --out --out-dir --output-dir --pipeline-model-parallel-size --recursive
    --tensor-model-parallel-size --use-precision-aware-optimizer --use-torch-fsdp2 --version
"""


def test_every_option_in_a_text_exists(sources: Sources) -> None:
    """Any text in the source counts, such as a note. An option that gets another name leaves its old one behind."""
    known = {option for name in NAMES for option in _options_of(name)} | {"--help", *OF_OTHERS.split()}
    found = [
        (path.name, text.lineno, option)
        for path, nodes in sources
        for docstrings in [{id(node.value) for node in nodes if isinstance(node, ast.Expr)}]
        for text in nodes
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and id(text) not in docstrings
        for option in _OPTION.findall(text.value)
    ]
    assert len(found) > 180
    assert [one for one in found if one[2] not in known] == []
    assert {*OF_OTHERS.split()} <= {option for _, _, option in found}


def test_every_option_in_a_message_is_declared(sources: Sources) -> None:
    found = [
        (path.name, line, one) for path, nodes in sources for line, text in messages(nodes) for one in keywords_in(text)
    ]
    assert len(found) > 250
    assert [place for place in found if place[2].name not in keywords().get(place[2].flag, ())] == []
    switches = [one for *_, one in found if keywords()[one.flag][one.name] is bool]
    assert {one.value for one in switches} == {True}
    assert [name for name, flag in FLAGS.items() if name not in keywords().get(flag, ())] == []


def test_no_error_hides_an_option_in_its_text(sources: Sources) -> None:
    """Python would show the command line's words. Commands in backticks and options of other programs may."""
    found = [
        (path.name, option)
        for path, nodes in sources
        for call in nodes
        if getattr(getattr(call, "func", None), "id", "").endswith("Error")
        for text in parts(call)
        for plain in (re.sub("`[^`]*`", "", part) for part in getattr(text, "parts", (text,)) if isinstance(part, str))
        for option in _OPTION.findall(plain)
        if option in keywords() and "Megatron-LM" not in text and option != "--optimizer"  # of Megatron's own
    ]
    assert found == []


#: They write the command line's words only, or arguments of a command.
_OF_THE_COMMAND_LINE = """
    ckpt/__main__.py ckpt/base/words.py ckpt/cli/parser.py ckpt/cli/usage.py ckpt/commands/check/checking.py
    ckpt/commands/convert/command.py ckpt/commands/doctor/diagnosis.py ckpt/commands/estimate/table.py
    ckpt/commands/inspect/overview.py ckpt/commands/push/push.py
"""
#: Functions that declare options.
_DECLARING = ("Flag", "option", "Option", "Positional", "Command")


def test_no_note_hides_an_option_in_its_text(sources: Sources) -> None:
    """Any text counts, wherever it is shown. Python reads `dtype='fp32'`, the command line prints `--dtype fp32`."""

    def is_apart(node: ast.AST) -> bool:
        name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        return is_docstring or is_message(node) or name in _DECLARING or name.endswith("Error")

    def plain_texts(nodes: list[ast.AST]) -> Iterator[str]:
        apart = {id(part) for node in nodes if is_apart(node) for part in ast.walk(node)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart:
                yield re.sub("`[^`]*`", "", node.value)

    found = {
        (name, text)
        for path, nodes in sources
        if (name := str(path.relative_to(REPOSITORY))) not in _OF_THE_COMMAND_LINE.split()
        for text in plain_texts(nodes)
        for option in _OPTION.findall(text)
        if option in keywords() and option not in OF_OTHERS.split()
    }
    assert found == {
        ("ckpt/api.py", "--accept-setting="),  # a command
        ("ckpt/runs/from_hub.py", " --revision "),  # of `hf download`
        ("ckpt/runs/plan_lines.py", "; --dtype fp32 keeps it"),  # a command's output
        ("converters/huggingface/hf.py", " --base MODEL` makes one"),
        ("converters/megatron/dist/optimizer.py", "the parameters stepped by --optimizer "),  # Megatron-LM's
        ("converters/megatron/dist/write.py", "Megatron-LM draws new ones from --seed"),
        ("converters/pytorch/full.py", " --model-only`"),
    }


def test_every_hint_proposes_something_or_is_of_a_known_kind(sources: Sources) -> None:
    flags = {name for command in NAMES for name, is_flag in hints._options(command).items() if is_flag}
    whole = [
        (place, text)
        for place, text in texts(sources)
        if "VALUE" not in text and " " in text and re.match(r"[`\w'-].{9}", text)
    ]
    assert len(whole) > 200
    missing = []
    for place, text in whole:
        outside = hints.without_backticks(text)
        is_typed = (
            any(name in flags or any(values) for name, values in hints.options_in(text).items())
            or hints.commands_in(text)
            or re.search(r"\b(?:another|a smaller|other|without|leave out|leave) .*(?:--|-o\b)|\w+=False", outside)
        )
        missing += [] if is_typed or advice.kind(text) or advice.kind(in_python(text)) else [(place, text)]
    assert not missing


def test_every_command_in_a_hint_exists_with_its_options(sources: Sources) -> None:
    missing = []
    for place, text in texts(sources):
        for command in re.findall(r"`ckpt ([^`]+)`", text):
            name, *words = command.split()
            known = {"--help", "-o"} | (_options_of(name) if name in NAMES else set())
            missing += [(place, command) for word in words if word.startswith("-") and word not in known]
            missing += [(place, command)] if name not in (*NAMES, "VALUE") else []
    assert not missing


#: Commands for a terminal during a training, without a Python function.
ON_COMMAND_LINE_ONLY = ("plot", "preflight", "watch")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ON_COMMAND_LINE_ONLY])
def test_python_has_a_word_for_every_option_of_a_function(name: str) -> None:
    parameters = inspect.signature(getattr(package, name.replace("-", "_"))).parameters
    for option in _options_of(name):
        keyword = option.removeprefix("--").replace("-", "_")
        if option.startswith("--") and keyword in parameters:
            assert keyword_of(option) == keyword


def test_kinds_of_hints_have_reasons() -> None:
    assert all(one.reason and one.phrases for one in advice.KINDS)
    assert advice.kind("pip install torch") == "install"
    assert advice.kind("a hint of no kind") is None


def test_a_hint_that_does_not_help_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "record_file", str(tmp_path / "hints.jsonl"))
    run = FIXTURES / "toy-zero3"
    wrong = hints.Told("no such thing", "--dtype fp32 makes it work")
    with pytest.raises(AssertionError, match="has no option --dtype"):
        hints.check_hint(["inspect", str(run)], None, f"error: {wrong.what}\n\nhint: {wrong.hint}\n", lambda *_: "")
    again = "error: no such thing at all\n\nhint: --tag 2 takes that step\n"
    with pytest.raises(AssertionError, match="ends with the same error"):
        hints.check_hint(["inspect", str(run)], None, again, lambda *_: again)
    with pytest.raises(AssertionError, match="of no kind"):
        hints.check("ckpt.open", hints.Told("a new error", "be lucky"), [], list)


def test_a_command_without_arguments_is_tried_in_a_copy_of_the_tests_folder(tmp_path: Path) -> None:
    """In the repository it would open every fixture."""
    (tmp_path / "adapter").mkdir()
    error, seen = "error: not served\n\nhint: use `ckpt merge-lora` to merge it\n", []

    def run(words: list[str], _: Path | None) -> str:
        seen.append((words, Path.cwd(), [path.name for path in Path().iterdir()]))
        return ""

    hints.check_hint(["convert", str(tmp_path / "adapter")], None, error, run)
    ((words, place, found),) = seen
    assert words == ["merge-lora", "--dry-run"] and found == ["adapter"]
    assert place != tmp_path and place.parent == tmp_path.parent and Path.cwd() != place
