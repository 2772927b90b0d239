"""Run folders: files and folders around checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.base.errors import CkptError, StorageError
from ckpt.containers.torchfile import read as torchfile
from ckpt.move.files import confined
from ckpt.move.json_files import read_json
from ckpt.move.listing import entries_in, files_in, folders_in, is_folder, names_in, once
from ckpt.move.source import read_file

#: transformers/trainer_callback.py, `TrainerState`
TRAINER_STATE = "trainer_state.json"
SCHEDULE = "scheduler.pt"
#: Random states of one of Accelerate's ranks.
ACCELERATE_RNG = re.compile(r"random_states_(\d+)\.pkl")
#: The last saved step's tag, and the last universal checkpoint's.
LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
#: Last step's number from Megatron-LM and verl. Megatron-LM's may say `release` instead.
TRACKER = "latest_checkpointed_iteration.txt"
#: megatron-core's last file in a step folder, and files written before it.
MEGATRONS_LAST, MEGATRONS_COMMON, OF_DCP = "metadata.json", "common.pt", ".metadata"
#: The ones above, and SkyRL's.
RECORDS = (LATEST, LATEST_UNIVERSAL, TRACKER, "latest_ckpt_global_step.txt")
_MAX_RECORDED = 4096
_MEGATRONS_KEYS = re.compile(
    rb"embedding\.word_embeddings\.|decoder\.layers\.(?:\d+\.)?(?:self_attention\.linear_|mlp\.(?:linear_fc|experts\.))"
)
_MAX_METADATA = 1 << 20

#: torch_checkpointing's record of `ITEM_RANK.pt` files, and its prefix for a save in progress.
RANKS_METADATA, STAGED, _RANKS_STEP = "metadata.pkl", "tmp_", "step_0.pt"
#: Usual items, which tell a folder without its record.
_RANK_0 = frozenset(("model_0", "optimizer_0", "step_0"))
RANK_FILE = re.compile(r"(?P<item>.+)_(?P<rank>\d+)\.(?P<kind>pt|safetensors)")

#: HF Trainer, TRL and Axolotl (transformers/trainer_utils.py).
TRAINER_STEP = re.compile(r"checkpoint-(\d+)")
#: megatron/training/checkpointing.py
MEGATRON_STEP = re.compile(r"iter_(\d{7,})")
STEP_NAMES = {
    r"checkpoint[-_]?": "HF Trainer, TRL, Axolotl, ms-swift, diffusers; Accelerate's own naming; Ray Train",
    r"(?:global[-_]?)?step[-_=]?": "DeepSpeed, NeoX, verl, SkyRL, VeOmni; torchtitan, Levanter, prime-rl, OLMo-core",
    r"iter(?:ation)?[-_]?": "Megatron, slime, Megatron-Bridge, MMEngine",
    r"epoch[-_=]?\d+[-_]step[-_=]?": "Lightning, NeMo Automodel, ColossalAI",
    r"(?:.+-)?step=": "Lightning and NeMo with a metric in the name",
    r"epoch\d+epochstep\d+globalstep": "AReaL",
    r"ep\d+-ba": "Composer",
    r"epoch[-_=]?": "Accelerate's examples, torchtune",
}
_ENDINGS = r"(?:-rank0)?(?:-consumed_samples=[\d.]+?)?(?:-last)?(?:-v\d+)?(?:\.(?:ckpt|pt|pth(?:\.tar)?))?"
ANY_STEP = re.compile(f"(?:{'|'.join(STEP_NAMES)})(\\d+){_ENDINGS}")
#: torchtitan's, Lightning's and LeRobot's folders for steps.
_HOLDERS = ("checkpoint", "checkpoints", "ckpt", "ckpts")
#: Newest step from Lightning, LeRobot, Composer or fairseq, without a number in its name.
_LAST = re.compile(r"(?:checkpoint[-_])?last(?:-v\d+)?(?:\.ckpt|\.pt|\.pth\.tar)?|latest-rank0(?:\.pt)?")
#: lerobot, utils/constants.py
LEROBOTS_STATE = "training_state"
_LEROBOTS_RECORD = f"{LEROBOTS_STATE}/training_step.json"
#: olmo_core/train/checkpoint.py
OLMOS_MODEL, _OLMOS_STATE = "model_and_optim", "train"
_OLMOS_RECORD, _OLMOS_LAST = f"{_OLMOS_STATE}/rank0.pt", ".metadata.json"
#: Files that LeRobot and OLMo-core write with the model, by the model's folder.
_WRITTEN_WITH = {
    "pretrained_model": (
        *(f"pretrained_model/{name}" for name in ("config.json", "train_config.json")),
        *(f"pretrained_model/policy_{name}.json" for name in ("preprocessor", "postprocessor")),
        _LEROBOTS_RECORD,
        *(f"{LEROBOTS_STATE}/{name}" for name in ("rng_state.safetensors", "optimizer_state.safetensors")),
        *(f"{LEROBOTS_STATE}/{name}" for name in ("optimizer_param_groups.json", "scheduler_state.json")),
    ),
    OLMOS_MODEL: (_OLMOS_RECORD, _OLMOS_LAST),
}
#: Copy of timm's best step.
_BEST = "model_best.pth.tar"
#: lightning/fabric/strategies/fsdp.py; timm/utils/checkpoint_saver.py names its checkpoints by epoch
LIGHTNINGS_RECORD, _TIMMS_END = "meta.pt", ".pth.tar"
#: composer/core/state.py, composer/core/time.py
_COMPOSERS_KEYS = ("state", "timestamp", "Timestamp", "batch")
_FILES = (".ckpt", ".pt", ".pth", ".pth.tar")
_COUNTS_EPOCHS = re.compile(r"epoch[-_=]?\d+(?:\.\w+)?")
#: They hold the model for OLMo-core, prime-rl, LeRobot, NeMo-RL, SkyRL, NeMo.
STEP_PARTS = (OLMOS_MODEL, "trainer/", "pretrained_model", "policy/weights", "policy", "weights", "model")


@dataclass(frozen=True, slots=True)
class Step:
    path: Path
    number: int
    counts_epochs: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder's steps, newest first.

    At equal numbers, a step with HF Trainer's record comes first. `last` holds steps without a number in their names,
    and `best` copies of older steps.

    Example:
        run = run_at(Path("outputs"))
        newest = run.steps[0].path  # outputs/checkpoint-400
    """

    path: Path
    steps: tuple[Step, ...]
    last: tuple[Path, ...] = ()
    best: tuple[Path, ...] = ()

    def name(self, place: Path) -> str:
        """Return a place's name relative to the run, for `--tag`."""
        return str(place.relative_to(self.path)) if place.is_relative_to(self.path) else str(place)

    def holder(self, place: Path) -> Step | None:
        return next((step for step in self.steps if place.is_relative_to(step.path)), None)

    def tagged(self, tag: str) -> list[Step]:
        named = [step for step in self.steps if tag in (step.path.name, self.name(step.path))]
        if Path(tag).name == tag and tag not in ("", ".."):
            named += [step for step in self.steps if link_target(step.path.with_name(tag)) == step.path]
        return named or [step for step in self.steps if tag.isdecimal() and step.number == int(tag)]

    def recorded(self) -> list[Path]:
        said = [text for name in RECORDS if (text := recorded_step(self.path / name))]
        named = [self.path / text for text in said if Path(text).name == text and (self.path / text).is_dir()]
        return [*named, *(step.path for text in said for step in self.tagged(text))]

    def copies(self, step: Path) -> list[str]:
        """Return names of moving averages next to a step."""
        stem = re.sub(r"\.(?:ckpt|pt|pth|pth\.tar)$", "", step.name)
        found = re.compile(rf"{re.escape(stem)}[-_.]ema(?:\.\w+)?", re.IGNORECASE)
        return [self.name(step.with_name(name)) for name in entries_in(step.parent) if found.fullmatch(name)]

    def record_of(self, place: Path) -> str | None:
        top = place.relative_to(self.path).parts[0] if place != self.path and place.is_relative_to(self.path) else ""
        for name in RECORDS if top else ():
            said = recorded_step(self.path / name)
            if said and (said == top or (said.isdecimal() and step_number(top) == int(said))):
                return name
        return None


@once
def run_at(path: Path) -> Run:
    """Return the steps in `path` and in its inner step folders, by name only."""
    found = [step for holder in _holders(path) for step in _steps_in(holder)]

    def order(step: Step) -> tuple[int, bool, str]:
        return step.number, has_trainer_state(step.path), step.path.name

    last = [holder / name for holder in _holders(path) for name in entries_in(holder) if _LAST.fullmatch(name)]
    best = [holder / _BEST for holder in _holders(path) if found and (holder / _BEST).is_file()]
    steps = tuple(sorted(found, key=order, reverse=True))
    return Run(path, steps, tuple(one for one in last if not one.is_symlink()), tuple(best))


def folders_beside(run: Run) -> list[Path]:
    """Return folders next to a run's steps, without copies of steps like `checkpoint-4-merged`."""
    holders = dict.fromkeys([run.path, *(step.path.parent for step in run.steps)])
    known = {*holders, *run.last, *(step.path for step in run.steps)}
    names = tuple(f"{step.path.name}{end}" for step in run.steps for end in "-_.")
    found = (one for holder in holders for one in sorted(searched_folders(holder)) if one not in known)
    return [one for one in found if not one.is_symlink() and not one.name.startswith((".", *names))]


@once
def is_closed(folder: Path) -> bool:
    """Return True for a folder that can't be listed, like a disk's `lost+found` for its users."""
    try:
        if folder.is_dir():
            entries_in(folder)
    except StorageError:
        return True
    return False


def searched_folders(path: Path) -> list[Path]:
    """Return the folders in `path`, without closed ones that have no step's name."""
    return [one for one in folders_in(path) if ANY_STEP.fullmatch(one.name) or not is_closed(one)]


def has_record(path: Path) -> bool:
    return any((path / name).is_file() for name in RECORDS)


def runs_inside(path: Path) -> list[Path]:
    """Return folders with steps or a record of their own, like OpenRLHF's `_actor` and `_critic`."""
    own = {*_holders(path), *(step.path for step in run_at(path).steps)}
    inside = [one for one in searched_folders(path) if one not in own and not one.is_symlink()]
    return sorted(one for one in inside if has_record(one) or run_at(one).steps)


def has_trainer_state(path: Path) -> bool:
    return (path / TRAINER_STATE).is_file()


def _holders(path: Path) -> list[Path]:
    return [path, *(path / name for name in _HOLDERS if (path / name).is_dir())] if path.is_dir() else []


def _steps_in(folder: Path) -> Iterator[Step]:
    entries = entries_in(folder)
    for name, entry in () if has_rank_files(entries) else entries.items():
        number = step_number(name)
        if number is None and name.startswith(STAGED) and is_ranks_folder(folder / name):
            number = step_number(name.removeprefix(STAGED))
        if name.isdecimal() and _is_bare_step(folder / name):
            number = int(name)
        if number is not None and (is_folder(entry) or (name.endswith(_FILES) and entry.is_file())):
            yield Step(folder / name, number, _COUNTS_EPOCHS.fullmatch(name) is not None)


def is_step(folder: Path) -> bool:
    return ANY_STEP.fullmatch(folder.name) is not None or (folder.name.isdecimal() and _is_bare_step(folder))


def _is_bare_step(folder: Path) -> bool:
    """Return True for a step with a number as its name: LeRobot's, Nanotron's, Orbax's."""
    return folder.parent.name in _HOLDERS or any((folder / part).is_dir() for part in STEP_PARTS)


def is_ranks_folder(folder: Path) -> bool:
    """Return True for a folder of torch_checkpointing, also unfinished or without its record."""
    names = names_in(folder) if folder.is_dir() else []
    is_unfinished = folder.name.startswith(STAGED) and step_number(folder.name.removeprefix(STAGED)) is not None
    return (has_rank_files(names) or is_unfinished) and any(map(RANK_FILE.fullmatch, names))


def has_rank_files(names: Collection[str]) -> bool:
    return RANKS_METADATA in names or _RANK_0.issubset(name.partition(".")[0] for name in names)


def step_number(name: str) -> int | None:
    match = ANY_STEP.fullmatch(name)
    return None if match is None else int(match[1])


@once
def recorded_step(path: Path) -> str | None:
    """Return the text in `latest` or a tracker file, perhaps "". None without such a file.

    A broken link counts as "", and so does a folder in place of Megatron's tracker. A folder called `latest` is a step.
    Raise UnsafeError for a link out of its folder.
    """
    if path.is_dir():
        return "" if path.name == TRACKER else None
    if not path.exists():
        return "" if path.is_symlink() else None
    return read_file(confined(path.parent, path.name), _MAX_RECORDED).decode("utf-8", "replace").strip()


def trainer_steps(path: Path) -> list[Path]:
    return [step.path for step in run_at(path).steps if TRAINER_STEP.fullmatch(step.path.name)]


def one_with_state(step: Path) -> Path | None:
    """Return another step with HF Trainer's record if `step`, a `checkpoint-N`, lacks it."""
    if not TRAINER_STEP.fullmatch(step.name) or (step / TRAINER_STATE).exists():
        return None
    return next((other for other in trainer_steps(step.parent) if (other / TRAINER_STATE).is_file()), None)


def trainer_state(step: Path) -> list[Path]:
    """Return the files of Lightning's, LeRobot's or OLMo-core's trainer next to the model in a step's folder."""
    folders = [folder for name in (LEROBOTS_STATE, _OLMOS_STATE) if (folder := step / name).is_dir()]
    inside = [folder / name for folder in folders for name in files_in(folder)]
    return [one for one in (step / LIGHTNINGS_RECORD, step / _OLMOS_LAST, *inside) if one.is_file()]


def link_target(path: Path) -> Path:
    """Return the step that a link names, like LeRobot's `last`, or `path` itself.

    A link in the same folder may name anything.
    """
    if not path.is_symlink():
        return path
    target = os.readlink(path)
    if Path(target).name == target != "..":
        return path.with_name(target)
    real = Path(os.path.realpath(path))
    return real if is_step(real) else path


def missing_trainer_state(step: Path) -> list[str]:
    """Return the names of LeRobot's or OLMo-core's trainer state that only the run's other steps have."""
    for model, names in _WRITTEN_WITH.items():
        if (step / model).is_dir():
            others = [one.path for one in run_at(step.parent).steps if one.path != step and (one.path / model).is_dir()]
            return [
                one for one in names if not (step / one).exists() and any((other / one).exists() for other in others)
            ]
    return []


def lost_trainer_state(step: Path) -> str:
    """Return a sentence if a step of OLMo-core's has no trainer state, or "".

    OLMo-core's `Checkpointer.load` (train/checkpoint.py) then begins at step 0, and finds no step without its last
    file.
    """
    if not (step / OLMOS_MODEL).is_dir() or ANY_STEP.fullmatch(step.name) is None:
        return ""
    missing = [one for one in (_OLMOS_RECORD, _OLMOS_LAST) if not (step / one).exists()]
    why = {_OLMOS_RECORD: "OLMo-core begins at step 0 without it", _OLMOS_LAST: "OLMo-core finds no step without it"}
    return "; ".join(f"{one} is missing: {why[one]}" for one in missing)


def lost_step_number(step: Path) -> str:
    """Return a sentence if a step of HF Trainer with a schedule has no trainer state, or ""."""
    if not TRAINER_STEP.fullmatch(step.name) or (step / TRAINER_STATE).exists() or not (step / SCHEDULE).is_file():
        return ""
    return f"{TRAINER_STATE}, with the step's number, is missing: HF Trainer does not resume without it"


def enclosing_folders(path: Path) -> list[Path]:
    if path.name in STEP_PARTS and is_step(path.parent):
        return [path, path.parent, path.parent.parent]
    if path.name == "dist_ckpt":  # verl's, next to the model's config and tokenizer
        return [path, path.parent / "huggingface", path.parent]
    is_inside = ANY_STEP.fullmatch(path.name) or _LAST.fullmatch(path.name) or is_step(path.parent)
    return [path, path.parent] if is_inside else [path]


def recorded_number(step: Path) -> int | None:
    """Return the step's number that a trainer recorded, or timm's epoch."""
    for path in (step, *(step / name for name in (LIGHTNINGS_RECORD, _OLMOS_RECORD, _RANKS_STEP))):
        if path.is_file():
            with suppress(CkptError):  # its tensors are read elsewhere
                return _number_in(torchfile.read(confined(path.parent, path.name)).root, path)
    if not (step / _LEROBOTS_RECORD).is_file():
        return trainer_step(step)
    recorded = read_json(confined(step, _LEROBOTS_RECORD))
    number = recorded.get("step") if isinstance(recorded, dict) else None
    return number if type(number) is int else None


def _number_in(root: Any, path: Path) -> int | None:
    keys: tuple[str, ...] = ("epoch",) if path.name.endswith(_TIMMS_END) else ("global_step",)
    keys = _COMPOSERS_KEYS if isinstance(root, Mapping) and _COMPOSERS_KEYS[0] in root else keys
    for key in () if path.name == _RANKS_STEP else keys:
        root = root.get(key) if isinstance(root, Mapping) else None
    return root if type(root) is int else None


def trainer_step(folder: Path) -> int | None:
    if not os.path.lexists(folder / TRAINER_STATE):
        return None
    recorded = read_json(confined(folder, TRAINER_STATE))
    step = recorded.get("global_step") if isinstance(recorded, dict) else None
    return step if type(step) is int else None


def contradicting_folder(place: Path, step: int | None) -> str | None:
    """Return a sentence if a checkpoint for `step` is in a folder with another number.

    HF Trainer and Megatron only use the step in folder names, and LeRobot's link does. Other trainers' names may count
    something else, so a mismatch needs another step with this number.
    """
    if what := _copied_from(place):
        return what
    for folder in (place, place.parent):
        recorded = step if MEGATRON_STEP.fullmatch(folder.name) else None
        if TRAINER_STEP.fullmatch(folder.name):
            with suppress(CkptError):  # reported elsewhere
                recorded = trainer_step(folder)
        if any((folder / name).is_file() for name in (_LEROBOTS_RECORD, _OLMOS_RECORD)):
            with suppress(CkptError):
                recorded = recorded_number(folder)
        number = int(folder.name) if folder.name.isdecimal() else step_number(folder.name)
        if recorded is not None and recorded != number:
            return (
                f"the folder is called {folder.name}, but its files are from step {recorded}: was it renamed, or "
                "copied?"
            )
    return None


def _copied_from(place: Path) -> str | None:
    """Return a sentence if a file, or a folder of Lightning's or torch_checkpointing's, records the other step."""
    name = "file" if place.is_file() else "folder"
    records = (place, place / LIGHTNINGS_RECORD, place / _RANKS_STEP)
    if ANY_STEP.fullmatch(place.name) is None or not any(path.is_file() for path in records):
        return None
    recorded, own = recorded_number(place), step_number(place.name)
    if recorded in (None, own):
        return None
    for other in run_at(place.parent).steps:
        if other.path != place and other.number == recorded == recorded_number(other.path):
            return f"the {name} is called {place.name}, but it is from step {recorded}, like {other.path.name}"
    return None


def missing_last_of_lightning(step: Path) -> str | None:
    """Return the name of Lightning's record if a folder of shards lacks it. Lightning loads no such folder."""
    is_lightnings = step.name.endswith(".ckpt") and (step / OF_DCP).is_file() and not (step / MEGATRONS_COMMON).exists()
    return LIGHTNINGS_RECORD if is_lightnings and not (step / LIGHTNINGS_RECORD).exists() else None


def missing_last_of_megatron(step: Path, has_own_names: bool) -> str | None:
    """Return the name of Megatron's last file in a step if it is missing."""
    is_megatrons = (step / MEGATRONS_COMMON).is_file() or (has_own_names and has_megatrons_keys(step))
    if not is_megatrons or not (step / OF_DCP).is_file() or (step / MEGATRONS_LAST).exists():
        return None
    return MEGATRONS_LAST


def has_megatrons_keys(step: Path) -> bool:
    """Search the first DCP keys."""
    path = step / OF_DCP
    return path.is_file() and _MEGATRONS_KEYS.search(read_file(path, _MAX_METADATA)) is not None
