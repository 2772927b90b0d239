"""Results of the functions of `ckpt`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn

from ckpt.base.text import preformatted


class Returned:
    """A result: printed, it is what the command prints, and `to_json()` what it prints with `--json`.

    It has no truth value, or `if ckpt.verify(a, b): remove(a)` would always remove.  `verdict` names what to ask for.
    """

    __slots__ = ()
    verdict: ClassVar[str] = ".exit_code"

    def __bool__(self) -> NoReturn:
        raise TypeError(f"this {type(self).__name__} is neither true nor false: ask for its {self.verdict}")

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
