"""The commands of `ckpt`: a folder for each, with its product and its declaration in `command.py`.

Other packages add commands through the entry-point group `ckpt.commands`.

May import: `ckpt.adapters`, `ckpt.api`, `ckpt.base`, `ckpt.compare`, `ckpt.containers`, `ckpt.move`, `ckpt.options`,
`ckpt.pictures`, `ckpt.plan`, `ckpt.processes`, `ckpt.runs`, `ckpt.state`, `ckpt.stores`, `ckpt.training`,
`ckpt.views`.
"""

from __future__ import annotations

from functools import cache
from pkgutil import iter_modules

from ckpt.base.entries import entries, load
from ckpt.base.errors import UsageError
from ckpt.options.command import GROUP, SECTIONS, Command


@cache
def own_places() -> dict[str, str]:
    names = sorted(module.name for module in iter_modules(__path__) if module.ispkg)
    return {name: f"ckpt.commands.{name}.command:COMMAND" for name in names}


@cache
def places() -> dict[str, str]:
    """Return each command's `module:object` by name. Raise UsageError for a name registered twice."""
    own = {name.replace("_", "-"): place for name, place in own_places().items()}
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
