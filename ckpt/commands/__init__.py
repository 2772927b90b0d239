"""The commands of `ckpt`: a folder for each, with its product and its declaration in `command.py`.

May import: `ckpt.adapters`, `ckpt.api`, `ckpt.base`, `ckpt.compare`, `ckpt.containers`, `ckpt.move`, `ckpt.options`,
`ckpt.pictures`, `ckpt.plan`, `ckpt.processes`, `ckpt.runs`, `ckpt.state`, `ckpt.stores`, `ckpt.training`,
`ckpt.views`.
"""

from functools import cache
from pkgutil import iter_modules


@cache
def places() -> dict[str, str]:
    names = sorted(module.name for module in iter_modules(__path__) if module.ispkg)
    return {name: f"ckpt.commands.{name}.command:COMMAND" for name in names}
