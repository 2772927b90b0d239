"""The pages of docs/journeys: every `$ ckpt` command runs, on what the tools really wrote, and prints what is there."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import Result, ckpt, process
from tests.support.engines import REPOSITORY
from tests.support.hub_server import TOKEN, HubServer

PAGES = REPOSITORY / "docs" / "journeys"
FIXTURES = REPOSITORY / "fixtures"

#: What stands in the folder that a page is read in: fixtures, and the names that the page has for them.
PLACES = {
    "axolotl-gpt-oss": {"axolotl-fsdp2": ".", "axolotl-lora-fsdp2": "."},
    "hf-trainer-fsdp": {"trl-fsdp2": "."},
    "lora-merge-push": {"trl-lora-zero3": "."},
    "megatron-to-hf": {"megatron-dist-flattened": "run"},
    "trl-qwen3-moe": {"trl-zero3": "."},
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield running


def commands(page: str) -> list[tuple[str, list[str]]]:
    """The page's `ckpt` commands, each with the lines that it is said to print."""
    blocks = re.findall(r"^    \$ ckpt (.*)\n((?:    (?!\$ ).+\n)*)", page, re.MULTILINE)
    return [(command, [line.strip() for line in printed.splitlines()]) for command, printed in blocks]


@pytest.mark.parametrize("name", sorted(path.stem for path in PAGES.glob("*.md")))
def test_a_page(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: HubServer) -> None:
    here = tmp_path / "here"
    for source, place in PLACES[name].items():
        shutil.copytree(FIXTURES / source, here / place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("truth"))
    if name == "megatron-to-hf":  # as Megatron leaves it, and the Hub's model elsewhere
        (here / "Llama-3.1-8B").mkdir()
        for path in (FIXTURES / "trl-zero3/outputs/qwen3-sft/checkpoint-2").glob("tokenizer*.json"):
            shutil.copy(path, here / "Llama-3.1-8B")  # its tokenizer
        for file in (here / "run").glob("*.json"):
            file.unlink() if "token" in file.name else file.rename(here / "Llama-3.1-8B" / file.name)
    monkeypatch.chdir(here)
    known = commands((PAGES / f"{name}.md").read_text())
    assert len(known) > 3
    for command, printed in known:
        words = shlex.split(command)
        done: Result = process(*words, cwd=here) if words[0] == "push" else ckpt(*words)
        assert done.code == 0, f"ckpt {command}\n{done.err}"
        for line in printed:
            assert line in done.out + done.err, f"ckpt {command}\n{done.out}{done.err}"


def test_every_file_that_a_page_names_is_there() -> None:
    for path in PAGES.glob("*.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text()):
            assert (path.parent / target).exists(), (path.name, target)
