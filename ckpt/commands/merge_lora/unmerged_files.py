"""Unmerged trained weights in an adapter's folder, such as TRL's value head: the trained model needs them."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt import api
from ckpt.adapters.names import PREFIX, parse_name
from ckpt.base.errors import CkptError, LossError, UsageError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.commands.merge_lora.find import Adapter, Factor
from ckpt.plan.checkpoint import HUB, MODEL_ROLES, TRANSFORMERS, Checkpoint
from ckpt.runs.sentence_modules import weights_files
from ckpt.runs.unread_files import STATE, UnreadFile, list_unread
from ckpt.state.naming import to_namespace

#: Next to a model (TRL, LLaMA-Factory).
_VALUE_HEAD = "v_head."
#: torchtune's own copy of the adapter (training/checkpointing).
_OWN_COPY = "adapter_model.pt"
_SHOWN = 3


def unread(checkpoint: Checkpoint) -> Iterator[UnreadFile]:
    """Yield unread files, without optimizers."""
    folder = Path(checkpoint.path)
    folder = folder if folder.is_dir() else folder.parent
    for one in list_unread(checkpoint):
        if "optim" not in one.name.lower():
            yield replace(one, name=os.path.normpath(folder / one.name) + ("/" if one.name.endswith("/") else ""))


def without_ignored(adapters: Sequence[Adapter], base: Checkpoint, ignored: Collection[str] = ()) -> list[Adapter]:
    """Return `adapters` without the tensors of the files in `ignored`.

    Raise LossError if another file holds trained weights, UsageError if an ignored file is missing.
    """
    found = [(adapter, list(unread(adapter.checkpoint))) for adapter in adapters]
    names = {Path(one.name).name for _, files in found for one in files}
    names |= {_file_name(factor) for adapter in adapters for factor in adapter.factors.values()}
    if unknown := sorted(set(ignored) - names):
        raise UsageError("no adapter folder has this file", found=unknown[0], expected=_first_names(names))
    for adapter, files in found if any(files for _, files in found) else ():
        for one in files:
            path = Path(one.name)
            if path.parent == Path(os.path.normpath(adapter.folder)):
                _check_neighbour(adapter, base, path, one.kind, ignored)
        _check_modules(adapter.folder, base, ignored)
    return [
        replace(one, factors={fqn: factor for fqn, factor in one.factors.items() if _file_name(factor) not in ignored})
        for one in adapters
    ]


def _check_neighbour(adapter: Adapter, base: Checkpoint, path: Path, kind: str, ignored: Collection[str]) -> None:
    if path.name in (*ignored, _OWN_COPY) or not path.is_file():
        return
    try:
        names = {fqn for fqn, role in api.open(path).tensors if role in MODEL_ROLES}
    except CkptError:
        if kind != STATE:
            return
        names = set()
    own = {parse_name(fqn).in_file for fqn in adapter.factors}
    if names and (own.issuperset(parse_name(fqn).in_file for fqn in names) or _is_whole_model(names, base)):
        return
    where = ""
    if names and all(name.startswith(_VALUE_HEAD) for name in names):
        where = "; TRL and LLaMA-Factory load it from a copy in the merged model's folder"
    raise LossError(
        "a file next to the adapter holds trained weights, and merging would drop them",
        path=path,
        expected="trained weights in the adapter's own file",
        found=f"{pluralize(len(names), 'tensor')}: {_first_names(names)}" if names else "unreadable tensors",
        hint=Message("{ignore_files} leaves it out{}", where, ignore_files=[path.name]),
    )


def _check_modules(folder: Path, base: Checkpoint, ignored: Collection[str]) -> None:
    """Raise LossError for sentence-transformers' modules in `folder` that the base has not."""
    lost = [path for path in weights_files(folder) if path.parent.name not in ignored and not _is_in(base, path)]
    if lost:
        raise LossError(
            "sentence-transformers' modules lie next to the adapter, and merging would drop them",
            path=folder,
            expected="modules equal to the base's",
            found=", ".join(path.parent.name for path in lost),
            hint=Message("{ignore_files} leaves them out", ignore_files=[path.parent.name for path in lost]),
        )


def _is_in(base: Checkpoint, module_file: Path) -> bool:
    copies = [Path(folder, *module_file.parts[-2:]) for folder in base.folders]
    return any(copy.is_file() and filecmp.cmp(copy, module_file, shallow=False) for copy in copies)


def _is_whole_model(names: Collection[str], base: Checkpoint) -> bool:
    """Return True if a model was saved into the same folder."""
    plain = {name.removeprefix(PREFIX) for name in names}
    for namespace in (HUB, TRANSFORMERS):
        known = to_namespace(base, namespace).shapes.keys()
        if 2 * len(plain & known) > len(known):
            return True
    return False


def _file_name(factor: Factor) -> str:
    return Path(factor.file or "").name


def _first_names(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:_SHOWN]) + (", ..." if len(shown) > _SHOWN else "")
