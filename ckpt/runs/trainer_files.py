"""A run folder's other files, adapted for another number of ranks or another engine.

Names follow HF Trainer (transformers/trainer.py, `_load_rng_state`, `_load_optimizer_and_scheduler`) and Accelerate
(accelerate/utils/constants.py, `checkpointing.py`). Files are copied as bytes and never loaded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.base.errors import LossError
from ckpt.base.text import pluralize
from ckpt.move.files import confined, translate_os_errors
from ckpt.move.json_files import parse_json
from ckpt.move.listing import files_below, files_in, names_in
from ckpt.plan.checkpoint import PART, Checkpoint, SourceFile, TargetFile
from ckpt.plan.dtypes import DType
from ckpt.plan.precision import Choice, model_dtypes, num_elements
from ckpt.runs.data_position import is_loader_state, position_notes
from ckpt.runs.file_checks import carried_content, check_copied
from ckpt.runs.file_table import TRAINING_STATE, FileKind, is_of
from ckpt.runs.lost_files import RandomState, random_states
from ckpt.runs.model_files import (
    CONFIG,
    companion_folders,
    companions,
    corrected_config,
    dump_config,
    find_config,
    hooks_folders,
    may_have_hooks,
    records_quantization,
    run_files_left_out,
    with_quantization,
)
from ckpt.runs.search import check_has_weights
from ckpt.runs.sentence_modules import MODULES, trainer_note
from ckpt.runs.steps import LIGHTNINGS_RECORD, OF_DCP, SCHEDULE, TRAINER_STATE, trainer_state

#: From `save_lora_weights` of diffusers (loaders/lora_base.py).
_HOOKS_ADAPTER = re.compile(r"pytorch_lora_weights.*\.safetensors")
_MAX_FILE = 64 << 20


@dataclass(frozen=True, slots=True)
class Companions:
    files: tuple[TargetFile, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]


def model_files(
    checkpoint: Checkpoint,
    dtype: DType | None,
    written: Sequence[Choice] | None = None,
    *,
    plain: bool = False,
    config: Mapping[str, Any] | None = None,
) -> tuple[list[TargetFile], list[str]]:
    """Return the files next to any model (config, tokenizer, ...), and notes.

    A config gets the most frequent dtype of `written` tensors, by default the model's own or `dtype`. `plain` is True
    if nothing quantized is written. `config` replaces the stored one. Raise CorruptError for a config that is not JSON.
    """
    folders = [Path(folder) for folder in checkpoint.folders]
    found = companions(folders)
    path = find_config(folders) if config is None else None
    config = config or checkpoint.config
    notes, is_requantized = list[str](), False
    if path is not None:
        found[CONFIG] = content_of(path.parent, path.name)
        config = parse_json(found[CONFIG], path)
    elif config is not None:
        found[CONFIG] = dump_config(config)
    if isinstance(config, Mapping):
        is_of_transformers = bool({"model_type", "architectures"} & config.keys())
        no_longer = checkpoint.config is not None and not records_quantization(checkpoint.config)
        counts = model_dtypes(checkpoint, dtype) if written is None else num_elements(written)
        recorded = config if no_longer or not checkpoint.config else with_quantization(config, checkpoint.config)
        is_requantized = path is not None and recorded != config
        true, notes = corrected_config(recorded, counts if is_of_transformers else {}, plain=plain or no_longer)
        if true != config:
            found[CONFIG] = dump_config(true)
    if plain or is_requantized or PART not in checkpoint.uncast.values():
        found = {name: content for name, content in found.items() if not is_of(name, FileKind.QUANTIZATION)}
    return _files(found), notes


def run_companions(
    checkpoint: Checkpoint,
    num_ranks: int | None,
    dtype: DType | None,
    *,
    deepspeed: bool = True,
    own: Sequence[TargetFile] = (),
    names: Collection[str] = (),
) -> Companions:
    """Return `model_files`, and for a resumable step also its trainer state, scheduler and random states.

    If `num_ranks` is None, the random states of all ranks are kept. `deepspeed` means a DeepSpeed target: a run's files
    are in the folder around its tag. `own` holds the format's files with training state, `names` an engine's tensors.
    Raise IncompleteError for a save hook's model without weights.
    """
    files, notes = model_files(checkpoint, dtype)
    notes += [note] if names and (note := trainer_note(checkpoint.folders, names)) else []
    home = _home(checkpoint) if deepspeed else trainer_folder(checkpoint)
    if home is None:
        left_out = run_files_left_out(checkpoint, {file.name for file in own})
        return Companions((*files, *own), tuple(left_out), tuple(notes))
    found: dict[str, TargetFile] = {}
    names = files_in(home)
    positions = list(position_notes(home, names, checkpoint.world_size, num_ranks))
    for name in names:
        if positions and is_loader_state(name):
            continue
        if is_of(name, FileKind.RUN, FileKind.ADAPTER) or (deepspeed and is_of(name, FileKind.SCRIPT)):
            found[name] = _copy(home, name)
    states = random_states(names)
    for state in states:
        if num_ranks is None or state.rank < num_ranks:
            to = state.name_among(num_ranks)
            found[to] = _copy(home, state.name, to)
    for folder in hooks_folders(home):
        check_has_weights(folder)
    hooks = [str(path.relative_to(home)) for path in hook_files(checkpoint)]
    found |= {name: _copy(home, name) for name in hooks}
    sources = {file.path for file in checkpoint.files}
    others = [name for name in names if str(home / name) not in sources]
    ranks = max((state.rank for state in states), default=0) + 1 if num_ranks is None else num_ranks
    files = [*(file for file in files if file.name not in found), *(found[name] for name in sorted(found))]
    files += [file for file in own if file.name not in found]
    notes += [*_missing(states, ranks, states), *(() if deepspeed else _no_schedule(files))]
    notes += [*positions, *_hooks_note(hooks)]
    return Companions(tuple(files), tuple(_dropped(others, states, ranks)), tuple(notes))


def lightnings_record(checkpoint: Checkpoint, num_ranks: int) -> tuple[list[TargetFile], list[str]]:
    """Return Lightning's record of a step, for a copy with the same names, and a note on its data position."""
    folder = Path(checkpoint.path)
    if not _is_of_lightning(folder):
        return [], []
    return _files({LIGHTNINGS_RECORD: content_of(folder, LIGHTNINGS_RECORD)}), list(
        _batches_note(checkpoint, num_ranks)
    )


def rank_notes(checkpoint: Checkpoint, num_ranks: int | None) -> Iterator[str]:
    """Yield what is lost if `num_ranks` ranks load the step's own files. None stands for the ranks that wrote them."""
    if (step := step_around(checkpoint)) is not None:
        names = files_in(step)
        states = random_states(names)
        ranks = num_ranks or checkpoint.world_size or max((one.rank for one in states), default=0) + 1
        yield from _missing(states, ranks, [one for one in states if one.name_among(num_ranks) == one.name])
        yield from position_notes(step, names, checkpoint.world_size, num_ranks)
    if num_ranks is not None and _is_of_lightning(Path(checkpoint.path)):
        yield from _batches_note(checkpoint, num_ranks)


def _is_of_lightning(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (OF_DCP, LIGHTNINGS_RECORD))


def _batches_note(checkpoint: Checkpoint, num_ranks: int) -> Iterator[str]:
    if checkpoint.world_size != num_ranks:
        counts = f"{LIGHTNINGS_RECORD} counts the batches of each of {pluralize(checkpoint.world_size or 0, 'rank')}"
        yield f"{counts}, and there are {num_ranks}: resume in the middle of an epoch skips other samples"


def carried_files(checkpoint: Checkpoint) -> list[Path]:
    found = companion_folders(map(Path, checkpoint.folders))
    beside = (folder / name for name, folder in sorted(found.items()))
    return [*beside, *run_files(checkpoint), *hook_files(checkpoint)]


def files_to_resume(checkpoint: Checkpoint) -> list[Path]:
    """Return the files that the trainer itself reads to resume from the step, besides the checkpoint's own.

    sentence-transformers' trainer builds a model from the step's folder (sentence-transformers 5 and 6, trainer.py,
    `_load_from_checkpoint`). Other trainers build the model as for a new run.
    """
    place = Path(checkpoint.path)
    found = [*run_files(checkpoint), *trainer_state(place), *trainer_state(place.parent)]
    is_built = (place / MODULES).is_file()
    return [*found, *(folder / name for name, folder in companion_folders([place] if is_built else []).items())]


def run_files(checkpoint: Checkpoint) -> list[Path]:
    home = step_around(checkpoint) if checkpoint.unmapped_optimizer else _home(checkpoint)
    if home is None:
        return []
    return [home / name for name in files_in(home) if is_of(name, *TRAINING_STATE)]


def _files(content: Mapping[str, bytes]) -> list[TargetFile]:
    return [TargetFile.of_bytes(name, content[name]) for name in sorted(content)]


def trainer_folder(checkpoint: Checkpoint) -> Path | None:
    """Return the HF Trainer or Accelerate step folder that contains a run's checkpoint.

    None without an optimizer: a trainer would continue without its states.
    """
    has_optimizer = checkpoint.optimizer_states or checkpoint.state.param_groups
    return step_around(checkpoint) if has_optimizer else None


def step_around(checkpoint: Checkpoint) -> Path | None:
    """Return the step folder of HF Trainer or Accelerate that contains the checkpoint."""
    path = Path(checkpoint.path)
    for folder in (path, path.parent) if path.is_dir() else (path.parent,):
        if folder == path or str(folder) in checkpoint.folders:
            names = names_in(folder)
            if TRAINER_STATE in names or any(not state.trainer for state in random_states(names)):
                return folder
    return None


def hook_files(checkpoint: Checkpoint) -> list[Path]:
    """Return the models and adapters of diffusers that the script's save hook wrote into the step."""
    step = _home(checkpoint)
    if step is None or not may_have_hooks(step):
        return []
    adapters = [step / name for name in files_in(step) if _HOOKS_ADAPTER.fullmatch(name)]
    return [*adapters, *(path for folder in hooks_folders(step) for path in files_below(folder))]


def _hooks_note(names: Sequence[str]) -> list[str]:
    found = dict.fromkeys(f"{folder}/" if inner else folder for folder, _, inner in (n.partition("/") for n in names))
    return [f"copied for the script's load hook: {', '.join(found)}"] if found else []


def _no_schedule(files: Sequence[TargetFile]) -> tuple[str, ...]:
    """Return a note if HF Trainer under FSDP lacks its scheduler (5.23)."""
    names = {file.name for file in files}
    if TRAINER_STATE not in names or SCHEDULE in names:
        return ()
    return (f"the source has no {SCHEDULE}, and HF Trainer needs it to load the optimizer state",)


def _home(checkpoint: Checkpoint) -> Path | None:
    """Return the folder with a step's files, for DeepSpeed around the tag."""
    step = trainer_folder(checkpoint)
    parent = Path(checkpoint.path).parent
    if step is None and checkpoint.tag is not None and str(parent) in checkpoint.folders:
        return parent
    return step


def _dropped(names: list[str], states: list[RandomState], num_ranks: int) -> Iterator[str]:
    gone = sorted(state.rank for state in states if state.rank >= num_ranks)
    if gone:
        yield f"random states of {_span(gone)}: the target run has {num_ranks}"
    weights = [name for name in names if is_of(name, FileKind.WEIGHTS)]
    if weights:
        yield f"{', '.join(weights[:4])}{', ...' if len(weights) > 4 else ''}: a second copy of the weights"


def _missing(states: list[RandomState], num_ranks: int, usable: list[RandomState]) -> Iterator[str]:
    there = {state.rank for state in usable}
    missing = [rank for rank in range(num_ranks) if rank not in there]
    if states and missing:
        yield f"no random states for {_span(missing)}: they start from fresh seeds"


def _span(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    whole = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]} to {ranks[-1]}" if whole else "ranks " + ", ".join(map(str, ranks))


def _copy(folder: Path, name: str, to: str | None = None) -> TargetFile:
    """Return a copy of a file of any size. Raise CorruptError for a damaged one."""
    path = confined(folder, name)
    with translate_os_errors(path):
        check_copied(path, folder)
        return TargetFile.of_copy(to or name, SourceFile.stat(str(path)))


def content_of(folder: Path, name: str) -> bytes:
    """Return a small file's content. Raise LossError for a large file, CorruptError for a damaged one."""
    path = confined(folder, name)
    with translate_os_errors(path):
        if path.stat().st_size > _MAX_FILE:
            raise LossError("a run file is too large to copy", path=path, expected="<= 64 MiB")
        return carried_content(path, folder)
