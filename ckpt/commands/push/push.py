"""Upload of a folder to the Hugging Face Hub, with a check of the uploaded files.

huggingface_hub skips files that the Hub already has, so an interrupted push can be repeated. After the upload, the
Hub's checksums are compared with the local files: sha256 for large files, git's blob sha1 for others.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.adapters.names import ADAPTER_CONFIG
from ckpt.base.errors import CkptError, CorruptError, NotFoundError, StorageError, UsageError, printable
from ckpt.base.results import Returned
from ckpt.base.text import HUB_ID, pluralize
from ckpt.base.words import Message
from ckpt.commands.push.card import CARD, is_ours
from ckpt.compare import manifest
from ckpt.compare.manifest import MANIFEST
from ckpt.move.files import OpenFiles, confined, is_broken_link, translate_os_errors
from ckpt.move.source import is_standin, open_stream, read_into
from ckpt.move.threads import in_threads
from ckpt.plan.checkpoint import SourceFile

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_SETS = {
    "model.safetensors": r"model\.safetensors",
    "safetensors shards": r"model-\d+-of-\d+\.safetensors|model\.safetensors\.index\.json",
    "pytorch_model.bin": r"pytorch_model\.bin",
    "bin shards": r"pytorch_model-\d+-of-\d+\.bin|pytorch_model\.bin\.index\.json",
    "adapter_model.safetensors": r"adapter_model\.safetensors",
    "adapter_model.bin": r"adapter_model\.bin",
}
#: Preferred ones first.
_ORDERS = {
    # modeling_utils.py, `_get_resolved_checkpoint_files`
    "transformers": ("model.safetensors", "safetensors shards", "pytorch_model.bin", "bin shards"),
    # utils/save_and_load.py, `load_peft_weights`
    "PEFT": ("adapter_model.safetensors", "adapter_model.bin"),
    # utils/modeling.py, `load_checkpoint_in_model`
    "accelerate": ("pytorch_model.bin", "model.safetensors"),
    # model_loader/weight_utils.py, `filter_duplicate_safetensors_files`: files in an index, or all
    "vLLM": ("safetensors shards", "model.safetensors", "bin shards", "pytorch_model.bin"),
}

#: Others may hold secrets.
_HIDDEN = {".metadata", ".gitattributes"}

_MAIN = "main"
_CHUNK = 1 << 20
_SILENCE = 600.0  # seconds
_MAX_NAMES = 5  # per message
_MAX_TITLE = 200  # characters in a pull request's title


@dataclass(frozen=True, slots=True)
class Push:
    """Target of a push. `revision` is a branch, created if missing. `private` applies to a new repository.

    `own_names` allows names that do not match the config's architecture, in repeated pushes too.
    """

    repo_id: str
    private: bool = False
    revision: str | None = None
    create_pr: bool = False
    message: str | None = None
    own_names: bool = False
    whole_run: bool = False

    def __post_init__(self) -> None:
        if not HUB_ID.fullmatch(self.repo_id):
            raise UsageError("invalid Hub repository", expected="ORG/NAME", found=self.repo_id)
        if self.create_pr and self.revision is not None:
            raise UsageError(
                "a pull request is made against the main branch",
                found=Message("{revision}", revision=self.revision),
                hint=Message("leave out {revision} or {create_pr=True}"),
            )

    def again(self, folder: Path) -> str:
        options = {"--repo-id": self.repo_id, "--revision": self.revision, "--commit-message": self.message}
        words = ["ckpt", "push", str(folder)]
        words += [word for name, value in options.items() if value is not None for word in (name, value)]
        words += ["--private"] * self.private + ["--create-pr"] * self.create_pr
        words += ["--names", "own"] * self.own_names
        words += ["--whole-run"] * self.whole_run
        return f"the local folder is unchanged; `{shlex.join(words)}` continues"


@dataclass(frozen=True, slots=True, repr=False)
class Pushed(Returned):
    """Verified result. `url` points to the commit or pull request."""

    repo_id: str
    url: str
    num_files: int
    num_bytes: int

    def __repr__(self) -> str:
        return f"<{self.repo_id}: {pluralize(self.num_files, 'file')}, verified, {self.url}>"

    def lines(self) -> list[str]:
        return [printable(self.url)]

    def to_json(self) -> dict[str, Any]:
        return {"repo_id": self.repo_id, "url": self.url, "files": self.num_files, "bytes": self.num_bytes}


def push(
    folder: Path,
    to: Push,
    *,
    card: Callable[[], str] | None = None,
    say: Callable[[str], None] = lambda _: None,
    progress: bool = False,
) -> Pushed:
    """Upload the files in `folder`, and verify them on the Hub bit for bit.

    `card` becomes README.md if neither side has one. The repository's model card stays if ckpt did not write it.

    Raise StorageError if the Hub can't be reached or refuses, UsageError if a loader would prefer other weights in the
    repository, or if it mixes a model and an adapter, UnsafeError if a symlink leads out, CorruptError if the folder
    differs from its manifest, or the Hub from the folder.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    if not progress:
        disable_progress_bars()
    files = _local_files(folder, say)
    found = {*files}
    sources = [SourceFile.stat(str(path)) for path in files.values()]
    if MANIFEST in files:
        _check_manifest(folder, say)
    api = HfApi()
    message = to.message or f"Upload {folder.resolve().name} with ckpt"
    with _translated(to.again(folder), to):
        api.create_repo(to.repo_id, private=to.private or None, exist_ok=True)
        if to.revision not in (None, _MAIN) and not str(to.revision).startswith("refs/"):
            api.create_branch(to.repo_id, branch=to.revision, exist_ok=True)
        remote = _remote_files(api, to.repo_id, to.revision or _MAIN)
        for line in _check_remote_weights(files.keys(), remote.keys(), to):
            say(f"note: {line}")
        kept = _is_others_card(api, files, remote, to)
        pull_request = None
        if to.create_pr:  # an interrupted push continues in the same one
            pull_request = api.create_pull_request(to.repo_id, title=message[:_MAX_TITLE])
            to = replace(to, create_pr=False, revision=pull_request.git_reference)
    with _translated(to.again(folder), to):
        if kept:
            files.pop(CARD)
            say(f"note: kept the {CARD} in {to.repo_id}, written by somebody else: {folder}/{CARD} is not pushed")
        extra: dict[str, bytes] = {}
        if card is not None and CARD not in files and CARD not in remote:
            extra[CARD] = card().encode()
        seen_by = "private" if api.repo_info(to.repo_id).private else "public"
        say(f"pushing {pluralize(len(files), 'file')} to {api.endpoint}/{to.repo_id} ({seen_by})")
        commit = _upload(api, folder, files, message, to)
        remote = _remote_files(api, to.repo_id, to.revision or _MAIN)
        for name, content in extra.items():
            api.upload_file(
                path_or_fileobj=content,
                path_in_repo=name,
                repo_id=to.repo_id,
                revision=to.revision,
                commit_message=f"{message}: model card",
            )
            remote = _remote_files(api, to.repo_id, to.revision or _MAIN)
        say("verifying checksums on the Hub")
        _verify(files, extra, remote, to)
        for source in sources:
            source.check_unchanged()
        if new := sorted(_local_files(folder, lambda _: None).keys() - found):
            say(f"note: not pushed, new since the push began: {', '.join(new[:_MAX_NAMES])}")
    num_bytes = sum(path.stat().st_size for path in files.values()) + sum(map(len, extra.values()))
    url = pull_request.url if pull_request else commit.commit_url
    return Pushed(to.repo_id, str(url), len(files) + len(extra), num_bytes)


def _upload(api: HfApi, folder: Path, files: Mapping[str, Path], message: str, to: Push) -> Any:
    """Upload only `files`: a trainer may still write into the folder. Stream files in a store, without local copies."""
    where: dict[str, Any] = {"repo_id": to.repo_id, "commit_message": message, "revision": to.revision}
    if not is_standin(str(folder)):
        return api.upload_folder(folder_path=folder, allow_patterns=[*map(glob.escape, files)], **where)
    from huggingface_hub import CommitOperationAdd

    with ExitStack() as opened:
        streams = {name: opened.enter_context(open_stream(path)) for name, path in files.items()}
        return api.create_commit(operations=[CommitOperationAdd(*named) for named in streams.items()], **where)


def check_room(files: Set[str], to: Push) -> None:
    """Raise UsageError early if the repository has no room for these files.

    A missing repository or branch is fine. Raise StorageError if the Hub can't be reached or refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    with _translated("nothing was pushed yet; without --push the result stays here", to):
        try:
            remote = _remote_files(HfApi(), to.repo_id, to.revision or _MAIN)
        except RevisionNotFoundError:
            remote = _remote_files(HfApi(), to.repo_id, _MAIN)  # the branch will start from main
        except RepositoryNotFoundError:
            return
        _check_remote_weights(files, remote.keys(), to)


def _check_remote_weights(files: Set[str], remote: Set[str], to: Push) -> list[str]:
    """Raise UsageError if a loader would prefer weights on the Hub to the new `files`.

    Return notes on remaining weights that no loader uses, and on a manifest of other files.
    """
    _check_kind(files, remote, to)
    ours, notes = _sets(files), []
    for (folder, is_adapter, name), stay in _sets(remote - files).items():
        beside = [one for *of, one in ours if of == [folder, is_adapter]]
        delete = _delete_command(stay, to)
        if loader := _preferring_loader(name, stay, beside):
            raise UsageError(
                f"{loader} would load other weights in the repository, not the pushed ones",
                path=to.repo_id,
                found=", ".join(stay[:_MAX_NAMES]),
                hint=f"`{delete}` first, or push to another repository",
            )
        if beside:
            notes.append(f"unused weights stay in {to.repo_id}: `{delete}`")
    if ours and MANIFEST in remote - files:
        notes.append(f"a manifest of other files stays in {to.repo_id}: `{_delete_command([MANIFEST], to)}`")
    return notes


def _sets(files: Set[str]) -> dict[tuple[str, bool, str], list[str]]:
    """Group weight files by folder, adapter or model, and set."""
    found: dict[tuple[str, bool, str], list[str]] = {}
    for file in sorted(files):
        folder, _, base = file.rpartition("/")
        for name, pattern in _SETS.items():
            if re.fullmatch(pattern, base):
                found.setdefault((folder, name.startswith("adapter"), name), []).append(file)
    return found


def _preferring_loader(name: str, stay: list[str], ours: list[str]) -> str | None:
    """Return the loader that prefers the set `name` to the sets `ours`."""
    if not ours or (name in ours and not any(file.endswith(".json") for file in stay)):
        return None  # the index selects the shards
    for loader, order in _ORDERS.items():
        if next((one for one in order if one == name or one in ours), None) == name:
            return loader
    return None


def _delete_command(files: Iterable[str], to: Push) -> str:
    patterns = dict.fromkeys(re.sub(r"-\d+-of-", "-*-of-", file) for file in files)
    revision = [] if to.revision is None else ["--revision", to.revision]
    return shlex.join(["hf", "repos", "delete-files", to.repo_id, *patterns, *revision])


def _check_kind(files: Set[str], remote: Set[str], to: Push) -> None:
    """Raise UsageError for a model next to an adapter.

    With PEFT installed, transformers loads the adapter on its base (transformers/integrations/peft.py,
    `maybe_load_adapters`).
    """
    with_model, with_adapter = bool(_models(files)), ADAPTER_CONFIG in files
    if with_model and not with_adapter and ADAPTER_CONFIG in remote:
        found, what = ADAPTER_CONFIG, "an adapter, and you push a model"
    elif with_adapter and not with_model and (weights := _models(remote)):
        found, what = weights[0], "a model, and you push an adapter"
    else:
        return
    raise UsageError(
        f"the repository holds {what}: loaders would use only the adapter",
        path=to.repo_id,
        found=found,
        hint=Message("give another repository with {repo_id}, or another branch with {revision}"),
    )


def _models(files: Set[str]) -> list[str]:
    return [
        file for (folder, is_adapter, _), of in _sets(files).items() if not folder and not is_adapter for file in of
    ]


def _is_others_card(api: HfApi, files: Mapping[str, Path], remote: Mapping[str, _HubFile], to: Push) -> bool:
    """Return True if both sides have different model cards, and ckpt did not write the Hub's."""
    there = remote.get(CARD)
    if CARD not in files or there is None:
        return False
    with OpenFiles() as opened:
        if _checksum(opened, files[CARD], there.kind) == there.checksum:
            return False
    return not is_ours(Path(api.hf_hub_download(to.repo_id, CARD, revision=to.revision)).read_bytes())


def files_to_push(folder: Path) -> list[str]:
    return list(_local_files(folder, lambda _: None))


def _local_files(folder: Path, say: Callable[[str], None]) -> dict[str, Path]:
    """Return files to push by name. Raise UnsafeError if a symlink leads out."""
    if not folder.is_dir():
        raise NotFoundError("folder not found", path=folder, hint="give the folder written by convert")
    files: dict[str, Path] = {}
    hidden: list[str] = []
    others: list[str] = []
    for name in _names_in(folder):
        path = folder / name
        if path.name.startswith(".") and (path.name not in _HIDDEN or path.is_dir()):
            hidden.append(name)
        elif not is_broken_link(path) and confined(folder, name).is_file():
            files[name] = path
        elif path.is_symlink() or not path.is_dir():
            others.append(name)
    if not files:
        raise NotFoundError("the folder is empty", path=folder)
    if hidden:
        say(f"note: hidden files are not pushed: {', '.join(hidden)}; `hf upload` takes one by its name")
    if others:
        say(f"note: not pushed, not regular files: {', '.join(others)}")
    return files


def _names_in(folder: Path) -> list[str]:
    """Skip the insides of hidden folders. Raise StorageError for an unreadable folder."""

    def fail(error: OSError) -> None:
        raise error

    found = []
    with translate_os_errors(folder):
        for parent, folders, names in os.walk(folder, onerror=fail):
            found += [(Path(parent) / name).relative_to(folder).as_posix() for name in (*folders, *names)]
            folders[:] = [name for name in folders if not name.startswith(".")]
    return sorted(found)


def _check_manifest(folder: Path, say: Callable[[str], None]) -> None:
    """Raise CorruptError if files differ from the folder's own manifest. The model card may differ."""
    say(f"comparing the files with {MANIFEST}")
    checked = manifest.check(folder)
    if problems := [one for one in checked.problems if not one.startswith(f"{CARD}: ")]:
        raise CorruptError(
            "the folder does not match its own manifest",
            path=folder,
            found="; ".join(problems[:_MAX_NAMES]),
            hint=f"`ckpt verify {shlex.quote(str(folder))}` lists all; if the changes are intended, remove {MANIFEST}",
        )


@dataclass(frozen=True, slots=True)
class _HubFile:
    size: int
    kind: str
    checksum: str


def _remote_files(api: HfApi, repo_id: str, revision: str) -> dict[str, _HubFile]:
    found = {}
    for entry in api.list_repo_tree(repo_id, recursive=True, revision=revision):
        if hasattr(entry, "blob_id"):
            lfs = entry.lfs
            found[entry.path] = _HubFile(entry.size, "sha256" if lfs else "git", lfs.sha256 if lfs else entry.blob_id)
    return found


def _verify(files: Mapping[str, Path], extra: Mapping[str, bytes], remote: Mapping[str, _HubFile], to: Push) -> None:
    found: dict[str, str] = {}

    def checksum(names: Iterator[str]) -> None:
        with OpenFiles() as opened:
            for name in names:
                if name in remote:
                    found[name] = _checksum(opened, files[name], remote[name].kind)

    in_threads(checksum, files)
    for name, content in extra.items():
        if name in remote:
            hasher = _hasher(remote[name].kind, len(content))
            hasher.update(content)
            found[name] = hasher.hexdigest()
    for name in sorted({*files, *extra}):
        there = remote.get(name)
        if there is None:
            raise CorruptError(
                "a file did not arrive on the Hub",
                path=files.get(name, name),
                hint=f"push again; if it happens again, a .gitignore in {to.repo_id} may leave it out",
            )
        if found[name] != there.checksum:
            raise CorruptError(
                "a file on the Hub differs from the pushed file",
                path=files.get(name, name),
                expected=f"{there.kind} {found[name]}",
                found=f"{there.kind} {there.checksum}",
                hint=f"push again; if it happens again, remove the file from {to.repo_id} first",
            )


def _hasher(kind: str, size: int) -> Any:
    if kind == "sha256":
        return hashlib.sha256()
    hasher = hashlib.sha1(usedforsecurity=False)
    hasher.update(f"blob {size}\0".encode())  # git's blob header, gitformat-loose(5)
    return hasher


def _checksum(opened: OpenFiles, path: Path, kind: str) -> str:
    descriptor, done = opened.descriptor(str(path)), 0
    with translate_os_errors(path):
        hasher = _hasher(kind, os.fstat(descriptor).st_size)
        buffer = memoryview(bytearray(_CHUNK))
        while count := read_into(descriptor, done, buffer):
            hasher.update(buffer[:count])
            done += count
    return str(hasher.hexdigest())


@contextmanager
def _translated(again: str, to: Push) -> Iterator[None]:
    """Turn errors into our own, with a hint to continue. Ctrl-C gets the hint too."""
    try:
        with _request_timeouts():
            yield
    except CkptError:
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {again}") from None
    except (ValueError, TypeError) as error:
        raise UsageError("the Hub's library refused this", path=to.repo_id, found=_text(error), hint=again) from error
    except Exception as error:  # from the library, its HTTP client or the system
        causes = [error, *([error.__cause__] if isinstance(error.__cause__, Exception) else [])]
        statuses = [getattr(getattr(one, "response", None), "status_code", None) for one in causes]
        status = next(filter(None, statuses), None)
        what, hint = _REFUSALS.get(status, ("the push did not come to its end", ""))
        raise StorageError(
            what,
            path=to.repo_id,
            found=" ".join(dict.fromkeys(map(_text, causes))),
            hint="; ".join(filter(None, (hint, again))),
        ) from error


@contextmanager
def _request_timeouts() -> Iterator[None]:
    """Limit requests: huggingface_hub's client would wait forever."""
    from huggingface_hub.utils import get_session

    def limit(request: Any) -> None:
        waits = request.extensions["timeout"]
        request.extensions["timeout"] = {what: _SILENCE if end is None else end for what, end in waits.items()}

    hooks = getattr(get_session(), "event_hooks", {"request": []})["request"]  # absent before version 1
    hooks.append(limit)
    try:
        yield
    finally:
        hooks.remove(limit)


_TOKEN_HINT = "set HF_TOKEN to a token with write access, or `hf auth login`"
_REFUSALS: Mapping[Any, tuple[str, str]] = {
    401: ("the Hub needs a token for pushing", _TOKEN_HINT),
    403: ("the Hub does not let this token push here", _TOKEN_HINT),
    404: ("repository or branch not found on the Hub, or hidden from this token", _TOKEN_HINT),
    409: ("somebody else is changing the repository", ""),
    412: ("somebody else is changing the repository", ""),
}


def _text(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
