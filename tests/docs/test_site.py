"""The docs site: it builds offline without warnings and agrees with the code."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from typer.core import TyperGroup

import ckpt
from ckpt import errors
from ckpt.cli import app
from converters.names.families.composites import COMPOSITES
from converters.names.families.encoders import ENCODERS
from converters.names.families.tables import FAMILIES
from converters.names.megatron.unsupported import MISSING
from tests.support.commands import ckpt as ckpt_command
from tests.support.places import REPOSITORY

DOCS = REPOSITORY / "docs"

#: Runs mkdocs without network access.
BUILD = """
import socket, sys
def refuse(*_): raise OSError("the site is built without network")
socket.socket.connect = refuse
from mkdocs.__main__ import cli
cli(["build", "--quiet", "--strict", "--site-dir", sys.argv[1]])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", BUILD, str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def html(site: Path, page: str) -> str:
    name = Path(page).with_suffix("").as_posix()
    return (site / ("" if name == "index" else name.removesuffix("/index")) / "index.html").read_text()


def text(site: Path, page: str) -> str:
    """Return the text of a page's article without markup."""
    article = re.search(r"<article.*?</article>", html(site, page), re.DOTALL)
    assert article is not None
    return unescape(re.sub(r"<[^>]+>", "", article[0]))


def test_every_page_is_in_the_nav_of_the_first(site: Path) -> None:
    links = re.findall(r"<a [^>]*md-nav__link[^>]*>", html(site, "index.md"))
    nav = [re.search(r'href="([^"]+)"', link) for link in links]
    named = {link[1] for link in nav if link}
    for path in DOCS.rglob("*.md"):
        name = path.relative_to(DOCS).with_suffix("").as_posix()
        assert ("." if name == "index" else f"{name.removesuffix('/index')}/") in named, name
    assert {"contributing/", "changelog/"} <= named


def test_an_old_address_leads_to_the_new_page(site: Path) -> None:
    for old, new in (("benchmarks", "performance"), ("journeys/hf-trainer-fsdp", "resume")):
        target = re.search(r'href="([^"]+)"', (site / old / "index.html").read_text())
        assert target and (site / old / target[1]).resolve() == (site / new).resolve()


def test_the_losses_on_the_page_are_recorded() -> None:
    """Every row in docs/testing.md is also in docs/losses.txt."""
    page = (DOCS / "testing.md").read_text().partition("## Losses after a resume")[2].partition("\n## ")[0]
    recorded = {tuple(line.split()) for line in (DOCS / "losses.txt").read_text().splitlines()}
    rows = [tuple(line.split()) for line in page.splitlines() if " -> " in line]
    assert rows and set(rows) <= recorded


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    fetched = r'<(?:script|img|link|iframe|source)\b[^>]*?(?:src|href)="((?:https?:)?//[^"]+)"'
    for path in site.rglob("*.html"):
        assert re.findall(fetched, path.read_text()) == [], path
    assert not any("https://fonts" in path.read_text() for path in site.rglob("*.css"))


def test_a_link_leads_to_the_page_of_its_file() -> None:
    code = (DOCS / "hooks.py").read_text()
    names: dict[str, Any] = {"__name__": "hooks", "__file__": str(DOCS / "hooks.py")}
    exec(compile(code, "hooks.py", "exec"), names)
    for written_in, shown_in, link, expected in (
        ("docs/journeys/a.md", "journeys/a.md", "[b](../resume.md#c)", "[b](../resume.md#c)"),
        ("docs/ja/journeys/a.md", "ja/journeys/a.md", "[b](../../../examples/trl)", "[b](../../examples.md)"),
        ("README.md", "formats.md", "![b](docs/picture.svg)", "![b](picture.svg)"),
        ("README.md", "ja/index.md", "[b](CONTRIBUTING.md)", "[b](../contributing.md)"),
        ("docs/a.md", "a.md", "[b](../train/__main__.py)", "b (`train/__main__.py`)"),
        ("docs/a.md", "a.md", "[b](../nowhere.py), [c](https://d)", "[b](../nowhere.py), [c](https://d)"),
    ):
        assert names["relinked"](link, written_in, shown_in) == expected


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    headings = re.findall(r'<h3 id="[^"]+" class="doc doc-heading">(.*?)</h3>', html(site, "api.md"), re.DOTALL)
    named = {re.sub(r"<[^>]+>|&para;|\s", "", heading) for heading in headings}
    assert {f"ckpt.{name}" for name in ckpt.__all__ if name != "__version__"} <= named


def test_the_reference_shows_each_option_with_its_type_and_default(site: Path) -> None:
    page = re.sub(r"\s+", " ", text(site, "api.md"))
    assert 'max_memory: str | int = "512MB"' in page
    assert "qlora: bool = False" in page
    assert "Unpack[" not in page


def test_the_reference_shows_no_constructor_that_only_ckpt_calls(site: Path) -> None:
    returned = text(site, "api.md").partition("What they return")[2]
    assert "OpenCheckpoint" in returned and "LazyTensor" in returned
    classes = "OpenCheckpoint|LazyTensor|Checkpoint|Conversion|Report|Result|Checked"
    assert not re.findall(rf"^(?:{classes})\(", returned, re.MULTILINE)


def test_the_table_of_architectures_is_the_code(site: Path) -> None:
    cell = r"\s*<td>(.*?)</td>"
    page = html(site, "architectures.md")
    found = re.findall(rf"<td><code>([\w-]+)</code></td>\s*<td><code>(\w+)</code></td>{cell * 3}", page)
    rows = [row[:3] for row in found]
    assert {name for name, _, _ in rows} == {*FAMILIES, *ENCODERS, *COMPOSITES}
    folder = REPOSITORY / "converters/names/megatron/architectures"
    assert {name for name, _, placed in rows if placed} == {
        p.stem.replace("megatron_bert", "megatron-bert") for p in folder.glob("*.py")
    } - {"__init__"}
    assert ("llama", "LlamaForCausalLM", "yes") in rows and ("gpt2", "GPT2LMHeadModel", "yes") in rows
    more = {name: (held, proved) for name, _, _, held, proved in found}
    assert more["llama"] == ("", "trained") and more["olmo2"] == ("", "")
    assert more["glm4_moe"] == ("q/k norms, experts, shared experts, multi-token prediction", "logits")
    assert "latent attention" in more["kimi_k2"][0] and "twin" in more["kimi_k2"][1]
    lacking = page.partition("What megatron-core lacks")[2]
    assert all(f"<code>{name}</code>" in lacking for name in MISSING)


def test_the_number_of_unsupported_architectures_is_the_codes() -> None:
    """Check the limits pages in both languages. The list of architectures counts the others itself."""
    lacking = len(MISSING)
    assert f"for {lacking} [the refusal says]" in (DOCS / "limits.md").read_text()
    assert f"{lacking} 種" in (DOCS / "ja/limits.md").read_text()


def test_what_the_readme_says_is_on_the_pages(site: Path) -> None:
    assert "megatron-core 0.16.1" in text(site, "formats.md")
    assert "zero_to_fp32.py" in text(site, "performance.md")
    for script in (REPOSITORY / "examples").glob("*.py"):
        assert f"examples/{script.name}" in text(site, "examples.md")


def test_the_table_of_exit_codes_is_the_code() -> None:
    page = (DOCS / "exit-codes.md").read_text()
    rows = dict(re.findall(r"^\| (\d+) \| .*? \| (.*?) ?\|$", page, re.MULTILINE))
    kinds = errors.CkptError.__subclasses__()
    for kind in kinds:
        assert f"ckpt.errors.{kind.__name__}" in rows[str(kind.exit_code)]
    assert {"0", "1", "70", "130", "141", "143"} == rows.keys() - {str(kind.exit_code) for kind in kinds}


def test_a_page_in_japanese_has_the_blocks_of_the_english_one(site: Path) -> None:
    """Commands, output and configurations are identical. No other Japanese pages exist."""
    pages = {path.relative_to(DOCS / "ja") for path in (DOCS / "ja").rglob("*.md")}
    journeys = {path.relative_to(DOCS) for path in DOCS.glob("journeys/*.md")}
    assert pages == journeys | set(map(Path, ("index.md", "resume.md", "command-line.md", "limits.md")))
    for page in pages:
        assert blocks((DOCS / page).read_text()) == blocks((DOCS / "ja" / page).read_text()), page
        english, japanese = (prose((folder / page).read_text()) for folder in (DOCS, DOCS / "ja"))
        assert english.code == japanese.code and english.numbers <= japanese.numbers, f"{page} says something else"
        assert '<html lang="ja"' in html(site, f"ja/{page}") and '<html lang="en"' in html(site, str(page))
        assert re.search(r"[ぁ-ん]", text(site, f"ja/{page}"))


def test_the_readme_in_japanese_has_the_blocks_of_the_english_one() -> None:
    english, japanese = ((REPOSITORY / name).read_text() for name in ("README.md", "README.ja.md"))
    assert blocks(english) == blocks(japanese)
    assert prose(english).code == prose(japanese).code
    assert prose(english).numbers <= prose(japanese).numbers
    links = re.findall(r"\]\(([^)#]+)", japanese)
    assert links and all((REPOSITORY / link).exists() for link in links)


def blocks(page: str) -> list[str]:
    return re.findall(r"^(?:    [^\n]+\n)+|^```.*?^```", page, re.MULTILINE | re.DOTALL)


class Prose(NamedTuple):
    code: set[str]
    numbers: set[str]


def prose(page: str) -> Prose:
    """Return the code and numbers outside a page's blocks. They are the same in every language."""
    text = re.sub(r"\]\([^)]*\)", "]", page)
    for block in blocks(page):
        text = text.replace(block, "")
    code = {" ".join(piece.split()) for piece in re.findall(r"`([^`]+)`", text)}
    return Prose(code, set(re.findall(r"\d+(?:\.\d+)*", re.sub(r"`[^`]*`", "", text))))


def test_what_was_never_run_is_said() -> None:
    """Each journey names its test runs. If it shows a server or launcher, it says that nobody ran the command."""
    for path in DOCS.glob("journeys/*.md"):
        said = path.read_text().partition("## What was run")[2]
        assert "test suite" in said, path.name
        if re.search(r"^    (?:\$ )?(vllm|accelerate|axolotl|torchrun) ", path.read_text(), re.MULTILINE):
            assert "not been run" in said, path.name


def test_every_command_has_a_page_of_its_help(site: Path) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup) and group.commands
    for name in group.commands:
        page = text(site, f"commands/{name}.md")
        shown = ckpt_command(name, "--help").out
        assert shown.strip() in page, name
        assert f'href="commands/{name}/"' in html(site, "index.md"), name


def test_a_japanese_page_has_no_spaces_inside_words(site: Path) -> None:
    names: dict[str, Any] = {"__name__": "hooks", "__file__": str(DOCS / "hooks.py")}
    exec(compile((DOCS / "hooks.py").read_text(), "hooks.py", "exec"), names)
    for written, expected in (
        ("学習\nした", "学習した"),
        ("- 学習\n  した", "- 学習した"),
        ("見る。\n`ckpt` は", "見る。`ckpt` は"),
        ("`ckpt`\nは bit\n単位", "`ckpt`\nは bit\n単位"),
        ("見る。\n\n次", "見る。\n\n次"),
        ("| 表。 |\n| 表 |", "| 表。 |\n| 表 |"),
        ("- 一つ。\n- 二つ。\n1. 三つ", "- 一つ。\n- 二つ。\n1. 三つ"),
    ):
        assert names["joined"](written) == expected
    letter = "[ぁ-ヿ一-鿿、。]"
    for path in (DOCS / "ja").rglob("*.md"):
        page = html(site, path.relative_to(DOCS).as_posix())
        paragraphs = re.findall(r"<p>.*?</p>|<li>.*?</li>", page[page.index("<article") :], re.DOTALL)
        assert any(re.search(letter, paragraph) for paragraph in paragraphs)
        assert not [one for one in paragraphs if re.search(rf"{letter}\n *{letter}", one)], path


@pytest.fixture(scope="module")
def nodes() -> list[ast.AST]:
    """Return all nodes of the parsed source."""
    paths = [path for room in ("ckpt", "converters") for path in (REPOSITORY / room).rglob("*.py")]
    return [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]


def test_every_message_on_the_page_of_errors_is_in_the_code(nodes: list[ast.AST]) -> None:
    constants = [
        re.sub(r"\{(\w+)(=True)?\}", lambda option: f"--{option[1]}", node.value)
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    messages = re.findall(r"^\| `(.+?)` \|", (DOCS / "errors.md").read_text(), re.MULTILINE)
    assert len(messages) > 30
    for message in messages:
        for piece in filter(None, (piece.strip(" ") for piece in message.split("..."))):
            assert any(piece in constant for constant in constants), message


def test_every_code_of_an_error_is_on_the_page(nodes: list[ast.AST]) -> None:
    raised: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Error"):
            raised |= {ast.literal_eval(one.value) for one in node.keywords if one.arg == "code"}
    pending = [errors.CkptError]
    for kind in pending:
        pending += kind.__subclasses__()
    raised |= {kind.code for kind in pending[1:]} | {"internal", "interrupted", "terminated"}
    listed = re.findall(r"^\| `([a-z-]+)` \| [^|]+ \| (\d+) \|$", (DOCS / "errors.md").read_text(), re.MULTILINE)
    assert {code for code, _ in listed} == raised and len(listed) == len(raised)
    assert {(kind.code, str(kind.exit_code)) for kind in pending[1:]} <= set(listed)


def test_the_groups_of_the_page_of_errors_are_the_exit_codes() -> None:
    codes = re.findall(r"^## (\d+):", (DOCS / "errors.md").read_text(), re.MULTILINE)
    assert {int(code) for code in codes} == {kind.exit_code for kind in errors.CkptError.__subclasses__()} | {70}


def test_every_reason_to_skip_a_test_is_one_that_is_given() -> None:
    """A stale reason would fail CI on a machine without the optional dependency."""
    code = "".join(path.read_text() for room in ("ckpt", "tests") for path in (REPOSITORY / room).rglob("*.py"))
    code += "zsh is not installed, fish is not installed"  # test_shells.py inserts the shell's name
    lines = (REPOSITORY / "tests" / "skips.txt").read_text().splitlines()
    reasons = [line for line in lines if line and not line.startswith("#")]
    assert reasons and [reason for reason in reasons if reason not in code] == []
