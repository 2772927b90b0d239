"""`ckpt push`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ckpt.base.errors import printable
from ckpt.base.flags import Flag, Positional
from ckpt.options import command as opt
from ckpt.options.command import CONVERT, Command
from ckpt.options.printing import say_notes
from ckpt.plan.groups import HubTarget, Names, NamesOption

if TYPE_CHECKING:
    from ckpt.commands.push.push import Push


def push(
    *,
    path: Annotated[Path, Positional(metavar="PATH", help="The folder or URL to push, without hidden files.")],
    at_hub: HubTarget,
    names: NamesOption = "hub",
    whole_run: Annotated[bool, Flag(help="Push a run's optimizer, random states and steps, too.")] = False,
    as_json: opt.JsonOption = False,
    quiet: opt.QuietOption = False,
) -> None:
    """Push a folder to the Hugging Face Hub, and verify the checksums of what arrived. Run it again to go on."""
    from ckpt.commands.push.pushing import push as push_folder

    how: dict[str, Any] = {
        "names": names,
        "whole_run": whole_run,
        "note": say_notes,
        "command": ["ckpt", *sys.argv[1:]],
    }
    pushed = push_folder(path, **vars(at_hub), **how, **telling(quiet))
    print(json.dumps(pushed.to_json(), indent=2) if as_json else pushed)


def push_target(at: HubTarget, names: Names, folders: list[Path], suffix: str = "") -> Push:
    from ckpt.commands.push.push import Push
    from ckpt.commands.push.recorded_repo import recorded_repo

    repo_id = at.repo_id or recorded_repo(folders, suffix)
    return Push(repo_id, at.private, at.revision, at.create_pr, at.commit_message, names == "own")


def telling(quiet: bool) -> dict[str, Any]:
    def say(text: str) -> None:
        if not quiet:
            print(printable(text), file=sys.stderr)

    return {"say": say, "progress": not quiet and sys.stderr.isatty()}


COMMAND = Command(
    name="push",
    section=CONVERT,
    function=push,
    examples=(
        ("ckpt push outputs-hf --repo-id org/name --private", "to a repository of its own, made where it is missing"),
        ("ckpt push outputs-hf --repo-id org/name --create-pr", "as a pull request"),
    ),
    guide="merge-lora.md",
    urls=("path",),
    texts=("commit_message",),
    writes=True,
    place=5,
    python="ckpt.commands.push.pushing:push",
)
