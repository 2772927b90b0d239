"""A run's position in its data, if the number of ranks changes.

HF Trainer records steps, not sequences: a resumed run skips `global_step` times its own batches (transformers 5.24,
trainer.py, `_init_training_state`). Accelerate's `dl_state_dict*.bin` counts one rank's batches, or all batches with
`dispatch_batches`, and records no mode (accelerate 1.15, checkpointing.py, data_loader.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, NotFoundError, UnsafeError
from ckpt.base.text import pluralize
from ckpt.containers.torchfile import read as torchfile
from ckpt.containers.torchfile.values import Record
from ckpt.move.files import confined
from ckpt.move.json_files import read_json
from ckpt.runs.data_loaders import batches_read
from ckpt.runs.file_table import TRAINING_ARGS, FileKind, fits, is_of
from ckpt.runs.recorded_precision import read_training_args
from ckpt.runs.steps import TRAINER_STATE

_LOADERS = ("dl_state_dict*.bin",)
_PER_DEVICE, _ACCUMULATED = "per_device_train_batch_size", "gradient_accumulation_steps"


def position_notes(step: Path, names: Collection[str], before: int | None, ranks: int | None) -> Iterator[str]:
    """Yield how `ranks` ranks go on at the sequence where `before` ranks stopped.

    By default, `before` is the number of random states: each rank writes one.
    """
    before = before or sum(is_of(name, FileKind.RANK) for name in names) or None
    if before is None or ranks is None or before == ranks:
        return
    if TRAINER_STATE in names:
        yield _of_trainer(step, before, ranks)
    for name in sorted(filter(is_loader_state, names)):
        yield _of_accelerate(step / name, before, ranks)


def is_loader_state(name: str) -> bool:
    return fits(name, _LOADERS)


def _of_accelerate(path: Path, before: int, ranks: int) -> str:
    """Return a note. With `split_batches` or `dispatch_batches`, the count doesn't depend on the number of ranks."""
    start = f"data position: {path.name} fits {pluralize(before, 'rank')} only"
    try:
        batches = batches_read(torchfile.read(confined(path.parent, path.name)).root)
    except (CorruptError, NotFoundError, UnsafeError):
        batches = None
    if not batches:
        return f"{start}, and records no number of batches; without it, the data starts again"
    start += f", after {batches} batches on each; without it, "
    if batches * before % ranks:
        return f"{start}the data starts again: {batches * before} batches in all are no multiple of {ranks}"
    at = batches * before // ranks
    there = f"call accelerator.skip_first_batches(loader, {at}) on {pluralize(ranks, 'rank')}"
    return f"{start}{there}, or (loader, {batches}) with split_batches"


def _of_trainer(step: Path, before: int, ranks: int) -> str:
    state, arguments = read_json(confined(step, TRAINER_STATE)), read_training_args(step / TRAINING_ARGS)
    done, batch = (state.get(name) if isinstance(state, dict) else None for name in ("global_step", "train_batch_size"))
    accumulated = None if arguments is None or _depends_on_ranks(arguments) else arguments.get(_ACCUMULATED)
    if type(done) is not int or type(batch) is not int or type(accumulated) is not int:
        return (
            "data position: HF Trainer counts it in steps, and the files don't prove the sequences per step: keep "
            f"{_PER_DEVICE} x {_ACCUMULATED} x ranks as on {pluralize(before, 'rank')}"
        )
    total = batch * accumulated * before
    place = f"data position: {pluralize(done, 'step')} of {pluralize(total, 'sequence')} = {done * total}; HF Trainer"
    there = f"on {pluralize(ranks, 'rank')}"
    if total % ranks == 0:
        return f"{place} goes on there with {_PER_DEVICE} x {_ACCUMULATED} = {total // ranks} {there}"
    skipped = f"skips {pluralize(done, 'step')} of the new size"
    return f"{place} can't continue {there}: {total} is not a multiple, and it {skipped}"


def _depends_on_ranks(arguments: Record | Mapping[Any, Any]) -> bool:
    order, accelerator = arguments.get("train_sampling_strategy"), arguments.get("accelerator_config")
    is_grouped = arguments.get("group_by_length") is True or order not in (None, "random", "sequential")
    is_split = isinstance(accelerator, Record | Mapping) and accelerator.get("split_batches") is True
    return is_grouped or is_split or arguments.get("parallelism_config") is not None
