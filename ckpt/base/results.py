"""Results of ckpt's functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn

from ckpt.base.text import preformatted


class Returned:
    """A command's result. `str()` is the command's output, `to_json()` its `--json` output.

    It has no truth value, because `if ckpt.verify(a, b): remove(a)` would always remove. `verdict` names the attribute
    to test instead.
    """

    __slots__ = ()
    verdict: ClassVar[str] = ".exit_code"

    def __bool__(self) -> NoReturn:
        raise TypeError(f"this {type(self).__name__} is neither true nor false: ask for its {self.verdict}")

    @property
    def exit_code(self) -> int:
        """Exit code of the command, 0 on success."""
        return 0

    def lines(self) -> Iterable[str]:
        """Return the printed lines."""
        raise NotImplementedError

    def to_json(self) -> Any:
        """Return plain values for JSON."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        return preformatted(str(self))
