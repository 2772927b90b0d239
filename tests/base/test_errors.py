"""`ckpt/base/errors.py`: error texts, in full if needed."""

from __future__ import annotations

from ckpt.errors import NotFoundError


def test_hint_is_never_cut() -> None:
    """A command in a shortened hint would not work."""
    folder = "/".join(["run"] * 1000)
    assert f"{folder}`, then" in str(NotFoundError("no such file", hint=f"`mkdir {folder} && cd {folder}`, then again"))
