"""moto's S3 server on the loopback, which counts requests and injects faults."""

from __future__ import annotations

import io
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import boto3
from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import ThreadedWSGIServer
from werkzeug.test import run_wsgi_app

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
    """A server at `endpoint`; `faults` may be replaced at any time."""

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
    server = _Server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), _Handler)
    endpoint = f"http://127.0.0.1:{server.port}"
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
    )
    server.store = store = ObjectStore(endpoint, client)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        client.create_bucket(Bucket=BUCKET)
        store.requests.clear()
        yield store
    finally:
        client.close()
        server.shutdown()
        for connection in server.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        thread.join()


class _Server(ThreadedWSGIServer):
    """Its end waits for the threads of all connections: other tests compare threads and open files."""

    store: ObjectStore
    daemon_threads = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connections: list[socket.socket] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)


class _Handler(MotoRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body waits 40 ms for the confirmation of its headers

    def log_request(self, *_: object) -> None:
        pass

    def _forward(self) -> None:
        store = self.server.store
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
        if not self.headers.get("Authorization", "").startswith("AWS"):  # Google's; the rest of its XML API is S3's
            del self.headers["Authorization"]
            self.headers["Authorization"] = _SIGNED
        if faults.never_ends:
            self.path = re.sub(r"continuation-token=[^&]*&?", "", self.path)
        environ = self.make_environ() | {"wsgi.input": io.BytesIO(body)}
        parts, status, answered = run_wsgi_app(self.server.app, environ, buffered=True)
        content = b"".join(parts)
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
            for name, value in answered
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server")
            and not (faults.no_etags and name.lower() == "etag")
        }
        if self.command == "HEAD":
            headers["Content-Length"] = answered.get("Content-Length", "0")
        if is_cut and self.command != "GET":  # the request succeeded, but the client never learns it
            self.close_connection = True
            self.connection.close()
            return None
        self._answer(int(status.split()[0]), headers, content, is_cut=is_cut, pause=faults.slow if is_slow else 0.0)
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
