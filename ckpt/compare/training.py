"""Comparison between two runs' training states: schedule, scaler, random states, data position, settings.

Every value has a dotted name (`lr_scheduler.last_epoch`, `rng_state.0`). The values come from the checkpoint's files,
from HF Trainer's files in the same folder, and from the bundled trainer's `records/step-N.json`. Tensors and long lists
are compared by their bytes and shown as a digest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from xxhash import xxh3_64

from ckpt.base.errors import shown
from ckpt.base.results import Returned
from ckpt.base.text import one_line, pluralize
from ckpt.compare.compare import Reader
from ckpt.compare.digest import row_major
from ckpt.containers.torchfile.read import read
from ckpt.containers.torchfile.scalars import read_scalar
from ckpt.containers.torchfile.values import Array, Record, StoredTensor
from ckpt.move.files import confined
from ckpt.move.json_files import read_object
from ckpt.plan.checkpoint import Checkpoint, OneElement
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Tensor, Whole
from ckpt.runs.file_table import fits
from ckpt.runs.model_files import run_files
from ckpt.state.positions import sequences_seen

_BESIDE = ("scheduler*.pt", "scaler*.pt", "rng_state*.pth")
_PLACES = ("files", "checkpoint", "version")
_LONG = 16  # list values
_SHOWN = 40  # differences
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class StateDifference:
    """A differing value. None means that the side does not have it."""

    name: str
    a: str | None
    b: str | None

    def __str__(self) -> str:
        if self.b is None:
            return f"only in A  {self.name}: {self.a}"
        return f"only in B  {self.name}: {self.b}" if self.a is None else f"differs  {self.name}: {self.a} and {self.b}"


@dataclass(frozen=True, slots=True, repr=False)
class RunReport(Returned):
    """The differing values, and the number of equal ones."""

    verdict: ClassVar[str] = ".equal"

    a: Checkpoint
    b: Checkpoint
    differences: tuple[StateDifference, ...]
    num_equal: int

    @property
    def equal(self) -> bool:
        """True if something was compared and nothing differs."""
        return not self.differences and self.num_equal > 0

    def __repr__(self) -> str:
        outcome = "equal" if self.equal else f"{pluralize(len(self.differences), 'difference')}"
        return f"<{shown(self.a.path)} and {shown(self.b.path)}: training states, {outcome}>"

    @property
    def exit_code(self) -> int:
        return int(not self.equal)

    def to_json(self) -> dict[str, Any]:
        return {
            "equal": self.equal,
            "a": {"path": one_line(self.a.path), "format": one_line(self.a.format)},
            "b": {"path": one_line(self.b.path), "format": one_line(self.b.format)},
            "num_equal": self.num_equal,
            "differences": [{"name": one.name, "a": one.a, "b": one.b} for one in self.differences],
        }

    def lines(self, verbose: bool = False) -> Iterator[str]:
        """Yield the report's lines. `verbose` shows every difference."""
        shown = self.differences if verbose else self.differences[:_SHOWN]
        yield from map(str, shown)
        if len(shown) < len(self.differences):
            yield f"... and {len(self.differences) - len(shown)} more; -v lists them all"
        same = f"{pluralize(self.num_equal, 'value')} in the training state equal"
        if self.equal:
            yield f"equal: {same}"
        elif not self.differences:
            yield "different: neither run recorded a training state"
        else:
            yield f"different: {pluralize(len(self.differences), 'value')} in the training state, {same}"


def compare_runs(a: Checkpoint, b: Checkpoint) -> RunReport:
    """Compare two checkpoints' training states.

    Raise the errors of `ckpt.containers.torchfile.read` if a run file is damaged.
    """
    with Reader() as reader:
        sides = [dict(_plain_values(_recorded(side), "", reader)) for side in (a, b)]
    found, num_equal = [], 0
    for name in dict.fromkeys((*sides[0], *sides[1])):
        one, other = (side.get(name, _ABSENT) for side in sides)
        if one == other and type(one) in (type(other), int, float) and _sign(one) == _sign(other):
            num_equal += 1
        else:
            texts = (None if value is _ABSENT else one_line(str(value)) for value in (one, other))
            found.append(StateDifference(one_line(name), *texts))
    return RunReport(a, b, tuple(found), num_equal)


def _sign(value: Any) -> float:
    """Tell 0.0 from -0.0."""
    return math.copysign(1, value) if isinstance(value, float) else 1


def _recorded(checkpoint: Checkpoint) -> dict[str, Any]:
    state = checkpoint.state
    found = {
        "step": state.step,
        "sequences": sequences_seen(state),
        "param_groups": [{"parameters": sorted(group.fqns), **group.options} for group in state.param_groups],
        "scalars": {name: _shared_value(values) for name, values in state.scalars.items()},
        **state.entries(),
    }
    folders = [Path(folder) for folder in checkpoint.run_folders]
    folders += [folder / "random_states" / Path(checkpoint.path).name for folder in folders]
    for name in run_files(map(str, folders)):
        if fits(name, _BESIDE):
            found[name] = read(confined(next(one for one in folders if (one / name).is_file()), name)).root
    for folder in folders:
        record = f"records/step-{state.step}.json"
        if (folder / record).is_file():
            content = read_object(confined(folder, record), "the record of a run")
            found["record"] = {name: value for name, value in content.items() if name not in _PLACES}
            break
    return {name: value for name, value in found.items() if value is not None and value != {} and value != []}


def _shared_value(values: Mapping[str, Any]) -> Any:
    """Return one value if all parameters share it (Adam's step)."""
    plain = {fqn: value.value if isinstance(value, OneElement) else value for fqn, value in sorted(values.items())}
    return next(iter(plain.values())) if len({repr(value) for value in plain.values()}) == 1 else plain


def _plain_values(value: Any, name: str, reader: Reader) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Record):
        value = {"class": value.typename, **value.attributes}
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _plain_values(entry, f"{name}.{key}" if name else str(key), reader)
    elif isinstance(value, list | tuple) and not _is_long(value):
        for number, entry in enumerate(value):
            yield from _plain_values(entry, f"{name}[{number}]", reader)
    else:
        yield name, _comparable(value, reader)


def _is_long(value: list[Any] | tuple[Any, ...]) -> bool:
    return len(value) > _LONG and all(isinstance(entry, int | float | str) for entry in value)


def _comparable(value: Any, reader: Reader) -> Any:
    if isinstance(value, StoredTensor):
        extent = value.extent
        if extent.numel == 1:
            return read_scalar(extent)
        tensor = Tensor("", "", extent.dtype, extent.shape, Whole(extent))
        hashed = xxh3_64()
        for bits in row_major(tensor, reader):
            hashed.update(bits.tobytes())
        return f"{extent.dtype.name} {list(extent.shape)} {hashed.hexdigest()}"
    if isinstance(value, Array):
        content = value.data if value.objects is None else repr(value.objects).encode()
        return f"{value.dtype} {list(value.shape)} {xxh3_64(content).hexdigest()}"
    if isinstance(value, bytes | bytearray):
        return f"{pluralize(len(value), 'byte')} {xxh3_64(bytes(value)).hexdigest()}"
    if isinstance(value, list | tuple | set | frozenset):
        members = sorted(map(repr, value)) if isinstance(value, set | frozenset) else list(map(repr, value))
        return f"{pluralize(len(value), 'value')} {xxh3_64(repr(members).encode()).hexdigest()}"
    if isinstance(value, DType):
        return value.name
    if isinstance(value, float) and math.isnan(value):
        return "nan"  # equal to itself here
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
