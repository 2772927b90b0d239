"""API of `ckpt doctor`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from ckpt import api
from ckpt.base.errors import LossError, UsageError, shown
from ckpt.base.flags import check_types
from ckpt.base.results import Returned
from ckpt.base.text import pluralize
from ckpt.commands.doctor import facts as known
from ckpt.commands.doctor import text
from ckpt.commands.doctor.facts import Facts, Trial
from ckpt.commands.inspect import overview
from ckpt.plan import registry
from ckpt.plan.checkpoint import Checkpoint
from ckpt.runs.search import MANIFEST
from ckpt.runs.unread_files import list_unread
from ckpt.stores.placeholder_files import is_standin

#: A command, its read-only part, and True if users expect it to work.
Proof = tuple[str, Callable[[], Any], bool]


@dataclass(frozen=True, repr=False)
class Diagnosis(Returned):
    facts: Facts
    checkpoint: Checkpoint | None = None
    commands: tuple[Trial, ...] = ()

    def __repr__(self) -> str:
        works = sum(one.problem is None for one in self.commands)
        return f"<ckpt {self.facts.version}: {works} of {pluralize(len(self.commands), 'command')} work>"

    def lines(self, width: int | None = None) -> Iterator[str]:
        yield from text.lines(self.facts, width)
        if self.checkpoint is not None:
            left = [one.to_json() for one in list_unread(self.checkpoint)]
            yield from ("", *map(shown, overview.lines(self.checkpoint, left, width=width)), "")
            yield from text.trial_lines(self.commands)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"facts": asdict(self.facts)}
        if self.checkpoint is not None:
            left = [one.to_json() for one in list_unread(self.checkpoint)]
            found["checkpoint"] = overview.describe(self.checkpoint, left)
            found["commands"] = [asdict(one) for one in self.commands]
        return found


@check_types
def doctor(path: str | PathLike[str] | None = None) -> Diagnosis:
    """Describe this installation and machine, and find usable commands for the checkpoint at `path`.

    Every command runs up to its first write.

    Args:
        path: A checkpoint or run folder; None for the installation alone.
    """
    place = None if path is None else Path(fspath(path))
    facts = gather(place)
    return Diagnosis(facts) if place is None else diagnosed(facts, place)


def gather(path: Path | None) -> Facts:
    from ckpt.move.threads import num_cores
    from ckpt.views.mount import library

    places = [Path.cwd()]
    if path is not None and path.exists() and not is_standin(str(path)):
        places.append(path if path.is_dir() else path.parent)
    return known.gather(places, num_cores(), known.attempt("ckpt mount", library))


def diagnosed(facts: Facts, path: Path) -> Diagnosis:
    checkpoint = api.open(path)
    return Diagnosis(facts, checkpoint, tuple(known.attempt(*one) for one in _proofs(path, checkpoint)))


def _proofs(path: Path, checkpoint: Checkpoint) -> Iterator[Proof]:
    from ckpt.commands.resume.resuming import source_of
    from ckpt.compare import manifest

    here = shlex.quote(shown(str(path)))
    trains = registry.get(checkpoint.format).carries_optimizer
    for one in registry.all_formats():
        if one.writes:
            yield f"ckpt convert auto {one.name} {here}", partial(_convert, checkpoint, one.name), one.name == "hf"
    yield f"ckpt resume {here}", partial(source_of, path, None, None, False), trains
    has_manifest = (Path(checkpoint.path) / MANIFEST).exists()
    yield f"ckpt verify {here}", partial(manifest.expected_bytes, path), has_manifest
    yield f"ckpt merge-lora {here}", partial(_merge, str(path)), checkpoint.is_adapter
    yield f"ckpt push {here} --repo-id ORG/NAME", partial(_push, checkpoint), not trains


def _convert(checkpoint: Checkpoint, to: str) -> None:
    loads = api.plan(checkpoint, to).plan.target.loads
    if loads is not None and loads.can is False:
        raise LossError(loads.denial, hint=loads.hint)


def _merge(where: str) -> None:
    from ckpt.commands.merge_lora import find, merge

    adapter = find.open_adapter(where)
    merge.plan([adapter], find.open_base(adapter, None))


def _push(checkpoint: Checkpoint) -> None:
    if registry.get(checkpoint.format).carries_optimizer:
        what, hint = "it holds training state, which no model on the Hub has", "push what `ckpt convert` makes of it"
        raise UsageError(what, found=checkpoint.format, hint=hint)
    api.prove_names(Path(checkpoint.path))
