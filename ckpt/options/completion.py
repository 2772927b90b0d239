"""What the shell is offered behind Tab: formats, step folders, tensors.  Where nothing is, it offers files itself.

A mistake in what was typed so far is no matter of completion: nothing is offered then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ckpt.base.errors import CkptError

_MAX_OFFERED = 500

#: Line for the end of zsh's file: typer's only defines the function at the first Tab, and offers nothing.
_AT_FIRST_TAB = '\nif [[ $zsh_eval_context[-1] = loadautofunc ]]; then _ckpt_completion "$@"; fi\n'


@contextlib.contextmanager
def completing_at_first_tab() -> Iterator[None]:
    """Complete the file for zsh that typer installs meanwhile."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path = Path.home() / ".zfunc/_ckpt"
            if _AT_FIRST_TAB not in (text := path.read_text()):
                path.write_text(text + _AT_FIRST_TAB)


def sources(incomplete: str) -> list[str]:
    """Formats to read."""
    from ckpt.runs.opening import AUTO

    return [*_beginning(lambda: [AUTO], incomplete), *_beginning(_formats, incomplete)]


def targets(incomplete: str) -> list[str]:
    """Formats to write."""
    return _beginning(_formats, incomplete)


def _formats() -> list[str]:
    from ckpt.plan import registry

    return registry.words()


def tags(ctx: Any, incomplete: str) -> list[str]:
    """Step folders of the run that was typed."""
    from ckpt.runs.steps import run_at

    path = _path(ctx)
    return _beginning(lambda: [step.path.name for step in run_at(path).steps] if path else [], incomplete)


def tensors(ctx: Any, incomplete: str) -> list[str]:
    """Names of the tensors of the checkpoint that was typed."""
    from ckpt import api

    path = _path(ctx)
    return _beginning(lambda: sorted({fqn for fqn, _ in api.open(path).tensors}) if path else [], incomplete)


def _path(ctx: Any) -> Path | None:
    """What stands on the command line as PATH; before an option without its value it is not parsed yet."""
    typed = [ctx.params.get("path"), *ctx.args]
    return next((Path(word) for word in reversed(typed) if word and Path(word).exists()), None)


def _beginning(names: Callable[[], list[str]], incomplete: str) -> list[str]:
    with contextlib.suppress(CkptError):
        return [name for name in names() if name.startswith(incomplete)][:_MAX_OFFERED]
    return []
