"""Self-contained HTML pages: `ckpt inspect --html`, `verify`, `diff`.

A page joins the files in `ckpt/pictures/web/` with its content: compressed JSON in base64. So no text from a checkpoint
becomes markup or script. The page's policy forbids any other script, and any loading.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

_SCRIPTS = {
    "inspect": ("common.js", "tensors.js", "map.js", "inspect.js"),
    "heat": ("common.js", "heat.js"),
}
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="ckpt">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; base-uri 'none'; form-action 'none'; \
style-src 'unsafe-inline'; script-src 'sha256-{digest}'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}<script type="application/octet-stream" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def page(name: str, content: dict[str, Any]) -> str:
    """Return the page `name` (`inspect`, `heat`). The content has a `title`."""
    script = "".join(map(_file, _SCRIPTS[name]))
    packed = zlib.compress(json.dumps(content, separators=(",", ":")).encode(), 6)
    return _PAGE.format(
        title=escape(content["title"]),
        digest=b64encode(sha256(script.encode()).digest()).decode(),
        style=_file("page.css"),
        body=_file(f"{name}.html"),
        data=b64encode(packed).decode(),
        script=script,
    )


def heat_map(report: dict[str, Any]) -> str:
    """Return a page for the `to_json()` of `ckpt.verify` or `ckpt.diff`."""
    return page("heat", report | {"title": f"{report['a']['path']} and {report['b']['path']}"})


def _file(name: str) -> str:
    return files("ckpt.pictures").joinpath("web", name).read_text("utf-8")
