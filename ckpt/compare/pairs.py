"""Comparison of two checkpoints: matching tensors, and bit equality.

Tensors are paired by fqn and role, independent of the formats. If one side has no place for a role (optimizer states in
a weights folder), it is listed as not compared, and never counts as equal.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

from ckpt.base.errors import CkptError, CorruptError, NotFoundError, StorageError, UsageError, printable, shown
from ckpt.base.results import Returned
from ckpt.base.text import one_line, pluralize, show_size
from ckpt.base.words import Message, Note
from ckpt.compare.changes import Change, measure
from ckpt.compare.compare import Difference, Element, Reader, check_replicas, compare, location, narrower, number_text
from ckpt.compare.other_files import is_of_training
from ckpt.compare.rounding import RoundingError
from ckpt.compare.skipped_content import WHY, count_state_tensors
from ckpt.containers.torchfile.scalars import read_scalar
from ckpt.move.files import translate_os_errors
from ckpt.move.reading import Computed
from ckpt.plan import services
from ckpt.plan.checkpoint import BUFFER, MASTER, MODEL_ROLES, WEIGHT, Checkpoint, OneElement
from ckpt.plan.dtypes import BFLOAT16, BY_NAME, FLOAT16, FLOAT32
from ckpt.plan.planner import check_source
from ckpt.plan.tensors import Tensor
from ckpt.state.summaries import summary_text

Only = Literal["all", "weights", "optimizer"]
#: Gets side A's compared bytes.
Progress = Callable[[int], None]

EQUAL, DIFFERENT, ONLY_A, ONLY_B, UNREADABLE = "=", "*", "-", "+", "!"

_SHOWN = 20  # results listed per kind without `verbose`
_MAX_NODES = 1000  # values compared in one hyperparameter


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome for one tensor.

    `status` is one of rclone's signs: `=` equal, `*` different, `-` only in A, `+` only in B, `!` not readable. `kind`
    gives the reason: `equal`, `values`, `shape`, `dtype`, `scalar`, `missing`, `extra` or `unreadable`. `fqn` and
    `role` are side A's if it has the tensor; `b_fqn` and `b_role` are side B's. `a` and `b` are the differing shapes,
    dtypes or scalars. `cast` is the comparison's dtype if it is not the tensors' own. `is_scalar` marks an optimizer
    state with one number (Adam's step). `exit_code` belongs to the `error`. `rounding` is a quantized weight's error,
    and `part_of` the quantized weight that lacks this part or has one more.
    """

    status: str
    kind: str
    fqn: str
    role: str
    b_fqn: str
    b_role: str
    nbytes: int = 0
    difference: Difference | None = None
    a: str | None = None
    b: str | None = None
    cast: str | None = None
    error: str | None = None
    exit_code: int = 0
    is_scalar: bool = False
    change: Change | None = None
    rounding: RoundingError | None = None
    part_of: str | None = None


@dataclass(frozen=True, slots=True)
class NotCompared:
    """Tensors with one role that were not compared, and the reason."""

    side: str
    role: str
    count: int
    why: str

    def __str__(self) -> str:
        return f"not compared: {one_line(self.role)} of {pluralize(self.count, 'tensor')} of {self.side}: {self.why}"


@dataclass(frozen=True)
class Report(Returned):
    """Outcome of a verification. `num_bytes` counts side A's compared bytes."""

    verdict: ClassVar[str] = ".equal"

    a: Checkpoint
    b: Checkpoint
    results: tuple[Result, ...]
    not_compared: tuple[NotCompared, ...]
    num_bytes: int
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        outcome = "equal" if self.equal else "unreadable" if self.counts[UNREADABLE] else "different"
        compared = pluralize(self.num_compared, "tensor")
        return f"<{shown(self.a.path)} and {shown(self.b.path)}: {outcome}, {compared} compared>"

    @property
    def equal(self) -> bool:
        """True if at least one tensor was compared and all are equal."""
        return self.num_compared > 0 and all(result.status == EQUAL for result in self.results)

    @property
    def exit_code(self) -> int:
        """0: equal, 1: different. If a tensor could not be read, the code of the first error."""
        return next((one.exit_code for one in self.results if one.status == UNREADABLE), 0 if self.equal else 1)

    @property
    def num_compared(self) -> int:
        """Number of tensors with compared elements."""
        return sum(result.kind in ("equal", "values") and not result.is_scalar for result in self.results)

    @property
    def counts(self) -> dict[str, int]:
        """Number of results by status, in display order."""
        found = Counter(result.status for result in self.results)
        return {status: found[status] for status in (EQUAL, DIFFERENT, ONLY_A, ONLY_B, UNREADABLE)}

    def of_kind(self, kind: str) -> tuple[Result, ...]:
        return tuple(result for result in self.results if result.kind == kind)

    def to_json(self) -> dict[str, Any]:
        """Return finite plain values without control characters."""
        return {
            "equal": self.equal,
            "a": {"path": one_line(self.a.path), "format": one_line(self.a.format)},
            "b": {"path": one_line(self.b.path), "format": one_line(self.b.format)},
            "counts": self.counts,
            "kinds": dict(Counter(result.kind for result in self.results)),
            "bytes_compared": self.num_bytes,
            "not_compared": [
                {"side": n.side, "role": one_line(n.role), "count": n.count, "why": n.why} for n in self.not_compared
            ],
            "notes": [one_line(note) for note in self.notes],
            "tensors": [_result_json(result) for result in self.results],
        }

    def lines(self, verbose: bool = False) -> Iterator[str]:
        """Yield the differences (with `verbose` everything), then the outcome."""
        shown: Counter[str] = Counter()
        for result in self.results:
            if verbose or (result.status != EQUAL and shown[result.kind] < _SHOWN):
                yield result_line(result, self.a, self.b)
                shown[result.kind] += 1
        if not verbose:
            for kind, count in Counter(r.kind for r in self.results if r.status != EQUAL).items():
                if count > _SHOWN:
                    yield f"... and {count - _SHOWN} more of the kind {kind}; -v lists them all"
        yield from map(str, self.not_compared)
        yield from (f"note: {one_line(note)}" for note in self.notes)
        yield self.outcome

    @property
    def outcome(self) -> str:
        counts = self.counts
        if self.equal:
            tensors = pluralize(self.num_compared, "tensor")
            num_scalars = counts[EQUAL] - self.num_compared
            scalars = f" and {pluralize(num_scalars, 'scalar')}" if num_scalars else ""
            how = "equal after rounding" if any(result.cast for result in self.results) else "equal"
            return f"{how}: {tensors} ({show_size(self.num_bytes)}){scalars}, every bit compared"
        if counts[EQUAL] == len(self.results):
            return "different: no tensor was compared"
        kinds = Counter(result.kind for result in self.results)
        words = {
            "unreadable": "could not be read",
            "values": "differ",
            "shape": "differ in shape",
            "dtype": "differ in dtype",
            "scalar": "differ as scalars",
            "missing": "only in A",
            "extra": "only in B",
            "equal": "equal",
        }
        found = ", ".join(f"{kinds[kind]} {word}" for kind, word in words.items() if kinds[kind])
        return f"{'not verified' if counts[UNREADABLE] else 'different'}: {found}"


Judge = Callable[[Tensor, Tensor, Reader], Result]


def verify(
    a: Checkpoint,
    b: Checkpoint,
    *,
    only: Only = "all",
    cast: bool = False,
    exact: bool = False,
    measured: bool = False,
    progress: Progress | None = None,
    expected: Progress | None = None,
) -> Report:
    """Compare every tensor in two checkpoints by name, bit for bit.

    `ckpt convert` rounds float32 masters to 16-bit weights, and a training checkpoint's float32 weights too. The
    comparison applies the same rounding unless `exact`. With `cast`, the wider of any two floating dtypes is cast to
    the narrower one. With `measured`, different tensors are read again to measure their distance. An unreadable tensor
    gets its own result. `expected` gets the total bytes for `progress` first.

    Raise UsageError if one side has nothing that `only` selects, CorruptError if a file was replaced in the meantime.
    """
    judge = bitwise(a, b, cast=cast, exact=exact, measured=measured)
    return Report(a, b, *walk(a, b, only, judge, progress, expected))


def bitwise(a: Checkpoint, b: Checkpoint, *, cast: bool = False, exact: bool = False, measured: bool = False) -> Judge:
    trained = is_of_training(a), is_of_training(b)
    return partial(_compare_tensors, cast=cast, exact=exact, trained=trained, measured=measured)


def walk(
    a: Checkpoint,
    b: Checkpoint,
    only: Only,
    judge: Judge,
    progress: Progress | None,
    expected: Progress | None,
) -> tuple[tuple[Result, ...], tuple[NotCompared, ...], int, tuple[str, ...]]:
    """Run `judge` on every pair. Return results, tensors not compared, side A's bytes, and notes."""
    for checkpoint in (a, b):
        _check_holds(checkpoint, only)
    work = _pair_up(a, b, only)
    results, num_bytes = _carry_out(work, (a.computed, b.computed), judge, progress, expected)
    results = _with_part_names(a, b, results)
    for file in (*a.files, *b.files):
        file.check_unchanged()
    notes = [*work.notes, *_side_notes(a, b, results)]
    not_compared = [NotCompared(side, role, count, why) for (side, role, why), count in work.skipped.items()]
    for label, side in (("A", a), ("B", b)):
        if only == "all":
            not_compared += [NotCompared(label, name, count, WHY) for name, count in count_state_tensors(side).items()]
        if only != "weights":
            notes += [f"not compared, of {label}: {sentence}" for sentence in side.unread]
    return tuple(results), tuple(not_compared), num_bytes, tuple(notes)


def _with_part_names(a: Checkpoint, b: Checkpoint, results: Sequence[Result]) -> list[Result]:
    """Add the quantized weight's name to its unpaired parts."""
    sides, found = {ONLY_A: a, ONLY_B: b}, list(results)
    for status in {one.status for one in results} & sides.keys():
        owners = services.quantization.quantized_weights(sides[status]).owners
        of_parts = {name: owner for owner, parts in owners.items() for name in parts.values()}
        found = [
            replace(one, part_of=of_parts[one.fqn]) if one.status == status and one.fqn in of_parts else one
            for one in found
        ]
    return found


def _check_holds(checkpoint: Checkpoint, only: Only) -> None:
    roles = {role for _, role in checkpoint.tensors}
    if only not in ("all", "weights", "optimizer"):
        raise UsageError("unknown choice", expected="all, weights or optimizer", found=only)
    if only == "weights" and not roles & set(MODEL_ROLES):
        raise UsageError("this checkpoint has no weights to compare", path=checkpoint.path)
    if only == "optimizer" and not roles - {WEIGHT, BUFFER} and not any(checkpoint.state.scalars.values()):
        raise UsageError(
            "this checkpoint has no optimizer states to compare",
            path=checkpoint.path,
            found=f"a checkpoint in the format {checkpoint.format}",
            hint=Message("use {only=weights} to compare the model's tensors"),
        )


@dataclass(frozen=True, slots=True)
class _Scalar:
    fqn: str
    role: str
    value: Any


_Thing = Tensor | _Scalar
_Roles = dict[str, _Thing]


@dataclass(frozen=True, slots=True)
class _Side:
    label: str
    format: str
    names: Mapping[str, _Roles]
    roles: frozenset[str]
    trains: bool

    @classmethod
    def of(cls, label: str, checkpoint: Checkpoint) -> _Side:
        names: dict[str, _Roles] = {}
        for (fqn, role), tensor in checkpoint.tensors.items():
            names.setdefault(fqn, {})[role] = tensor
        for role, values in checkpoint.state.scalars.items():
            for fqn, value in values.items():
                number = value.value if isinstance(value, OneElement) else value
                names.setdefault(fqn, {}).setdefault(role, _Scalar(fqn, role, number))
        roles = frozenset(role for things in names.values() for role in things)
        optimizes = bool(roles - {WEIGHT, BUFFER}) or bool(checkpoint.state.param_groups)
        return cls(label, checkpoint.format, names, roles, optimizes)

    def reason_missing(self, thing: _Thing, format: str) -> str | None:
        """Return None if this side has a place for `thing`."""
        if thing.role in self.roles:
            return None
        if thing.role == MASTER:
            return f"{self.label} holds no masters"
        if not self.trains:
            return f"{self.label} holds no optimizer states"
        has_place = thing.role == "step" or format == self.format  # every optimizer format records the step
        return None if has_place or isinstance(thing, Tensor) else f"{self.label} does not record it"


@dataclass
class _Work:
    a: _Side
    b: _Side
    pairs: list[tuple[_Thing, _Thing] | Result] = field(default_factory=list)
    skipped: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def skip(self, side: _Side, thing: _Thing, why: str) -> None:
        self.skipped[side.label, thing.role, why] += 1

    def alone(self, side: _Side, other: _Side, thing: _Thing) -> None:
        if (why := other.reason_missing(thing, side.format)) is not None:
            self.skip(side, thing, why)
        else:
            self.missing(side, thing)

    def missing(self, side: _Side, thing: _Thing) -> None:
        status, kind = (ONLY_A, "missing") if side is self.a else (ONLY_B, "extra")
        self.pairs.append(Result(status, kind, thing.fqn, thing.role, thing.fqn, thing.role))


def _match(
    a: _Side, b: _Side, a_ties: Mapping[str, str], b_ties: Mapping[str, str]
) -> Iterator[tuple[str | None, str | None]]:
    """Yield pairs with a name in A and its name in B. None stands for a missing tensor.

    If one side stores a name and the other records it as tied, its partner is the tie's owner on the other side.
    """
    of_a = [(x, _owner(x, b_ties, b.names)) for x in a.names if x not in b.names]
    of_b = [(_owner(y, a_ties, a.names), y) for y in b.names if y not in a.names]
    tied = dict.fromkeys(pair for pair in (*of_a, *of_b) if None not in pair)
    met_a, met_b = {x for x, _ in tied}, {y for _, y in tied}
    for fqn in a.names:
        if fqn in b.names or fqn not in met_a:
            yield fqn, fqn if fqn in b.names else None
    yield from tied
    for fqn in b.names:
        if fqn not in a.names and fqn not in met_b:
            yield None, fqn


def _owner(fqn: str, ties: Mapping[str, str], names: Mapping[str, Any]) -> str | None:
    seen = set()
    while fqn in ties and fqn not in seen:
        seen.add(fqn)
        fqn = ties[fqn]
        if fqn in names:
            return fqn
    return None


def _pair_up(a: Checkpoint, b: Checkpoint, only: Only) -> _Work:
    work = _Work(_Side.of("A", a), _Side.of("B", b))
    num_common = num_tied = 0
    for x, y in _match(work.a, work.b, a.ties, b.ties):
        a_roles = work.a.names[x] if x is not None else {}
        b_roles = work.b.names[y] if y is not None else {}
        is_tied = x is not None and y is not None and x != y
        is_second = is_tied and (x in work.b.names or y in work.a.names)  # its owner has its own match
        num_common += bool(a_roles and b_roles)
        num_tied += is_tied
        model = _model_tensors(a_roles, b_roles)
        if only != "optimizer":
            _put_model(work, a_roles, b_roles, model)
        if only != "weights":
            _put_states(work, a_roles, b_roles, model if only == "all" else (None, None), is_second)
    if num_tied:
        work.notes.append(f"{pluralize(num_tied, 'tensor')} compared with the tied tensor on the other side")
    if not num_common and work.a.names and work.b.names:
        work.notes.append(f"A and B share no names (A {a.namespace}, B {b.namespace}): are they from one model?")
    return work


def _model_tensors(a: _Roles, b: _Roles) -> tuple[_Thing | None, _Thing | None]:
    """Return each side's tensor for the parameter or buffer.

    A weight is paired with a weight, a master with a master. If one side lacks the partner or the weights' dtypes
    differ, a weight is paired with the other side's master.
    """
    x, y = a.get(WEIGHT) or a.get(BUFFER), b.get(WEIGHT) or b.get(BUFFER)
    x_master, y_master = a.get(MASTER), b.get(MASTER)
    if x is not None and y is not None:
        if _dtype(x) != _dtype(y):
            if x_master is not None and y_master is None:
                return x_master, y
            if y_master is not None and x_master is None:
                return x, y_master
        return x, y
    if x_master is not None and y_master is not None:
        return x_master, y_master
    return x or x_master, y or y_master


def _dtype(thing: _Thing) -> object:
    return thing.dtype if isinstance(thing, Tensor) else None


def _put_model(work: _Work, a: _Roles, b: _Roles, model: tuple[_Thing | None, _Thing | None]) -> None:
    x, y = model
    if x is None or y is None:
        for side, thing in ((work.a, x), (work.b, y)):
            if thing is not None:
                work.missing(side, thing)
        return
    work.pairs.append((x, y))
    for side, other, roles in ((work.a, work.b, a), (work.b, work.a, b)):
        thing = roles.get(WEIGHT) or roles.get(BUFFER)
        if thing is not None and thing is not x and thing is not y:
            work.skip(side, thing, f"{other.label} stores these only as masters, compared above")


def _put_states(work: _Work, a: _Roles, b: _Roles, done: tuple[_Thing | None, _Thing | None], second: bool) -> None:
    """Add masters and optimizer states, except a master compared as the parameter itself."""
    for role in dict.fromkeys((*a, *b)):
        x, y = a.get(role), b.get(role)
        if role in (WEIGHT, BUFFER):
            continue
        if x is not None and y is not None:
            if x is not done[0] or y is not done[1]:
                work.pairs.append((x, y))
        elif x is not None and x is not done[0] and not second:
            work.alone(work.a, work.b, x)
        elif y is not None and y is not done[1] and not second:
            work.alone(work.b, work.a, y)


def _carry_out(
    work: _Work, computed: tuple[Computed, Computed], judge: Judge, progress: Progress | None, expected: Progress | None
) -> tuple[list[Result], int]:
    """Read in side A's file order."""
    results: list[Result | None] = []
    jobs: list[tuple[int, Tensor, Tensor]] = []
    for item in work.pairs:
        if isinstance(item, Result):
            results.append(item)
        elif isinstance(item[0], Tensor) and isinstance(item[1], Tensor):
            jobs.append((len(results), item[0], item[1]))
            results.append(None)
        else:
            results.append(_compare_scalars(work, *item))
    jobs.sort(key=lambda job: location(job[1]))
    advance = progress or (lambda _: None)
    if expected is not None:
        expected(sum(x.nbytes for _, x, _ in jobs))
    with (
        Reader(advance, computed) as reader,
        Reader(computed=computed[0]) as ranks_a,
        Reader(computed=computed[1]) as ranks_b,
    ):
        for slot, x, y in jobs:
            result = results[slot] = _judged(judge, x, y, reader, (ranks_a, ranks_b))
            if result.kind in ("shape", "dtype"):  # decided without reading
                advance(x.nbytes)
    done = [result for result in results if result is not None]
    return done, sum(result.nbytes for result in done)


def _judged(judge: Judge, a: Tensor, b: Tensor, reader: Reader, other_ranks: tuple[Reader, Reader]) -> Result:
    names = a.fqn, a.role, b.fqn, b.role
    try:
        for tensor, ranks in zip((a, b), other_ranks, strict=True):
            check_source(tensor)
            check_replicas(tensor, ranks)
        if a.shape != b.shape:
            return Result(DIFFERENT, "shape", *names, a=str(list(a.shape)), b=str(list(b.shape)))
        return judge(a, b, reader)
    except (CorruptError, NotFoundError, StorageError) as error:
        return _unreadable(names, error)


def _compare_tensors(
    a: Tensor, b: Tensor, reader: Reader, *, cast: bool, exact: bool, trained: tuple[bool, bool], measured: bool
) -> Result:
    names = a.fqn, a.role, b.fqn, b.role
    rounds = not exact and (cast or _is_rounded(a, b, trained[0]) or _is_rounded(b, a, trained[1]))
    common = narrower(a.dtype, b.dtype) if rounds else a.dtype
    if common is None or (not rounds and a.dtype != b.dtype):
        return differing_dtypes(a, b)
    difference = compare(a.shape, a.fragments(), b.fragments(), reader, cast=rounds)
    cast_to = common.name if a.dtype != b.dtype else None
    if difference is None:
        return Result(EQUAL, "equal", *names, nbytes=a.nbytes, cast=cast_to)
    found = Result(DIFFERENT, "values", *names, nbytes=a.nbytes, difference=difference, cast=cast_to)
    return replace(found, change=measure(a.shape, a.fragments(), b.fragments(), reader)) if measured else found


def differing_dtypes(a: Tensor, b: Tensor) -> Result:
    return Result(DIFFERENT, "dtype", a.fqn, a.role, b.fqn, b.role, a=a.dtype.name, b=b.dtype.name)


def _is_rounded(wide: Tensor, weight: Tensor, is_trained: bool) -> bool:
    """Return True if `weight` should be the rounded `wide`: a master, or a training checkpoint's float32 weight.

    FSDP stores masters as weights.
    """
    if weight.role != WEIGHT or wide.dtype == weight.dtype:
        return False
    is_kept = wide.role == MASTER or (is_trained and wide.role == WEIGHT)
    return wide.native == weight.dtype or (is_kept and wide.dtype == FLOAT32 and weight.dtype in (BFLOAT16, FLOAT16))


def _unreadable(names: tuple[str, str, str, str], error: CkptError, is_scalar: bool = False) -> Result:
    text = _error_text(error)
    return Result(UNREADABLE, "unreadable", *names, error=text, exit_code=error.exit_code, is_scalar=is_scalar)


def _error_text(error: CkptError) -> str:
    facts = [f"{name}: {value}" for name, value in error.facts().items() if name != "tensor"]
    return "; ".join([printable(error.what), *facts])


def _compare_scalars(work: _Work, a: _Thing, b: _Thing) -> Result | None:
    """Compare two numbers, also from a one-element tensor. Return None for other values."""
    names = a.fqn, a.role, b.fqn, b.role
    try:
        x, y = _scalar_value(a), _scalar_value(b)
    except (CorruptError, NotFoundError, StorageError) as error:
        return _unreadable(names, error, is_scalar=True)
    same = same_value(x, y)
    if same is None:
        work.skip(work.a, a, "values with these kinds can't be compared")
        return None
    if same:
        return Result(EQUAL, "equal", *names, is_scalar=True)
    return Result(DIFFERENT, "scalar", *names, a=summary_text(x), b=summary_text(y), is_scalar=True)


def _scalar_value(thing: _Thing) -> Any:
    if isinstance(thing, _Scalar):
        return thing.value
    if thing.numel != 1:
        return list(thing.shape)  # equal to no number
    check_source(thing)
    extent = next(fragment.extent for fragment in thing.fragments() if fragment.extent.numel)
    with translate_os_errors(extent.path):
        return read_scalar(extent)


def same_value(a: Any, b: Any) -> bool | None:
    """Return True if two plain values are equal. Numbers compare by value: 4 is 4.0, NaN is NaN, 0.0 is not -0.0.

    Return None if a value is not plain, or has too many parts.
    """
    left, unknown = [(a, b)], False
    for _ in range(_MAX_NODES):
        if not left:
            return None if unknown else True
        x, y = left.pop()
        if isinstance(x, int | float) and isinstance(y, int | float):
            if number_text(x) != number_text(y):
                return False
        elif isinstance(x, list | tuple) and isinstance(y, list | tuple):
            if len(x) != len(y):
                return False
            left += zip(x[:_MAX_NODES], y[:_MAX_NODES], strict=True)
        elif isinstance(x, dict) and isinstance(y, dict):
            if x.keys() != y.keys():
                return False
            left += [(x[key], y[key]) for _, key in zip(range(_MAX_NODES), x, strict=False)]
        elif _is_plain(x) and _is_plain(y):
            if x != y:
                return False
        else:
            unknown = True
    return None


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, int | float | str | bytes | list | tuple | dict)


def _side_notes(a: Checkpoint, b: Checkpoint, results: Iterable[Result]) -> Iterator[str]:
    results = list(results)
    if not any(r.status in (EQUAL, DIFFERENT) for r in results):
        yield "nothing was compared, so nothing was found equal"
    castable = sum(r.kind == "dtype" and _castable(r) for r in results)
    if castable:
        verb = "differs" if castable == 1 else "differ"
        what = f"{pluralize(castable, 'tensor')} {verb} in dtype"
        yield Note("{}; use {cast=True} to round the wider side first", what)
    casts = Counter(r.cast for r in results if r.cast is not None)
    for name, count in casts.items():
        what = f"{pluralize(count, 'tensor')} compared in {name}, with the wider side rounded"
        yield Note("{}; use {exact=True} to compare without rounding", what)
    crossed = Counter((r.role, r.b_role) for r in results if r.role != r.b_role and r.kind in ("equal", "values"))
    for (role, b_role), count in crossed.items():
        if {role, b_role} != {WEIGHT, BUFFER}:
            yield f"{pluralize(count, 'tensor')} compared across roles: {role} of A with {b_role} of B"
    if a.state.step is not None and b.state.step is not None and a.state.step != b.state.step:
        yield f"the training steps differ: {a.state.step} in A, {b.state.step} in B"
    yield from _hyperparameter_notes(a, b)


def _castable(result: Result) -> bool:
    assert result.a is not None and result.b is not None
    return narrower(BY_NAME[result.a], BY_NAME[result.b]) is not None


def _hyperparameter_notes(a: Checkpoint, b: Checkpoint) -> Iterator[str]:
    """Yield differing options. They do not make checkpoints different."""
    a_groups, b_groups = a.state.param_groups, b.state.param_groups
    group_in_b = {fqn: number for number, group in enumerate(b_groups) for fqn in group.fqns}
    common = Counter(
        (number, group_in_b[fqn]) for number, group in enumerate(a_groups) for fqn in group.fqns if fqn in group_in_b
    )
    found: Counter[str] = Counter()
    for (x, y), count in common.items():
        one, other = a_groups[x].options, b_groups[y].options
        for name in one:
            if name in other and same_value(one[name], other[name]) is False:
                found[f"{name} is {summary_text(one[name])} in A, {summary_text(other[name])} in B"] += count
    for text, count in list(found.items())[:_SHOWN]:
        yield f"hyperparameter {text}, for {pluralize(count, 'parameter')}"
    if len(found) > _SHOWN:
        yield f"{pluralize(len(found) - _SHOWN, 'more hyperparameter')} differ"


def more_lines(count: int) -> Iterator[str]:
    if count > 0:
        yield f"... and {count} more; -v lists them all"


def result_line(result: Result, a: Checkpoint, b: Checkpoint) -> str:
    roles = one_line(result.role)
    if result.b_role != result.role:
        roles += f" against {one_line(result.b_role)}"
    name = f"{result.status} {one_line(result.fqn)} ({roles})"
    if result.b_fqn != result.fqn:
        name += f", in B {one_line(result.b_fqn)}"
    if result.difference is not None:
        one, other = result.difference.a, result.difference.b
        return f"{name}: {result.difference}; A: {_place(one, a)}; B: {_place(other, b)}"
    if result.kind in ("shape", "dtype", "scalar"):
        return f"{name}: {result.kind} {result.a} in A, {result.b} in B"
    if result.error is not None:
        return f"{name}: {one_line(result.error)}"
    if result.rounding is not None:
        return f"{name}: {result.rounding}"
    if result.part_of is not None:
        here, there = ("A", "B") if result.status == ONLY_A else ("B", "A")
        return f"{name}: a part of quantized weight {one_line(result.part_of)} in {here}, missing from {there}"
    return name


def _place(element: Element, checkpoint: Checkpoint) -> str:
    path = os.path.relpath(element.path, checkpoint.path)
    if path.startswith(os.pardir) or path == os.curdir:
        path = element.path
    rank = "" if element.rank is None else f" (rank {element.rank})"
    return f"{one_line(path)}{rank} at byte {element.offset}"


def _result_json(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = {
        "status": result.status,
        "kind": result.kind,
        "fqn": one_line(result.fqn),
        "role": one_line(result.role),
    }
    if (result.b_fqn, result.b_role) != (result.fqn, result.role):
        found |= {"b_fqn": one_line(result.b_fqn), "b_role": one_line(result.b_role)}
    if result.nbytes:
        found["bytes"] = result.nbytes
    for name, text in (("a", result.a), ("b", result.b), ("cast", result.cast), ("error", result.error)):
        if text is not None:
            found[name] = one_line(text)
    if result.difference is not None:
        found["difference"] = _difference_json(result.difference)
    if result.change is not None:
        found["change"] = result.change.to_json()
    if result.rounding is not None:
        found["rounding"] = result.rounding.to_json()
    if result.part_of is not None:
        found["part_of"] = one_line(result.part_of)
    return found


def _difference_json(difference: Difference) -> dict[str, Any]:
    return {
        "num_different": difference.num_different,
        "numel": difference.numel,
        "index": list(difference.index),
        "a": _element_json(difference.a),
        "b": _element_json(difference.b),
        "largest": _finite(difference.largest),
        "num_nan": difference.num_nan,
    }


def _element_json(element: Element) -> dict[str, Any]:
    return {
        "value": _finite(element.value),
        "bits": element.bits,
        "file": one_line(element.path),
        "offset": element.offset,
        "rank": element.rank,
    }


def _finite(value: int | float | str | None) -> int | float | str | None:
    """Return a name if JSON has no such number."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
