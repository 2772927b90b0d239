"""`ckpt/base/text.py`: counts in messages, one and many."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

import ckpt
import converters
from ckpt.base.text import pluralize

#: Texts before a verb: `config.json names no modules`.
VERBS = {"{MODEL} records", "{MODULES} names", "{RUN_CONFIG} only records", "{name} names", "{name} records"}
#: Texts other than a single number: several numbers, `all`, or a kind.
NO_NUMBERS = {
    *("{', '.join(map(str, counts.values()))} experts", "{', '.join(map(str, recorded))} experts"),
    *("{', then '.join(ranks)} ranks", "{'with' if slot else 'without'} these names", "{_listed(counts)} ranks"),
    *("{_runs(row.stages)} layers", "{kind} files"),
    *("{_ACCUMULATED} x ranks", "{name} for ranks", "{_stored(exact)} masters", "{_stored(rounded)} masters"),
    *("{count} names", "{have} no elements", "{'some' if few else 'all'} layers"),
    *("{short(nbytes)} bytes", "{short(numel)} elements"),
}
#: Limits, and numbers from a file, perhaps with another type.
OTHERS = {
    *("{len(text)} characters", "{self.total_size} bytes", "{rows} rows"),
    *(
        "{bits} bits",
        "{kind['bits_per_parameter']} bits",
        "{groups or heads} query groups",
        "{groups} query groups",
        "{heads} heads",
    ),
    "{len(ids) if isinstance(ids, list) else ids} parameters",
}
ALLOWED = VERBS | NO_NUMBERS | OTHERS


def trees() -> Iterator[ast.Module]:
    for package in (ckpt, converters):
        for path in Path(str(package.__file__)).parent.rglob("*.py"):
            yield ast.parse(path.read_text("utf-8"))


def test_one_is_singular() -> None:
    assert [pluralize(1, what) for what in ("file", "entry", "process")] == ["1 file", "1 entry", "1 process"]
    assert [pluralize(2, what) for what in ("file", "entry", "process")] == ["2 files", "2 entries", "2 processes"]
    assert pluralize(1200, "byte", ",") == "1,200 bytes" and pluralize(0, "day") == "0 days"


def test_no_count_has_a_fixed_plural() -> None:
    """`{number} tensors` is wrong for 1: `{pluralize(number, 'tensor')}` is right."""
    nodes = [node for tree in trees() for node in ast.walk(tree)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "pluralize"]
    nouns = {str(call.args[1].value) for call in calls if isinstance(call.args[1], ast.Constant)}
    plurals = "|".join(sorted({pluralize(2, noun.split()[-1])[2:] for noun in nouns}, key=len, reverse=True))
    fixed = re.compile(rf" (?:(?!of|in|as|and|has|holds)[a-z]+ )?(?:{plurals})\b")
    strings = [pairwise(node.values) for node in nodes if isinstance(node, ast.JoinedStr)]
    found = {
        f"{{{ast.unparse(value.value)}}}{match[0]}"
        for value, text in chain.from_iterable(strings)
        if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant)
        if (match := fixed.match(str(text.value)))
    }
    assert found == ALLOWED, sorted(found ^ ALLOWED)
