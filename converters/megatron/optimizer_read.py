"""Megatron-LM's `torch` format: the optimizer's state, in the file of the model or in `distrib_optim.pt`.

No file names a parameter.  The order in which an optimizer knows them is that of the modules, which is the order of
the model's own entries in the same file; which of them are in which param group follows from what Megatron puts
there: what has one dim or is called bias is not decayed.  Everything is checked against shapes and lengths.

    plain        {"optimizer": {"state": {0: {...}}, "param_groups": [...]}, "fp32_from_fp16_params": [[...]]}
    fp32 model   {"state": ..., "param_groups": [...]}
    distributed  {"optimizer": {"param_groups": [...]}}, and in distrib_optim.pt
                 {"buckets_coalesced": True, 0: {(bfloat16, float32): {"param": ..., "exp_avg": ..., ...}}, 1: ...}

A list of these stands for several optimizers: that of dense parameters, and that of experts on other ranks.

Format facts: megatron-core 0.16.1, optimizer/__init__.py (`_get_param_groups`, `get_megatron_optimizer`),
optimizer/optimizer.py, optimizer/distrib_optimizer.py; see `converters.megatron.buffers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt.containers.torchfile.scalars import read_scalar
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.errors import CorruptError, NotFoundError
from ckpt.plan.checkpoint import MASTER, ParamGroup
from converters.megatron.buffers import bucket_sizes, find_buffer
from converters.megatron.read import DISTRIBUTED, Local, RankFile, Reading

#: Under which name the masters stand in distrib_optim.pt; the others there are optimizer states.
_PARAM = "param"
_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")
#: What decides which param group is which (optimizer.py, `param_group_identifier_keys`).
IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")


@dataclass
class Optimizers:
    """What has been read of the optimizers of all ranks."""

    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: dict[tuple[Any, ...], tuple[dict[str, None], Mapping[str, Any]]] = field(default_factory=dict)
    items: dict[str, Any] = field(default_factory=dict)

    def param_groups(self, order: Sequence[str]) -> tuple[ParamGroup, ...]:
        """The groups, each with its parameters in the order of the model."""
        place = {fqn: number for number, fqn in enumerate(order)}
        return tuple(
            ParamGroup(tuple(sorted(fqns, key=place.__getitem__)), options) for fqns, options in self.groups.values()
        )


@dataclass(frozen=True, slots=True)
class Trained:
    """A parameter of a rank that its optimizer has: where in the model it is, and which group it belongs to."""

    local: Local
    vp: int


def read_optimizers(reading: Reading, files: Sequence[RankFile]) -> Optimizers:
    """Note all optimizer states in `reading`.

    CorruptError where files do not fit the model, NotFoundError for a layout that is not read.
    """
    found = Optimizers()
    with_one = [file for file in files if file.content.get("optimizer") is not None]
    if not with_one:
        return found
    for file in files:
        content = file.content.get("optimizer")
        if content is None:
            raise CorruptError(
                "the file of a rank has no optimizer, and others have one", path=file.path, rank=file.rank.number
            )
        _read_rank(reading, found, file, content if isinstance(content, list) else [content])
    return found


def _read_rank(reading: Reading, found: Optimizers, file: RankFile, optimizers: Sequence[Any]) -> None:
    members = _members(reading, file, len(optimizers))
    states: Any = None
    for number, (content, trained) in enumerate(zip(optimizers, members, strict=True)):
        inner, outer = _unwrap(content, file)
        _note_groups(found, inner["param_groups"], trained, file, reading.args)
        if "grad_scaler" in outer:
            found.items.setdefault("grad_scaler", outer["grad_scaler"])
        if isinstance(inner.get("state"), Mapping):
            _read_plain(reading, found, file, trained, inner, outer)
            continue
        if states is None:
            states = _distributed(reading, file, len(optimizers))
        _read_distributed(reading, found, file, trained, inner, states[number], number)


def _unwrap(content: Any, file: RankFile) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The torch optimizer's state dict, and what stands around it."""
    outer = content if isinstance(content, Mapping) else {}
    inner = outer.get("optimizer", outer.get("optimizer_state_dict", outer))
    if not isinstance(inner, Mapping) or not isinstance(inner.get("param_groups"), list):
        raise CorruptError("this is no optimizer of Megatron", path=file.path, expected="param_groups")
    return inner, outer


def _members(reading: Reading, file: RankFile, count: int) -> list[list[Trained]]:
    """The parameters of each of a rank's optimizers, in its order.

    Experts have an optimizer of their own where they are spread over ranks (`allreduce` of a parameter).  A first
    optimizer for the first chunk alone comes with `overlap_param_gather_with_optimizer_step`.
    """
    everything = [Trained(local, vp) for vp, chunk in enumerate(file.chunks) for local in chunk if not local.is_buffer]
    apart = reading.grid.ep > 1
    dense = [one for one in everything if not (apart and one.local.is_expert)]
    groups = [dense]
    if reading.args.get("overlap_param_gather_with_optimizer_step"):
        groups = [[one for one in dense if one.vp == 0], [one for one in dense if one.vp > 0]]
    if apart and len(groups) < count:
        groups.append([one for one in everything if one.local.is_expert])
    if len(groups) != count:
        raise CorruptError(
            "the file has another number of optimizers than a model of this kind",
            path=file.path,
            rank=file.rank.number,
            expected=len(groups),
            found=count,
        )
    return groups


# -- param groups --------------------------------------------------------------------------------------------


def is_decayed(name: str, ndim: int, args: Mapping[str, Any]) -> bool:
    """Whether weight decay applies to a parameter, as `get_standard_config_overrides` has it."""
    if args.get("apply_wd_to_qk_layernorm") and ("q_layernorm." in name or "k_layernorm." in name) and ndim == 1:
        return True
    return not (name.endswith(".bias") or ndim == 1)


def is_decoupled(name: str, args: Mapping[str, Any]) -> bool:
    """Whether a parameter has the learning rate of the embedding and the output layer."""
    return args.get("decoupled_lr") is not None and name.startswith(("embedding.word_embeddings.", "output_layer."))


def belongs(name: str, ndim: int, group: Mapping[str, Any], args: Mapping[str, Any]) -> bool:
    """Whether a parameter, under its module's own name, is of the kind that this param group is for."""
    multiplier = group.get("wd_mult", group.get("pre_wd_mult", 1.0))
    if (multiplier != 0.0) != is_decayed(name, ndim, args):
        return False
    decoupled = bool(group.get("is_decoupled_lr")) or (
        args.get("decoupled_lr") is not None and group.get("max_lr") == args["decoupled_lr"]
    )
    return decoupled == is_decoupled(name, args)


def _grouped(
    groups: Sequence[Any], trained: Sequence[Trained], file: RankFile, args: Mapping[str, Any]
) -> list[list[Trained]]:
    if not all(isinstance(group, Mapping) for group in groups):
        raise CorruptError("a param group is no dict", path=file.path)
    if len(groups) == 1:
        return [list(trained)]
    return [
        [one for one in trained if belongs(one.local.name, len(one.local.stored.shape), group, args)]
        for group in groups
    ]


def _note_groups(
    found: Optimizers,
    groups: Sequence[Any],
    trained: Sequence[Trained],
    file: RankFile,
    args: Mapping[str, Any],
) -> None:
    for group, members in zip(groups, _grouped(groups, trained, file, args), strict=True):
        options = {name: value for name, value in group.items() if name != "params"}
        key = tuple(str(options.get(name, options.get(f"pre_{name}"))) for name in IDENTITY)
        fqns, _ = found.groups.setdefault(key, ({}, options))
        fqns |= dict.fromkeys(piece.name for one in members for piece in one.local.pieces)
        step = options.get("step")
        if isinstance(step, StoredTensor):
            step = read_scalar(step.extent)
        if type(step) in (int, float):
            _note_scalar(found, "step", [piece.name for one in members for piece in one.local.pieces], step, file)


def _note_scalar(found: Optimizers, name: str, fqns: Sequence[str], value: Any, file: RankFile) -> None:
    scalars = found.scalars.setdefault(name, {})
    for fqn in fqns:
        if scalars.setdefault(fqn, value) != value:
            raise CorruptError(
                f"ranks disagree in the optimizer's {name!r} of a parameter",
                path=file.path,
                rank=file.rank.number,
                fqn=fqn,
                expected=scalars[fqn],
                found=value,
            )


# -- the plain optimizer -------------------------------------------------------------------------------------


def _read_plain(
    reading: Reading,
    found: Optimizers,
    file: RankFile,
    trained: Sequence[Trained],
    inner: Mapping[str, Any],
    outer: Mapping[str, Any],
) -> None:
    groups = inner["param_groups"]
    members = _grouped(groups, trained, file, reading.args)
    for group, ones in zip(groups, members, strict=True):
        ids = group.get("params")
        if not isinstance(ids, list) or len(ids) != len(ones):
            raise _misfit(file, "a param group", len(ones), len(ids) if isinstance(ids, list) else ids)
        for identity, one in zip(ids, ones, strict=True):
            for name, value in inner["state"].get(identity, {}).items():
                _note_state(reading, found, file, one, str(name), value)
    common = inner["state"].get("common_step")
    if common is not None:
        step = read_scalar(common.extent) if isinstance(common, StoredTensor) else common
        _note_scalar(found, "step", [piece.name for one in trained for piece in one.local.pieces], step, file)
    masters = next((outer[name] for name in _MASTERS if name in outer), None)
    if masters is None:
        return
    for ones, values in zip(members, masters, strict=False):
        halves = [one for one in ones if one.local.stored.dtype.itemsize == 2]
        if len(values) != len(halves):
            raise _misfit(file, "a group of masters", len(halves), len(values))
        for one, value in zip(halves, values, strict=True):
            _note_tensor(reading, file, one, MASTER, value)


def _note_state(reading: Reading, found: Optimizers, file: RankFile, one: Trained, name: str, value: Any) -> None:
    if isinstance(value, StoredTensor) and value.shape:
        _note_tensor(reading, file, one, name, value)
        return
    scalar = read_scalar(value.extent) if isinstance(value, StoredTensor) else value
    _note_scalar(found, name, [piece.name for piece in one.local.pieces], scalar, file)


def _note_tensor(reading: Reading, file: RankFile, one: Trained, role: str, value: Any) -> None:
    if not isinstance(value, StoredTensor) or value.shape != one.local.stored.shape:
        raise CorruptError(
            f"the optimizer's {role!r} is not that of the parameter in its place",
            path=file.path,
            rank=file.rank.number,
            fqn=one.local.name,
            expected=list(one.local.stored.shape),
            found=list(value.shape) if isinstance(value, StoredTensor) else type(value).__name__,
        )
    reading.add(one.local, role, value.extent, file.path, file.rank)


def _misfit(file: RankFile, what: str, expected: Any, found: Any, path: str | None = None) -> CorruptError:
    return CorruptError(
        f"{what} of the optimizer does not fit the model's parameters",
        path=path or file.path,
        rank=file.rank.number,
        expected=expected,
        found=found,
        hint="parameters that were frozen are not known from the file; the model alone: remove its `optimizer`",
    )


# -- the distributed optimizer -------------------------------------------------------------------------------


def _distributed(reading: Reading, file: RankFile, count: int) -> list[Any]:
    """The content of `distrib_optim.pt`: an entry for each optimizer, None where another rank gathered it."""
    path = Path(file.path).with_name(DISTRIBUTED)
    if not path.is_file():
        raise CorruptError(
            "the distributed optimizer's file of a rank is missing: it has a part of every state",
            path=path,
            rank=file.rank.number,
            expected=DISTRIBUTED,
            found="no file",
        )
    content: Any = reading.load(path)
    states = content if isinstance(content, list) else [content]
    if len(states) != count:
        raise CorruptError(
            "the file has another number of optimizers than the one beside it",
            path=path,
            rank=file.rank.number,
            expected=count,
            found=len(states),
        )
    return states


def _read_distributed(
    reading: Reading,
    found: Optimizers,
    file: RankFile,
    trained: Sequence[Trained],
    inner: Mapping[str, Any],
    state: Any,
    number: int,
) -> None:
    path = str(Path(file.path).with_name(DISTRIBUTED))
    if state is None:
        if number == 0 and file.rank.in_stage < reading.grid.tp:
            raise CorruptError(
                "a rank's file lacks the state of its parameters", path=path, rank=file.rank.number, found="None"
            )
        return
    if not isinstance(state, Mapping):
        raise CorruptError("this is no distributed optimizer's state", path=path, found=type(state).__name__)
    if not state.get("buckets_coalesced"):
        raise NotFoundError(
            "the distributed optimizer's file is of Megatron-LM before May 2024: lists of buckets",
            path=path,
            expected="buckets_coalesced",
            hint="load and save it with a newer Megatron-LM (--ckpt-convert-update-legacy-dist-opt-format)",
        )
    buffers = list(_buffers(trained))
    stored = [(key, value) for key, value in state.items() if key != "buckets_coalesced"]
    if [key for key, _ in stored] != list(range(len(buffers))):
        raise _misfit(file, "the state", f"{len(buffers)} buffers", f"{len(stored)} buffers", path)
    for (vp, members), (_, by_dtype) in zip(buffers, stored, strict=True):
        if not isinstance(by_dtype, Mapping) or len(by_dtype) != 1:
            raise CorruptError("a buffer of the distributed optimizer has not one dtype", path=path)
        _read_buffer(reading, file, path, vp, members, next(iter(by_dtype.values())))


def _buffers(trained: Sequence[Trained]) -> Iterator[tuple[int, list[Trained]]]:
    """The parameters of each buffer: of one chunk and one dtype, in the order in which they first occur."""
    buffers: dict[tuple[int, str], list[Trained]] = {}
    for one in trained:
        buffers.setdefault((one.vp, one.local.stored.dtype.name), []).append(one)
    for (vp, _), members in sorted(buffers.items(), key=lambda item: item[0][0]):
        yield vp, members


def _read_buffer(
    reading: Reading, file: RankFile, path: str, vp: int, members: Sequence[Trained], tensors: Any
) -> None:
    flat = {name: value for name, value in tensors.items() if isinstance(value, StoredTensor)}
    if not isinstance(tensors, Mapping) or _PARAM not in flat:
        raise CorruptError("a buffer of the distributed optimizer has no parameters", path=path, expected=_PARAM)
    numels = [one.local.stored.extent.numel for one in members]
    length = flat[_PARAM].extent.numel
    everything = sum(local.stored.extent.numel for local in file.chunks[vp])
    sizes = list(bucket_sizes(reading.args, file.rank.pp, vp, everything))
    buffer = find_buffer(numels, [one.local.shared for one in members], sizes, length)
    if buffer is None:
        raise _misfit(
            file, "a buffer", f"{sum(numels)} elements and gaps between parameters", f"{length} elements", path
        )
    for name, value in flat.items():
        if value.extent.numel != length or len(value.shape) != 1:
            raise CorruptError(
                f"the states of a buffer differ in length: {name}", path=path, expected=length, found=value.shape
            )
        for one, start, numel in zip(members, buffer.starts, numels, strict=True):
            extent = value.extent.flat(start, start + numel)
            reading.add(one.local, MASTER if name == _PARAM else str(name), extent, path, file.rank)
