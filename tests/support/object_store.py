"""moto's S3 server on the loopback, behind a proxy that counts requests and injects faults."""

from __future__ import annotations

import http.client
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import boto3
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer

BUCKET = "runs"
EXPIRED = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>ExpiredToken</Code>'
    b"<Message>The provided token has expired.</Message></Error>"
)
#: Fake credentials. moto does not check them and only reads the region.
_SIGNED = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


class Request(NamedTuple):
    """A client's request: for a GET, the range and the number of bytes answered or sent."""

    method: str
    key: str
    query: str
    range: str | None
    num_bytes: int


@dataclass
class Faults:
    """Faults and how many times they strike.

    `status` answers with an error, `cut` closes in mid-body, `slow` pauses, `expired` refuses all, `before` sees
    requests, `no_etags` and `never_ends` spoil listings; `writes` is for PUTs and POSTs.
    """

    status: int = 0
    num_status: int = 0
    num_cut: int = 0
    slow: float = 0.0
    num_slow: int = 0
    expired: bool = False
    writes: bool = False
    before: Any = None
    no_etags: bool = False
    never_ends: bool = False

    def concern(self, method: str, key: str) -> bool:
        return bool(key) and method in (("PUT", "POST") if self.writes else ("GET",))


@dataclass
class ObjectStore:
    """A server; `endpoint` is the proxy's address, `faults` may be replaced at any time."""

    endpoint: str
    client: Any
    requests: list[Request] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def upload(self, folder: Path, prefix: str, without: str = "truth") -> str:
        """Upload a folder below `prefix` and return its URL."""
        for path in sorted(folder.rglob("*")):
            inside = path.relative_to(folder)
            if path.is_file() and without not in inside.parts:
                self.put(f"{prefix}/{inside}", path.read_bytes())
        return f"s3://{BUCKET}/{prefix}"

    def put(self, key: str, content: bytes) -> None:
        """Put an object directly into the in-process server: a request would take 5 ms."""
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(BUCKET, key, content)

    def objects(self, prefix: str) -> dict[str, bytes]:
        """Return the objects below `prefix`, by the rest of the key."""
        found = [*s3_backends[DEFAULT_ACCOUNT_ID]["aws"].get_bucket(BUCKET).keys.items()]
        return {key.removeprefix(f"{prefix}/"): one.value for key, one in found if key.startswith(f"{prefix}/")}

    def unfinished(self) -> list[str]:
        """Return the keys for multipart uploads neither completed nor aborted."""
        return [one["Key"] for one in self.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])]

    def environment(self) -> Mapping[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


@contextmanager
def serve() -> Iterator[ObjectStore]:
    """Serve an empty bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    direct = boto3.client(
        "s3",
        endpoint_url=f"http://{host}:{port}",
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )
    direct.create_bucket(Bucket=BUCKET)
    proxy = _Server(("127.0.0.1", 0), _Proxy)
    proxy.daemon_threads = True
    store = ObjectStore(f"http://127.0.0.1:{proxy.server_address[1]}", direct)
    proxy.store, proxy.behind = store, (host, port)  # type: ignore[attr-defined]
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        proxy.shutdown()
        proxy.server_close()
        moto.stop()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnected: the message would appear during a later test."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body waits 40 ms for the confirmation of its headers

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _forward(self) -> None:
        store: ObjectStore = self.server.store  # type: ignore[attr-defined]
        url = urlsplit(self.path)
        key = unquote(url.path).removeprefix(f"/{BUCKET}").strip("/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding"):
            raise AssertionError("a chunked body is not forwarded")
        if store.faults.before is not None:
            store.faults.before(self.command, key)
        with store.lock:
            faults = store.faults
            is_concerned = faults.concern(self.command, key)
            fails = is_concerned and faults.num_status > 0
            faults.num_status -= fails
            is_cut = is_concerned and not fails and faults.num_cut > 0
            faults.num_cut -= is_cut
            is_slow = is_concerned and not fails and not is_cut and faults.num_slow > 0
            faults.num_slow -= is_slow
        if faults.expired:
            return self._answer(400, {"Content-Type": "application/xml"}, EXPIRED)
        if fails:
            return self._answer(faults.status, {}, b"<Error><Code>InternalError</Code></Error>")
        connection = http.client.HTTPConnection(*self.server.behind)  # type: ignore[attr-defined]
        asked = {name.lower(): value for name, value in self.headers.items()}
        if not asked.get("authorization", "").startswith("AWS"):  # Google's; the rest of its XML API is S3's
            asked["authorization"] = _SIGNED
        path = re.sub(r"continuation-token=[^&]*&?", "", self.path) if faults.never_ends else self.path
        connection.request(self.command, path, body, asked)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if faults.no_etags:
            content = re.sub(rb"<ETag>.*?</ETag>", b"", content) if b"<ListBucketResult" in content else content
        if faults.never_ends:
            more = b"<IsTruncated>true</IsTruncated><NextContinuationToken>again</NextContinuationToken>"
            content = re.sub(rb"<IsTruncated>\s*false\s*</IsTruncated>", more, content)
        with store.lock:
            size = len(content) if self.command == "GET" else len(body)
            store.requests.append(Request(self.command, key, url.query, self.headers.get("Range"), size))
        headers = {
            name: value
            for name, value in answer.getheaders()
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server")
            and not (faults.no_etags and name.lower() == "etag")
        }
        if self.command == "HEAD":
            headers["Content-Length"] = answer.getheader("Content-Length") or "0"
        if is_cut and self.command != "GET":  # the request succeeded, but the client never learns it
            self.close_connection = True
            self.connection.close()
            return None
        self._answer(answer.status, headers, content, is_cut=is_cut, pause=faults.slow if is_slow else 0.0)
        return None

    def _answer(
        self, status: int, headers: Mapping[str, str], content: bytes, *, is_cut: bool = False, pause: float = 0.0
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        half = len(content) // 2
        if is_cut or pause:
            self.wfile.write(content[:half])
            self.wfile.flush()
        if is_cut:
            self.close_connection = True
            self.connection.close()
            return
        if pause:
            time.sleep(pause)
        self.wfile.write(content[half if pause else 0 :])

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward  # noqa: N815
