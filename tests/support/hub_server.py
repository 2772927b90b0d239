"""In-memory Hub on the loopback, with the upload API of huggingface_hub 2.4 and hf_xet 1.8.

Attributes turn faults on.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants

from tests.support import xet

TOKEN, XET_TOKEN = "hf_loopback", "xet_loopback"
LARGE = 1000  # minimum bytes for a large file
PART = 4096  # bytes in one part of a multipart upload


@dataclass(frozen=True)
class File:
    """A file in a tree."""

    content: bytes
    is_large: bool

    @property
    def oid(self) -> str:
        """Return a large file's sha256, or a small file's git blob hash."""
        if self.is_large:
            return hashlib.sha256(self.content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()


@dataclass
class Repo:
    """A repository: trees by branch."""

    private: bool
    branches: dict[str, dict[str, File]] = field(default_factory=lambda: {"main": {}})
    messages: list[str] = field(default_factory=list)
    pull_requests: list[str] = field(default_factory=list)

    @property
    def commit(self) -> str:
        """Return a hash over the whole content, because the library caches by commit."""
        return hashlib.sha1(repr(self.branches).encode()).hexdigest()


class _NoRevisionError(LookupError):
    """Missing branch or commit in a repository."""


class HubServer:
    """Context manager with an `endpoint`.

    `drop` uploads are cut, all uploads from number `refuse` on are refused, `hold` makes later ones wait, `corrupt`
    names a file to change on arrival, `ignored` a file in .gitignore, `status` and `silent` match requests.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.uploads: Counter[str] = Counter()
        self.drop = 0
        self.refuse: int | None = None
        self.hold: threading.Event | None = None
        self.corrupt: str | None = None
        self.ignored: str | None = None
        self.status: dict[str, int] = {}
        self.silent: str | None = None
        self.ended = threading.Event()
        self.sent: Counter[str] = Counter()  # downloaded bytes, by path
        self.xorbs: dict[str, list[bytes]] = {}
        self.lock = threading.Lock()
        server = self

        class Handler(_Handler):
            hub = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def configure(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        """Let huggingface_hub use this server in the test and in processes that it starts.

        In the test it uploads through LFS, because hf_xet has one server in a process.
        """
        monkeypatch.setenv("HF_ENDPOINT", self.endpoint)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HOME", str(home))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        # read from the environment before
        read = {"ENDPOINT": self.endpoint, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
        read |= {"HF_TOKEN_PATH": str(home / "no-token"), "HF_HUB_CACHE": str(home / "hub")}
        read |= {"HUGGINGFACE_CO_URL_TEMPLATE": self.endpoint + "/{repo_id}/resolve/{revision}/{filename}"}
        for name, value in read.items():
            monkeypatch.setattr(constants, name, value)

    def __exit__(self, *exc: object) -> None:
        if self.hold is not None:
            self.hold.set()
        self.ended.set()
        self._http.shutdown()
        self._http.server_close()

    def tree(self, repo_id: str, branch: str = "main") -> dict[str, bytes]:
        return {path: file.content for path, file in self.repos[repo_id].branches[branch].items()}


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body waits 40 ms for the confirmation of its headers

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._route("GET")

    def do_HEAD(self) -> None:
        self._route("HEAD")

    def do_POST(self) -> None:
        self._route("POST")

    def do_PUT(self) -> None:
        self._upload()

    def _route(self, method: str) -> None:
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        if re.fullmatch("POST /cas/v1/xorbs/.*", f"{method} {url.path}"):
            return self._upload_xorb(url.path.rpartition("/")[2])
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.hub.silent is not None and re.fullmatch(self.hub.silent, f"{method} {url.path}"):
            self.hub.ended.wait()
        for pattern, status in self.hub.status.items():
            if re.fullmatch(pattern, f"{method} {url.path}"):
                return self._answer({"error": f"you get {status}"}, status)
        if url.path.startswith("/cas/"):
            return self._cas(method, url.path, body)
        if url.path.startswith("/lfs/"):
            return self._finish_upload(url.path, json.loads(body))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer({"error": "Invalid credentials"}, 401)
        for pattern, answer in _ROUTES.items():
            match = re.fullmatch(pattern, f"{method} {url.path}")
            if match:
                if "/api/models/" in pattern and match[1] not in self.hub.repos:
                    return self._answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
                try:
                    return answer(self, body, *map(unquote, match.groups()))
                except _NoRevisionError:
                    return self._answer({"error": "Revision not found"}, 404, {"X-Error-Code": "RevisionNotFound"})
        return self._answer({"error": f"no such place: {method} {self.path}"}, 404)

    def _answer(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        repo_id = f"{asked['organization']}/{asked['name']}"
        exists = repo_id in self.hub.repos
        if not exists:
            self.hub.repos[repo_id] = Repo(asked.get("visibility") == "private" or bool(asked.get("private")))
        self._answer({"url": f"{self.hub.endpoint}/{repo_id}", "name": repo_id}, 409 if exists else 200)

    def _branch(self, body: bytes, repo_id: str, branch: str) -> None:
        branches = self.hub.repos[repo_id].branches
        exists = branch in branches
        branches.setdefault(branch, dict(branches["main"]))
        self._answer({}, 409 if exists else 200)

    def _validate(self, body: bytes) -> None:
        good = json.loads(body)["content"].startswith("---\n")
        self._answer({"errors": [] if good else [{"message": "no metadata"}], "warnings": []}, 200 if good else 400)

    def _modes(self, body: bytes, repo_id: str, revision: str) -> None:
        there = self.hub.repos[repo_id].branches.get(revision)
        if there is None:
            return self._answer({"error": "Revision not found"}, 404, {"X-Error-Code": "RevisionNotFound"})
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["size"] >= LARGE else "regular",
                "shouldIgnore": file["path"] == self.hub.ignored,
                "oid": there[file["path"]].oid if file["path"] in there else None,
            }
            for file in json.loads(body)["files"]
        ]
        return self._answer({"files": files})

    def _batch(self, body: bytes, repo_id: str) -> None:
        objects = []
        for asked in json.loads(body)["objects"]:
            oid, size = asked["oid"], asked["size"]
            one = {"oid": oid, "size": size}
            if oid not in self.hub.blobs:
                url = f"{self.hub.endpoint}/lfs/{oid}"
                header = {}
                if size > PART:
                    header = {str(n + 1): f"{url}?part={n + 1}" for n in range(-(-size // PART))}
                    header["chunk_size"] = str(PART)
                one["actions"] = {"upload": {"href": url, "header": header}, "verify": {"href": f"{url}/verify"}}
            objects.append(one)
        self._answer({"transfer": "basic", "objects": objects})

    def _received(self, name: str, *, may_be_first: bool = True) -> bytes | None:
        """Return the body of an upload, or None if a fault struck and no further answer is due."""
        hub, length = self.hub, int(self.headers["Content-Length"])
        with hub.lock:
            number = hub.uploads.total()
            hub.uploads[name] += 1
            dropped = hub.drop > 0
            hub.drop -= dropped
        if dropped:
            self.rfile.read(length // 2)
            self.connection.close()
            self.close_connection = True
            return None
        body = self.rfile.read(length)
        if len(body) < length:  # the sender is gone
            self.close_connection = True
            return None
        if hub.hold is not None and not (number == 0 and may_be_first):
            hub.hold.wait()
        if hub.refuse is not None and number >= hub.refuse:
            self._answer({"error": "over the quota"}, 413)
            return None
        return body

    def _upload(self) -> None:
        url = urlsplit(self.path)
        oid, query = url.path.removeprefix("/lfs/"), parse_qs(url.query)
        body = self._received(oid)
        if body is None:
            return
        if "part" in query:
            self.hub.parts[oid, int(query["part"][0])] = body
        else:
            self.hub.blobs[oid] = body
        self._answer({}, headers={"ETag": f'"{len(body)}"'})

    def _upload_xorb(self, xorb: str) -> None:
        body = self._received(xorb, may_be_first=False)
        if body is not None:
            self.hub.xorbs[xorb] = xet.chunks(body)
            self._answer({"was_inserted": True})

    def _cas(self, method: str, path: str, body: bytes) -> None:
        """Serve Xet's store with the `v1` API, the client's fallback."""
        if self.headers.get("Authorization") != f"Bearer {XET_TOKEN}":
            return self._answer({"error": "Invalid credentials"}, 401)
        if (method, path) != ("POST", "/cas/v1/shards"):
            return self._answer({"error": "Not found"}, 404)  # among others: is this chunk known?
        for content in xet.files(body, self.hub.xorbs):
            self.hub.blobs[hashlib.sha256(content).hexdigest()] = content
        return self._answer({"result": 1})

    def _xet_token(self, body: bytes, repo_id: str, revision: str) -> None:
        self._answer({"accessToken": XET_TOKEN, "exp": int(time.time()) + 3600, "casUrl": f"{self.hub.endpoint}/cas"})

    def _open_pull_request(self, body: bytes, repo_id: str) -> None:
        repo = self.hub.repos[repo_id]
        repo.pull_requests.append(json.loads(body)["title"])
        number = len(repo.pull_requests)
        repo.branches[f"refs/pr/{number}"] = dict(repo.branches["main"])
        self._answer({"num": number})

    def _pull_request(self, body: bytes, repo_id: str, number: str) -> None:
        details = {
            "title": self.hub.repos[repo_id].pull_requests[int(number) - 1],
            "num": int(number),
            "author": {"name": "me"},
            "createdAt": "2026-01-01T00:00:00.000Z",
            "status": "draft",
            "repo": {"name": repo_id, "type": "model"},
            "isPullRequest": True,
            "events": [],
            "filesWithConflicts": [],
            "changes": {"base": "refs/heads/main"},
        }
        self._answer(details)

    def _finish_upload(self, path: str, asked: dict[str, Any]) -> None:
        oid = path.removeprefix("/lfs/").removesuffix("/verify")
        if not path.endswith("/verify"):
            self.hub.blobs[oid] = b"".join(self.hub.parts[oid, part["partNumber"]] for part in asked["parts"])
        good = hashlib.sha256(self.hub.blobs[oid]).hexdigest() == oid == asked["oid"]
        self._answer({}, 200 if good else 400)

    def _commit(self, body: bytes, repo_id: str, revision: str) -> None:
        repo = self.hub.repos[repo_id]
        lines = [json.loads(line) for line in body.splitlines()]
        tree = repo.branches[revision]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                repo.messages.append(value["summary"])
            elif line["key"] == "file":
                tree[value["path"]] = File(base64.b64decode(value["content"]), False)
            elif line["key"] == "lfsFile":
                tree[value["path"]] = File(self.hub.blobs[value["oid"]], True)
            if line["key"] != "header" and value["path"] == self.hub.corrupt:
                file = tree[value["path"]]
                tree[value["path"]] = File(bytes([file.content[0] ^ 1]) + file.content[1:], file.is_large)
        oid = hashlib.sha1(body).hexdigest()
        url = f"{self.hub.endpoint}/{repo_id}"
        self._answer({"success": True, "commitUrl": f"{url}/commit/{oid}", "commitOid": oid})

    def _tree(self, body: bytes, repo_id: str, revision: str) -> None:
        entries = []
        for path, file in self._tree_of(repo_id, revision).items():
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(file.content), "oid": file.oid}
            if file.is_large:
                entry["oid"] = hashlib.sha1(file.oid.encode()).hexdigest()  # the pointer's
                entry["lfs"] = {"oid": file.oid, "size": len(file.content), "pointerSize": 130}
            entries.append(entry)
        start = int(self.query.get("cursor", ["0"])[0])
        headers = {}
        if len(entries) > start + 3:  # in pages
            headers["Link"] = f'<{self.hub.endpoint}{urlsplit(self.path).path}?cursor={start + 3}>; rel="next"'
        self._answer(entries[start : start + 3], headers=headers)

    def _resolve(self, body: bytes, repo_id: str, revision: str, path: str) -> None:
        """Answer a download, whole or in a range, or a HEAD request."""
        file = self._tree_of(repo_id, revision)[path]
        content, status, headers = file.content, 200, {}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
            first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        self.hub.sent[path] += len(content)
        self.send_response(status)
        for name, value in {
            "ETag": f'"{file.oid}"',
            "X-Repo-Commit": self.hub.repos[repo_id].commit,
            "Content-Length": len(content),
            **headers,
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _tree_of(self, repo_id: str, revision: str) -> dict[str, File]:
        """Return the tree for a branch or for the first branch's newest commit. Older commits are not kept."""
        repo = self.hub.repos[repo_id]
        branch = "main" if revision == repo.commit else revision
        if branch not in repo.branches:
            raise _NoRevisionError
        return repo.branches[branch]

    def _info(self, body: bytes, repo_id: str) -> None:
        self._answer(
            {
                "id": repo_id,
                "sha": self.hub.repos[repo_id].commit,
                "private": self.hub.repos[repo_id].private,
                "tags": [],
            }
        )


_REPO = r"([^/]+/[^/]+)"
_ROUTES = {
    r"POST /api/repos/create": _Handler._create,
    r"POST /api/validate-yaml": _Handler._validate,
    rf"POST /api/models/{_REPO}/branch/([^/]+)": _Handler._branch,
    rf"POST /api/models/{_REPO}/preupload/([^/]+)": _Handler._modes,
    rf"POST /api/models/{_REPO}/commit/([^/]+)": _Handler._commit,
    rf"GET /api/models/{_REPO}/tree/([^/]+)": _Handler._tree,
    rf"(?:GET|HEAD) /{_REPO}/resolve/([^/]+)/(.+)": _Handler._resolve,
    rf"GET /api/models/{_REPO}(?:/revision/[^/]+)?": _Handler._info,
    rf"GET /api/models/{_REPO}/xet-write-token/([^/]+)": _Handler._xet_token,
    rf"POST /api/models/{_REPO}/discussions": _Handler._open_pull_request,
    rf"GET /api/models/{_REPO}/discussions/(\d+)": _Handler._pull_request,
    rf"POST /{_REPO}\.git/info/lfs/objects/batch": _Handler._batch,
}
