"""Consistency checks between rank files: all must be from the same step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.base.text import pluralize
from ckpt.containers.sources import RankFile
from ckpt.containers.torchfile.scalars import number_state
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.plan.checkpoint import ParamGroup

_SHOWN = 16
#: Counts of steps that ranks share, and items with nothing else. A data loader's `step` is each rank's own.
_COUNTS = ("last_epoch", "global_step", "global_steps")
_ITEMS = (*_COUNTS, "step", "iteration")


def check_same(name: str, said: Sequence[tuple[RankFile, Any]], fqn: str | None = None) -> None:
    """Raise CorruptError, with each file's value, unless all are equal."""
    if all(value is said[0][1] or value == said[0][1] for _, value in said):
        return
    values: list[tuple[Any, list[RankFile]]] = []
    for file, value in said:
        held = next((files for known, files in values if known == value), None)
        if held is None:
            values.append((value, [file]))
        else:
            held.append(file)
    common, most = max(values, key=lambda pair: len(pair[1]))
    odd = next(files[0] for value, files in values if value != common)

    def listed(value: Any, files: Sequence[RankFile]) -> str:
        more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
        return f"{name} {value} in {', '.join(Path(file.path).name for file in files[:_SHOWN])}{more}"

    raise CorruptError(
        "the folder mixes ranks from different steps",
        **odd.where,
        fqn=fqn,
        expected=f"{name} {common}, found in {len(most)} of {pluralize(len(said), 'file')}",
        found="; ".join(listed(*pair) for pair in values),
    )


def check_same_counts(name: str, ranks: Sequence[tuple[RankFile, Any]]) -> None:
    """Raise CorruptError unless every rank counts the same steps, also in a schedule."""
    counted: dict[str, list[tuple[RankFile, int]]] = {}
    for file, value in ranks:
        for at, number in _counts(name, value):
            counted.setdefault(at, []).append((file, number))
    for at, said in counted.items():
        check_same(at, said)


def _counts(name: str, value: Any) -> Iterator[tuple[str, int]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(inner, Mapping) or key in _COUNTS:
                yield from _counts(f"{name}.{key}", inner)
    elif type(value) is int and (name in _ITEMS or "." in name):
        yield name, value


def check_same_options(ranks: Sequence[tuple[RankFile, Sequence[ParamGroup]]]) -> None:
    """Compare hyperparameters: a schedule changes them every step."""
    every = [(file, _plain_options(groups)) for file, groups in ranks]
    for name in every[0][1]:
        check_same(name, [(file, options.get(name)) for file, options in every])


def _plain_options(groups: Sequence[ParamGroup]) -> dict[str, Any]:
    """Return plain values. A tensor `lr` is an extent, without its value."""
    return {
        f"{name} of group {number}": value
        for number, group in enumerate(groups)
        for name, value in group.options.items()
        if isinstance(value, int | float | str | tuple)
    }


def different_numbers(name: str, said: Sequence[tuple[RankFile, Any]], fqn: str | None = None) -> list[Any]:
    """Return the distinct numbers. Raise CorruptError if steps differ."""
    numbers = [(f, number_state(name, v.extent) if isinstance(v, StoredTensor) else v) for f, v in said]
    if name.endswith("step"):
        check_same(name, numbers, fqn)
    found: list[Any] = []
    for _, number in numbers:
        if number not in found:
            found.append(number)
    return found
