"""Shell completion for formats, step folders and tensors. Errors in the words before give an empty list."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ckpt.base.errors import CkptError

_MAX_OFFERED = 500

#: Last line in zsh's file. At the first Tab, typer's own file only defines the function, and completes nothing.
_AT_FIRST_TAB = '\nif [[ $zsh_eval_context[-1] = loadautofunc ]]; then _ckpt_completion "$@"; fi\n'


@contextlib.contextmanager
def completing_at_first_tab() -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path = Path.home() / ".zfunc/_ckpt"
            if _AT_FIRST_TAB not in (text := path.read_text()):
                path.write_text(text + _AT_FIRST_TAB)


def sources(incomplete: str) -> list[str]:
    from ckpt.runs.opening import AUTO

    return [*_beginning(lambda: [AUTO], incomplete), *_beginning(_formats, incomplete)]


def targets(incomplete: str) -> list[str]:
    return _beginning(_formats, incomplete)


def _formats() -> list[str]:
    from ckpt.plan import registry

    return registry.words()


def tags(ctx: Any, incomplete: str) -> list[str]:
    from ckpt.runs.steps import run_at

    path = _path(ctx)
    return _beginning(lambda: [step.path.name for step in run_at(path).steps] if path else [], incomplete)


def tensors(ctx: Any, incomplete: str) -> list[str]:
    from ckpt import api

    path = _path(ctx)
    return _beginning(lambda: sorted({fqn for fqn, _ in api.open(path).tensors}) if path else [], incomplete)


def _path(ctx: Any) -> Path | None:
    """Return the PATH on the command line. It is not parsed yet if an option without its value follows."""
    typed = [ctx.params.get("path"), *ctx.args]
    return next((Path(word) for word in reversed(typed) if word and Path(word).exists()), None)


def _beginning(names: Callable[[], list[str]], incomplete: str) -> list[str]:
    with contextlib.suppress(CkptError):
        return [name for name in names() if name.startswith(incomplete)][:_MAX_OFFERED]
    return []
