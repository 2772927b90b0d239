"""`ckpt/plan/checkpoint.py`: typed fields carry every fact a writer needs, never notes for people."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckpt
import converters
from ckpt.errors import CkptError
from ckpt.plan import registry
from ckpt.plan.checkpoint import Checkpoint, Layout, ReadRequest
from ckpt.state.naming import to_namespace
from ckpt.testing.conformance import Declaration
from converters.deepspeed.pipeline.read import OTHER_ORDER as OTHER_ORDER_OF_PIPELINE
from converters.megatron.read import OTHER_ORDER
from tests.formats.declarations import DECLARATIONS

WRITABLE = [name for name in registry.names() if registry.get(name).writes]
SHARDED = [one.format for one in DECLARATIONS if one.is_sharded]
#: Replacement notes for every reader: none, or other words and another reader's words.
SAID = [(), ("a note in other words", OTHER_ORDER, OTHER_ORDER_OF_PIPELINE)]


def written(path: Path, declaration: Declaration) -> dict[str, Any]:
    """Return each writable format's files for a sample with all their bytes, or the error."""
    checkpoint, found = ckpt.open(path, declaration.format), {}
    for name in WRITABLE:
        layout = Layout(world_size=2 if checkpoint.world_size is None and name in SHARDED else None)
        try:
            target = registry.get(name)
            found[name] = target.lay_out(to_namespace(checkpoint, target.namespace, layout), layout).files
        except CkptError as error:
            found[name] = (type(error), str(error))
    return found


@pytest.mark.parametrize("declaration", [pytest.param(one, id=one.format, marks=one.marks) for one in DECLARATIONS])
def test_a_reworded_note_changes_no_output(
    declaration: Declaration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = declaration.make(tmp_path)
    as_read = written(path, declaration)
    assert any(not isinstance(files[0], type) for files in as_read.values())
    kind = type(registry.get(declaration.format))
    read = kind.read
    for said in SAID:

        def reworded(self: Any, path: Path, request: ReadRequest, notes: tuple[str, ...] = said) -> Checkpoint:
            return replace(read(self, path, request), notes=notes, framework=None)

        with monkeypatch.context() as patched:
            patched.setattr(kind, "read", reworded)
            assert set(said) <= set(ckpt.open(path, declaration.format).notes)
            assert written(path, declaration) == as_read


def facts_taken_from_text(tree: ast.AST) -> Iterator[str]:
    """Yield lines that inspect a note, or the name of the read format or framework."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        texts: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            texts = node.comparators
        elif isinstance(node, ast.Subscript):
            texts = [node.value]
        for text in texts:  # a reader may check its own list of notes
            if isinstance(text, ast.Attribute) and text.attr == "notes" and ast.unparse(text.value) != "reading":
                yield f"{text.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Attribute) and node.attr in ("format", "framework") and id(node) not in called:
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_no_converter_takes_a_fact_from_a_text() -> None:
    paths = sorted(Path(converters.__path__[0]).rglob("*.py"))
    assert len(paths) > 60
    found = {path.name: list(facts_taken_from_text(ast.parse(path.read_text()))) for path in paths}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "checkpoint.format == 'dcp'",
        "checkpoint.format in ('zero1', 'zero2')",
        "(checkpoint.framework or '').startswith('deepspeed')",
        "OTHER_ORDER in checkpoint.notes",
        "checkpoint.notes[0]",
    ],
)
def test_a_fact_taken_from_a_text_is_found(line: str) -> None:
    assert list(facts_taken_from_text(ast.parse(line)))
