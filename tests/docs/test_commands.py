"""Commands in docs/: each runs on files written by the real tools and prints what the page shows."""

from __future__ import annotations

import json
import pickle
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import models

import ckpt as api
from tests.estimate.models import PUBLIC
from tests.support.commands import ckpt, ckpt_in_order
from tests.support.hub_server import HubServer
from tests.support.pages import Command, blocks, commands, differences, row_differs
from tests.support.places import FIXTURES, REPOSITORY
from tests.support.run_folders import in_the_order_of_steps

DOCS = REPOSITORY / "docs"

RUN = {"trl-zero3/outputs/qwen3-sft": "outputs"}
#: Fixtures and their names in a page's working folder, by page and by the heading where a new folder starts.
PLACES: dict[str, dict[str, dict[str, str]]] = {
    "check": {"": {"trainer-zero2": "outputs"}},
    "clean": {"": {"trainer-zero2": "outputs"}},
    "command-line": {"": {"toy-zero3": "outputs"}},
    "diff": {"": {"trainer-zero2": "outputs"}},
    "doctor": {"": {"trl-lora-zero3/outputs/qwen3-lora": "outputs"}},
    "exit-codes": {"": RUN},
    "estimate": {"": RUN},
    "formats": {"": RUN, "Write GGUF for llama.cpp": {"gguf/llama": "model"}},
    "how-it-works": {"": RUN},
    "index": {"": RUN},
    "journeys/axolotl-gpt-oss": {
        "": {"axolotl-fsdp2": ".", "axolotl-lora-fsdp2": ".", "axolotl-lora-fsdp2-ac": ".", "../examples/axolotl": "."}
    },
    "journeys/llm-jp-v4": {"": {"megatron-llm-jp": "."}},
    "journeys/lora-merge-push": {"": {"trl-lora-zero3": "."}},
    "journeys/megatron-to-hf": {"": {"megatron-dist-flattened": "run"}},
    "journeys/trl-qwen3-moe": {"": {"trl-zero3": "."}},
    "journeys/verify-in-ci": {"": RUN},
    "operations": {"": {"trainer-zero2": "outputs"}},
    "pages": {
        "": {"trainer-zero2": "outputs"},
        "Plot the losses of several runs": {
            "trl-zero3/outputs/qwen3-sft": "unbroken",
            "trl-fsdp2/outputs/llama-sft": "resumed",
        },
    },
    "performance": {"": RUN},
    "picture": {"": {"toy-zero3": "outputs"}, "Checkpoints that are damaged": {"dcp-fsdp2/step-2": "step-2"}},
    "reliability": {"": RUN},
    "resume": {
        "": {"megatron-dist-flattened": "run", "moe-zero3": "outputs"},
        "HF Trainer under DeepSpeed": RUN,
        "HF Trainer under FSDP": {"trl-fsdp2": "."},
        "Runs of Megatron-Bridge": {"megatron-dist-flattened": "run"},
    },
    "verify": {"": RUN},
}
#: Sections whose commands run in tests/train/test_demo.py, training/test_watch.py and quantized/test_rounding.py.
ELSEWHERE = {
    ("resume", "From 2 ranks to 3"),
    ("operations", ""),
    ("verify", "Compare a quantized model with the plain one"),
}
#: Blocks with output that another test compares, by page and heading.
COMPARED = {
    ("README", "See it in a second"): "tests/cli/test_readme.py",
    ("README", "Demo"): "tests/train/test_demo.py",
    ("check", ""): "tests/check/test_checking.py",
    ("errors", "For programs"): "tests/cli/test_streams.py",
    ("merge-lora", "A run under ZeRO-3"): "tests/train/test_demo.py",
    ("merge-lora", "Did it do anything?"): "tests/lora/test_merge_proof.py",
    ("operations", "Spikes"): "tests/engines/test_operations.py",
    ("resume", "From 2 ranks to 3"): "tests/train/test_demo.py",
    ("resume", "HF Trainer under DeepSpeed"): "tests/engines/test_trainer_recipe.py",
    ("testing", "HF Trainer on other processes"): "tests/engines/test_trainer_recipe.py",
    ("testing", "Losses after a resume"): "tests/docs/test_site.py",
    ("testing", "Memory estimates"): "tests/estimate/test_published.py",
    ("training", "What the preflight finds"): "tests/train/test_training_page.py",
    ("versions", "Install a release"): "tests/docs/test_release.py",
}
#: Blocks without a terminal, or with output that can't be reproduced.
NOT_COMPARED = {
    ("CONTRIBUTING", "The house"),
    ("estimate", "If training ran out of memory"),  # torch's error
    ("journeys/trl-qwen3-moe", "Under Slurm"),  # a variable and a command
    ("new-architecture", "Megatron's table"),
    ("journeys/llm-jp-v4", "On another number of nodes"),  # lines from a job script
    ("new-architecture", "Models with images"),
    ("command-line", "Defaults of your own"),  # the user's own file
}
#: First words of a terminal line if the block has no `$`.
PROGRAMS = r"(make|pip|ckpt|python|torchrun|srun|sbatch|qsub|accelerate|axolotl) |  "

#: Sources for the table in docs/resume.md, by format.
STARTS = {
    "auto": "trl-zero3/outputs/qwen3-sft",
    "dcp": "dcp-fsdp2/step-2",
    "fsdp-ranks": "verl-fsdp1",
    "megatron-dist": "megatron-fsdp",
    "full": "dcp-fsdp2/step-2",
    "megatron": "trl-zero3/outputs/qwen3-sft",
}


def pages() -> list[str]:
    """Return all pages in docs/ but cards, whose own runs write them.

    `test_site.py` compares commands in Japanese and English pages.
    """
    found = (path.relative_to(DOCS).with_suffix("").as_posix() for path in sorted(DOCS.rglob("*.md")))
    return [name for name in found if not name.startswith(("ja/", "cards/"))]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as running:
        running.configure(monkeypatch, tmp_path / "hf-home")
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        yield running


def furnished(here: Path, places: dict[str, str]) -> Path:
    for source, place in places.items():
        shutil.copytree(FIXTURES / source, here / place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("truth"))
    return in_the_order_of_steps(here)


def make_a_hole(file: Path) -> None:
    """Remove one chunk of a tensor from DCP's metadata."""
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata["model.down.weight"].chunks.pop()
    file.write_bytes(pickle.dumps(metadata))


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("name", PLACES)
def test_a_page(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = [
        command
        for command in commands((DOCS / f"{name}.md").read_text())
        if command.text.startswith("ckpt ") and (name, command.heading) not in ELSEWHERE
    ]
    assert known
    here = furnished(tmp_path / "here", PLACES[name][""])
    if name == "journeys/megatron-to-hf":  # Megatron's output, and the Hub's model next to it
        (here / "Llama-3.1-8B").mkdir()
        for path in (FIXTURES / "trl-zero3/outputs/qwen3-sft/checkpoint-2").glob("tokenizer*.json"):
            shutil.copy(path, here / "Llama-3.1-8B")  # the tokenizer
        for file in (here / "run").glob("*.json"):
            file.unlink() if "token" in file.name else file.rename(here / "Llama-3.1-8B" / file.name)
    if name == "estimate":
        (here / "Llama-3-8B").mkdir()
        (here / "Llama-3-8B/config.json").write_text(json.dumps(PUBLIC["Llama-3-8B"][1]))
    places, wrong = "", []
    for command in known:
        if command.heading in PLACES[name] and command.heading != places:
            places = command.heading
            here = furnished(tmp_path / places, PLACES[name][places])
            if "damaged" in places:
                make_a_hole(here / "step-2/.metadata")
        monkeypatch.chdir(here)
        words = command.words[1:]
        done = ckpt_in_order(*words)
        assert done.code == command.code, f"{command.text}\n{done.out}{done.err}"
        if command.printed is not None and (different := differences(command.printed, done.out + done.err)):
            wrong.append(f"{command.text}\n{different}")
    assert not wrong, "\n\n".join(wrong)


def test_the_table_of_conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command in the table of docs/resume.md runs for M = 2."""
    section = (DOCS / "resume.md").read_text().partition("## Convert without `ckpt.resume`\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    known = [words for row in rows for words in re.findall(r"`ckpt (convert [^`]+)`", row)]
    assert len(known) == len(rows) - 2 >= 11  # one command per row below the header
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
    """Each page's commands run here, or in a test that names the page's file."""
    tests = [path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py") if path.name != Path(__file__).name]
    for name in pages():
        if name not in PLACES and commands((DOCS / f"{name}.md").read_text()):
            assert any(re.search(rf"\b{name}\.md\b", text) for text in tests), f"no test runs the commands of {name}.md"
    assert set(PLACES) <= set(pages())


def test_every_block_that_shows_what_is_printed_is_compared() -> None:
    files = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(DOCS / f"{name}.md" for name in pages())]
    found = set()
    for path in files:
        name = path.relative_to(DOCS).with_suffix("").as_posix() if DOCS in path.parents else path.stem
        for block in blocks(path.read_text()):
            if name in PLACES and any(line.startswith("$ ") for line in block.lines):
                shown = [one for one in block.commands() if one.printed and not one.text.startswith("ckpt ")]
            elif any(line.startswith("$ ") for line in block.lines):
                shown = [one for one in block.commands() if one.printed]
            else:
                shown = [line for line in block.lines if line.strip() and not re.match(PROGRAMS, line)]
            if shown and name != "api":  # the page contains only mkdocstrings' options
                found.add((name, block.heading))
    assert found == COMPARED.keys() | NOT_COMPARED
    for (name, _), test in COMPARED.items():
        assert re.search(rf"\b{name}(\.md\b|\")", (REPOSITORY / test).read_text()), f"{test} does not read {name}.md"


def test_what_other_commands_name_is_there() -> None:
    """Check names of make targets, benchmark sections and options, test files and extras, without running them."""
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
    page = "text\n\n    $ ckpt a b  # exit 3\n    said\n\n      more\n    ...\n    $ other\n    ckpt not\n\n"
    page += "    ckpt c\n    ckpt row       1.00    2.00     9\n\n"
    page += "## Next\n\n```\n$ ckpt d\n$ ckpt e\n```\n```python\nckpt f\n```\n"
    assert commands(page) == [
        Command("ckpt a b  # exit 3", "", 3, ["said", "", "  more", "..."]),
        Command("other", "", 0, ["ckpt not", "", "ckpt c", "ckpt row       1.00    2.00     9"]),
        Command("ckpt d", "Next", 0, None),
        Command("ckpt e", "Next", 0, None),
    ]
    assert commands("    ckpt c\n    ckpt row       1.00    2.00     9\n\n") == [Command("ckpt c", "", 0, None)]
    assert commands("    $ ckpt a\n    $ ckpt b\n    said\n")[0].printed == []


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        (["a", "b"], "a\nb\n", True),
        (["a", "b"], "\na\nb\n\n", True),
        (["a"], "a\nb\n", False),
        (["b"], "a\nb\n", False),
        (["a", "c"], "a\nb\nc\n", False),
        (["a"], "ab\n", False),
        ([], "a\n", False),
        ([], "", True),
        (["...", "b"], "a\nb\n", True),
        (["a", "...", "d", "..."], "a\nb\nc\nd\n", True),
        (["a", "...", "d"], "a\nb\n", False),
        (["loss 5.4..., lr 0.1", "..."], "loss 5.41, lr 0.1\n", True),
        (["loss 5.4..., lr 0.1"], "loss 5.51, lr 0.1\n", False),
        (["a.c"], "abc\n", False),
    ],
)
def test_what_is_shown_is_compared_with_what_is_printed(shown: list[str], printed: str, same: bool) -> None:
    assert (differences(shown, printed) == "") == same


def test_a_row_is_compared_with_what_a_test_prints() -> None:
    page = "    head  step 5  relative\n    a on 2  5.3795 5.3791  7.5e-05  -\n    b  1,024 (3)  -\n"
    assert not row_differs(page, "a on 2", {"step": "5.3794 5.3792", "relative": "equal"})
    assert not row_differs(page, "b", {"bytes": "1,024 (3)"})
    assert row_differs(page, "a on 2", {"step": "5.4794 5.3792", "relative": "7.5e-05"})
    assert row_differs(page, "a on 2", {"step": "5.3795", "relative": "7.5e-05"})
    assert row_differs(page, "a on 2", {"step": "5.3795 5.3791", "relative": "-"})
    assert row_differs(page, "b", {"bytes": "1,025 (3)"}) and row_differs(page, "c", {})


def test_leaf_modules_are_layers_of_transformers() -> None:
    page = (DOCS / "journeys/trl-qwen3-moe.md").read_text()
    names = re.findall(r"^ +\| .+ \| `(\w+)` \|$", page, re.MULTILINE)
    sources = [path.read_text() for path in Path(models.__file__).parent.glob("*/modeling_*.py")]
    assert len(names) == 6
    for name in names:
        assert any(f"class {name}(" in source for source in sources), name
