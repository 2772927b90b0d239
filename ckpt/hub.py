"""Pushing a folder to the Hugging Face Hub, and checking what arrived.

The upload is huggingface_hub's own: files that the Hub has already are not sent again, so a push that was interrupted
goes on when it is run again.  Afterwards the Hub is asked for the checksum of every file (sha256 where it keeps a file
as a large one, git's blob sha1 otherwise), and these are compared with the local files'.

`HF_ENDPOINT` and `HF_TOKEN` mean what they do for that library.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt import torchfile
from ckpt.digest import ALGORITHM, in_threads
from ckpt.errors import CkptError, CorruptError, NotFoundError, StorageError, UsageError, printable
from ckpt.files import OpenFiles, translate_os_errors
from ckpt.pickles import Record
from ckpt.runs import enclosing_folders, trainer_steps

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CARD = "README.md"
TRAINING_ARGS = "training_args.bin"

_REPO_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_MAIN = "main"
_CHUNK = 1 << 20
#: What huggingface_hub itself never uploads from a folder.
_NOT_UPLOADED = (".git", ".cache")


@dataclass(frozen=True, slots=True)
class Push:
    """Where to push: `revision` is a branch, made where it is missing; `private` holds for a repository that is new."""

    repo_id: str
    private: bool = False
    revision: str | None = None
    create_pr: bool = False
    message: str | None = None

    def __post_init__(self) -> None:
        if not _REPO_ID.fullmatch(self.repo_id):
            raise UsageError("this is no repository of the Hub", expected="ORG/NAME", found=self.repo_id)
        if self.create_pr and self.revision is not None:
            raise UsageError("a pull request is made against the main branch", found=f"--revision {self.revision}")


@dataclass(frozen=True, slots=True)
class Pushed:
    """What is on the Hub now, and has been verified: `url` is that of the commit or the pull request."""

    repo_id: str
    url: str
    num_files: int
    num_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {"repo_id": self.repo_id, "url": self.url, "files": self.num_files, "bytes": self.num_bytes}


def push(
    folder: Path,
    to: Push,
    *,
    card: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    progress: bool = False,
) -> Pushed:
    """Upload every file of `folder`, and verify that the Hub holds them bit for bit.

    `card` becomes README.md where neither the folder nor the repository has one; `progress` shows the library's own
    bars.  Raises StorageError where the Hub
    cannot be reached or refuses, CorruptError where what it holds differs from the folder; the folder is only read, and
    pushing it again goes on.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    if not progress:
        disable_progress_bars()
    files = _local_files(folder)
    api = HfApi()
    with _translated(folder, to):
        api.create_repo(to.repo_id, private=to.private or None, exist_ok=True)
        if to.revision not in (None, _MAIN) and not str(to.revision).startswith("refs/"):
            api.create_branch(to.repo_id, branch=to.revision, exist_ok=True)
        say(f"pushing {len(files)} files to {api.endpoint}/{to.repo_id}")
        message = to.message or f"Upload {folder.resolve().name} with ckpt"
        commit = api.upload_folder(
            repo_id=to.repo_id,
            folder_path=folder,
            commit_message=message,
            revision=to.revision,
            create_pr=to.create_pr,
        )
        revision = commit.pr_revision or to.revision or _MAIN
        remote = _remote_files(api, to.repo_id, revision)
        extra: dict[str, bytes] = {}
        if card is not None and CARD not in files and CARD not in remote:
            extra[CARD] = card.encode()
            api.upload_file(
                path_or_fileobj=extra[CARD],
                path_in_repo=CARD,
                repo_id=to.repo_id,
                revision=revision,
                commit_message=f"{message}: model card",
            )
            remote = _remote_files(api, to.repo_id, revision)
    say("verifying the checksums of what the Hub holds")
    _verify(files, extra, remote, to)
    num_bytes = sum(path.stat().st_size for path in files.values()) + sum(map(len, extra.values()))
    return Pushed(to.repo_id, str(commit.pr_url or commit.commit_url), len(files) + len(extra), num_bytes)


def _local_files(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise NotFoundError("there is no folder to push", path=folder)
    files = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not set(path.relative_to(folder).parts).intersection(_NOT_UPLOADED)
    }
    if not files:
        raise NotFoundError("the folder is empty", path=folder)
    return files


@dataclass(frozen=True, slots=True)
class _Remote:
    """A file on the Hub: its size and checksum, of `kind` sha256 or git."""

    size: int
    kind: str
    checksum: str


def _remote_files(api: HfApi, repo_id: str, revision: str) -> dict[str, _Remote]:
    found = {}
    for entry in api.list_repo_tree(repo_id, recursive=True, revision=revision):
        if hasattr(entry, "blob_id"):
            lfs = entry.lfs
            found[entry.path] = _Remote(entry.size, "sha256" if lfs else "git", lfs.sha256 if lfs else entry.blob_id)
    return found


def _verify(files: Mapping[str, Path], extra: Mapping[str, bytes], remote: Mapping[str, _Remote], to: Push) -> None:
    """Raise CorruptError for the first file, by name, that is not on the Hub as it is here."""
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
        if there is None or found[name] != there.checksum:
            raise CorruptError(
                "a file on the Hub is not the one that was pushed" if there else "a file did not arrive on the Hub",
                path=files.get(name, name),
                expected=None if there is None else f"{there.kind} {found[name]}",
                found=None if there is None else f"{there.kind} {there.checksum}",
                hint=f"push again; if it stays so, remove the file from {to.repo_id} first",
            )


def _hasher(kind: str, size: int) -> Any:
    if kind == "sha256":
        return hashlib.sha256()
    hasher = hashlib.sha1(usedforsecurity=False)
    hasher.update(f"blob {size}\0".encode())  # what git hashes, gitformat-loose(5)
    return hasher


def _checksum(opened: OpenFiles, path: Path, kind: str) -> str:
    descriptor, done = opened.descriptor(str(path)), 0
    with translate_os_errors(path):
        hasher = _hasher(kind, os.fstat(descriptor).st_size)
        while data := os.pread(descriptor, _CHUNK, done):
            hasher.update(data)
            done += len(data)
    return str(hasher.hexdigest())


@contextmanager
def _translated(folder: Path, to: Push) -> Iterator[None]:
    """Turn what huggingface_hub raises into one of our errors that says how to go on."""
    again = f"what is here stays; `ckpt push {shlex.quote(str(folder))} --repo-id {to.repo_id}` goes on"
    try:
        yield
    except CkptError:
        raise
    except (ValueError, TypeError) as error:
        raise UsageError("the Hub's library refused this", found=_text(error)) from error
    except Exception as error:  # its own errors, the HTTP library's (which has changed) and OS errors
        status = getattr(getattr(error, "response", None), "status_code", None)
        denied = status in (401, 403)
        raise StorageError(
            "the Hub did not let us in" if denied else "the push did not come to its end",
            path=to.repo_id,
            found=_text(error),
            hint="set HF_TOKEN to a token with write access, or `hf auth login`" if denied else again,
        ) from error


def _text(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


# -- the model card ------------------------------------------------------------------------------------------


def model_card(
    title: str, facts: Mapping[str, str], digests: Mapping[str, str], command: Sequence[str], base: str | None = None
) -> str:
    """A model card: what it was made from, by which command, and digests to compare with `ckpt hash`.

    `base` is the Hub id of the model that this one derives from, if it is one.
    """
    head = {"library_name": "transformers", "tags": ["ckpt"]}
    if base is not None and _REPO_ID.fullmatch(base) and not Path(base).exists():
        head |= {"base_model": base}
    lines = ["---", *(f"{name}: {json.dumps(value)}" for name, value in head.items()), "---", ""]
    lines += [f"# {_inline(title)}", ""]
    lines += [f"- {name}: {_inline(value)}" for name, value in facts.items()]
    lines += ["", "Made with:", "", f"    {printable(shlex.join(command))}", ""]
    lines += [f"What it holds, as `ckpt hash` prints it for this model in any format ({ALGORITHM}):", ""]
    lines += [f"    {digest}  {kind}" for kind, digest in digests.items()]
    return "\n".join(lines) + "\n"


def _inline(text: str) -> str:
    """`text` on one line, and with nothing that Markdown reads as HTML."""
    return printable(text).replace("\n", " ").replace("<", "&lt;")


# -- the repository that a run records ------------------------------------------------------------------------


def recorded_repo(folders: Sequence[Path]) -> str:
    """The `hub_model_id` in the training arguments of the run that `folders` belong to.

    UsageError where none is recorded, which asks for it.
    """
    places: list[Path] = []
    for folder in folders:
        places += [*enclosing_folders(folder.resolve()), *trainer_steps(folder)]
    looked_at = []
    for place in dict.fromkeys(places):
        path = place / TRAINING_ARGS
        if path.is_file():
            looked_at.append(str(path))
            found = _hub_model_id(path)
            if found is not None and _REPO_ID.fullmatch(found):
                return found
    raise UsageError(
        "to which repository? the run does not record one",
        expected="hub_model_id in its training arguments",
        found=f"none in {', '.join(looked_at)}" if looked_at else f"no {TRAINING_ARGS}",
        hint="give it with --repo-id ORG/NAME",
    )


def _hub_model_id(path: Path) -> str | None:
    """`hub_model_id` of a file that HF Trainer wrote (transformers, trainer.py, `_save`), without running anything."""
    try:
        root = torchfile.read(path).root
    except CkptError:  # of a class that we do not know
        return None
    found = root.get("hub_model_id") if isinstance(root, Record) else None
    return found if isinstance(found, str) else None
