"""Files in or next to a checkpoint's folder that no reader opened, judged by name and first bytes.

A subfolder without any opened file is reported as a whole if its files look like training state. Around a checkpoint,
only tensor files are reported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ckpt.adapters.names import ADAPTER_CONFIG
from ckpt.base.errors import CkptError, printable
from ckpt.containers.safetensors import read_header
from ckpt.move.listing import entries_in, names_in
from ckpt.move.source import open_stream
from ckpt.plan.checkpoint import Checkpoint
from ckpt.runs.file_table import TENSOR_SUFFIXES, TRAINING_STATE, FileKind, fits, is_of
from ckpt.runs.sentence_modules import weights_files
from ckpt.runs.steps import (
    ANY_STEP,
    LATEST,
    RECORDS,
    TRAINER_STEP,
    is_closed,
    is_step,
    link_target,
    recorded_step,
    run_at,
)

_NO_TENSORS = (
    *("*.txt", "*.md", "*.rst", "*.json", "*.jsonl", "*.yaml", "*.yml", "*.toml", "*.cfg", "*.ini", "*.csv", "*.tsv"),
    *("*.xml", "*.html", "*.log", "*.out", "*.err", "*.py", "*.sh", "*.jinja", "*.lock", "*.sha256", "*.parquet"),
    *("*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.webp", "*.pdf", "*.ipynb"),
    *("*.model", "*.tiktoken", "*.spm", "*.bpe", "*.codes", "*.vocab"),
    *("LICENSE*", "NOTICE*", "README*", "Makefile", "Dockerfile"),
)
#: Kinds of files handled by `convert` or useless elsewhere.
_HARMLESS = (
    FileKind.TOKENIZER,
    FileKind.PROCESSOR,
    FileKind.GENERATION,
    FileKind.RUN,
    FileKind.RANK,
    FileKind.RECORD,
    FileKind.LOG,
)
#: Complete models from transformers, diffusers, PEFT, Accelerate and Mistral.
_WEIGHTS = re.compile(
    r"(?P<stem>(?:model|pytorch_model(?:_fsdp)?|diffusion_pytorch_model|adapter_model|pytorch_lora_weights|consolidated)"
    r"(?:\.[A-Za-z][\w]*|\.\d\d)?)"
    r"(?:-\d{5}-of-(?P<count>\d{5}))?(?P<suffix>\.safetensors|\.bin|\.pth)"
)
_NAMED = {
    FileKind.COUNTER: "the run's data position, without tensors",
    FileKind.FOREIGN: "another program's file",
}
_STATE = re.compile(
    r"optim(?!um|iz(?:ed|ation))|(?:^|[^a-z])rank[_-]?\d|shard|\d-of-\d|model_states|pytorch_model_fsdp|^layer_\d"
    r"|^offloaded_tensors$|exp_avg"
)
_OF_A_RANK = re.compile(r"(?:^|[^a-z])rank[_-]?\d|_states\b|shard|\d-of-\d")
_OF_TENSORS = (".safetensors", ".distcp")
#: A zip's first record, and torch's older magic number (torch/serialization.py, `MAGIC_NUMBER`).
_ZIP, _LEGACY = b"PK\x03\x04", bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")
_HEAD, _TAIL = 512, 1 << 16
_MAX_SHOWN = 20
_MAX_DEPTH = 3  # of folders in an unread folder
_MAX_NAMED = 6
_OPTIMIZER = "the run's optimizer, next to weights only"

STATE, OTHER = "state", "other"


@dataclass(frozen=True, slots=True)
class UnreadFile:
    """An unread file, or a folder (`name` ends in `/`). `kind` is STATE if it looks like training state."""

    name: str
    kind: str
    why: str

    def to_json(self) -> dict[str, str]:
        return {"name": printable(self.name), "kind": self.kind, "why": self.why}


@dataclass(frozen=True, slots=True)
class ListedName:
    """A name in a listing. `size` is None for a folder."""

    name: str
    size: int | None


def list_unread(checkpoint: Checkpoint) -> tuple[UnreadFile, ...]:
    """Return unopened files and folders that may matter.

    Names next to the checkpoint's folder begin with `../`.
    """
    root = Path(checkpoint.path)
    if not root.is_dir():
        if not checkpoint.is_adapter:
            return tuple(_next_to_file(checkpoint, root))
        root = root.parent
    files = {
        os.path.relpath(file.path, root) for file in checkpoint.files if os.path.isabs(file.path) == root.is_absolute()
    }
    opened = {name for name in files if not name.startswith("../")}
    folders = {name.partition("/")[0] for name in opened if "/" in name}
    own = list(_listed(root, ""))
    listing = [*own, *(entry for folder in sorted(folders) for entry in _listed(root, folder))]
    found = list(judged(listing, opened, partial(_ends_in, root)))
    return (
        *found,
        *_unread_folders(root, own, {*folders, *(one.name.rstrip("/") for one in found)}),
        *_next_to(checkpoint, root),
    )


def _unread_folders(root: Path, entries: Iterable[ListedName], known: Collection[str]) -> Iterator[UnreadFile]:
    """Yield folders with tensor files, except `known` ones, the steps of a run and DeepSpeed's folder in a step."""
    modules = {path.parent.name for path in weights_files(root)}
    is_trainers = TRAINER_STEP.fullmatch(root.name) is not None
    for name in (entry.name for entry in entries if entry.size is None):
        if name in known or name.startswith("."):
            continue
        if is_step(link_target(root / name)) and (not is_trainers or recorded_step(root / LATEST) == name):
            continue
        if name in modules:
            yield UnreadFile(f"{name}/", OTHER, "a module of sentence-transformers")
        else:
            yield from _with_tensors(root, name)


def _with_tensors(root: Path, folder: str, depth: int = 0) -> Iterator[UnreadFile]:
    """Yield `folder` if it has tensor files, else its subfolders with tensor files."""
    if is_closed(root / folder):
        yield UnreadFile(f"{folder}/", OTHER, "the folder can't be listed")
        return
    if (root / folder / ADAPTER_CONFIG).is_file():
        yield UnreadFile(f"{folder}/", OTHER, "another adapter")
        return
    listed = list(_listed(root, folder))
    if any(_WEIGHTS.fullmatch(_base(one.name)) for one in listed):
        yield UnreadFile(f"{folder}/", OTHER, "a folder with a model's weights")
        return
    found = judged(listed, (), partial(_ends_in, root))
    if states := [one.name for one in found if one.kind == STATE]:
        more = ", an optimizer's among them" if any("optim" in _base(one).lower() for one in states) else ""
        yield UnreadFile(f"{folder}/", OTHER, f"a folder with tensor files{more}")
        return
    for one in listed if depth < _MAX_DEPTH else ():
        if one.size is None and not _base(one.name).startswith(".") and not (root / one.name).is_symlink():
            yield from _with_tensors(root, one.name, depth + 1)


def _next_to(checkpoint: Checkpoint, root: Path) -> Iterator[UnreadFile]:
    """Yield tensor files in the folders around `root`, nearest first."""
    opened = {file.path for file in checkpoint.files}
    for folder in sorted((Path(one) for one in checkpoint.run_folders), key=lambda one: -len(one.parts)):
        if folder == root or not root.is_relative_to(folder) or not folder.is_dir():
            continue
        is_step = _is_of_step(root, folder)
        up, inner = os.path.relpath(folder, root), root.relative_to(folder).parts[0]
        entries = [
            entry for entry in _listed(folder, "") if entry.name != inner and str(folder / entry.name) not in opened
        ]
        files = [one for one in entries if one.size is not None and not _WEIGHTS.fullmatch(one.name)]
        files = [one for one in files if not is_of(one.name, FileKind.DATA_POSITION, FileKind.OPTIMIZER)]
        if is_step and not checkpoint.optimizer_states:
            optimizers = [one.name for one in entries if is_of(one.name, FileKind.OPTIMIZER)]
            yield from (UnreadFile(f"{up}/{name}", OTHER, _OPTIMIZER) for name in optimizers)
        for one in judged(files, (), partial(_ends_in, folder)):
            if one.kind == STATE and not _is_copy(folder / one.name, checkpoint):
                yield UnreadFile(f"{up}/{one.name}", STATE if is_step else OTHER, f"next to the checkpoint: {one.why}")
        if is_step:
            used = {os.path.relpath(path, folder).partition("/")[0] for path in opened}
            for one in _unread_folders(folder, entries, used):
                yield UnreadFile(f"{up}/{one.name}", OTHER, f"next to the checkpoint: {one.why}")


def _next_to_file(checkpoint: Checkpoint, file: Path) -> Iterator[UnreadFile]:
    """Yield tensor files next to a trainer's single file, except other steps."""
    run, opened = run_at(file.parent), {one.path for one in checkpoint.files}
    steps = {*run.last, *run.best, *(step.path for step in run.steps)}
    if file not in steps:
        return
    entries = [entry for entry in _listed(file.parent, "") if entry.size is not None]
    others = [one for one in entries if not {str(file.parent / one.name), file.parent / one.name} & (opened | steps)]
    others = [one for one in others if link_target(file.parent / one.name) not in steps]
    for one in judged(others, (), partial(_ends_in, file.parent)):
        if one.kind == STATE:
            yield UnreadFile(f"../{one.name}", OTHER, f"next to the checkpoint: {one.why}")


def _is_copy(path: Path, checkpoint: Checkpoint) -> bool:
    """Return True if `checkpoint` has every tensor in a safetensors file, like LLaMA-Factory's value head."""
    if path.suffix != ".safetensors":
        return False
    try:
        return checkpoint.holds(entry.name for entry in read_header(path).entries)
    except CkptError:
        return False


def _is_of_step(root: Path, folder: Path) -> bool:
    if is_step(folder):
        return True
    is_named = is_step(root) or root in run_at(folder).last
    return folder == root.parent and not is_named and not any((folder / one).exists() for one in RECORDS)


def judged(
    listing: Iterable[ListedName], opened: Collection[str], ends: Callable[[str], bytes]
) -> Iterator[UnreadFile]:
    """Judge a listing like `list_unread`. `ends` returns a file's first and last bytes."""
    used = {place for name in opened for place in _around(name)}
    models = {found.group("stem", "suffix", "count") for name in opened if (found := _WEIGHTS.fullmatch(_base(name)))}
    weights_alone = bool(models) and not any(is_of(name, FileKind.OPTIMIZER) for name in opened)
    for entry in listing:
        name, base = entry.name, _base(entry.name)
        if name in opened or base.startswith("."):
            continue
        if entry.size is None:
            if name not in used and (folder := _unread_folder(name)) is not None:
                yield folder
        elif not _is_harmless(base) and (entry.size or not base.endswith(".distcp")):  # a rank without items
            if weights_alone and is_of(name, FileKind.OPTIMIZER):
                yield UnreadFile(name, OTHER, _OPTIMIZER)
            else:
                yield _other_weights(name, models) or UnreadFile(name, *_kind_of_file(base, partial(ends, name)))


def is_named_like_state(name: str) -> bool:
    return _STATE.search(name.lower()) is not None


def holds_tensors(name: str) -> bool:
    return name.endswith(TENSOR_SUFFIXES) and not _is_harmless(_base(name))


def stray_names(folder: Path) -> list[str]:
    """Return the tensor files in `folder` if none has the usual name of a model or a rank's part."""
    names = [name for name in names_in(folder) if holds_tensors(name) and not name.endswith(".distcp")]
    usual = [name for name in names if _WEIGHTS.fullmatch(name) or name.startswith("model") or _OF_A_RANK.search(name)]
    return [] if usual else names


def may_hold_tensors(folder: Path) -> bool:
    """Search `folder` and one level below."""
    entries = list(_listed(folder, ""))
    return any(judged(entries, (), partial(_ends_in, folder))) or any(_unread_folders(folder, entries, ()))


def owner_in_run(name: str, is_weights: bool) -> str | None:
    """Return the training step or file that the relative `name` belongs to, or None for a model's file."""
    parts = name.split("/")
    for depth, part in enumerate(parts[:-1], 1):
        if ANY_STEP.fullmatch(part) or (is_named_like_state(part) and not is_weights):
            return "/".join(parts[:depth]) + "/"
    base = parts[-1]
    if is_of(base, *TRAINING_STATE, FileKind.RECORD):
        return name
    is_models = is_weights or _WEIGHTS.fullmatch(base) or fits(base, _NO_TENSORS) or is_of(base, *_NAMED)
    return name if not is_models and is_named_like_state(base) else None


def lines(found: Sequence[Mapping[str, str]], *, verbose: bool = True) -> list[str]:
    """Return the user's lines, from the JSON form."""
    if not verbose and len(found) > 1:
        names = [one["name"] for one in found]
        more = [f"{len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else []
        return [f"not read: {', '.join([*names[:_MAX_NAMED], *more])} (-v says why)"]
    told = [f"not read: {one['name']}: {one['why']}" for one in found[:_MAX_SHOWN]]
    return [*told, *([f"not read: {len(found) - _MAX_SHOWN} more"] if len(found) > _MAX_SHOWN else [])]


def _around(name: str) -> Iterator[str]:
    while name := name.rpartition("/")[0]:
        yield name


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _is_harmless(base: str) -> bool:
    return fits(base, _NO_TENSORS) or is_of(base, *_HARMLESS)


def _unread_folder(name: str) -> UnreadFile | None:
    base = _base(name)
    if is_named_like_state(base) and not ANY_STEP.fullmatch(base):
        return UnreadFile(f"{name}/", STATE, "a folder named like training state")
    return UnreadFile(f"{name}/", OTHER, "a folder next to files read here") if "/" in name else None


def _other_weights(name: str, models: AbstractSet[tuple[str | None, ...]]) -> UnreadFile | None:
    found = _WEIGHTS.fullmatch(_base(name))
    if found is None or (own := found.group("stem", "suffix", "count")) in models:
        return None
    same_name = any(own[:2] == other[:2] for other in models)
    if same_name and own[2] is None:  # loaders prefer it to shards
        return None
    why = "a shard of another save" if same_name else "more weights, next to the model's"
    return UnreadFile(name, OTHER, why)


def _kind_of_file(base: str, ends: Callable[[], bytes]) -> tuple[str, str]:
    if known := next((why for kind, why in _NAMED.items() if is_of(base, kind)), None):
        return OTHER, known
    if is_named_like_state(base):
        return STATE, "its name suggests training state"
    if base.endswith(_OF_TENSORS):
        return STATE, "it holds tensors"
    start = ends()
    if start.startswith(_ZIP) and b"data.pkl" in start[:_HEAD] and b"/data/" not in start[_HEAD:]:
        return OTHER, "a torch file without tensors"
    if start.startswith(_LEGACY) or (start.startswith(_ZIP) and b"data.pkl" in start[:_HEAD]):
        return STATE, "a torch file"
    if start[8:10] == b'{"' and not any(start[5:8]):  # safetensors: the header's length, then the header
        return STATE, "it holds tensors"
    return OTHER, "no reader knows it"


def _listed(root: Path, folder: str) -> Iterator[ListedName]:
    for base, entry in entries_in(root / folder).items():
        name = f"{folder}/{base}" if folder else base
        try:
            yield ListedName(name, None if entry.is_dir() else entry.stat().st_size)
        except OSError:  # a broken link, or a file just removed
            yield ListedName(name, 0)


def _ends_in(folder: Path, name: str) -> bytes:
    return _ends(folder / name)


def _ends(path: Path) -> bytes:
    """Return a file's first bytes, and for a zip also its last ones with the record names."""
    try:
        with open_stream(path) as file:
            start = file.read(_HEAD)
            if start.startswith(_ZIP):
                file.seek(max(len(start), file.seek(0, os.SEEK_END) - _TAIL))
                start += file.read(_TAIL)
            return start
    except (CkptError, OSError):
        return b""
