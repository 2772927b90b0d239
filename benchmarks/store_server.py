"""Folder served as an S3 bucket with range reads: `python -m benchmarks.store_server FOLDER`.

It prints its port and ignores signatures. moto's server takes ten times longer than the clients.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"
_DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder = Path()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        key = unquote(url.path).removeprefix(f"/{BUCKET}").strip("/")
        if not key:
            return self._list(parse_qs(url.query))
        path = self.folder / key
        if not path.is_file():
            return self._start(404, 0)
        size = path.stat().st_size
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", f"bytes=0-{size - 1}"))
        assert found is not None
        first, stop = int(found[1]), min(size, int(found[2]) + 1)
        self._start(206, stop - first, f"bytes {first}-{stop - 1}/{size}")
        self.wfile.flush()
        with path.open("rb") as file:
            while self.command == "GET" and first < stop:
                first += os.sendfile(self.connection.fileno(), file.fileno(), first, stop - first)
        return None

    def _start(self, status: int, length: int, content_range: str | None = None) -> None:
        self.send_response(status)
        headers = {"Content-Length": str(length), "ETag": '"1"', "Last-Modified": _DATE, "Content-Range": content_range}
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{path.stat().st_size}</Size><ETag>&quot;1&quot;</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and (name := str(path.relative_to(self.folder))).startswith(prefix)
            if "delimiter" not in query or "/" not in name.removeprefix(prefix)
        )
        body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()
        self._start(200, len(body))
        self.wfile.write(body)


def main() -> None:
    _Handler.folder = Path(sys.argv[1])
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
