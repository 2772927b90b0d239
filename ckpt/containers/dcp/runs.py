"""Fast reader for a DCP `.metadata`: regular expressions match long runs of equal-looking items.

Python's pickler (protocols 4 and 5) writes the same steps for every item in a dict, with other names and numbers.
`Machine` runs the pickle and offers every run to `Runs`. `Runs` takes the items with a known form and leaves the rest:
the first item of each kind (it names the class) and anything unusual. Equal descriptions share one object.

If anything here raises an error, read the file again without `Runs`: positions in messages would be wrong.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from io import BytesIO
from itertools import accumulate, compress
from operator import add, itemgetter
from struct import iter_unpack
from typing import Any, NamedTuple

from ckpt.containers.torchfile.machine import Machine
from ckpt.containers.torchfile.table import allowed
from ckpt.containers.torchfile.tree import check_tree
from ckpt.containers.torchfile.values import MAX_PICKLE, CutShortError, Global, Record
from ckpt.move.source import open_stream

_REF = rb"(?:h.|j.{4})"
_TEXT = rb"\x8c.[^\x94]{0,255}\x94"
_NUMBER = rb"(?:K.|M..|J.{4}|\x8a\x05.{5})"
_KEY = rb"(?:%b|%b)" % (_TEXT, _REF)
_STEP = rb"(?:%b|%b|K.)" % (_TEXT, _REF)
_SIZE = rb"%b(?:\)|%b{1,3}[\x85-\x87]\x94|\(%b{1,64}t\x94)\x85\x94R\x94" % (_REF, _NUMBER, _NUMBER)
_TOKEN = rb"(?:%b|%b|%b|[]N\x88\x89)}(Rbut\x81\x85-\x87\x94])" % (_TEXT, _REF, _NUMBER)
_NEW, _REFS = b"\x8c", (b"h", b"j")
_Counts = Sequence[int] | int

_MAX_STEPS = 6
_MAX_USUAL = 40  # descriptions matched literally: ten times faster
_LONGEST_USUAL = 1000
_MAX_MISSED = 100  # failed runs until no more are tried
_PLACE = (
    rb"%(index)b\)\x81\x94\}\x94\(%(fqn)b(?P<key>%(key)b)%(hint)b(?:N|%(number)b)(?:%(at)b(?P<where>%(size)b))?ub"
    rb"%(info)b\)\x81\x94\}\x94\(%(file)b(?P<path>%(key)b)%(start)b(?P<offset>%(number)b)%(size_)b(?P<length>%(number)b)ub"
)
_NAMED = {
    b"index": "MetadataIndex",
    b"fqn": "fqn",
    b"hint": "index",
    b"at": "offset",
    b"info": "_StorageInfo",
    b"file": "relative_path",
    b"start": "offset",
    b"size_": "length",
}


def _form(text: bytes) -> re.Pattern[bytes]:
    return re.compile(text, re.DOTALL)


def _place_form(refs: Mapping[bytes, bytes]) -> re.Pattern[bytes]:
    return _form(_PLACE % {b"key": _KEY, b"number": _NUMBER, b"size": rb"%b|%b" % (_SIZE, _REF), **refs})


_TOKENS = _form(_TOKEN)
#: A tensor's description ends with its chunk list. Another value's description is an object without state. Python
#: appends up to a thousand chunks at once.
_DESCRIBED = rb"(%b)(%%b%b\)\x81\x94(?:\}\x94\((?:%b{0,30000}[ae]){1,9}?ub|(?!\})))" % (_KEY, _REF, _TOKEN)
#: Paths with one step, two, ...
_PATHS = [
    _form(
        b"(%b)%b%b%b\\x94"
        % (_KEY, b"\\(" * (num > 3), b"(%b)" % _STEP * num, b"t" if num > 3 else b"\\x%02x" % (0x84 + num))
    )
    for num in range(1, _MAX_STEPS + 1)
]
_ANY_PLACE = _place_form({name: rb"(?P<%b>%b)" % (name, _REF) for name in _NAMED})


class Columns(NamedTuple):
    """A dict's keys and values in two lists: there may be a million."""

    keys: list[Any]
    values: list[Any]


class IrregularError(Exception):
    """Signal to read this pickle without `Runs`."""


def unframed(path: str) -> bytes:
    """Return a pickle without its frames. Raise IrregularError if they do not add up."""
    kept = BytesIO()
    with open_stream(path) as file:
        kept.write(file.read(2))
        while head := file.read(9):
            length = int.from_bytes(head[1:], "little")
            is_frame = head[0] == 0x95 and 0 < length <= MAX_PICKLE - kept.tell()
            if not is_frame or kept.write(file.read(length)) != length:
                raise IrregularError
    return kept.getvalue()


class Runs:
    """Reader for one pickle's regular runs."""

    def __init__(self) -> None:
        self.fqns: list[str] = []
        self.wheres: list[Any] = []
        self.files: list[str] = []
        self.offsets: list[int] = []
        self.lengths: list[int] = []
        self._values: dict[bytes, tuple[Any, int]] = {b"": (None, 0)}
        self._usual: list[bytes] = []
        self._described = _form(_DESCRIBED % b"")
        self._taken: dict[str, Columns] = {}
        self._form: re.Pattern[bytes] | None = None
        self._refs: dict[bytes, bytes] = {}
        self._memo = _Memo()
        self._missed = 0

    def load(self, path: str) -> Any:
        """Return the pickle's object, without the places now in columns. May raise IrregularError."""
        data = unframed(path)
        machine = Machine(data, allowed(), path=path, runs=self.take)
        machine.memo = self._memo
        try:
            root, end = machine.run()
        except CutShortError:
            raise IrregularError from None
        if end != len(data) or type(root) is not Record or type(root.state) is not dict:
            raise IrregularError
        for name, taken in self._taken.items():
            if type(root.state.get(name)) is not dict:
                raise IrregularError
            _move(root.state[name], taken)
            root.state[name] = taken
        return root

    def take(self, machine: Machine, at: int) -> int:
        """Take the items with a known form after a mark. Return the position after them."""
        stack = machine.stack
        if (
            self._missed > _MAX_MISSED
            or len(stack) < 4
            or len(machine.marks) != 2
            or machine.marks[0] != 2
            or type(stack[-1]) is not dict
        ):
            return at
        end = self._take(machine, at)
        self._missed += end == at
        return end

    def _take(self, machine: Machine, at: int) -> int:
        stack = machine.stack
        if stack[-2] == "storage_data":
            return self._take_places(machine, at)
        take = {"state_dict_metadata": self._take_described, "planner_data": self._take_paths}.get(stack[-2])
        if take is None:
            return at
        # The taken items form a tree by their pattern. Items already built by the machine come first.
        check_tree(stack[-1], at)
        taken = self._taken.setdefault(stack[-2], Columns([], []))
        _move(stack[-1], taken)
        return take(machine, at, taken)

    def _take_described(self, machine: Machine, at: int, taken: Columns) -> int:
        rows, end = _matched_rows(self._described, machine.data, at)
        if not rows:
            return at
        keys, blobs = zip(*rows, strict=True)
        if not self._know(machine, blobs):
            return at
        more = [code for code, count in Counter(blobs).items() if count > 1 and len(code) <= _LONGEST_USUAL]
        usual = [*dict.fromkeys(self._usual + more)][:_MAX_USUAL]
        if usual != self._usual:
            self._usual = usual
            self._described = _form(_DESCRIBED % (rb"(?:%b)(?!\})|" % b"|".join(map(re.escape, usual))))
        values, counts = self._cached_results(blobs)
        (names,) = self._resolved(machine, keys, counts)
        taken.keys.extend(_as_names(names))
        taken.values.extend(values)
        return end

    def _take_paths(self, machine: Machine, at: int, taken: Columns) -> int:
        end = -1
        while end < at:
            end = at
            for form in _PATHS:
                rows, at = _matched_rows(form, machine.data, at)
                if rows:
                    keys, *steps = self._resolved(machine, *zip(*rows, strict=True), 1)
                    taken.keys.extend(_as_names(keys))
                    taken.values.extend(zip(*steps, strict=True))
        return end

    def _take_places(self, machine: Machine, at: int) -> int:
        form = self._place_form(machine, at)
        if form is None:
            return at
        rows, end = _matched_rows(form, machine.data, at)
        if not rows:
            return at
        keys, wheres, files, offsets, lengths = zip(*rows, strict=True)
        if not self._know(machine, wheres):
            return at
        corners, counts = self._cached_results(wheres)
        # Both objects and their dicts are in the memo.
        fqns, names = self._resolved(machine, 2, keys, counts, 2, files)
        self.fqns += _as_names(fqns)
        self.wheres += corners
        self.files += _as_names(names)
        self.offsets += _numbers(offsets)
        self.lengths += _numbers(lengths)
        return end

    def _place_form(self, machine: Machine, at: int) -> re.Pattern[bytes] | None:
        """Return None if a reference has another meaning than in the pattern."""
        if self._form is None and (found := _ANY_PLACE.match(machine.data, at)):
            self._refs = {name: found[name.decode()] for name in _NAMED}
            self._refs[b"at"] = self._refs[b"start"]  # the first item may have no offset
            self._form = _place_form({name: re.escape(token) for name, token in self._refs.items()})
        for name, token in self._refs.items():
            named = machine.memo[_step_number(token)]
            if (named.name if type(named) is Global else named) != _NAMED[name]:
                return None
        return self._form

    def _know(self, machine: Machine, codes: Iterable[bytes]) -> bool:
        """Run each distinct byte string once and cache its result.

        Return False if the code refers to a memo entry from its own run: its result depends on the position.
        """
        base = _num_memoized(machine)
        for code in set(codes) - self._values.keys():
            for token in _TOKENS.findall(code):
                if token[:1] in _REFS and _step_number(token) >= base:
                    return False
                if token[:1] == _NEW and len(token) != token[1] + 3:
                    return False
            inner = Machine(code + b".", machine.table, path=machine.path)
            inner.memo, inner.skipped = machine.memo, machine.skipped
            value, _ = inner.run()
            count = _num_memoized(machine) - base
            for index in range(base, base + count):
                del machine.memo[index]
            self._values[code] = value, count
        return True

    def _cached_results(self, codes: Sequence[bytes]) -> tuple[list[Any], _Counts]:
        """Return the results and their numbers of memo entries."""
        if _are_alike(codes):
            value, count = self._values[codes[0]]
            return [value] * len(codes), count
        values, counts = zip(*map(self._values.__getitem__, codes), strict=True)
        return list(values), counts

    def _resolved(self, machine: Machine, *parts: Sequence[Any] | int) -> list[list[Any]]:
        """Return the columns' values. A number in `parts` counts memo entries between columns."""
        sizes = [part if isinstance(part, int) or isinstance(part[0], int) else _new(part) for part in parts]
        base, num_rows = _num_memoized(machine), next(len(part) for part in parts if not isinstance(part, int))
        places, end = _places(base, num_rows, sizes)
        columns = []
        for part, size in zip(parts, sizes, strict=True):
            if part is not size and not isinstance(part, int):
                columns.append(_pushed_values(self._memo, base, part, size, places))
            places = _later(places, size)
        machine.skipped += end - base
        return columns


class _Memo(dict[int, Any]):
    """A machine's memo. Texts stay in columns until a lookup."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._columns: list[list[tuple[Sequence[int], Sequence[str]]]] = []

    def add(self, base: int, places: Sequence[int], texts: Sequence[str]) -> None:
        """Add a column: ascending memo places and their texts. Its run began after `base` entries."""
        if not self._bases or self._bases[-1] != base:
            self._bases.append(base)
            self._columns.append([])
        self._columns[-1].append((places, texts))

    def __missing__(self, place: int) -> str:
        run = bisect_right(self._bases, place) - 1
        for places, texts in self._columns[run] if run >= 0 else ():
            at = bisect_left(places, place)
            if at < len(places) and places[at] == place:
                return texts[at]
        raise KeyError(place)


def _move(items: dict[Any, Any], to: Columns) -> None:
    to.keys.extend(items)
    to.values.extend(items.values())
    items.clear()


def _numbers(tokens: Sequence[bytes]) -> list[int]:
    if set(map(itemgetter(0), tokens)) == {ord("J")}:
        return [number for (number,) in iter_unpack("<xi", b"".join(tokens))]
    known = {token: _step_number(token) for token in set(tokens)}
    return list(map(known.__getitem__, tokens))


def _step_number(token: bytes) -> int:
    if token[:1] == b"\x8a":
        return int.from_bytes(token[2:], "little", signed=True)
    return int.from_bytes(token[1:], "little", signed=token[:1] == b"J")


def _num_memoized(machine: Machine) -> int:
    return len(machine.memo) + machine.skipped


def _matched_rows(form: re.Pattern[bytes], data: bytes, at: int) -> tuple[list[Any], int]:
    rows: list[Any] = []
    found = None
    for found in iter(form.scanner(data, at).match, None):  # type: ignore[attr-defined]
        rows.append(found.groups(b""))
    return rows, found.end() if found else at


def _are_alike(codes: Sequence[bytes]) -> bool:
    return codes.count(codes[0]) == len(codes)


def _new(steps: Sequence[bytes]) -> _Counts:
    """Return 1 if all steps push a new text, 0 if none does, otherwise one value per step."""
    kinds = set(map(itemgetter(0), steps))
    if len(kinds) == 1 or _NEW[0] not in kinds:
        return int(_NEW[0] in kinds)
    return [step[0] == _NEW[0] for step in steps]


def _places(base: int, num_rows: int, sizes: Sequence[_Counts]) -> tuple[Sequence[int], int]:
    """Return the memo size before each row and after the last one."""
    each = sum(size for size in sizes if isinstance(size, int))
    places: Sequence[int] = range(base, base + num_rows * each, each) if each else [base] * num_rows
    if not (others := [size for size in sizes if not isinstance(size, int)]):
        return places, base + num_rows * each
    *before, end = accumulate(reduce(lambda a, b: list(map(add, a, b)), others), initial=0)
    return list(map(add, places, before)), base + num_rows * each + end


def _later(places: Sequence[int], count: _Counts) -> Sequence[int]:
    if not isinstance(count, int):
        return list(map(add, places, count))
    if type(places) is range:
        return range(places.start + count, places.stop + count, places.step)
    return [place + count for place in places] if count else places


def _pushed_values(memo: _Memo, base: int, steps: Sequence[bytes], new: _Counts, places: Sequence[int]) -> list[Any]:
    """Return the pushed values. `places` are the memo sizes at each step.

    Raise IrregularError for a text with a wrong length, or a reference to a later entry.
    """
    known: dict[bytes, Any] = {}
    first: dict[bytes, int] = {}
    if new:
        said = steps if isinstance(new, int) else list(compress(steps, new))
        texts = _texts(said)
        memo.add(base, places if isinstance(new, int) else list(compress(places, new)), texts)
        if isinstance(new, int):
            return texts
        known = dict(zip(said, texts, strict=True))
    for step in set(steps).difference(known):
        number = _step_number(step)
        known[step] = number if step[:1] == b"K" else memo[number]
        if step[:1] != b"K" and number >= places[0]:
            first = first or dict(zip(reversed(steps), reversed(places), strict=True))
            if number >= first[step]:
                raise IrregularError
    return [known[steps[0]]] * len(steps) if len(known) == 1 else list(map(known.__getitem__, steps))


def _texts(steps: Sequence[bytes]) -> list[str]:
    """Raise IrregularError for a text with a wrong length."""
    times = len(steps) if _are_alike(steps) else 1  # file names repeat
    steps = steps[:1] if times > 1 else steps
    texts = [step[2:-1].decode("ascii") for step in steps]  # ASCII only: otherwise, bytes and characters may differ
    if bytes(map(len, texts)) != bytes(map(itemgetter(1), steps)):
        raise IrregularError
    return texts * times


def _as_names(values: list[Any]) -> list[str]:
    if set(map(type, values)) != {str}:
        raise IrregularError
    return values
