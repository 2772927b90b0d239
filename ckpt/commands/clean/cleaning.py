"""API of `ckpt clean`. It never removes a run's checkpoints."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt import api
from ckpt.base.errors import CkptError, NotFoundError, printable
from ckpt.base.flags import check_types
from ckpt.base.results import Returned
from ckpt.base.text import pluralize, show_size
from ckpt.commands.resume.copies import copies_folder, copies_in, remove_staging, unfinished_in
from ckpt.compare import manifest
from ckpt.move.files import REPLACED, destination_of, disk_bytes, is_staged, staging_folder, translate_os_errors
from ckpt.move.listing import folders_in
from ckpt.plan import registry
from ckpt.runs.half_checkpoints import holds_model
from ckpt.runs.opening import open_training
from ckpt.runs.output_place import run_root
from ckpt.runs.search import MANIFEST
from ckpt.runs.steps import Step, run_at

STAGING, COPY, CONVERSION = "staging folder", "resume copy", "conversion"


@dataclass(frozen=True, slots=True)
class Leftover:
    path: str
    kind: str
    num_bytes: int
    why: str
    is_kept: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "path": printable(self.path),
            "kind": self.kind,
            "bytes": self.num_bytes,
            "why": self.why,
            "kept": self.is_kept,
        }


@dataclass(frozen=True, slots=True, repr=False)
class Cleaned(Returned):
    path: str
    leftovers: tuple[Leftover, ...]
    removed: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<{printable(self.path)}: {self._summary()}>"

    def remove(self) -> Cleaned:
        """Delete and return the removable leftovers, except ones in use."""
        return _removed(self)

    @property
    def removable(self) -> tuple[Leftover, ...]:
        return tuple(one for one in self.leftovers if not one.is_kept)

    @property
    def num_bytes(self) -> int:
        """Size on disk of all removable and removed leftovers."""
        return sum(one.num_bytes for one in self.removable)

    def _summary(self) -> str:
        gone = [one for one in self.removable if one.path in self.removed]
        left = [one for one in self.removable if one.path not in self.removed]
        said = [f"removed {pluralize(len(gone), 'folder')}, {_total(gone)} freed"] if gone else []
        said += [f"{pluralize(len(left), 'folder')} to remove, {_total(left)}"] if left else []
        return "; ".join(said) or "nothing to remove"

    def lines(self) -> Iterator[str]:
        for one in self.leftovers:
            does = "keep" if one.is_kept else "removed" if one.path in self.removed else "remove"
            yield printable(f"{does}: {one.path} ({one.kind}, {show_size(one.num_bytes)}): {one.why}")
        yield self._summary()

    def to_json(self) -> dict[str, Any]:
        leftovers = [one.to_json() | {"removed": one.path in self.removed} for one in self.leftovers]
        return {"path": printable(self.path), "bytes": self.num_bytes, "leftovers": leftovers}


def _total(leftovers: Iterable[Leftover]) -> str:
    return show_size(sum(one.num_bytes for one in leftovers))


@check_types
def clean(path: str | os.PathLike[str] = ".") -> Cleaned:
    """List ckpt's leftovers in and next to the run folder `path`. The result's `remove()` deletes them.

    Removable are staging folders of interrupted conversions, copies of `ckpt resume` before the newest step, and
    conversions with a newer one of the same run. A copy stays if the next resume uses it, or if the run has lost its
    step. Raises NotFoundError if the folder is missing.

    Args:
        path: The run folder.
    """
    place = Path(path)
    if not place.is_dir():
        raise NotFoundError("folder not found", path=place, hint="give a run folder")
    with translate_os_errors(place):
        found = tuple(_leftovers(run_root(Path(os.path.abspath(place)))))
        if not place.is_absolute():  # show paths as the user writes them
            found = tuple(replace(one, path=os.path.relpath(one.path)) for one in found)
        return Cleaned(str(place), found)


def _removed(found: Cleaned) -> Cleaned:
    removed, leftovers = [], []
    for one in found.leftovers:
        if not one.is_kept:
            try:
                _remove(Path(one.path), one.kind)
                removed.append(one.path)
            except CkptError as error:  # a running conversion has locked its staging folder
                one = replace(one, why=f"not removed: {error.what}", is_kept=True)
        leftovers.append(one)
    return Cleaned(found.path, tuple(leftovers), tuple(removed))


def _remove(place: Path, kind: str) -> None:
    with translate_os_errors(place):
        if kind == STAGING:
            remove_staging(destination_of(place))
            return
        # Readers ignore this name, so an interrupted removal leaves no broken checkpoint.
        doomed = staging_folder(place)
        os.rename(place, doomed)
        shutil.rmtree(doomed)


def _leftovers(run: Path) -> Iterator[Leftover]:
    yield from _staging(run)
    newest = _newest_step(run)
    kept = copies_folder(run)
    for copy in copies_in(kept):
        why, is_kept = _judged(copy.step, newest, copy.is_current)
        yield Leftover(str(copy.place), COPY, disk_bytes(copy.place), why, is_kept)
    for copy in unfinished_in(kept):
        why = "a resume was stopped; the next one continues from here" if copy.is_current else "a resume was stopped"
        yield Leftover(str(copy.place), STAGING, disk_bytes(copy.place), why)
    yield from _conversions(run)


def _staging(run: Path) -> Iterator[Leftover]:
    neighbours = [
        place for place in folders_in(run.parent) if place.name.startswith((f".{run.name}-", f".{run.name}."))
    ]
    for place in (*neighbours, *folders_in(run)):
        if place.is_symlink():
            continue
        if place.name.startswith(".") and place.name.endswith(REPLACED):
            what = "its replacement was interrupted: it is restored, or removed if the new one is there"
            yield Leftover(str(place), STAGING, disk_bytes(place), what)
        elif is_staged(place):
            what = f"the conversion to {destination_of(place).name} was stopped; the same command continues from here"
            yield Leftover(str(place), STAGING, disk_bytes(place), what)


def _newest_step(run: Path) -> int | None:
    with contextlib.suppress(CkptError):
        checkpoint = open_training(run)
        return None if checkpoint is None else checkpoint.state.step
    return None


def _judged(step: int | None, newest: int | None, is_current: bool) -> tuple[str, bool]:
    """Return the reason, and True to keep the copy."""
    name = "this step" if step is None else f"step {step}"
    if newest is None:
        return f"the run holds no complete checkpoint: this may be the only copy of {name}", True
    if step is not None and step > newest:
        return f"the newest complete checkpoint of the run is step {newest}: this is the only copy of {name}", True
    if not is_current:
        return "its source has gone or changed", False
    if step is None or step == newest:
        return "the next `ckpt resume` uses it", True
    return f"step {newest} of the run is newer", False


def _conversions(run: Path) -> Iterator[Leftover]:
    """Yield conversions replaced by a newer one."""
    neighbours = [place for place in folders_in(run.parent) if place.name.startswith(f"{run.name}-")]
    places = [*neighbours, *(inner for place in neighbours for inner in folders_in(place))]
    series: dict[str, list[tuple[Step, Path]]] = {}
    for place in places:
        if not place.is_symlink() and (place / MANIFEST).is_file() and (found := _converted_step(run, place)):
            step, kind = found
            series.setdefault(kind, []).append((step, place))
    for members in series.values():
        newest, replacing = max(members, key=lambda member: (member[0].number, member[1]))
        for step, place in sorted(members, key=lambda member: (member[0].number, member[1])):
            if step.number == newest.number or not _is_as_written(replacing):
                continue
            is_kept, why = False, f"{replacing.name} is of a newer step, {newest.number}"
            if not _holds_model(step):
                is_kept, why = True, f"{step.path.name} cannot be read: this may be the only copy of its weights"
            elif not _is_as_written(place):
                is_kept, why = True, "its files are not those of its manifest: somebody has changed it"
            yield Leftover(str(place), CONVERSION, disk_bytes(place), why, is_kept)


def _converted_step(run: Path, place: Path) -> tuple[Step, str] | None:
    """Return the step in a conversion's name, and the rest.

    Default outputs are `run-checkpoint-4-hf`, and the callback's `run-hf/checkpoint-4`.
    """
    name = str(place.relative_to(run.parent)).removeprefix(f"{run.name}-")
    for step in run_at(run).steps:
        own = "-".join(step.path.relative_to(run).parts)
        if name.startswith(f"{own}-"):
            return step, name.removeprefix(own)
        target, _, inner = name.partition("/")
        if inner == own and target in registry.words():
            return step, target
    return None


def _holds_model(step: Step) -> bool:
    with contextlib.suppress(CkptError):
        return holds_model(api.open(step.path))
    return False


def _is_as_written(place: Path) -> bool:
    with contextlib.suppress(CkptError):
        checked = manifest.check(place, elements=False)
        return checked.good and not checked.unknown
    return False
