"""Every `ckpt` command in docs/ is run, on what the tools really wrote, and prints what the page says."""

from __future__ import annotations

import pickle
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import ckpt as api
from tests.support.commands import Result, ckpt, process
from tests.support.engines import REPOSITORY
from tests.support.hub_server import TOKEN, HubServer

DOCS = REPOSITORY / "docs"
FIXTURES = REPOSITORY / "fixtures"

RUN = {"trl-zero3/outputs/qwen3-sft": "outputs"}
#: What stands in the folder that a page is read in, by the heading from which on it is another: fixtures, and the names
#: that the page has for them.
PLACES: dict[str, dict[str, dict[str, str]]] = {
    "check": {"": {"trainer-zero2": "outputs"}},
    "command-line": {"": {"toy-zero3": "outputs"}},
    "exit-codes": {"": RUN},
    "formats": {"": RUN},
    "hf-trainer-resume": {
        "": RUN,
        "FSDP": {"trl-fsdp2/outputs/llama-sft": "outputs", "trl-fsdp2/meta-llama/Llama-3.1-8B": "outputs"},
    },
    "how-it-works": {"": RUN},
    "index": {"": RUN},
    "journeys/axolotl-gpt-oss": {"": {"axolotl-fsdp2": ".", "axolotl-lora-fsdp2": "."}},
    "journeys/hf-trainer-fsdp": {"": {"trl-fsdp2": "."}},
    "journeys/lora-merge-push": {"": {"trl-lora-zero3": "."}},
    "journeys/megatron-to-hf": {"": {"megatron-dist-flattened": "run"}},
    "journeys/trl-qwen3-moe": {"": {"trl-zero3": "."}},
    "journeys/verify-in-ci": {"": RUN},
    "operations": {"": {"trainer-zero2": "outputs"}},
    "performance": {"": RUN},
    "picture": {"": {"toy-zero3": "outputs"}, "Checkpoints that are damaged": {"dcp-fsdp2/step-2": "step-2"}},
    "resume": {"": {"megatron-dist-flattened": "run", "moe-zero3": "outputs"}},
}
#: A section whose commands tests/engines/test_trainer_recipe.py runs.
ELSEWHERE = {("hf-trainer-resume", "Tried")}

#: What the table of docs/resume.md starts from, by format.
STARTS = {
    "zero3": "trl-zero3/outputs/qwen3-sft",
    "dcp": "dcp-fsdp2/step-2",
    "fsdp-ranks": "verl-fsdp1",
    "megatron-dist": "megatron-fsdp",
    "full": "dcp-fsdp2/step-2",
    "megatron": "trl-zero3/outputs/qwen3-sft",
}


@dataclass
class Command:
    """A command of a page without its `ckpt`, the code that it ends with, and lines that it prints."""

    text: str
    heading: str
    code: int = 0
    printed: list[str] = field(default_factory=list)


def commands(page: str) -> list[Command]:
    """The `ckpt` commands in blocks of a page; what follows one with a `$` is printed by it."""
    found: list[Command] = []
    printing, fence, heading = False, "", ""
    for line in page.splitlines():
        if line.startswith("```"):
            fence, printing = "" if fence else line, False
        elif not fence and line.startswith("## "):
            heading = line[3:]
        elif fence in ("```python", "```yaml") or not (fence or line.startswith("    ")) or not line.strip():
            printing = False
        elif match := re.match(r"\s*(\$ )?ckpt (.*)", line):
            exits = re.search(r"# exit (\d+)$", line)
            found.append(Command(match[2], heading, int(exits[1]) if exits else 0))
            printing = match[1] is not None
        elif line.strip().startswith("$ "):
            printing = False
        elif printing and line.strip() != "...":
            found[-1].printed.append(line.strip())
    return found


def pages() -> list[str]:
    """Names of the pages of docs/; those in Japanese have the commands of the English ones (`test_site.py`)."""
    found = (path.relative_to(DOCS).with_suffix("").as_posix() for path in sorted(DOCS.rglob("*.md")))
    return [name for name in found if not name.startswith("ja/")]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield running


def furnished(here: Path, places: dict[str, str]) -> Path:
    for source, place in places.items():
        shutil.copytree(FIXTURES / source, here / place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("truth"))
    return here


def make_a_hole(file: Path) -> None:
    """Take a chunk of a tensor out of what DCP's metadata says."""
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata["model.down.weight"].chunks.pop()
    file.write_bytes(pickle.dumps(metadata))


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("name", PLACES)
def test_a_page(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = [
        command for command in commands((DOCS / f"{name}.md").read_text()) if (name, command.heading) not in ELSEWHERE
    ]
    assert known
    here = furnished(tmp_path / "here", PLACES[name][""])
    if name == "journeys/megatron-to-hf":  # as Megatron leaves it, and the Hub's model elsewhere
        (here / "Llama-3.1-8B").mkdir()
        for path in (FIXTURES / "trl-zero3/outputs/qwen3-sft/checkpoint-2").glob("tokenizer*.json"):
            shutil.copy(path, here / "Llama-3.1-8B")  # its tokenizer
        for file in (here / "run").glob("*.json"):
            file.unlink() if "token" in file.name else file.rename(here / "Llama-3.1-8B" / file.name)
    places = ""
    for command in known:
        if command.heading in PLACES[name] and command.heading != places:
            places = command.heading
            here = furnished(tmp_path / places, PLACES[name][places])
            if "damaged" in places:
                make_a_hole(here / "step-2/.metadata")
        monkeypatch.chdir(here)
        words = shlex.split(command.text, comments=True)
        done: Result = process(*words, cwd=here) if words[0] == "push" else ckpt(*words)
        assert done.code == command.code, f"ckpt {command.text}\n{done.err}"
        for line in command.printed:
            assert line in done.out + done.err, f"ckpt {command.text}\n{done.out}{done.err}"


def test_the_table_of_conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command in the table of docs/resume.md, for M = 2."""
    rows = [line for line in (DOCS / "resume.md").read_text().splitlines() if line.startswith("| ")]
    known = [words for row in rows for words in re.findall(r"`ckpt (convert [^`]+)`", row)]
    assert len(known) == len(rows) - 2 >= 11  # a command for each row below the head
    for number, command in enumerate(known):
        words = [word.replace("M", "2") for word in shlex.split(command)]
        form, place = words[1], tmp_path / str(number) / words[3]
        start = FIXTURES / STARTS[form]
        if form in ("full", "megatron"):
            api.plan(api.open(start), form).run(place)
        else:
            shutil.copytree(start, place)
        monkeypatch.chdir(place.parent)
        done = ckpt(*words)
        assert done.code == 0, f"ckpt {command}\n{done.err}"


def test_the_commands_of_every_page_are_run() -> None:
    """Here, or by another test, which then reads the page by its name."""
    tests = [path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py") if path.name != Path(__file__).name]
    for name in pages():
        if name not in PLACES and commands((DOCS / f"{name}.md").read_text()):
            assert any(re.search(rf"\b{name}\.md\b", text) for text in tests), f"no test runs the commands of {name}.md"
    assert set(PLACES) <= set(pages())


def test_what_other_commands_name_is_there() -> None:
    """Targets of make, sections and options of the benchmarks, files of tests, extras of the package; none is run."""
    text = "\n".join(path.read_text() for path in DOCS.rglob("*.md"))
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert {"bench"} <= set(re.findall(r"^    make ([a-z-]+)", text, re.MULTILINE)) <= set(targets)
    source = (REPOSITORY / "benchmarks/__main__.py").read_text()
    for line in re.findall(r"^    python -m benchmarks (.*?)(?: {2,}#.*)?$", text, re.MULTILINE):
        words = [word for word in line.split() if not word.isdecimal()]
        assert words and all(f'"{word}"' in source for word in words), line
    assert all((REPOSITORY / name).is_file() for name in re.findall(r"\btests/[\w/]+\.py\b", text))
    extras = re.findall(r"^(\w+) = \[", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:'\.|ckpt-toolkit)\[(\w+)\]", text)) <= set(extras)


def test_every_command_is_found() -> None:
    page = "text\n\n    $ ckpt a b  # exit 3\n    said\n    ...\n    $ other\n    not\n    ckpt c\n    not\n\n"
    page += "## Next\n\n```\n$ ckpt d\nx\n```\n```python\nckpt e\n```\n"
    first, last = Command("a b  # exit 3", "", 3, ["said"]), Command("d", "Next", 0, ["x"])
    assert commands(page) == [first, Command("c", ""), last]
