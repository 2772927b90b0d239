"""Store interface and its libraries: obstore for S3, Google and Azure, fsspec for all others.

Other packages add stores through the entry-point group `ckpt.stores`. An entry's name is a URL scheme, and its function
makes a `Store` from the text between `scheme://` and the next `/`. `ckpt.testing.stores` is their test suite.

Credentials come from each store's own tools: for S3 from boto3 (environment, profiles, SSO, instance), for Google and
Azure from the environment and their tools' default places, for the Hub from `HF_TOKEN` or `hf auth login`.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable
from urllib.parse import unquote
from uuid import uuid4

from ckpt.base.entries import entries, load
from ckpt.base.errors import CkptError, CorruptError, NotFoundError, SourceGoneError, StorageError, UsageError
from ckpt.base.text import pluralize

T = TypeVar("T")

_OBSTORE = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
_HUB = "hf"
_UPLOADING = 32 << 20  # bytes in flight per object
_TRIES = 5  # tries for a truncated answer
FIRST_WAIT, _LONGEST_WAIT = 0.2, 10.0  # seconds between tries
#: Failures before an answer arrives.
RETRIES = {
    "max_retries": 8,
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=10), "base": 2},
    "retry_timeout": timedelta(seconds=120),
}
_TIMEOUT = {"connect_timeout": timedelta(seconds=15), "read_timeout": timedelta(seconds=60), "timeout": "600s"}
LISTING = 300.0  # seconds to wait for the next objects
_AT_A_TIME = 100  # objects per listing page
_MOST_PAGES = 10_000  # pages per Hub listing
_SILENCE = 60.0  # seconds; the Hub's library would wait forever
#: botocore returns no credentials that expire within ten minutes, and notices newer ones.
_CREDENTIALS_KEPT = timedelta(minutes=10)


class Entry(NamedTuple):
    """An object: its size in bytes, modification time, and a version id."""

    key: str
    size: int
    modified_ns: int
    identity: str | None


class Store(Protocol):
    """A store of objects. `/` separates the parts of a key. The key "" is the top folder."""

    def below(self, key: str) -> Iterator[Entry]:
        """Yield all objects below the folder."""

    def directly_in(self, key: str) -> Iterator[Entry]:
        """Yield the objects directly in the folder."""

    def read(self, entry: Entry, start: int, stop: int) -> memoryview:
        """Raise CorruptError if the object was replaced since the listing."""


@runtime_checkable
class WritableStore(Store, Protocol):
    """A store with atomic writes."""

    def put(self, key: str, chunks: Iterator[memoryview], size: int, part: int) -> None:
        """Send an object in parts of `part` bytes. Raise the error of `chunks` if it fails."""

    def claim(self, key: str) -> bool:
        """Create an object that only one process can create. Return False if another process has it."""

    def remove(self, key: str) -> None:
        """Remove an object if it exists."""


@lru_cache
def store(scheme: str, root: str) -> Store:
    """Raise UsageError, or NotFoundError for a missing package."""
    if scheme in _OBSTORE:
        return _Obstore(scheme, root)
    if scheme == _HUB:
        return _Hub(root)
    registered = entries("ckpt.stores")
    return cast(Store, load(registered[scheme])(root)) if scheme in registered else _Fsspec(scheme, root)


def split(url: str) -> tuple[str, str, str]:
    """Split a URL into its scheme, its store (a bucket, host or repository), and the key. Raise UsageError."""
    scheme, _, rest = url.partition("://")
    parts = rest.split("/")
    count = 2 if scheme == _HUB else 1
    if scheme == _HUB and parts[0] == "buckets":
        bucket = "/".join(["buckets", *parts[1:3]])
        hint = f"download it first: `hf sync {scheme}://{bucket} FOLDER`"
        raise UsageError("ckpt can't read Hub buckets", path=url, hint=hint)
    if len(parts) < count or (scheme == _HUB and parts[0] in ("datasets", "spaces")):
        raise UsageError(
            "the URL is not a model repository", found=url, expected="hf://org/name or hf://org/name/folder"
        )
    return scheme, "/".join(parts[:count]), "/".join(parts[count:])


def _changed(url: str, expected: object, found: object) -> CorruptError:
    return CorruptError(
        "the object was replaced while it was being read",
        path=url,
        expected=expected,
        found=found,
        hint="is a run still writing there? wait for it, then start again",
    )


# -- S3, Google, Azure ------------------------------------------------------------------------------------------------


class _Obstore:
    def __init__(self, scheme: str, bucket: str) -> None:
        self._url = f"{scheme}://{bucket}"
        try:
            import obstore
            import obstore.auth.boto3
        except ImportError:
            raise NotFoundError(
                f"{scheme}:// needs the packages obstore and boto3", hint="pip install 'ckpt-toolkit[remote]'"
            ) from None
        self.lib = obstore
        with self.errors(""):
            self.client = _client(_OBSTORE[scheme], bucket)

    def below(self, key: str) -> Iterator[Entry]:
        with self.errors(key, is_listing=True):
            pages = iter(self.lib.list(self.client, key or None, chunk_size=_AT_A_TIME))
            while (page := _interruptible(lambda: next(pages, None), LISTING)) is not None:
                yield from map(_entry, page)

    def directly_in(self, key: str) -> Iterator[Entry]:
        with self.errors(key, is_listing=True):
            found = _interruptible(lambda: self.lib.list_with_delimiter(self.client, key or None), LISTING)
            yield from map(_entry, found["objects"])

    def read(self, entry: Entry, start: int, stop: int) -> memoryview:
        options: Any = {"range": (start, stop)}
        if entry.identity is not None:
            options["if_match"] = entry.identity

        def get() -> memoryview:
            answer = self.lib.get(self.client, entry.key, options=options)
            expected, found = _object_version(entry, entry), _object_version(_entry(answer.meta), entry)
            if found != expected:  # the server ignored the condition
                raise _changed(f"{self._url}/{entry.key}", expected, found)
            try:
                return memoryview(answer.bytes())
            except self.lib.exceptions.GenericError as error:
                raise _BrokenOffError(str(error)) from error

        with self.errors(entry.key):
            return _interruptible(lambda: _insist(get, stop - start, _BrokenOffError))

    def put(self, key: str, chunks: Iterator[memoryview], size: int, part: int) -> None:
        failure: list[BaseException] = []

        def written_chunks() -> Iterator[memoryview]:
            try:
                yield from chunks
            except Exception as error:  # the library would wrap it in its own error
                failure.append(error)
                raise

        at_a_time = max(1, _UPLOADING // part)
        try:
            with self.errors(key):
                if size <= part:
                    self.lib.put(self.client, key, b"".join(written_chunks()), use_multipart=False)
                else:
                    self.lib.put(self.client, key, written_chunks(), chunk_size=part, max_concurrency=at_a_time)
        except CkptError:
            if failure:
                raise failure[0] from None
            raise

    def claim(self, key: str) -> bool:
        mine = uuid4().bytes
        with self.errors(key):
            try:
                self.lib.put(self.client, key, mine, mode="create")
            except self.lib.exceptions.AlreadyExistsError:  # from a try whose answer was lost, or from another process
                return self._holds(key, mine)
        return True

    def _holds(self, key: str, content: bytes) -> bool:
        try:
            there = self.lib.get(self.client, key)
        except (self.lib.exceptions.NotFoundError, FileNotFoundError):
            raise StorageError(
                "the store refuses to make an object because it exists, but does not list it",
                path=f"{self._url}/{key}",
                hint="another process may have ended just now: start again; or the store knows no conditional writes",
            ) from None
        return there.meta["size"] == len(content) and bytes(there.bytes()) == content

    def remove(self, key: str) -> None:
        with self.errors(key), contextlib.suppress(self.lib.exceptions.NotFoundError, FileNotFoundError):
            _interruptible(lambda: self.lib.delete(self.client, key))

    @contextlib.contextmanager
    def errors(self, key: str, *, is_listing: bool = False) -> Iterator[None]:
        kinds, url = self.lib.exceptions, f"{self._url}/{key}".rstrip("/")
        try:
            yield
        except CkptError:
            raise
        except (kinds.NotFoundError, FileNotFoundError) as error:
            if is_listing:
                raise NotFoundError("no such store", path=self._url) from error
            raise SourceGoneError("the object was removed during the read", path=url) from error
        except kinds.PreconditionError as error:
            raise _changed(url, "the listed object", "another one") from error
        except (kinds.BaseError, OSError, ValueError) as error:
            if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                raise NotFoundError("no such store", path=self._url) from error
            raise _failed(error, url) from error


def unique_entries(entries: Iterable[Entry], url: str) -> Iterator[Entry]:
    """Raise StorageError for a duplicate: such a listing may be endless."""
    known: set[str] = set()
    for entry in entries:
        if entry.key in known:
            raise StorageError("the store lists an object twice", path=url, found=repr(entry.key))
        known.add(entry.key)
        yield entry


def _interruptible(action: Callable[[], T], limit: float = math.inf) -> T:
    """Return the result of `action`, run in another thread if called in the main thread: obstore ignores Ctrl-C.

    Raise StorageError if it takes more than `limit` seconds.
    """
    if limit == math.inf and threading.current_thread() is not threading.main_thread():
        return action()
    done: Future[T] = Future()

    def act() -> None:
        try:
            done.set_result(action())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=act, daemon=True).start()
    end = time.monotonic() + limit
    while not wait([done], 0.2).done:  # a signal that comes just before a wait doesn't end it
        if time.monotonic() > end:
            raise StorageError("the store's listing does not end", found=f"nothing new in {limit:.0f} s")
    return done.result()


class _BrokenOffError(OSError):
    pass


def _client(kind: str, bucket: str) -> Any:
    from obstore.store import from_url

    options: dict[str, Any] = {"client_options": {**_TIMEOUT, "allow_http": True}, "retry_config": RETRIES}
    if kind != "s3":
        return from_url(f"{kind}://{bucket}", **options)
    from botocore.exceptions import BotoCoreError

    try:
        options |= _s3_options(bucket)
    except (BotoCoreError, ValueError) as error:
        hint = "is AWS_PROFILE right? `aws sts get-caller-identity` looks at the same places"
        what = "the credentials for S3 could not be read"
        raise StorageError(what, path=f"s3://{bucket}", found=str(error), hint=hint) from error
    return from_url(f"s3://{bucket}", **options)


def _s3_options(bucket: str) -> dict[str, Any]:
    """Use the places of AWS's own tools."""
    from botocore.configprovider import ConfiguredEndpointProvider
    from botocore.session import Session
    from obstore.auth.boto3 import Boto3CredentialProvider

    session, options = Session(), dict[str, Any]()
    if os.environ.get("AWS_SKIP_SIGNATURE", "").lower() not in ("1", "true"):
        if session.get_credentials() is None:
            hint = "`aws configure`, AWS_PROFILE, or AWS_SKIP_SIGNATURE=true for public data"
            raise StorageError("no credentials for S3", path=f"s3://{bucket}", hint=hint)
        options["credential_provider"] = Boto3CredentialProvider(session, ttl=_CREDENTIALS_KEPT)
    options["region"] = os.environ.get("AWS_REGION") or session.get_config_variable("region") or "us-east-1"
    configured = ConfiguredEndpointProvider(session.full_config, session.get_scoped_config(), "s3")
    if (endpoint := configured.provide()) is not None:
        options["endpoint"] = endpoint
    return options


def _object_version(entry: Entry, listed: Entry) -> tuple[str | None, int, int]:
    """Return an object's ETag. Without one in the listing, return its size and time in seconds."""
    if listed.identity is not None:
        return entry.identity, 0, 0
    return None, entry.size, entry.modified_ns // 10**9


def _entry(found: Any) -> Entry:
    modified = found["last_modified"]
    return Entry(found["path"], found["size"], int(modified.timestamp() * 1e9), _quoted(found["e_tag"]))


def _quoted(tag: str | None) -> str | None:
    """Azure lists ETags without quotes."""
    return tag if tag is None or tag.endswith('"') else f'"{tag}"'


def _insist(get: Callable[[], memoryview], length: int, passing: type[Exception]) -> memoryview:
    """Return `length` bytes. Retry truncated answers and errors of the type `passing`."""
    for tried in range(1, _TRIES + 1):
        try:
            data = get()
            if len(data) == length:
                return data
            error: Exception = _BrokenOffError(f"{pluralize(len(data), 'byte')} came instead of {length}")
        except passing as raised:
            error = raised
        if tried < _TRIES:
            import random  # imported late: failures are rare

            time.sleep(min(_LONGEST_WAIT, FIRST_WAIT * 2**tried) * random.uniform(0.5, 1))
    raise error


def _failed(error: Exception, url: str) -> CkptError:
    text = " ".join(str(error).split("\n\nDebug source")[0].split())
    hint = None
    if any(word in text for word in ("ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "credential")):
        hint = "the store does not take these credentials; are they expired? renew them and start again"
    elif "RequestTimeTooSkewed" in text:
        hint = "this machine's clock differs too much from the store's clock; set it and start again"
    elif re.search(r"\b40[13]\b|AccessDenied|Forbidden|denied", text):
        hint = "may these credentials read, list or write this?"
    return StorageError("the store could not be used", path=url, found=text[:300], hint=hint)


# -- everything else --------------------------------------------------------------------------------------------------


def _filesystem(scheme: str, url: str) -> Any:
    import fsspec

    try:
        kind = fsspec.get_filesystem_class(scheme)
        return kind(**kind._get_kwargs_from_urls(url), use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        raise NotFoundError(f"{scheme}:// needs another package", found=str(error)) from None
    except Exception as error:
        failure = _failed(error, url)
        _forget_frames(error)
    raise failure


def _forget_frames(error: BaseException) -> None:
    """Release an error's frames silently: half-made objects may fail in their destructors."""
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        error.__traceback__ = None
    finally:
        sys.unraisablehook = before


class _Fsspec:
    """A store without conditional reads, so each read checks the object again."""

    def __init__(self, scheme: str, root: str) -> None:
        import fsspec

        self._url = f"{scheme}://{root}"
        if scheme not in fsspec.available_protocols() or scheme in ("file", "local"):
            hint = "give a local path without file://" if scheme in ("file", "local") else None
            raise UsageError("unknown store type", found=f"{scheme}://", hint=hint)
        self.fs = _filesystem(scheme, self._url)
        self._base = self.fs._strip_protocol(self._url).rstrip("/")

    def below(self, key: str) -> Iterator[Entry]:
        with self._errors(key):
            found = _interruptible(lambda: self.fs.find(self._path(key), detail=True), LISTING)
            yield from map(self._entry, found.values())

    def directly_in(self, key: str) -> Iterator[Entry]:
        with self._errors(key):
            yield from (
                self._entry(info) for info in self.fs.ls(self._path(key), detail=True) if info["type"] == "file"
            )

    def read(self, entry: Entry, start: int, stop: int) -> memoryview:
        path = self._path(entry.key)

        def get() -> memoryview:
            return memoryview(self.fs.cat_file(path, start, stop))

        with self._errors(entry.key):
            data = _insist(get, stop - start, Exception)
            now = self._entry(self.fs.info(path))
            if now[1:] != entry[1:]:
                raise _changed(f"{self._url}/{entry.key}", entry[1:], now[1:])
            return data

    def _path(self, key: str) -> str:
        return f"{self._base}/{key}"

    def _entry(self, info: Any) -> Entry:
        names = ("ETag", "etag", "md5", "checksum", "uid", "ino")
        identity = next((str(info[name]) for name in names if info.get(name)), None)
        modified = next(
            (info[name] for name in ("LastModified", "mtime", "last_modified", "created") if name in info), 0
        )
        modified = modified.timestamp() if hasattr(modified, "timestamp") else modified
        if info.get("size") is None:
            raise StorageError("the store does not say how long an object is", path=info["name"])
        key = str(info["name"]).removeprefix(self._base).strip("/")
        return Entry(key, info["size"], int(modified * 1e9) if isinstance(modified, (int, float)) else 0, identity)

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        url = f"{self._url}/{key}".rstrip("/")
        try:
            yield
        except CkptError:
            raise
        except FileNotFoundError as error:
            raise NotFoundError("no such object or folder", path=url) from error
        except Exception as error:  # each store type has its own errors
            raise _failed(error, url) from error


class _Hub:
    """A model repository on the Hugging Face Hub, read at one fixed commit."""

    def __init__(self, root: str) -> None:
        self._url = f"{_HUB}://{root}"
        self._repo, _, self._revision = root.partition("@")

    def below(self, key: str) -> Iterator[Entry]:
        from huggingface_hub import HfApi

        api, inside = HfApi(), f"{key}/" if key else ""
        with self._errors(key):
            revision = unquote(self._revision) or None
            commit = api.repo_info(self._repo, revision=revision, timeout=_SILENCE).sha
            page = f"{api.endpoint}/api/models/{self._repo}/tree/{commit}?recursive=true"
            for _ in range(_MOST_PAGES):
                answer = self._get(page)
                for one in answer.json():
                    if one["type"] == "file" and one["path"].startswith(inside):
                        yield Entry(one["path"], one["size"], 0, commit)
                page = answer.links.get("next", {}).get("url")
                if not page:
                    return
            raise StorageError("the repository's listing does not end", path=self._url)

    def directly_in(self, key: str) -> Iterator[Entry]:
        inside = f"{key}/" if key else ""
        return (one for one in self.below(key) if "/" not in one.key.removeprefix(inside))

    def read(self, entry: Entry, start: int, stop: int) -> memoryview:
        from huggingface_hub import hf_hub_url

        def get() -> memoryview:
            url = hf_hub_url(self._repo, entry.key, revision=entry.identity)
            return memoryview(self._get(url, range=f"bytes={start}-{stop - 1}").content)

        with self._errors(entry.key):
            return _insist(get, stop - start, _BrokenOffError)

    def _get(self, url: str, **headers: str) -> Any:
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        answer = http_backoff("GET", url, headers={**build_hf_headers(), **headers}, timeout=_SILENCE)
        hf_raise_for_status(answer)
        return answer

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        try:
            yield
        except CkptError:
            raise
        except RevisionNotFoundError as error:
            what = "unknown branch, tag or commit"
            raise NotFoundError(what, path=f"{self._url}/{key}".rstrip("/")) from error
        except RepositoryNotFoundError as error:
            hint = "for a private or gated repository, use a token: `hf auth login`, or HF_TOKEN"
            raise NotFoundError("no such repository", path=self._url, hint=hint) from error
        except Exception as error:
            raise _failed(error, f"{self._url}/{key}".rstrip("/")) from error
