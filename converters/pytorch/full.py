"""Full state dicts in torch files: `pytorch_model.bin`, `pytorch_model_fsdp.bin` with `optimizer.bin`, `model.pt`.

Read:

    pytorch_model_fsdp.bin, optimizer.bin       Accelerate and HF Trainer, FSDP with FULL_STATE_DICT
    pytorch_model.bin, optimizer.bin|.pt        Accelerate's save_state, zero_to_fp32.py, transformers before 5
    pytorch_model.bin.index.json, shards        transformers before 5
    model.pt and any other torch file           a state dict, or {"model": ..., "optimizer": ..., ...}

Written: only weights as `pytorch_model.bin` (sharded, with an index, above the shard size limit). With an optimizer
`pytorch_model_fsdp.bin` and `optimizer.bin`, for Accelerate and HF Trainer to resume under FSDP 1 or 2 with
FULL_STATE_DICT on any number of ranks. The other training state goes into `training_state.pt`, and torch's LR scheduler
also into `scheduler.pt`.

Format facts: accelerate 1.15 (utils/fsdp_utils.py, `save_fsdp_model`, `load_fsdp_optimizer`; utils/constants.py),
transformers 5.23 (trainer.py) and 4.57 (modeling_utils.py), torch 2.13 (optim, distributed/checkpoint/state_dict.py).

Names: engines write transformers' in-memory names, transformers 4's `save_pretrained` the Hub's. Nothing records the
kind: `converters.names.transformers.relation` keeps names that already have the other form.

Ties: two names with the same storage, offset, shape and strides are one tensor. The first name is the owner. FSDP2
gathers each name separately, so the model's config and the optimizer, which has one of the names, decide.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt.base.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    LossError,
    NeverWholeError,
    NotFoundError,
    UsageError,
)
from ckpt.base.text import Brief, pluralize
from ckpt.base.words import Message, Note
from ckpt.containers.torchfile import read as torchfile
from ckpt.containers.torchfile.tree import tensors_in
from ckpt.containers.torchfile.values import StoredDict, StoredTensor, is_part, is_state_dict
from ckpt.containers.torchfile.write import FromSource, NewStorage, NewTensor, torch_file
from ckpt.containers.weights import (
    MAX_INDEX,
    SHARD,
    check_shard_set,
    index_file,
    index_is_missing,
    index_of,
    is_shard_set,
    missing_file,
    parse_index,
    shards,
)
from ckpt.move.files import confined
from ckpt.move.json_files import read_json
from ckpt.move.listing import entries_in, is_folder
from ckpt.move.source import read_file
from ckpt.plan.checkpoint import (
    MASTER,
    MODEL_ROLES,
    TRANSFORMERS,
    WEIGHT,
    Checkpoint,
    Format,
    Layout,
    QuantizedStates,
    ReadRequest,
    Target,
    TargetFile,
)
from ckpt.plan.precision import CAST_SOURCES, Choice, choices, describe, kept_in_training
from ckpt.plan.tensors import Tensor, Whole, whole
from ckpt.runs.file_table import TORCH_SUFFIXES, TRAINING_STATE, fits, is_of
from ckpt.runs.finding import Steps, find_step, number_of, numbered, optimizers_fit
from ckpt.runs.half_checkpoints import optimizer_alone
from ckpt.runs.model_files import read_config
from ckpt.runs.steps import enclosing_folders, is_ranks_folder, step_number, trainer_step
from ckpt.runs.trainer_files import run_companions
from ckpt.state.naming import clean_names
from ckpt.state.plain import is_plain
from converters.optimizers.state_dicts import is_optimizer, take_apart
from converters.pytorch.keys import other_model, several_models
from converters.pytorch.optimizer_file import optimizer_file
from converters.pytorch.state_dicts import Reading, step_of, tie_as_declared

FSDP_MODEL = "pytorch_model_fsdp.bin"
MODEL = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
OPTIMIZERS = ("optimizer.bin", "optimizer.pt")
SCHEDULERS = ("scheduler.pt", "scheduler.bin")
STATE = "training_state.pt"

#: Names used by frameworks and scripts, in search order.
_FRAMEWORKS = (FSDP_MODEL, MODEL, INDEX)
_SCRIPTS = ("model.pt", "model.pth", "model.bin", "model.ckpt")
#: Rank files, not read here.
_OF_RANKS = ("*_world_size_*_rank_*.pt", "pytorch_model_fsdp_*rank*.bin", "optimizer_*rank*.bin")
#: Torch files from other formats.
_OTHERS = (
    STATE,
    "*model_states.pt",
    "*optim_states.pt",
    *_OF_RANKS,
    "adapter_model*.bin",
    "model_optim_rng.pt",
    "distrib_optim.pt",
    "common.pt",
    "*train_state.pt",
)
_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json", "pytorch_lora_weights.safetensors")
#: Skip torch files next to Accelerate's sharded folder or an adapter.
_SHARDED = "pytorch_model_fsdp_0"
_ADAPTER = {"adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"}
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_states", "optimizers")
_RANKS_HINT = (
    "use the format `fsdp-ranks` for files from all ranks: each has only the model's state dict, under verl's or "
    "Accelerate's name: model_world_size_W_rank_R.pt or pytorch_model_fsdp_0_rankR.bin"
)
_SHARD_NAME = "pytorch_model-{:05d}-of-{:05d}.bin"
_LARGE = 1 << 20


class Full(Format):
    name = "full"
    title = "full state dict in torch files"
    aliases = ("torch",)
    namespace = TRANSFORMERS
    carries_blocks = True
    carries_quantized = True
    takes = ("world_size", "max_shard_size")

    def find(self, path: Path, tag: str | None) -> Path | None:
        """Return a torch file, or a folder with one (named by `tag`).

        Skip a folder with safetensors weights: its `pytorch_model.bin` is only a copy.
        """
        if path.is_file():
            return path if _is_weights_name(path.name) and _is_torch_file(path, or_large=True) else None
        found = find_step(path, tag, _STEPS)
        return path if found is None and tag is not None and _holds_model(path, tag) else found

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        """Describe the state dicts. Every tensor of the model has the role `weight`; files don't mark buffers."""
        folder = path.parent if path.is_file() else path
        name = path.name if path.is_file() else _weights_in(folder)
        if name is None:
            raise NotFoundError("found no torch file with model weights", path=path)
        reading = _Reading(folder)
        if isinstance(name, list):
            _read_shards(reading, name)
        elif name.endswith(".index.json"):
            _read_sharded(reading, name)
        else:
            _read_bundle(reading, name, request.tag)
        number = number_of(path)
        if path.is_dir() or name == FSDP_MODEL or number is not None:
            _read_training_files(reading, number)
        folders = tuple(p for p in (request.config, *enclosing_folders(folder)) if p is not None)
        config = read_config(folders)
        if reading.states.groups:
            trained = {fqn for group in reading.states.groups for fqn in group.fqns}
            tie_as_declared(reading.tensors, reading.ties, config, trained)
        return Checkpoint(
            path=str(path),
            format=self.name,
            tensors=reading.tensors,
            files=reading.sources.files,
            framework="accelerate" if name == FSDP_MODEL else None,
            ties=reading.ties,
            state=reading.state(reading.step),
            config=config,
            folders=tuple(str(p) for p in folders),
            notes=tuple(reading.notes),
            computed=reading.states.computed,
            quantized=QuantizedStates(reading.states.quantized, reading.states.blocks),
            unread=reading.states.left_out(),
            unmapped_optimizer=reading.unmapped,
        )

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        trained = bool(checkpoint.optimizer_states or checkpoint.state.param_groups)
        chosen = trained_weights(checkpoint, layout, trained)
        extra = checkpoint.state.extra_state or {}
        if trained:
            if "max_shard_size" in layout.of_files():
                what = "training state needs exactly two files, for the model and the optimizer"
                raise UsageError(what, found=Message("{max_shard_size}"), hint=Message("leave {max_shard_size} out"))
            files = [
                torch_file(FSDP_MODEL, _model(chosen, checkpoint.ties, extra)),
                optimizer_file(OPTIMIZERS[0], checkpoint),
            ]
        else:
            files = _weight_files(chosen, checkpoint.ties, extra, layout.max_shard_size)
        states, dropped = state_files(checkpoint)
        beside = run_companions(checkpoint, layout.world_size, layout.dtype, deepspeed=False, own=states)
        return Target(
            files=(*beside.files, *files),
            dropped=(*_dropped(checkpoint, chosen), *beside.dropped, *dropped),
            notes=(*_notes(checkpoint, chosen, layout, trained), *beside.notes),
        )


FULL = Full()


# -- finding -------------------------------------------------------------------------------------------------


def _is_weights_name(name: str) -> bool:
    if name.endswith(".bin.index.json"):
        return True
    if SHARD.fullmatch(name):
        return False
    return name.endswith(TORCH_SUFFIXES) and not is_of(name, *TRAINING_STATE) and not fits(name, _OTHERS)


def _is_torch_file(path: Path, *, or_large: bool = False) -> bool:
    """Return True for a zip archive, torch's magic number from before 1.6, or an index name.

    Large files are judged by name unless requested, because other programs also write `.bin`.
    """
    if path.name.endswith(".json"):
        return True
    if path.stat().st_size > _LARGE:
        return or_large or not path.name.endswith(".bin") or "pytorch_model" in path.name
    head = read_file(path, 16)
    # Empty and zeroed files are reported as damaged.
    return head.startswith(b"PK\3\4") or b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19" in head or not head.strip(b"\0")


def _weights_in(folder: Path) -> str | list[str] | None:
    """Return the torch file, its index, or the shards without an index."""
    entries = {name: is_folder(entry) for name, entry in entries_in(folder).items()}
    names = {name for name, is_one in entries.items() if not is_one}
    if ".metadata" in names or is_ranks_folder(folder):
        return None
    if FSDP_MODEL in names:
        return FSDP_MODEL
    is_of_ranks = any(fits(name, _OF_RANKS) for name in names)
    if is_of_ranks or _SHARDED in entries or names.intersection(_SAFETENSORS):
        return None
    is_adapter = bool(_ADAPTER & names)
    for name in _FRAMEWORKS if is_adapter else (*_FRAMEWORKS, *_SCRIPTS):
        if name in names:
            return name
    if is_adapter:
        return None
    shard_set = sorted(name for name in names if SHARD.fullmatch(name))
    if is_shard_set(shard_set) and shard_set[0].endswith(".bin"):
        return shard_set
    others = sorted(name for name in names if _is_weights_name(name) and name[0] != "." and not name.endswith(".json"))
    is_one = len(others) == 1 and step_number(others[0]) is None  # a step is found by its number
    return others[0] if is_one and _is_torch_file(folder / others[0]) else None


_STEPS = Steps(lambda folder: _weights_in(folder) is not None)

# -- reading -------------------------------------------------------------------------------------------------


@dataclass
class _Reading(Reading):
    step: int | None = None
    has_optimizer: bool = False

    def add(self, tensor: Tensor, path: str) -> None:
        if tensor.key in self.tensors:
            raise CorruptError("the tensor is in two files", path=path, fqn=tensor.fqn)
        self.tensors[tensor.key] = tensor


def _read_bundle(reading: _Reading, name: str, tag: str | None = None) -> None:
    path, root = reading.load(name)
    if not isinstance(root, Mapping):
        raise NotFoundError("this torch file has no state dict", path=path, found=type(root).__name__)
    root, tag = _unbundled(reading, name, root, tag, path)
    bundles = _bundles_in(root)
    others = _models_in(root)
    named = [key for key in _MODEL_KEYS if key in others]
    key = tag if tag in others else named[0] if named else None
    is_open = len(named) > 1 or (not named and len(others) > 1 and not is_state_dict(root))
    if is_open and tag not in others:
        raise several_models(named or others, path)
    if key is None and not is_state_dict(root) and len(others) == 1:
        key = others[0]
        reading.notes.append(f"the model is taken from {key!r}, the only state dict in {name}")
    if key is None and not is_state_dict(root):
        if is_optimizer(root) or any(is_optimizer(_only(root.get(name))) for name in _OPTIMIZER_KEYS):
            raise optimizer_alone(Path(path))
        raise NotFoundError(
            "this torch file has no state dict",
            path=path,
            expected="names with tensors, or a dict with `model`",
            found=", ".join(map(str, list(root)[:8])),
        )
    # torchtitan has the model's names beside `optimizer` and similar entries.
    rest = {k: v for k, v in root.items() if (_is_entry(k, v) if key is None else k != key)}
    _add_model(reading, {k: v for k, v in root.items() if k not in rest} if key is None else root[key], path)
    reading.notes += [
        other_model(other)
        for other in (*others, *bundles)
        if other not in (key, tag) and other in rest and tag not in others
    ]
    optimizer = next((key for key in _OPTIMIZER_KEYS if _only(rest.get(key)) is not None), None)
    if optimizer is not None and key == tag and len(others) > 1 and (is_open or key not in _MODEL_KEYS):
        reading.notes.append(f"{optimizer!r} is kept as training state: nothing records its model")
        optimizer = None
    if optimizer is not None:
        states = _only(rest.pop(optimizer))
        if not _add_optimizer(reading, states, path):
            _check_all_trained(states, [value for name, value in root.items() if name != optimizer], path)
    for key, value in rest.items():
        if is_optimizer(value):
            reading.notes.append(f"{key!r} looks like an optimizer with its own name: kept as training state")
        elif isinstance(value, list) and len(value) > 1 and any(map(is_optimizer, value)):
            reading.notes.append(f"{key!r} holds several optimizers: kept as training state")
    reading.items |= {str(k): v for k, v in rest.items() if v is not None}
    reading.step = step_of(rest)


def _models_in(root: Mapping[str, Any]) -> list[str]:
    """Prefer state dicts with dots in their names: models, not statistics."""
    found = [k for k, v in root.items() if is_state_dict(v) and k not in _OPTIMIZER_KEYS and "rng" not in str(k)]
    return [k for k in found if k in _MODEL_KEYS or any("." in name for name in root[k])] or found


def _unbundled(
    reading: _Reading, name: str, root: Mapping[str, Any], tag: str | None, path: str
) -> tuple[Mapping[str, Any], str | None]:
    """Return the bundle with the model to use, and the rest of the tag.

    Entries next to a single bundle are its training state.
    """
    while (bundles := _bundles_in(root)) and tag not in _models_in(root):
        beside: Mapping[str, Any] = {}
        key = _bundle_of(tag, bundles)
        if key is not None:
            tag = str(tag)[len(key) + 1 :] or None
        elif _has_own_model(root):
            break
        elif len(bundles) > 1:
            raise several_models(bundles, path)
        elif _has_named_model(root[bundles[0]]):
            key = bundles[0]
            beside = {other: value for other, value in root.items() if other != key and other not in root[key]}
            reading.notes.append(f"the model is taken from {key!r}, the only one with a model in {name}")
        else:
            break
        left = [str(other) for other in root if other != key and other not in beside]
        reading.notes += [f"not carried from {name}: {', '.join(left)}"] if left else []
        root = {**beside, **root[key]}
    return root, tag


def _bundles_in(root: Mapping[str, Any]) -> list[str]:
    """Return the keys of bundles: `actor`, `critic`, or an `ema` next to a model.

    Next to a model, other dicts of tensors are statistics.
    """
    is_bundle = _has_named_model if _has_own_model(root) else _has_model
    return [
        key
        for key, value in root.items()
        if isinstance(key, str) and "rng" not in key and key not in _OPTIMIZER_KEYS and is_bundle(value)
    ]


def _has_own_model(root: Mapping[str, Any]) -> bool:
    return is_state_dict(root) or bool(_models_in(root))


def _has_model(value: Any) -> bool:
    return isinstance(value, Mapping) and not is_optimizer(value) and bool(_models_in(value) or _has_named_model(value))


def _has_named_model(value: Any) -> bool:
    """Search a dict for a state dict with a model's key or with dots in its names."""
    if not isinstance(value, Mapping) or is_state_dict(value) or is_optimizer(value):
        return False
    models = _models_in(value)
    return any(key in _MODEL_KEYS or any("." in name for name in value[key]) for key in models) or any(
        _has_named_model(inner) for key, inner in value.items() if key not in _OPTIMIZER_KEYS
    )


def _bundle_of(tag: str | None, bundles: Sequence[str]) -> str | None:
    return next((key for key in bundles if f"{tag}.".startswith(f"{key}.")), None)


def _holds_model(folder: Path, key: str) -> bool:
    name = _weights_in(folder) if folder.is_dir() else None
    if name is None or isinstance(name, list) or name.endswith(".json"):
        return False
    try:
        root = torchfile.read(confined(folder, name)).root
    except CkptError:
        return False
    return isinstance(root, Mapping) and (key in _models_in(root) or _bundle_of(key, _bundles_in(root)) is not None)


def _only(value: Any) -> Any:
    """Return the only item of a list, like Lightning's `optimizer_states`, or of a dict, like Composer's."""
    if isinstance(value, list):
        value = value[0] if len(value) == 1 else None
    if isinstance(value, Mapping) and len(value) == 1 and is_optimizer(only := next(iter(value.values()))):
        return only
    return None if isinstance(value, str) else value or None


def _is_entry(name: str, value: Any) -> bool:
    """Return True for the trainer's own entry: a dict or a number."""
    return "." not in name and not isinstance(value, StoredTensor) and not is_part(value)


def _read_sharded(reading: _Reading, name: str) -> None:
    """Read an index's shards. Each must hold exactly the tensors listed for it."""
    path = confined(reading.folder, name)
    index = parse_index(read_json(path, unique=True, max_bytes=MAX_INDEX), path, "torch file", (".bin", ".pt", ".pth"))
    by_file: dict[str, set[str]] = {}
    for fqn, shard in index.weight_map.items():
        by_file.setdefault(shard, set()).add(fqn)
    for shard in sorted(by_file):
        _read_shard(reading, shard, by_file[shard])


def _read_shards(reading: _Reading, names: list[str]) -> None:
    """Read shards without an index. HF Trainer can't resume without it."""
    check_shard_set(names, reading.folder)
    check_has_index(reading.folder, names[0])
    for shard in names:
        _read_shard(reading, shard, None)
    reading.notes.append(index_is_missing(names[0]))


def check_has_index(folder: Path, shard: str) -> None:
    """Raise IncompleteError for shards without an index next to HF Trainer's or Accelerate's optimizer."""
    if first(folder, OPTIMIZERS) is not None:
        what = "the shard index is missing: it is written last, and engines need it to resume"
        raise IncompleteError(what, path=folder, expected=index_of(shard), found="every shard")


def _read_shard(reading: _Reading, shard: str, expected: set[str] | None) -> None:
    if expected is not None and not (reading.folder / shard).is_file():
        raise missing_file(reading.folder / shard, dict.fromkeys(sorted(expected), shard))
    path, root = reading.load(shard)
    if not isinstance(root, Mapping):
        raise CorruptError("a shard has no state dict", path=path, found=type(root).__name__)
    expected = {*root} if expected is None else expected
    for fqn in expected ^ set(root):
        lost = "the index names a tensor missing from its file"
        what = lost if fqn in expected else "the file has a tensor missing from the index"
        raise CorruptError(what, path=path, fqn=str(fqn))
    _add_model(reading, root, path)


def _add_model(reading: _Reading, state: Mapping[str, Any], path: str) -> None:
    names = clean_names(state, path)
    owners: dict[Any, str] = {}
    extra: dict[str, Any] = {}
    for name, value in state.items():
        fqn = names[name]
        if is_part(value):
            # Under FSDP2 with FULL_STATE_DICT, Accelerate 1.13 (fsdp_utils.py, _get_model_state_dict) saves only rank
            # 0's parts of an adapter, but Trainer the whole.
            beside = (
                f"adapter_model.safetensors is whole: use `ckpt merge-lora {reading.folder}` to merge it, or continue "
                f"without its optimizer on any number of GPUs: `ckpt resume {reading.folder} --model-only`"
            )
            is_whole = (reading.folder / "adapter_model.safetensors").is_file()
            raise (NeverWholeError if is_whole else IncompleteError)(
                "this file has only one rank's parts, not whole tensors",
                path=path,
                fqn=fqn,
                hint=beside if is_whole else _RANKS_HINT,
            )
        if not isinstance(value, StoredTensor):
            extra[fqn] = value
            continue
        extent = value.extent
        if extent.numel and owners.setdefault(extent, fqn) != fqn:
            reading.ties[fqn] = owners[extent]
            continue
        reading.add(Tensor(fqn, WEIGHT, extent.dtype, extent.shape, Whole(extent)), path)
    if extra:
        reading.items["extra_state"] = {**reading.items.get("extra_state", {}), **extra}


def _add_optimizer(reading: _Reading, content: Any, path: str) -> bool:
    reading.has_optimizer = True
    order = [fqn for fqn, role in reading.tensors if role == WEIGHT]  # registration order
    is_mapped = reading.add_optimizer(content, path, reading.tensors, reading.ties, order)
    reading.tensors |= reading.states.tensors
    return is_mapped


def _check_all_trained(optimizer: Any, others: Sequence[Any], path: str) -> None:
    """Raise IncompleteError if more parameters have states than the file's other entries have tensors.

    An optimizer may also train parameters outside the model, such as a loss's.
    """
    trained = sum(map(bool, take_apart(optimizer, path).states.values()))
    tensors = sum(value.extent.dtype in CAST_SOURCES for value in tensors_in(others))
    if trained > tensors:
        raise IncompleteError(
            "the optimizer has states for parameters missing from the file",
            path=path,
            expected=pluralize(trained, "trained parameter"),
            found=pluralize(tensors, "tensor"),
        )


def _read_training_files(reading: _Reading, number: int | None) -> None:
    optimizer = optimizer_name(reading, number)
    if optimizer is not None and not reading.has_optimizer:
        path, root = reading.load(optimizer)
        _add_optimizer(reading, root, path)
    own = own_state(reading)
    reading.step = own.pop("step", reading.step)
    reading.items |= own
    scheduler = first(reading.folder, tuple(numbered(name, number or 0) for name in SCHEDULERS))
    if scheduler is not None and "lr_scheduler" not in reading.items:
        reading.items["lr_scheduler"] = reading.load(scheduler)[1]
    if reading.step is None:
        reading.step = trainer_step(reading.folder)


def optimizer_name(reading: Reading, number: int | None) -> str | None:
    """Return the optimizer's file name. A save with several models has one per model `number`."""
    found = first(reading.folder, tuple(numbered(name, number or 0) for name in OPTIMIZERS))
    if number is None or optimizers_fit(reading.folder):
        return found
    if first(reading.folder, OPTIMIZERS) is not None:
        what = "the save has different numbers of models and optimizers, and does not record the pairs"
        reading.leave_out_optimizer(f"left out the optimizer states: {what}")
    return None


def own_state(reading: Reading) -> dict[str, Any]:
    if first(reading.folder, (STATE,)) is None:
        return {}
    path, root = reading.load(STATE)
    if not isinstance(root, Mapping):
        raise CorruptError("this is not a training state", path=path, expected="a dict", found=type(root).__name__)
    return {str(key): value for key, value in root.items()}


def first(folder: Path, names: tuple[str, ...]) -> str | None:
    """Return the first existing name, even if opening it fails."""
    return next((name for name in names if os.path.lexists(folder / name)), None)


# -- writing -------------------------------------------------------------------------------------------------


def trained_weights(checkpoint: Checkpoint, layout: Layout, trained: bool = True) -> dict[str, Choice]:
    """Return the tensor to write for each parameter and buffer.

    Beside an optimizer it is the unchanged master, unless `--dtype` is given. FSDP and Accelerate do the same.
    """
    chosen = (kept_in_training if trained else choices)(checkpoint, layout.dtype)
    return {fqn: chosen[fqn] for fqn, role in checkpoint.tensors if role in MODEL_ROLES}


def _model(chosen: Mapping[str, Choice], ties: Mapping[str, str], extra: Mapping[str, Any]) -> StoredDict:
    """Return the model's state dict. Tied names share a storage."""
    state = StoredDict("OrderedDict")
    aliases: dict[str, list[str]] = {}
    for alias, owner in ties.items():
        if alias not in chosen:
            aliases.setdefault(owner, []).append(alias)
    for fqn, choice in chosen.items():
        shape = choice.tensor.shape
        storage = NewStorage(choice.dtype, choice.tensor.numel, (FromSource(choice.key, whole(shape)),))
        for name in (fqn, *aliases.get(fqn, ())):
            state[name] = NewTensor(choice.dtype, shape, storage=storage)
    state.update(extra)
    return state


def _weight_files(
    chosen: Mapping[str, Choice], ties: Mapping[str, str], extra: Mapping[str, Any], max_size: int
) -> list[TargetFile]:
    """Fill shards greedily in the model's order."""
    packs = shards(chosen, lambda fqn: chosen[fqn].tensor.numel * chosen[fqn].dtype.itemsize, max_size)
    if len(packs) == 1:
        return [torch_file(MODEL, _model(chosen, ties, extra))]
    files, weight_map = [], {}
    for position, pack in enumerate(packs, start=1):
        name = _SHARD_NAME.format(position, len(packs))
        inside = {alias: owner for alias, owner in ties.items() if owner in pack and alias not in chosen}
        state = _model({fqn: chosen[fqn] for fqn in pack}, inside, extra if position == len(packs) else {})
        files.append(torch_file(name, state))
        weight_map.update(dict.fromkeys(state, name))
    total = sum(choice.tensor.numel * choice.dtype.itemsize for choice in chosen.values())
    return [*files, index_file(INDEX, weight_map, total_size=total)]


def state_files(checkpoint: Checkpoint) -> tuple[list[TargetFile], list[str]]:
    content: dict[str, Any] = {}
    dropped = []
    if checkpoint.state.step is not None:
        content["step"] = checkpoint.state.step
    for name, value in replace(checkpoint.state, extra_state=None).entries().items():  # the model's file holds it
        if not is_plain(value):
            dropped.append(f"training state {name}: objects of the framework's")
            continue
        try:
            torch_file(STATE, value)
        except LossError as error:
            dropped.append(f"training state {name}: {error.what}")
        else:
            content[name] = value
    files = [torch_file(STATE, content)] if content else []
    scheduler = content.get("lr_scheduler")
    if isinstance(scheduler, Mapping) and "last_epoch" in scheduler:  # torch's; DeepSpeed's schedulers differ
        files.append(torch_file(SCHEDULERS[0], scheduler))
    return files, dropped


def _dropped(checkpoint: Checkpoint, chosen: Mapping[str, Choice]) -> list[str]:
    written = {choice.key for choice in chosen.values()}
    masters = [key for key in checkpoint.tensors if key[1] == MASTER and key not in written]
    if masters and checkpoint.optimizer_states:
        return [Note("the masters of {}: {dtype} requests another precision", pluralize(len(masters), "parameter"))]
    return []


def _notes(checkpoint: Checkpoint, chosen: Mapping[str, Choice], layout: Layout, trained: bool) -> list[str]:
    if not trained:
        return describe(chosen, checkpoint, layout.dtype)
    masters = sum(choice.tensor.role == MASTER and not choice.is_cast for choice in chosen.values())
    what = "written like their masters, as the optimizer updates these"
    notes: list[str] = [Brief(f"{pluralize(masters, 'parameter')} {what}")] if masters else []
    if not checkpoint.state.param_groups:
        notes.append("the source records no param groups: keep the live optimizer's groups when you load this")
    return notes
