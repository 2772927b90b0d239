"""A headless Chromium, driven by the WebDriver protocol over HTTP."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Options for Chromium to run as root, and to keep it from calling its maker's servers.
_ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--force-color-profile=srgb"),
)


def missing() -> str | None:
    """Return the missing program, `chromium` or `chromedriver` (Debian's package names), or None."""
    return next((name for name in ("chromium", "chromedriver") if shutil.which(name) is None), None)


class Browser:
    """One window; `script` runs code in the page and returns its result."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, page: Path) -> None:
        self._post("url", {"url": page.as_uri()})

    def script(self, body: str, *args: Any) -> Any:
        return self._post("execute/sync", {"script": body, "args": list(args)})

    def wait(self, expression: str, seconds: float = 20) -> Any:
        """Return an expression's first true value."""
        end = time.monotonic() + seconds
        while not (found := self.script(f"return {expression}")):
            assert time.monotonic() < end, f"{expression} stays {found!r}; {self.log()}"
            time.sleep(0.02)
        return found

    def click(self, selector: str) -> None:
        self._post(f"element/{self._element(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        self._post(f"element/{self._element(selector)}/clear", {})
        self._post(f"element/{self._element(selector)}/value", {"text": text})

    def point(self, selector: str, across: float, down: float, *, click: bool = False) -> None:
        """Move the mouse to a point in an element, given in fractions of its width and height."""
        place = self.script(
            "const r = document.querySelector(arguments[0]).getBoundingClientRect();"
            "return [r.x, r.y, r.width, r.height]",
            selector,
        )
        x, y = int(place[0] + place[2] * across), int(place[1] + place[3] * down)
        moves: list[dict[str, Any]] = [{"type": "pointerMove", "x": x, "y": y, "duration": 0}]
        if click:
            moves += [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self._post("actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": moves}]})

    def log(self) -> list[str]:
        """Return new console errors: from scripts, and from the page's policy."""
        return [one["message"] for one in self._post("se/log", {"type": "browser"}) if one["level"] == "SEVERE"]

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(_call("GET", f"{self._session}/screenshot")))

    def size(self, width: int, height: int) -> None:
        self._post("window/rect", {"width": width, "height": height})

    def _element(self, selector: str) -> str:
        found: dict[str, str] = self._post("element", {"using": "css selector", "value": selector})
        return next(iter(found.values()))

    def _post(self, what: str, content: dict[str, Any]) -> Any:
        return _call("POST", f"{self._session}/{what}", content)


@contextlib.contextmanager
def opened(width: int = 1400, height: int = 1000) -> Iterator[Browser]:
    """Open a new browser and close it after the block."""
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        port = next(found[1] for line in driver.stdout if (found := re.search(r"on port (\d+)\.", line)))
        options = {"args": [*_ARGUMENTS, f"--window-size={width},{height}"]}
        asked = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        root = f"http://127.0.0.1:{port}/session"
        session = f"{root}/{_call('POST', root, {'capabilities': {'alwaysMatch': asked}})['sessionId']}"
        try:
            yield Browser(session)
        finally:
            _call("DELETE", session)
    finally:
        driver.terminate()
        driver.wait(20)


def _call(method: str, url: str, content: dict[str, Any] | None = None) -> Any:
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(json.load(error)["value"]["message"]) from None
