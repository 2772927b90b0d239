"""Model cards for folders that ckpt wrote."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt.base.errors import printable
from ckpt.base.text import HUB_ID
from ckpt.compare.digest import ALGORITHM

CARD = "README.md"
_OURS = f"What it holds, as `ckpt hash` prints it for this model in any format ({ALGORITHM}):"


def model_card(
    title: str, facts: Mapping[str, str], digests: Mapping[str, str], command: Sequence[str], base: str | None = None
) -> str:
    head = {"library_name": "transformers", "tags": ["ckpt"]}
    if base is not None and HUB_ID.fullmatch(base) and not Path(base).exists():
        head |= {"base_model": base}
    lines = ["---", *(f"{name}: {json.dumps(value)}" for name, value in head.items()), "---", ""]
    lines += [f"# {_inline(title)}", ""]
    lines += [f"- {name}: {_inline(value)}" for name, value in facts.items()]
    lines += ["", "Made with:", "", f"    {printable(shlex.join(command))}", ""]
    lines += [_OURS, ""]
    lines += [f"    {digest}  {kind}" for kind, digest in digests.items()]
    return "\n".join(lines) + "\n"


def _inline(text: str) -> str:
    """Escape HTML for Markdown."""
    return printable(text).replace("\n", " ").replace("<", "&lt;")


def is_ours(card: bytes) -> bool:
    return _OURS.encode() in card
