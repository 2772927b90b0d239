"""`ckpt/stores/objects.py`: Azure's listing has ETags without quotes; answers follow Azurite 3.35."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

import ckpt
from ckpt import api
from ckpt.errors import CorruptError
from ckpt.stores import objects
from tests.support.places import FIXTURES

RUN = FIXTURES / "toy-zero3"
WHEN = "Mon, 23 Nov 2026 07:15:30 GMT"


class Azure(BaseHTTPRequestHandler):
    """Blob container, read by listings and by conditional ranges."""

    blobs: dict[str, bytes]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if query.get("comp") == ["list"]:
            prefix = query.get("prefix", [""])[0]
            names = [name for name in self.blobs if name.startswith(prefix)]
            if "delimiter" in query:
                names = [name for name in names if "/" not in name[len(prefix) :]]
            found = "".join(
                f"<Blob><Name>{name}</Name><Properties><Last-Modified>{WHEN}</Last-Modified><Etag>{self.tag(name)}</Etag>"
                f"<Content-Length>{len(self.blobs[name])}</Content-Length><Content-Type>application/octet-stream</Content-Type>"
                "<BlobType>BlockBlob</BlobType></Properties></Blob>"
                for name in names
            )
            self.answer(200, f"<EnumerationResults><Blobs>{found}</Blobs><NextMarker/></EnumerationResults>".encode())
            return
        name = unquote(url.path).removeprefix("/account/bucket/")
        if self.headers["If-Match"] != f'"{self.tag(name)}"':
            self.answer(412, b"<Error><Code>ConditionNotMet</Code></Error>")
            return
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        data = self.blobs[name]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}")
        self.send_header("ETag", f'"{self.tag(name)}"')
        self.send_header("Last-Modified", WHEN)
        self.finish_with(data[first : last + 1])

    def tag(self, name: str) -> str:
        return "0x" + hashlib.sha256(self.blobs[name]).hexdigest()[:15].upper()

    def answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.finish_with(body)

    def finish_with(self, body: bytes) -> None:
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def blobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    there = {f"run/{path.relative_to(RUN)}": path.read_bytes() for path in RUN.rglob("*") if path.is_file()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Container", (Azure,), {"blobs": there}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{server.server_port}/account")
    objects.store.cache_clear()
    yield there
    server.shutdown()
    server.server_close()
    objects.store.cache_clear()


def test_a_run_in_a_container_is_that_on_the_disk(blobs: dict[str, bytes]) -> None:
    there, here = ckpt.open("az://bucket/run"), ckpt.open(RUN)
    assert api.digests(there) == api.digests(here)


def test_a_blob_that_is_replaced_meanwhile_is_refused(blobs: dict[str, bytes]) -> None:
    store = objects.store("az", "bucket")
    (entry,) = (entry for entry in store.below("run") if entry.key == "run/latest")
    assert bytes(store.read(entry, 0, 6)) == b"global"
    blobs["run/latest"] = b"GLOBAL_STEP2"
    with pytest.raises(CorruptError, match="was replaced while it was being read"):
        store.read(entry, 0, 6)
