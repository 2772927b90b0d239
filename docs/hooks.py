"""Hooks for `mkdocs build` (see `hooks` in mkdocs.yml).

- `<!-- README: Speed and memory -->` inserts this section of the README.
- `<!-- made: architectures -->` inserts the result of `MADE["architectures"]`.
- CONTRIBUTING.md and CHANGELOG.md become pages.
- Each command gets a page with its help in `commands/`.
- Japanese lines are joined without a space.
- Links to repository files become links to their pages, or the file's name if it has no page.
- Pages missing from the nav go to How-to, and cards to Background.
- Old addresses in `REDIRECTS` lead to the new pages.
"""

from __future__ import annotations

import ast
import contextlib
import io
import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
#: Pages made from files and folders outside docs/.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
FOLDERS = {"examples": "examples.md"}
COPIED = ("CONTRIBUTING.md", "CHANGELOG.md")
OTHERS = "How-to"
BACKGROUND = "Background"
COMMANDS = "Reference"
#: New page for each merged page.
REDIRECTS = {
    "benchmarks": "performance",
    "hf-trainer-resume": "resume",
    "journeys/hf-trainer-fsdp": "resume",
    "out-of-memory": "estimate",
    "ja/journeys/hf-trainer-fsdp": "ja/resume",
}
_LINK = re.compile(r"\[([^]]*)\]\((?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?\)")
#: Line ends to remove from Japanese text: between two letters, or next to punctuation.
_LINE_END = re.compile(
    r"(?<=[、-ヿ一-鿿])\n *(?=[、-ヿ一-鿿])"
    r"|(?<=[、。」])\n *(?=\S)(?!([-*|#>]+|\d+\.) |```)"
    r"|(?<=\S)\n *(?=[、。」])"
)
_MARK = re.compile(r"^<!-- (README|made): (.+) -->$", re.MULTILINE)


# -- the pages ---------------------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the commands' pages to Reference, and pages missing from the nav to their tabs."""
    assert config.nav is not None
    reference = next(section[COMMANDS] for section in config.nav if COMMANDS in section)
    reference.append({"Each command": [{f"ckpt {name}": f"commands/{name}.md"} for name in guides()]})
    named = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    docs = Path(config.docs_dir)
    for path in sorted(docs.rglob("*.md")):
        if (name := path.relative_to(docs).as_posix()) not in named:
            tab = BACKGROUND if name.startswith("cards/") else OTHERS
            next(section[tab] for section in config.nav if tab in section).append(name)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name in COPIED:
        files.append(File.generated(config, PAGES[name], content=(ROOT / name).read_text("utf-8")))
    for name in guides():
        files.append(File.generated(config, f"commands/{name}.md", content=command_page(name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    if here.startswith("ja/"):
        markdown = joined(markdown)
    copied = {PAGES[name]: name for name in COPIED}
    markdown = relinked(markdown, copied.get(here, f"docs/{here}"), here)

    def inserted(mark: re.Match[str]) -> str:
        kind, what = mark.groups()
        return relinked(section(what), "README.md", here) if kind == "README" else MADE[what]()

    return _MARK.sub(inserted, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    is_japanese = page.file.src_uri.startswith("ja/")
    return output.replace('<html lang="en"', '<html lang="ja"', 1) if is_japanese else output


def on_post_build(config: MkDocsConfig) -> None:
    """Write a redirect for each old address."""
    for old, new in REDIRECTS.items():
        target = posixpath.relpath(new, old) + "/"
        folder = Path(config.site_dir) / old
        folder.mkdir(parents=True)
        refresh = f'<meta http-equiv="refresh" content="0; url={target}">'
        (folder / "index.html").write_text(f'<!doctype html>{refresh}<a href="{target}">{new}</a>\n', "utf-8")


def joined(markdown: str) -> str:
    """Join lines of Japanese text, because a browser would show their ends as spaces."""
    return _LINE_END.sub("", markdown)


def relinked(markdown: str, written_in: str, shown_in: str) -> str:
    """Return `markdown` with links to repository files replaced by links between pages."""

    def one(link: re.Match[str]) -> str:
        words, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(written_in), target))
        folder = path.partition("/")[0]
        page = PAGES.get(path) or FOLDERS.get(folder) or (path[len("docs/") :] if folder == "docs" else None)
        if page is not None:
            return f"[{words}]({posixpath.relpath(page, posixpath.dirname(shown_in) or '.')}{anchor or ''})"
        return f"{words} (`{path}`)" if (ROOT / path).is_file() else link[0]

    return _LINK.sub(one, markdown)


def section(title: str) -> str:
    """Return a section of the README. Raise KeyError if the heading is missing."""
    parts = re.split(r"^## (.+)\n", (ROOT / "README.md").read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[title].strip()


# -- tables from the code ----------------------------------------------------------------------------------------------


def architectures() -> str:
    """Return a table of all known model types, and their support in Megatron's formats."""
    from converters.names.families.composites import COMPOSITES
    from converters.names.families.encoders import ENCODERS
    from converters.names.families.tables import FAMILIES
    from converters.names.megatron.relation import architectures as placed_by_megatron

    placed = placed_by_megatron()
    classes: dict[str, str] = {name: family.stem + family.causal for name, family in FAMILIES.items()}
    classes |= {name: encoder.stem + next(iter(encoder.heads)) for name, encoder in ENCODERS.items()}
    classes |= {name: composite.cls for name, composite in COMPOSITES.items()}
    rows = []
    for name in sorted({*classes, *placed}):
        held = ("yes", held_by_megatron(name), proof(name)) if name in placed else ("", "", "")
        rows.append(f"| `{name}` | `{classes[name]}` | {' | '.join(held)} |")
    head = "| model type | class | Megatron's formats | features | proved |\n| --- | --- | --- | --- | --- |"
    return "\n".join([f"{len(classes)} model types; {len(placed)} in Megatron's formats.", "", head, *rows])


def held_by_megatron(name: str) -> str:
    """Return the features in Megatron's table for an architecture."""
    from converters.names.families.composites import Composite
    from converters.names.families.rows import parse
    from converters.names.megatron.relation import table_of

    table = table_of(name)
    has_images = isinstance(table.family, Composite)
    texts = table.family.texts.values() if isinstance(table.family, Composite) else [table.family]
    on_hub = {row.name for text in texts for row in parse(text.layer)}
    rows = {row.megatron for row in table.rows if row.hubs[0] in on_hub or ".layers." not in row.megatron}
    features = {
        "images": has_images,
        "latent attention": any("linear_kv_up_proj" in row for row in rows),
        "q/k norms": any(".q_layernorm." in row for row in rows),
        "gated delta nets": any(".self_attention.in_proj." in row for row in rows),
        "Mamba-2": any(".mixer." in row for row in rows),
        "sinks": any("softmax_offset" in row for row in rows),
        "learned positions": any("position_embeddings" in row for row in rows),
        "experts": any("local_experts" in row for row in rows),
        "shared experts": any("shared_experts" in row for row in rows),
        "multi-token prediction": bool(table.prediction),
    }
    return ", ".join(feature for feature, has in features.items() if has)


def proof(name: str) -> str:
    """Return the proof for an architecture: training, logits, or logits of a twin."""
    from tests.support.twins import TWINS
    from train.config import ARCHITECTURES

    if name in ARCHITECTURES:
        return "trained"
    return f"logits of a twin (`{TWINS[name].model_type}`)" if name in TWINS else "logits"


def missing() -> str:
    """Return a table of unsupported architectures, by the missing feature."""
    from converters.names.megatron.unsupported import MISSING

    lacking: dict[str, list[str]] = {}
    for name, what in MISSING.items():
        lacking.setdefault(what, []).append(f"`{name}`")
    rows = [f"| {what} | {', '.join(sorted(names))} |" for what, names in lacking.items()]
    return "\n".join(["| what is missing | model types |", "| --- | --- |", *rows])


def examples() -> str:
    """Return each script in examples/, under its docstring."""
    shown = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text("utf-8")
        document = ast.get_docstring(ast.parse(source)) or ""
        title, _, about = document.partition("\n")
        code = source[source.index('"""', 3) + 3 :].strip()
        shown.append(f"## {title.rstrip('.')}\n\n`examples/{path.name}`\n\n{about.strip()}\n\n```python\n{code}\n```")
    return "\n\n".join(shown)


def guides() -> dict[str, str]:
    """Return each command's guide page."""
    from ckpt import commands

    return {command.name: command.guide for command in commands.all_commands()}


def command_page(name: str) -> str:
    """Return a page with a command's help."""
    from ckpt.cli import app

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        app([name, "--help"], prog_name="ckpt")
    guide = guides()[name]
    more = f"More about it: [{guide.removesuffix('.md')}](../{guide}). [Exit codes](../exit-codes.md)."
    return f"# ckpt {name}\n\n```text\n{shown.getvalue().strip()}\n```\n\n{more}\n"


#: Functions for `<!-- made: NAME -->`.
MADE: Mapping[str, Callable[[], str]] = {"architectures": architectures, "missing": missing, "examples": examples}
