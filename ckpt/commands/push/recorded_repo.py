"""Hub repository recorded by a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ckpt.base.errors import UsageError
from ckpt.base.text import HUB_ID
from ckpt.base.words import Message
from ckpt.commands.push.card import CARD
from ckpt.move.source import read_file
from ckpt.runs.file_table import TRAINING_ARGS
from ckpt.runs.recorded_precision import read_training_args
from ckpt.runs.steps import enclosing_folders, run_at

_MAX_CARD = 4 << 20
#: Axolotl adds its config to the model card (axolotl, train.py).
_IN_CARD = re.compile(rb"^hub_model_id:[ \t]*[\"']?([\w./-]+)", re.MULTILINE)


def recorded_repo(folders: Sequence[Path], suffix: str = "") -> str:
    """Return the run's `hub_model_id`, from training arguments or model card, or raise UsageError."""
    places: list[Path] = []
    for folder in folders:
        places += [*enclosing_folders(folder.resolve()), *(step.path for step in run_at(folder).steps)]
    looked_at, without_owner = [], None
    for place in dict.fromkeys(places):
        for path, read in ((place / TRAINING_ARGS, _in_arguments), (place / CARD, _in_card)):
            if path.is_file():
                looked_at.append(str(path))
                found = read(path)
                if found is not None and HUB_ID.fullmatch(found):
                    return found + suffix
                without_owner = without_owner or found
    if without_owner is not None:
        what, hint = (
            "the run records one without its owner",
            Message("give it with {repo_id}", repo_id=f"ORG/{without_owner}{suffix}"),
        )
        raise UsageError(f"to which repository? {what}", expected="ORG/NAME", found=without_owner, hint=hint)
    raise UsageError(
        "to which repository? the run does not record one",
        expected=f"hub_model_id in its training arguments ({TRAINING_ARGS}) or Axolotl's config in its {CARD}",
        found=f"none in {', '.join(looked_at)}" if looked_at else f"no {TRAINING_ARGS}",
        hint=Message("give it with {repo_id=ORG/NAME}"),
    )


def _in_card(path: Path) -> str | None:
    found = _IN_CARD.search(read_file(path, _MAX_CARD))
    return found[1].decode("ascii", "replace") if found and found[1] not in (b"null", b"~") else None


def _in_arguments(path: Path) -> str | None:
    value = (read_training_args(path) or {}).get("hub_model_id")
    return value if isinstance(value, str) and value else None
