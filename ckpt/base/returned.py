"""What the functions of `ckpt` return."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckpt.base.text import preformatted


class Returned:
    """What a function returns: printed, it is what the command prints, and `to_json()` what it prints with `--json`."""

    __slots__ = ()

    @property
    def exit_code(self) -> int:
        """The exit code of the command: 0 where all is well."""
        return 0

    def lines(self) -> Iterable[str]:
        """The text that the command prints, a line each."""
        raise NotImplementedError

    def to_json(self) -> Any:
        """Plain values for JSON."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        return preformatted(str(self))
