"""The folder to go on from, on what there is now: the newest complete checkpoint, converted only if it must be."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any, Literal, overload

from ckpt import api, registry
from ckpt.caller import caller
from ckpt.errors import CkptError, IncompleteError, NotFoundError, StorageError, UsageError, printable
from ckpt.move.files import translate_os_errors
from ckpt.move.group import Alone, the_callers
from ckpt.plan.checkpoint import Checkpoint, Layout
from ckpt.plan.dtypes import CASTABLE
from ckpt.run_folder.companions import read_json
from ckpt.run_folder.steps import ANY_STEP, LATEST, TRACKER, TRAINER_STATE, recorded_step
from ckpt.text import scheme_of

#: In each converted folder, what it was made of.
RECORD = "ckpt-resume.json"

#: Formats whose files fit as many ranks as wrote them.
_OF_RANKS = ("zero1", "zero2", "zero3", "fsdp-ranks", "megatron-deepspeed")
#: Formats of which an engine is given the folder around a step's, and takes the step that is recorded there.
_RECORDED = ("zero0", "zero1", "zero2", "zero3", "universal", "megatron", "megatron-dist", "megatron-deepspeed")
#: Megatron-LM's arguments that `megatron` and `megatron-deepspeed` files fit; torch_dist is loaded at any sizes.
_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
#: Ends of names of files that hold tensors.
_OF_TENSORS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".distcp")


def say_on_stderr(line: str) -> None:
    """Print a line on stderr, escaped."""
    print(printable(line), file=sys.stderr, flush=True)


@overload
def resume(
    path: str | os.PathLike[str],
    *,
    format: str | None = ...,
    world_size: int | None = ...,
    tag: str | None = ...,
    config: str | None = ...,
    dtype: str | None = ...,
    missing_ok: Literal[False] = ...,
    say: Callable[[str], None] = ...,
    **options: Any,
) -> str: ...
@overload
def resume(path: str | os.PathLike[str], *, missing_ok: bool, **options: Any) -> str | None: ...
def resume(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    world_size: int | None = None,
    tag: str | None = None,
    config: str | None = None,
    dtype: str | None = None,
    missing_ok: bool = False,
    say: Callable[[str], None] = say_on_stderr,
    **options: Any,
) -> str | None:
    """The folder to resume from: of the run folder or checkpoint `path`, on the engine and ranks that there are now.

    That is the newest complete checkpoint of `path` itself if it fits.  Otherwise it is converted, into a hidden folder
    beside `path` (`.NAME.ckpt-resume`), where the next call finds it again; conversions whose source has gone are
    removed there.  `format` and `world_size` are found out: the process group of torch.distributed, the environment of
    torchrun, deepspeed, srun, mpirun and accelerate, HF Trainer's DeepSpeed config; failing that they are the source's.
    `dtype` is that of weights (`bf16`), failing that the
    DeepSpeed config's; `options` are those of the format, as `tp` and `pp` of Megatron's.

    Called by every process of an initialized torch.distributed, the first one converts, and all return the same path or
    raise the same error.  `say` is given what was done, a line each, in the first process.

    With `missing_ok` it is None where `path` does not exist or holds no file of tensors: the run begins.  A checkpoint
    that is not complete, or of no known format, is an error all the same.

    Raises what `ckpt.open` and `ckpt.plan` do, StorageError where processes do not see the same files, and UsageError
    where several processes were started and torch.distributed is not initialized.
    """
    if scheme_of(path) is not None:
        hint = "ckpt.open, ckpt.StorageReader and `ckpt convert` read from a store"
        raise UsageError("a run that goes on lies in a local folder", path=path, hint=hint)
    path = Path(path)
    now = caller()
    with the_callers() as group:
        if missing_ok and not any(group.gather(_holds_tensors(path))):
            if group.rank == 0:
                say(f"{path} holds no checkpoint: the run begins")
            return None
        if group.size == 1 and os.environ.get("RANK", "0") != "0":
            raise UsageError(
                "several processes were started, and they cannot agree on one that converts",
                expected="an initialized torch.distributed",
                hint="call ckpt.resume behind init_process_group (deepspeed.initialize, TrainingArguments), "
                "or give the path that `ckpt resume` prints",
            )
        found: str | None = None
        error: Exception | None = None
        if group.rank == 0:
            dtype = dtype or now.dtype
            layout = Layout(CASTABLE[dtype] if dtype else None, world_size=world_size or now.world_size, **options)
            try:
                found = _resume(path, format or now.format, layout, tag, config, say)
            except Exception as raised:
                error = raised
        _raise_together(error, path, group)
        place: str = group.gather(found)[0]  # type: ignore[assignment]
        _check_seen_by_all(place, group)
        return place


def _holds_tensors(path: Path) -> bool:
    return any(file.suffix in _OF_TENSORS for file in path.rglob("*"))


def _raise_together(error: Exception | None, path: Path, group: Alone) -> None:
    """Raise the first process's error in all of them, or what explains it: that they see other files."""
    first = group.gather(error)[0]
    if first is None:
        return
    if group.size > 1 and isinstance(first, NotFoundError | IncompleteError):
        seen = group.gather((socket.gethostname(), _files_below(path)))
        if len({names for _, names in seen}) > 1:
            every = frozenset[str]().union(*(names for _, names in seen))
            lacking = {host: sorted(every - names) for host, names in seen if every - names}
            found = "; ".join(f"{host} lacks {len(n)}, as {', '.join(n[:3])}" for host, n in lacking.items())
            raise StorageError(
                "the nodes do not see the same files: the checkpoint lies on storage of single nodes",
                path=path,
                found=found,
                hint="copy the files of all nodes to storage that they share, and give that path",
            ) from error
    raise first


def _files_below(path: Path) -> frozenset[str]:
    return frozenset(str(found.relative_to(path)) for found in path.rglob("*") if found.is_file())


def _check_seen_by_all(place: str, group: Alone) -> None:
    without = [host for host, is_seen in group.gather((socket.gethostname(), os.path.exists(place))) if not is_seen]
    if without:
        raise StorageError(
            "other nodes do not see the folder to resume from: it is not on storage that all of them share",
            path=place,
            found=f"not there on {', '.join(sorted(set(without)))}",
            hint="keep the run on shared storage",
        )


def _resume(
    path: Path, format: str | None, layout: Layout, tag: str | None, config: str | None, say: Callable[[str], None]
) -> str:
    checkpoint = api.open(path, tag=tag, config=config)
    for note in (*checkpoint.passed_over, *(note for note in checkpoint.notes if note not in checkpoint.passed_over)):
        say(f"note: {note}")
    wanted = registry.get(format or checkpoint.format).name
    as_it_is = _folder_to_load(path, checkpoint)
    misfit = _misfit(checkpoint, wanted, layout)
    if as_it_is is not None and misfit is None:
        say(f"resuming from {as_it_is}, as it is")
        return str(as_it_is)
    say(f"{checkpoint.path} does not fit: {misfit or f'{LATEST} or a tracker names another step'}")
    kept = _kept_folder(path)
    size = layout.world_size if wanted in (*_OF_RANKS, "megatron", "megatron-dist") else None
    layout = Layout(layout.dtype, layout.max_shard_size, size, layout.options)
    destination = kept / _name(checkpoint, wanted, layout)
    if destination.is_dir():
        say(f"resuming from {destination}, which was converted before")
    else:
        conversion = api.plan(checkpoint, wanted, layout)
        record = json.dumps({"source": [file.path for file in checkpoint.files]}).encode()
        conversion.run(destination, resume=True, describe=lambda _: {RECORD: record})
        for line in (*conversion.plan.target.notes, *conversion.plan.target.not_written):
            say(f"note: {line}" if line in conversion.plan.target.notes else f"not in the target: {line}")
        say(f"resuming from {destination}, converted from {checkpoint.path}")
    _remove_orphans(kept, say)
    return str(destination)


def _folder_to_load(path: Path, checkpoint: Checkpoint) -> Path | None:
    """The folder that the engine or Trainer is given for `checkpoint`; None where its record names another step."""
    place = Path(checkpoint.path)
    around = [place, place.parent, *(p for p in place.parents[1:] if p.is_relative_to(path))]
    for folder in around:
        if (folder / TRAINER_STATE).is_file():
            return folder
        recorded = [recorded_step(folder / LATEST), recorded_step(folder / TRACKER)]
        if checkpoint.format in _RECORDED and any(_is_step(place.name, step) for step in recorded if step):
            return folder
    return None if checkpoint.format in _RECORDED else place


def _is_step(name: str, recorded: str) -> bool:
    return name == recorded or (recorded.isdecimal() and name == f"iter_{int(recorded):07d}")


def _misfit(checkpoint: Checkpoint, wanted: str, layout: Layout) -> str | None:
    """Why `checkpoint` cannot be loaded as it is; None where it can."""
    if checkpoint.format != wanted:
        return f"it is {checkpoint.format}, and {wanted} is loaded"
    size = layout.world_size
    if wanted in _OF_RANKS and size is not None and checkpoint.world_size != size:
        return f"it was written by {checkpoint.world_size} ranks, and there are {size}"
    args: Mapping[str, Any] = checkpoint.state.args or {}
    for name, argument in _AXES.items():
        asked, written = layout.options.get(name), args.get(argument) or 1
        if asked is not None and asked != written and wanted != "megatron-dist":
            return f"it was written with {argument} {written}, and {asked} is asked for"
    return None


def _kept_folder(path: Path) -> Path:
    """Where conversions for the run of `path` are kept: hidden, so that no search for runs or steps meets them."""
    run = Path(os.path.abspath(path))
    run = run.parent if ANY_STEP.fullmatch(run.name) else run
    if not run.name:
        raise UsageError("there is no place beside the root folder", path=path, hint="give a folder in it")
    return run.with_name(f".{run.name}.ckpt-resume")


def _name(checkpoint: Checkpoint, wanted: str, layout: Layout) -> str:
    """Tells apart what was converted, from which files as they were, and to what."""
    from xxhash import xxh3_64

    asked = (layout.dtype, layout.world_size, sorted(layout.options.items()))
    facts = repr((wanted, asked, [astuple(file) for file in checkpoint.files]))
    step = f"step{checkpoint.state.step}" if checkpoint.state.step is not None else Path(checkpoint.path).name
    ranks = f"-on-{layout.world_size}" if layout.world_size else ""
    return f"{step}-{wanted}{ranks}-{xxh3_64(facts.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _remove_orphans(kept: Path, say: Callable[[str], None]) -> None:
    """Remove conversions of which a file of the source has gone."""
    for record in sorted(kept.glob(f"*/{RECORD}")):
        try:
            content = read_json(record)
            sources = content["source"]
            is_orphan = not all(os.path.exists(source) for source in sources)
        except (CkptError, KeyError, TypeError):
            continue
        if is_orphan:
            with translate_os_errors(record.parent):
                shutil.rmtree(record.parent)
            say(f"removed {record.parent}, whose source has gone")
