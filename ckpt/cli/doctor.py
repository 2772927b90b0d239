"""`ckpt doctor`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.base.errors import CkptError, UsageError, shown
from ckpt.cli import options as opt
from ckpt.cli.text import terminal_width

if TYPE_CHECKING:
    from ckpt.plan.checkpoint import Checkpoint


def doctor(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="PATH", help="A checkpoint or run folder: which commands work on it?", readable=False),
    ] = None,
    as_json: opt.JsonOption = False,
) -> None:
    """Show what this installation and this machine have, and which commands work on a checkpoint."""
    from ckpt import api
    from ckpt.doctor import facts as known
    from ckpt.doctor import text
    from ckpt.move.threads import num_cores
    from ckpt.run_folder.not_read import not_read
    from ckpt.show import overview
    from ckpt.stores.standins import is_standin
    from ckpt.views.mount import library

    places = [Path.cwd()]
    if path is not None and path.exists() and not is_standin(str(path)):
        places.append(path if path.is_dir() else path.parent)
    facts = known.gather(places, num_cores(), known.attempt("ckpt mount", library))
    if path is None:
        print(_json({"facts": asdict(facts)}) if as_json else "\n".join(text.lines(facts)))
        return
    try:
        checkpoint = api.open(path)
    except CkptError:  # what is known is printed all the same
        print(_json({"facts": asdict(facts)}) if as_json else "\n".join([*text.lines(facts), ""]), flush=True)
        raise
    trials = [known.attempt(*one) for one in _proofs(path, checkpoint)]
    left = [one.to_json() for one in not_read(checkpoint)]
    if as_json:
        found = {"checkpoint": overview.describe(checkpoint, left), "commands": [asdict(one) for one in trials]}
        print(_json({"facts": asdict(facts), **found}))
    else:
        shown_as = overview.lines(checkpoint, left, width=terminal_width())
        print("\n".join([*text.lines(facts), "", *map(shown, shown_as), "", *text.trial_lines(trials)]))


def _json(content: Any) -> str:
    return shown(json.dumps(content, indent=2))


def _proofs(path: Path, checkpoint: Checkpoint) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Commands that may work on `checkpoint`, and for each what proves it: all that it does before it writes."""
    from ckpt import api
    from ckpt.plan import registry
    from ckpt.resume.resuming import source_of
    from ckpt.verify import manifest

    here = shlex.quote(shown(str(path)))
    for one in registry.all_formats():
        if one.writes:
            yield f"ckpt convert auto {one.name} {here}", partial(api.plan, checkpoint, one.name)
    yield f"ckpt resume {here}", partial(source_of, path, None, None, False)
    yield f"ckpt verify {here}", partial(manifest.expected_bytes, path)
    yield f"ckpt merge-lora {here}", partial(_merge, str(path))
    yield f"ckpt push {here} --repo-id ORG/NAME", partial(_push, checkpoint)


def _merge(where: str) -> None:
    from ckpt.lora import find, merge

    adapter = find.open_adapter(where)
    merge.plan([adapter], find.open_base(adapter, None))


def _push(checkpoint: Checkpoint) -> None:
    from ckpt import api
    from ckpt.plan import registry

    if registry.get(checkpoint.format).carries_optimizer:
        what, hint = "it holds training state, which no model on the Hub has", "push what `ckpt convert` makes of it"
        raise UsageError(what, found=checkpoint.format, hint=hint)
    api.prove_names(Path(checkpoint.path))
