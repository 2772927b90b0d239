"""Command registry: folders in `ckpt.commands`, and other packages' entry points."""

from __future__ import annotations

from functools import cache

from ckpt import commands
from ckpt.base.entries import entries, load
from ckpt.base.errors import UsageError
from ckpt.options.command import GROUP, SECTIONS, Command


@cache
def places() -> dict[str, str]:
    """Return each command's `module:object` by name. Raise UsageError for a name registered twice."""
    own = {name.replace("_", "-"): place for name, place in commands.places().items()}
    others = entries(GROUP)
    if taken := sorted(own.keys() & others.keys()):
        raise UsageError(
            f"an installed package registers the built-in command {taken[0]!r}",
            found=others[taken[0]],
            hint="uninstall or update that package",
        )
    return own | others


@cache
def command(name: str) -> Command:
    """Raise UsageError if the command can't be imported or is not declared."""
    found = load(places()[name])
    if not isinstance(found, Command) or found.name != name:
        what = f"the command {name!r} is not declared"
        raise UsageError(what, expected=f"a `Command` named {name!r}", found=f"{places()[name]}: {found!r:.200}")
    return found


def all_commands() -> list[Command]:
    titles = [*SECTIONS, *sorted({command(name).section for name in places()} - {*SECTIONS})]
    found = [command(name) for name in places()]
    return sorted(found, key=lambda one: (titles.index(one.section), one.place, one.name))
