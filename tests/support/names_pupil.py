"""Searches for what shapes and names have to do with a config, for `fixtures/make_names.py`."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from converters.names.hub.learned import NoAnswerError, Scope
from tests.support.names_lab import Lab, NotLearnedError, Sample


class Pupil:
    """Searches for words and conditions that are right for all samples."""

    def __init__(self, lab: Lab, samples: Sequence[Sample], null: Mapping[str, str], lists: Mapping[str, Any]) -> None:
        self.lab, self.samples, self.null, self.lists = lab, samples, null, lists
        self.scopes = [Scope(s.values, null, lists) for s in samples]
        varied = {name: {json.dumps(s.values[name]) for s in samples} for name in lab.accepted}
        self.varied = [name for name, values in varied.items() if len(values) > 1]
        self.counts: dict[str, str] = {}
        self.found: dict[Any, str] = {}

    # numbers

    def symbols(self) -> list[str]:
        found = []
        for name in self.varied:
            kinds = {type(s.values[name]) for s in self.samples} - {type(None)}
            if kinds == {int}:
                found.append(name)
            elif (
                kinds == {list} and self.lab.is_per_layer(name) and all(isinstance(i, int) for i in self.lab.base[name])
            ):
                found.append(f"{name}[#]")
        return found

    @functools.cached_property
    def relevant(self) -> dict[str, set[str]]:
        """Entries that change a tensor's shape where they alone are changed, by its pattern."""
        base = self.samples[0]
        found: dict[str, set[str]] = defaultdict(set)
        for sample in self.lab.samples:
            changed = [n for n in self.lab.accepted if sample.values[n] != base.values[n]]
            if len(changed) <= 2:
                for name, shape in {**sample.required, **sample.optional}.items():
                    if {**base.required, **base.optional}.get(name, shape) != shape:
                        found[re.sub(r"(?<=\.)\d+(?=\.|$)", "#", name)].update(changed)
        return found

    @functools.cache  # noqa: B019 - a pupil lives as long as its samples
    def columns(self, counter: str) -> dict[str, np.ndarray]:
        """The value of each symbol at each place, -1 where it has none."""
        return {
            symbol: np.array([self.number(symbol, c, i) for c, i in self.places(counter)], dtype=np.int64)
            for symbol in self.symbols()
        }

    def number(self, symbol: str, sample: int, index: int) -> int:
        try:
            return self.scopes[sample].number(symbol, index)
        except NoAnswerError:
            return -1

    @functools.cache  # noqa: B019 - a pupil lives as long as its samples
    def places(self, counter: str) -> list[tuple[int, int]]:
        """Where a tensor may be: a sample and an index."""
        return [
            (c, i)
            for c in range(len(self.samples))
            for i in range(self.scopes[c].number(self.counts[counter]) if counter else 1)
        ]

    def words(self, counter: str, at: Sequence[int] | np.ndarray, wanted: Sequence[int], near: Iterable[str]) -> str:
        """An expression that has these values at these places."""
        y = np.array(wanted, dtype=np.int64)
        if (y == y[0]).all():
            constant = str(y[0])
        else:
            constant = ""
        columns = {s: column[at] for s, column in self.columns(counter).items() if (column[at] >= 0).all()}
        near = [s for s in columns if s.partition("[")[0] in set(near)]
        if constant and not near:
            return constant
        for chosen, degree, terms in ((near, 3, 3), (list(columns), 2, 2)):
            key = (y.tobytes(), tuple(chosen), tuple(columns[s].tobytes() for s in chosen))
            if key not in self.found:
                self.found[key] = search(y, {s: columns[s] for s in chosen}, degree, terms) if chosen else ""
            if self.found[key]:
                return self.found[key]
        if constant:
            return constant
        raise NotLearnedError(f"no words for {sorted(set(wanted))[:4]} near {near}")

    # conditions

    @functools.cache  # noqa: B019 - a pupil lives as long as its samples
    def atoms(self, counter: str) -> tuple[list[tuple[int, int]], dict[str, np.ndarray]]:
        """Where a tensor may be, and which of all conditions hold there."""
        places = self.places(counter)
        names: list[str] = []
        ints: list[str] = []
        for name in self.varied:
            values = [s.values[name] for s in self.samples]
            kinds = {type(v) for v in values}
            if kinds & {bool, int, list}:
                names.append(name)
            if kinds & {str, int, type(None)} and len(kinds - {type(None)}) <= 1:
                plain = {v for v in values if v is None or isinstance(v, str) or v == 0 or v == 1}
                names += [
                    f"{name}={'null' if v is None else v}" for v in sorted(plain, key=str) if not isinstance(v, bool)
                ]
            if self.lab.is_per_layer(name) and counter:
                items = {item for v in values if v for item in v}
                names += [f"{name}[#]={item}" for item in sorted(items, key=str)]
            elif list in kinds and counter:
                names.append(f"#@{name}")
            if int in kinds and kinds <= {int, type(None)} and counter:
                ints.append(name)
        if counter:
            names += ["#<1", f"#<{self.counts[counter]}-1"]
            layered = [n for n in ints if not re.search(r"(size|dim|rank|heads|vocab)", n)]
            names += [f"#<{n}" for n in layered] + [f"#+1%{n}" for n in layered] + [f"#%{n}" for n in layered]
            names += [f"#-{a}%{b}" for a, b in itertools.permutations(layered, 2) if "offset" in a]
            names += ["#+1%2", "#%2", "#+1%4"]
        found = {}
        for name in names:
            try:
                found[name] = np.array([self.scopes[c].holds(name, i) for c, i in places])
            except (NoAnswerError, KeyError):
                continue
        return places, found

    def conditions(self, counter: str, there: np.ndarray, where: np.ndarray | None = None) -> list[str]:
        """Conditions of which exactly one holds where `there` is true, and none elsewhere."""
        _, atoms = self.atoms(counter)
        where = np.ones_like(there) if where is None else where
        literal = [(f"{mark}{n}", ~v if mark else v) for n, v in atoms.items() for mark in ("", "!")]
        found = self.conjunction(literal, there, where)
        if found is not None:
            return [found]
        for name, value in literal[::2]:
            parts = [
                self.conjunction(literal, there & side & where, where & side) if (there & side & where).any() else "-"
                for side in (value, ~value)
            ]
            if None not in parts:
                return [
                    f"{mark}{name} {part}".strip() for mark, part in zip(("", "!"), parts, strict=True) if part != "-"
                ]
        raise NotLearnedError("no conditions")

    @staticmethod
    def conjunction(literal: Sequence[tuple[str, np.ndarray]], there: np.ndarray, where: np.ndarray) -> str | None:
        left = where & ~there
        implied = [(n, ~v & left) for n, v in literal if v[there & where].all()]
        chosen: list[str] = []
        while left.any():
            gain = [(int((out & left).sum()), -len(n)) for n, out in implied]
            best = max(range(len(gain)), key=gain.__getitem__, default=None)
            if best is None or not gain[best][0]:
                return None
            chosen.append(implied[best][0])
            left = left & ~implied[best][1]
        return " ".join(chosen)

    # tensors

    def patterns(self) -> dict[str, dict[tuple[int, int], str]]:
        """Names by pattern, with `#` for what is counted: where each is, and what it is called there."""
        names = [{**s.required, **s.optional} for s in self.samples]
        constant: dict[str, bool] = {}
        found: dict[str, dict[tuple[int, int], str]] = defaultdict(dict)
        raw: dict[str, list[set[int]]] = defaultdict(lambda: [set() for _ in self.samples])
        for c, here in enumerate(names):
            for name in here:
                if match := re.search(r"(?<=\.)(\d+)(?=\.|$)", name):
                    raw[name[: match.start()]][c].add(int(match[1]))
        for before, numbers in raw.items():
            constant[before] = len({frozenset(n) for n in numbers if n}) == 1 and not self.is_layered(before)
            if not constant[before]:
                sizes = [(c, max(n) + 1) for c, n in enumerate(numbers) if n]
                self.counts[before] = self.words("", [c for c, _ in sizes], [n for _, n in sizes], self.varied)
        for c, here in enumerate(names):
            for name in here:
                match = re.search(r"(?<=\.)(\d+)(?=\.|$)", name)
                if match and not constant[name[: match.start()]]:
                    found[f"{name[: match.start()]}#{name[match.end() :]}"][c, int(match[1])] = name
                else:
                    found[name][c, 0] = name
        return found

    def is_layered(self, before: str) -> bool:
        return bool(re.search(r"(layers|blocks|block|h|layer)\.$", before))

    def rows(self, patterns: Mapping[str, Mapping[tuple[int, int], str]], which: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for pattern, present in patterns.items():
            counter = pattern.partition("#")[0] if "#" in pattern else ""
            places, atoms = self.atoms(counter)
            shapes = [getattr(self.samples[c], which).get(present.get((c, i), "")) for c, i in places]
            there = np.array([shape is not None for shape in shapes])
            if not there.any():
                continue
            near = self.relevant.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "#", pattern), set())
            for condition in self.conditions(counter, there):
                holds = np.array([self.scopes[c].holds(condition, i) for c, i in places])
                for more in self.split(counter, atoms, shapes, holds, near):
                    where = " ".join(dict.fromkeys(f"{condition} {more[1]}".split()))
                    found[f"{more[0]} ? {where}" if where else more[0]].append(pattern)
        return dict(found)

    def split(
        self, counter: str, atoms: Any, shapes: Any, holds: np.ndarray, near: set[str], deep: int = 0
    ) -> list[tuple[str, str]]:
        """The words of shapes, and further conditions where there are different ones."""
        at = np.flatnonzero(holds)
        try:
            if len({len(shapes[k]) for k in at}) > 1:
                raise NotLearnedError("ranks differ")
            dims = zip(*(shapes[k] for k in at), strict=True)
            return [(" ".join(self.words(counter, at, dim, near) for dim in dims), "")]
        except NotLearnedError:
            if deep == 1:
                raise
        for name, value in atoms.items():
            if (holds & value).any() and (holds & ~value).any():
                try:
                    return [
                        (words, f"{mark}{name} {more}".strip())
                        for mark, side in (("", value), ("!", ~value))
                        for words, more in self.split(counter, atoms, shapes, holds & side, near, deep + 1)
                    ]
                except NotLearnedError:
                    continue
        raise NotLearnedError(f"no shape of {sorted({shapes[k] for k in at})[:3]}")


def search(y: np.ndarray, columns: Mapping[str, np.ndarray], degree: int, terms: int) -> str:
    """A sum of products of columns that is `y`."""
    products: dict[bytes, tuple[str, np.ndarray]] = {}
    for n in range(1, degree + 1):
        for chosen in itertools.combinations_with_replacement(columns, n):
            value = functools.reduce(np.multiply, (columns[c] for c in chosen))
            products.setdefault(value.tobytes(), ("*".join(chosen), value))
            if n == 3 and len(columns) > 8:
                continue
            for below in columns:
                if below not in chosen and (columns[below] > 0).all() and not (value % columns[below]).any():
                    quotient = value // columns[below]
                    products.setdefault(quotient.tobytes(), (f"{'*'.join(chosen)}/{below}", quotient))
    # powers of a size are an accident more often than not
    factors = (1, 2, 3, 4, 6, 8)
    known: dict[bytes, str] = {}
    for words, value in sorted(products.values(), key=lambda p: len(p[0])):
        for factor in factors:
            known.setdefault((value * factor).tobytes(), f"{factor}*{words}" if factor > 1 else words)
        for divisor in (2, 4, 8):
            if not (value % divisor).any():
                known.setdefault(
                    (value // divisor).tobytes(),
                    f"{words}{'*' if '/' in words else '/'}{divisor}" if "/" not in words else f"{words}/{divisor}",
                )
    if y.tobytes() in known:
        return known[y.tobytes()]
    if terms < 2:
        return ""
    for constant in (1, 2, 3, 4):
        for sign in "+-":
            if found := known.get((y - constant if sign == "+" else y + constant).tobytes()):
                return f"{found}{sign}{constant}"
    simple = sorted(known.items(), key=lambda item: len(item[1]))[: 3000 if terms == 2 else 600]
    vectors = [(np.frombuffer(raw, dtype=np.int64), words) for raw, words in simple]
    for value, words in vectors:
        for sign, rest in (("+", y - value), ("-", y + value)):
            if found := known.get(rest.tobytes()):
                return f"{found}{sign}{words}" if sign == "-" else f"{words}+{found}"
    if terms < 3:
        return ""
    for (one, a), (two, b) in itertools.combinations(vectors[:250], 2):
        if found := known.get((y - one - two).tobytes()):
            return f"{a}+{b}+{found}"
    return ""
