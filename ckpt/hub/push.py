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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.containers.torchfile import read as torchfile
from ckpt.containers.torchfile.table import AnyName
from ckpt.containers.torchfile.values import Record
from ckpt.errors import CkptError, CorruptError, NotFoundError, StorageError, UnsafeError, UsageError, printable
from ckpt.move.files import OpenFiles, translate_os_errors
from ckpt.move.source import read_into
from ckpt.run_folder.steps import enclosing_folders, trainer_steps
from ckpt.state.adapter import CONFIG as ADAPTER_CONFIG
from ckpt.text import HUB_ID
from ckpt.verify.digest import ALGORITHM, in_threads

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CARD = "README.md"
TRAINING_ARGS = "training_args.bin"

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"

_MAIN = "main"
_CHUNK = 1 << 20
_MAX_ARGUMENTS = 16 << 20  # bytes of training arguments, which take a few kB
_MAX_CARD = 4 << 20
_MAX_TITLE = 200  # characters of a pull request's title on the Hub
#: `hub_model_id` in the config that Axolotl puts into the model card (axolotl, train.py).
_IN_CARD = re.compile(rb"^hub_model_id:[ \t]*[\"']?([\w./-]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Push:
    """Where to push: `revision` is a branch, made where it is missing; `private` holds for a repository that is new."""

    repo_id: str
    private: bool = False
    revision: str | None = None
    create_pr: bool = False
    message: str | None = None

    def __post_init__(self) -> None:
        if not HUB_ID.fullmatch(self.repo_id):
            raise UsageError("this is no repository of the Hub", expected="ORG/NAME", found=self.repo_id)
        if self.create_pr and self.revision is not None:
            raise UsageError(
                "a pull request is made against the main branch",
                found=f"--revision {self.revision}",
                hint="leave out --revision or --create-pr",
            )

    def command(self, folder: Path) -> str:
        """What pushes `folder` to the same place."""
        options = {"--repo-id": self.repo_id, "--revision": self.revision, "--commit-message": self.message}
        words = ["ckpt", "push", str(folder)]
        words += [word for name, value in options.items() if value is not None for word in (name, value)]
        words += ["--private"] * self.private + ["--create-pr"] * self.create_pr
        return shlex.join(words)


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
    bars.  Raises StorageError where the Hub cannot be reached or refuses, UsageError where other weights in the
    repository would be loaded in place of these, and CorruptError where what the Hub holds differs from the folder; the
    folder is only read, and pushing it again goes on.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    if not progress:
        disable_progress_bars()
    files = _local_files(folder)
    api = HfApi()
    message = to.message or f"Upload {folder.resolve().name} with ckpt"
    with _translated(folder, to):
        api.create_repo(to.repo_id, private=to.private or None, exist_ok=True)
        if to.revision not in (None, _MAIN) and not str(to.revision).startswith("refs/"):
            api.create_branch(to.repo_id, branch=to.revision, exist_ok=True)
        _check_what_is_there(files, _remote_files(api, to.repo_id, to.revision or _MAIN), to)
        pull_request = None
        if to.create_pr:  # first, so that a push which is cut off goes on in the same one
            pull_request = api.create_pull_request(to.repo_id, title=message[:_MAX_TITLE])
            to = replace(to, create_pr=False, revision=pull_request.git_reference)
    with _translated(folder, to):
        say(f"pushing {len(files)} files to {api.endpoint}/{to.repo_id}")
        commit = api.upload_folder(repo_id=to.repo_id, folder_path=folder, commit_message=message, revision=to.revision)
        remote = _remote_files(api, to.repo_id, to.revision or _MAIN)
        extra: dict[str, bytes] = {}
        if card is not None and CARD not in files and CARD not in remote:
            extra[CARD] = card.encode()
            api.upload_file(
                path_or_fileobj=extra[CARD],
                path_in_repo=CARD,
                repo_id=to.repo_id,
                revision=to.revision,
                commit_message=f"{message}: model card",
            )
            remote = _remote_files(api, to.repo_id, to.revision or _MAIN)
        say("verifying the checksums of what the Hub holds")
        _verify(files, extra, remote, to)
    if "config.json" in files and ADAPTER_CONFIG in remote and ADAPTER_CONFIG not in files:
        say(f"note: {to.repo_id} holds an adapter too, and where PEFT is installed transformers loads that on its base")
    num_bytes = sum(path.stat().st_size for path in files.values()) + sum(map(len, extra.values()))
    url = pull_request.url if pull_request else commit.commit_url
    return Pushed(to.repo_id, str(url), len(files) + len(extra), num_bytes)


def _check_what_is_there(files: Mapping[str, Path], remote: Mapping[str, _Remote], to: Push) -> None:
    """UsageError where weights on the Hub go before those of `files`.

    transformers takes `model.safetensors` before it looks for an index (modeling_utils.py,
    `_get_resolved_checkpoint_files`).
    """
    if _INDEX in files and _WEIGHTS in remote and _WEIGHTS not in files:
        raise UsageError(
            f"the repository holds {_WEIGHTS}, which is loaded in place of the shards that would be pushed",
            path=to.repo_id,
            hint=f"push to another branch with --revision, or `hf repos delete-files {to.repo_id} {_WEIGHTS}` first",
        )


def _local_files(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise NotFoundError("there is no folder to push", path=folder, hint="give the folder that convert wrote")
    from huggingface_hub.utils import DEFAULT_IGNORE_PATTERNS, filter_repo_objects

    names = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    files = {name: folder / name for name in filter_repo_objects(names, ignore_patterns=DEFAULT_IGNORE_PATTERNS)}
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
        if there is None:
            raise CorruptError(
                "a file did not arrive on the Hub",
                path=files.get(name, name),
                hint=f"push again; if it stays so, a .gitignore in {to.repo_id} may leave it out",
            )
        if found[name] != there.checksum:
            raise CorruptError(
                "a file on the Hub is not the one that was pushed",
                path=files.get(name, name),
                expected=f"{there.kind} {found[name]}",
                found=f"{there.kind} {there.checksum}",
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
        buffer = memoryview(bytearray(_CHUNK))
        while count := read_into(descriptor, done, buffer):
            hasher.update(buffer[:count])
            done += count
    return str(hasher.hexdigest())


@contextmanager
def _translated(folder: Path, to: Push) -> Iterator[None]:
    """Turn what huggingface_hub raises into one of our errors that says how to go on; Ctrl-C says it too."""
    again = f"what is here stays; `{to.command(folder)}` goes on"
    try:
        yield
    except CkptError:
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {again}") from None
    except (ValueError, TypeError) as error:
        raise UsageError("the Hub's library refused this", path=to.repo_id, found=_text(error), hint=again) from error
    except Exception as error:  # its own errors, the HTTP library's (which has changed) and OS errors
        causes = [error, *([error.__cause__] if isinstance(error.__cause__, Exception) else [])]
        statuses = [getattr(getattr(one, "response", None), "status_code", None) for one in causes]
        status = next(filter(None, statuses), None)
        what, hint = _REFUSALS.get(status, ("the push did not come to its end", ""))
        raise StorageError(
            what,
            path=to.repo_id,
            found=" ".join(map(_text, causes)),
            hint="; ".join(filter(None, (hint, again))),
        ) from error


_TOKEN_HINT = "set HF_TOKEN to a token with write access, or `hf auth login`"
#: What to say of a status with which the Hub answers, and what to do about it.
_REFUSALS: Mapping[Any, tuple[str, str]] = {
    401: ("the Hub does not know who is pushing", _TOKEN_HINT),
    403: ("the Hub does not let this token push there", _TOKEN_HINT),
    404: ("the Hub has no such repository or branch, or does not show it to this token", _TOKEN_HINT),
    409: ("somebody else is changing the repository", ""),
    412: ("somebody else is changing the repository", ""),
}


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
    if base is not None and HUB_ID.fullmatch(base) and not Path(base).exists():
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
    """The `hub_model_id` that the run which `folders` belong to records: in its training arguments or model card.

    UsageError where none is recorded, which asks for it.
    """
    places: list[Path] = []
    for folder in folders:
        places += [*enclosing_folders(folder.resolve()), *trainer_steps(folder)]
    looked_at, without_owner = [], None
    for place in dict.fromkeys(places):
        for path, read in ((place / TRAINING_ARGS, _in_arguments), (place / CARD, _in_card)):
            if path.is_file():
                looked_at.append(str(path))
                found = read(path)
                if found is not None and HUB_ID.fullmatch(found):
                    return found
                without_owner = without_owner or found
    if without_owner is not None:
        raise UsageError(
            "to which repository? the run records one without its owner",
            expected="ORG/NAME",
            found=without_owner,
            hint=f"give it with --repo-id ORG/{without_owner}",
        )
    raise UsageError(
        "to which repository? the run does not record one",
        expected=f"hub_model_id in its training arguments ({TRAINING_ARGS}) or Axolotl's config in its {CARD}",
        found=f"none in {', '.join(looked_at)}" if looked_at else f"no {TRAINING_ARGS}",
        hint="give it with --repo-id ORG/NAME",
    )


def _in_card(path: Path) -> str | None:
    with translate_os_errors(path), path.open("rb") as file:
        found = _IN_CARD.search(file.read(_MAX_CARD))
    return found[1].decode("ascii", "replace") if found and found[1] not in (b"null", b"~") else None


def _in_arguments(path: Path) -> str | None:
    """`hub_model_id` of a file that HF Trainer wrote (transformers, trainer.py, `_save`).

    The arguments may be of a class of anybody's, so names outside the table are read as inert records.
    """
    if path.stat().st_size > _MAX_ARGUMENTS:
        return None
    try:
        found = torchfile.read(path, table=AnyName()).root
    except (CorruptError, NotFoundError, UnsafeError):  # no file of torch.save, or one that is damaged
        return None
    value = found.get("hub_model_id") if isinstance(found, Record | dict) else None
    return value if isinstance(value, str) and value else None
