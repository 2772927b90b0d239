"""API of `ckpt push`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Literal

from ckpt import api
from ckpt.base.flags import check_types
from ckpt.base.text import pluralize, show_size
from ckpt.commands.push import push as hub
from ckpt.commands.push.card import CARD, model_card
from ckpt.commands.push.push import Push, Pushed
from ckpt.commands.push.recorded_repo import recorded_repo
from ckpt.commands.push.run_state import check_no_run
from ckpt.stores.placeholder_files import local


@check_types
def push(
    path: str | PathLike[str],
    repo_id: str | None = None,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    names: Literal["hub", "own"] = "hub",
    whole_run: bool = False,
    say: Callable[[str], None] = lambda _: None,
    note: Callable[[Sequence[str]], None] = lambda _: None,
    progress: bool = False,
    command: Sequence[str] | None = None,
) -> Pushed:
    """Push a folder to the Hugging Face Hub, and verify the checksums there. Call it again to continue.

    Raises LossError for a run's training state, unless `whole_run=True`, and other errors of `ckpt.errors`.

    Args:
        path: The folder or URL to push.
        repo_id: The repository, `ORG/NAME`; None for the run's recorded `hub_model_id`.
        private: Make a new repository private.
        revision: The branch to push to.
        create_pr: Push as a pull request.
        commit_message: The commit's message on the Hub.
        names: `hub`, or `own` to push weights with other names than the config's architecture.
        whole_run: Push the training state of a run, too.
        say: Called with each line about the progress.
        note: Called with notes on skipped checkpoints.
        progress: Show the library's own bars.
        command: The command for the model card; None for this call.
    """
    place = local(path)
    repo_id = repo_id or recorded_repo([place])
    to = Push(repo_id, private, revision, create_pr, commit_message, names == "own", whole_run)
    script = f"import ckpt; ckpt.push({json.dumps(fspath(path))}, {json.dumps(repo_id)})"
    return push_model(place, to, command or ["python", "-c", script], say=say, note=note, progress=progress)


def push_model(
    folder: Path,
    to: Push,
    command: Sequence[str],
    *,
    say: Callable[[str], None],
    note: Callable[[Sequence[str]], None] = lambda _: None,
    progress: bool = False,
) -> Pushed:
    """Check tensor names first. Add a card that names `command` if there is none."""
    if not to.own_names:
        api.prove_names(folder)
    if not to.whole_run and folder.is_dir():
        check_no_run(folder, hub.files_to_push(folder))
    card: Callable[[], str] | None = None
    if folder.is_dir() and not (folder / CARD).exists():
        checkpoint = api.open(folder)
        note(checkpoint.passed_over)
        title, facts = to.repo_id.rpartition("/")[2], {"format": checkpoint.format}

        def card() -> str:
            return model_card(title, facts, api.digests(checkpoint).whole, command)

    return push_files(folder, to, card, say=say, progress=progress)


def push_files(
    folder: Path, to: Push, card: Callable[[], str] | None, *, say: Callable[[str], None], progress: bool
) -> Pushed:
    pushed = hub.push(folder, to, card=card, say=say, progress=progress)
    say(f"verified: {pluralize(pushed.num_files, 'file')}, {show_size(pushed.num_bytes)}, identical on the Hub")
    return pushed
