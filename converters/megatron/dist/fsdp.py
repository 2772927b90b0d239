"""Megatron's `fsdp_dtensor` format: PyTorch's distributed checkpoint of a model under Megatron-FSDP.

    <run>/latest_checkpointed_iteration.txt
    <run>/iter_0000100/.metadata, __0_0.distcp, ...    without megatron-core's files

    model.module.<name>                               parameters; in mixed precision only the fp32 masters (the
                                                      ranks compute with rounded copies)
    model.module.<...linear_fc1.weight>_w, _v         gate and up rows of a SwiGLU MLP
    optimizer.state.module.module.module.<name>.exp_avg      (with `_w` and `_v`, too)
    optimizer.param_to_group_meta.module.module.module.<name>.lr     its param group's options
    args, iteration, checkpoint_version, opt_param_scheduler, rng_state.(0, 0), ...

Names have one `module.` per wrapper, and experts numbered over the whole model (since 0.16). Tensors are stored whole,
cut among ranks at any row. The exception is a gated MLP other than SwiGLU (in 0.15, also one of experts). One tensor
holds each tensor-parallel rank's gate rows, then its up rows.

States other than Adam's two are copied whole under `_w` and `_v`.

Format facts: megatron-core 0.15.0, 0.16.1 and 0.19.0, transformer/fsdp_dtensor_checkpoint.py,
optimizer/distrib_optimizer.py (`sharded_param_state_fsdp_dtensor`), distributed/fsdp/src/megatron_fsdp/
(param_and_grad_buffer.py, uneven_dtensor.py); Megatron-LM core_v0.16.1 and August 2026, training/checkpointing.py
(`generate_state_dict`, `preprocess_fsdp_dtensor_state_dict`, `get_rng_state`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, LossError, NotFoundError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.containers.dcp.metadata import Metadata, Path_, read_metadata
from ckpt.containers.dcp.nested import nest
from ckpt.containers.dcp.tensors import ChunkedTensor
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT
from ckpt.plan.dtypes import BFLOAT16, FLOAT16, FLOAT32
from ckpt.plan.tensors import Box, Extent, Shape, whole
from converters.megatron.chunks import BUFFERS
from converters.megatron.dist.keys import ObjectKey, TensorKey
from converters.megatron.dist.read import DistReading, is_models
from converters.megatron.optimizer import Optimizers, check_alike, plain
from converters.names.megatron.model.axes import Grid
from converters.names.megatron.model.spelling import LANGUAGE, Spelling, is_expert, layer_kinds, split_layer
from converters.names.megatron.model.splits import is_gated, packed, second_linear
from converters.optimizers.state_dicts import with_same_options

_HALF = re.compile(r"(?P<name>.*\.linear_fc1\.(?:weight|bias)\d*)_(?P<half>[wv])")
_PLACE = re.compile(r"\((\d+), (\d+)\)")
_MODEL, _OPTIMIZER = "model", "optimizer"
_STATES, _GROUPS = "state", "param_to_group_meta"
_RNG = "rng_state"
#: Index of the parameter's name in a path.
_NAMED: Mapping[Path_, int] = {(_MODEL,): 1, (_OPTIMIZER, _STATES): 2, (_OPTIMIZER, _GROUPS): 2}
#: Transformer Engine's copy of the parameter.
_MASTER_STATE = "master_param"
_SINKS = ".softmax_offset"
_EXPERT = re.compile(r"(?P<before>.*\.local_experts\.)(?P<expert>\d+)(?P<after>\..*)")
_LEGACY_EXPERTS = re.compile(r"\.mlp\.experts\.weight[12]$")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def read_folder(folder: Path, accepted: Collection[str] = ()) -> tuple[DistReading, Optimizers]:
    """Read an iteration.

    Raise LossError if parts are missing, NotFoundError for an unsupported form.
    """
    stored = _SavedState.of(folder, accepted)
    reading = stored.reading
    _note_model(stored)
    check_layers(reading)
    _check_experts(reading)
    _check_sinks(reading)
    _note_random_states(stored)
    found = Optimizers()
    _note_states(stored, found)
    _note_groups(stored, found)
    check_alike(reading.shapes, found, reading.args, folder)
    return reading, found


@dataclass
class _SavedState:
    """Saved state dict.

    `found` has the stored values by number in `metadata`. `parts` maps the first name of a path, or the optimizer's
    first two, to these numbers.
    """

    reading: DistReading
    metadata: Metadata
    found: Sequence[Any]
    parts: Mapping[Path_, Sequence[int]]
    options: dict[str | int, dict[str, Any]]
    rest: Mapping[str | int, Any]
    names: Mapping[str, TensorKey]
    grid: Grid
    shapes: dict[TensorKey, Shape] = field(default_factory=dict)
    masters: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, folder: Path, accepted: Collection[str]) -> _SavedState:
        reading, metadata = DistReading(folder, accepted=accepted), read_metadata(folder)
        _refuse_flat(metadata)
        found, steps = reading.data.read(metadata), metadata.steps
        reading.data.count_ranks(folder)
        parts: dict[Path_, list[int]] = {}
        options: dict[str | int, dict[str, Any]] = {}
        last, mine = None, {}
        for number in metadata.order:
            path = steps[number]
            if len(path) == 4 and path[1] == _GROUPS and path[0] == _OPTIMIZER and type(path[3]) is str:  # most paths
                if path[2] != last:
                    last, mine = path[2], options.setdefault(path[2], {})
                mine[path[3]] = value if type(value := found[number]) is not ChunkedTensor else value_of(reading, value)
            else:
                parts.setdefault(path[: 2 if path[0] == _OPTIMIZER else 1], []).append(number)
        leaves = (
            (steps[number], value_of(reading, found[number]))
            for top, numbers in parts.items()
            if top not in ((_MODEL,), (_OPTIMIZER, _STATES))
            for number in numbers
        )
        rest = nest(leaves, metadata.path)
        reading.common = {name: value for name, value in rest.items() if name not in (_OPTIMIZER, _RNG)}
        dtypes = {"bf16": BFLOAT16, "fp16": FLOAT16}
        reading.native = next((dtype for name, dtype in dtypes.items() if reading.args.get(name)), None)
        grid = Grid.recorded(reading.args, folder)
        paths = ((at, steps[number]) for top, at in _NAMED.items() for number in parts.get(top, ()))
        names = dict.fromkeys([*(path[at] for at, path in paths if len(path) > at), *options])
        return cls(reading, metadata, found, parts, options, rest, _meanings(map(str, names)), grid)

    def under(self, *top: str | int) -> Iterator[tuple[str, Path_, Any]]:
        """Yield key, path and stored value."""
        keys, steps = self.metadata.keys, self.metadata.steps
        return ((keys[number], steps[number], self.found[number]) for number in self.parts.get(top, ()))

    def unexpected_entry(self, key: str, expected: str) -> CorruptError:
        return CorruptError(
            "unexpected entry in a Megatron-FSDP checkpoint", path=self.metadata.path, fqn=key, expected=expected
        )


def _refuse_flat(metadata: Metadata) -> None:
    """Refuse a flat state dict from Megatron-LM's tools/checkpoint/checkpoint_inspector.py."""
    for path in metadata.steps:
        if len(path) == 1 and (key := str(path[0])).startswith(f"{_MODEL}."):
            raise NotFoundError(
                "the state dict's names are not nested in Megatron-FSDP's way",
                path=metadata.path,
                fqn=key,
                hint="was this made from a torch_dist checkpoint? Convert the original, or a later save; or "
                "use the format dcp to read the folder with its own names",
            )


def value_of(reading: DistReading, found: Any) -> Any:
    if not isinstance(found, ChunkedTensor):
        return found
    if len(found.placed) != 1 or found.placed[0][0] != whole(found.entry.shape):
        raise CorruptError(
            "a training state tensor is not stored in one piece", path=reading.folder, fqn=found.entry.key
        )
    return StoredTensor(found.placed[0][1])


def _meanings(names: Iterable[str]) -> dict[str, TensorKey]:
    """Map stored names to a whole-model tensor and half."""
    parts: dict[str, tuple[str, int | None]] = {}
    for name in names:
        bare = re.sub(r"^(?:module\.)+", "", name).removeprefix(LANGUAGE)
        match = _HALF.fullmatch(bare)
        parts[name] = (match["name"], "wv".index(match["half"])) if match else (bare, None)
    own = {bare for bare, _ in parts.values()}
    kinds, spelling = layer_kinds(own), Spelling.of_names(own)
    if (hybrid := next((bare for bare in own if packed(bare) or packed(bare.rpartition(".")[0])), None)) is not None:
        raise NotFoundError(
            "packed layers (gated delta nets, Mamba's mixers) are not supported in Megatron-FSDP checkpoints",
            fqn=hybrid,
            hint="load and save it with Megatron-LM, --ckpt-format torch_dist",
        )
    canonical = {bare: spelling.canonical(bare, kinds.get(split_layer(bare)[0]), 0, 0) for bare in own}
    return {name: TensorKey(canonical[bare], half=half) for name, (bare, half) in parts.items()}


# -- model ---------------------------------------------------------------------------------------------------


def _note_model(stored: _SavedState) -> None:
    """Treat fp32 tensors in a 16-bit model as masters."""
    reading = stored.reading
    found: dict[TensorKey, ChunkedTensor] = {}
    for key, path, tensor in stored.under(_MODEL):
        name = stored.names.get(str(path[1])) if len(path) == 2 else None
        if name is None or not is_models(name.name) or not isinstance(tensor, ChunkedTensor):
            raise stored.unexpected_entry(key, "a tensor in embedding., decoder., mtp. or output_layer.")
        if name in found:
            raise CorruptError("two keys name the same tensor", path=stored.metadata.path, fqn=key)
        found[name] = tensor
        stored.shapes[name] = tensor.entry.shape
    for name, tensor in found.items():
        role = WEIGHT
        if name.name.endswith(BUFFERS):
            role = BUFFER
        elif reading.native is not None and tensor.entry.dtype == FLOAT32:
            role = MASTER
            stored.masters.add(name.name)
        _note(stored, name, role, tensor)
    if not reading.args:
        reading.notes.append(
            "no Megatron-LM arguments are recorded: all parameters become weights in their stored dtype (in "
            "mixed precision, the masters' dtype)"
        )


def _note(stored: _SavedState, name: TensorKey, role: str, tensor: ChunkedTensor, copy: int = 0) -> None:
    shape, placed = tensor.entry.shape, tensor.placed
    if name.half is not None and not shape:
        raise stored.unexpected_entry(tensor.entry.key, "rows")
    if name.half is None and (size := _tensor_ranks(stored, name.name, shape)) > 1:
        placed = list(_by_halves(stored, tensor, size))
    parts = [(inner, place) for box, extent in placed for _, inner, place in name.parts(shape, box, extent)]
    stored.reading.add_stored((name.name, role), name.shape(shape), tensor.entry.dtype, parts, copy)


def _tensor_ranks(stored: _SavedState, fqn: str, shape: Shape) -> int:
    """Return the number of ranks whose gated MLP rows are stacked."""
    second = second_linear(fqn)
    other = stored.shapes.get(TensorKey(second)) if second else None
    if other is None or len(other) != 2 or not shape or not is_gated(shape, other):
        return 1
    if not stored.reading.args:
        raise LossError(
            "gate and up rows are stored by tensor parallel rank, but the number of ranks is not recorded",
            path=stored.metadata.path,
            fqn=fqn,
            expected="args",
        )
    return stored.grid.etp if is_expert(fqn) else stored.grid.tp


def _by_halves(stored: _SavedState, tensor: ChunkedTensor, size: int) -> Iterator[tuple[Box, Extent]]:
    each, rest = divmod(tensor.entry.shape[0], 2 * size)
    if rest:
        raise stored.unexpected_entry(tensor.entry.key, f"rows divisible by twice {size} tensor parallel ranks")
    for box, extent in tensor.placed:
        start, stop = box.offsets[0], box.offsets[0] + box.sizes[0]
        for block in range(start // each, -(-stop // each)):
            first, last = max(start, block * each), min(stop, (block + 1) * each)
            rank, half = divmod(block, 2)
            row = (half * size + rank) * each + first - block * each
            inner = Box((first - start, *(0 for _ in box.offsets[1:])), (last - first, *box.sizes[1:]))
            yield Box((row, *box.offsets[1:]), inner.sizes), extent.narrow(inner)


def _recorded_number(reading: DistReading, name: str) -> int | None:
    value = reading.args.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise CorruptError(f"the recorded argument {name} is not a number", path=reading.folder, found=repr(value))
    return value


def _are_all(found: set[int], number: int) -> bool:
    """Compare counts first: the recorded number is arbitrary."""
    return len(found) == number and found == set(range(number))


def check_layers(reading: DistReading) -> None:
    found = {int(match[1]) for fqn, _ in reading.placed if (match := _LAYER.match(fqn))}
    number = _recorded_number(reading, "num_layers") or max(found, default=-1) + 1
    if not _are_all(found, number):
        raise LossError(
            "model layers are missing: pipeline stages save theirs under the same names",
            path=reading.folder,
            expected=f"{pluralize(number, 'layer')}",
            found=f"{pluralize(len(found), 'layer')}",
            hint="FSDP is for --pipeline-model-parallel-size 1",
        )


def _check_experts(reading: DistReading) -> None:
    found: dict[tuple[str, str], set[int]] = {}
    for fqn, _ in reading.placed:
        if match := _EXPERT.fullmatch(fqn):
            found.setdefault((match["before"], match["after"]), set()).add(int(match["expert"]))
    most = max((max(numbers) + 1 for numbers in found.values()), default=0)
    count = _recorded_number(reading, "num_experts") or _recorded_number(reading, "num_moe_experts") or most
    for (before, after), numbers in found.items():
        if not _are_all(numbers, count):
            raise LossError(
                "experts are missing: expert parallel ranks saved theirs under the same names",
                path=reading.folder,
                fqn=f"{before}*{after}",
                expected=f"{pluralize(count, 'expert')}",
                found=f"{pluralize(len(numbers), 'expert')}",
                hint="save with megatron-core 0.16 or later: it numbers experts across all ranks",
            )
    legacy = next((fqn for fqn, _ in reading.placed if _LEGACY_EXPERTS.search(fqn)), None)
    if legacy is not None and _recorded_number(reading, "expert_model_parallel_size") not in (None, 1):
        raise LossError(
            "only one expert parallel rank's experts are stored: megatron-core doesn't number the legacy "
            "grouped GEMM's weights",
            path=reading.folder,
            fqn=legacy,
            hint=Message("--expert-model-parallel-size 1, or another {ckpt_format}"),
        )


def _check_sinks(reading: DistReading) -> None:
    """Raise LossError for sinks with fewer heads: megatron-core 0.16.1 leaves their sharding unmarked."""
    heads = reading.args.get("num_attention_heads")
    for (fqn, _), (shape, _) in reading.shapes.items():
        if fqn.endswith(_SINKS) and heads and shape != (heads,):
            raise LossError(
                "only one tensor parallel rank's attention sinks are stored",
                path=reading.folder,
                fqn=fqn,
                expected=[heads],
                found=list(shape),
            )


def _note_random_states(stored: _SavedState) -> None:
    """Add random states under `torch_dist`'s places."""
    states = stored.rest.get(_RNG)
    if states is None:
        return
    reading, grid = stored.reading, stored.grid
    places = {str(name): _PLACE.fullmatch(str(name)) for name in states} if isinstance(states, Mapping) else {}
    if not places or None in places.values():
        raise stored.unexpected_entry(_RNG, "(0, 0)")
    if grid.ep > 1:
        reading.notes.append("random state is left out: ranks sharing experts stored only one rank's state")
        return
    reading.objects[_RNG] = {
        ObjectKey(_RNG, (int(match[1]), int(match[2])), (grid.pp, grid.tp)): states[name]
        for name, match in places.items()
        if match
    }


# -- optimizer -----------------------------------------------------------------------------------------------


def _note_states(stored: _SavedState, found: Optimizers) -> None:
    for top in stored.parts:
        if top[0] != _OPTIMIZER:
            continue
        for key, path, leaf in stored.under(*top):
            if path[1:2] == (_STATES,) and len(path) == 4:
                _note_state(stored, found, key, stored.names[str(path[2])], str(path[3]), leaf)
            elif len(path) < 4 or path[1] != _GROUPS:
                raise NotFoundError(
                    "this optimizer state layout is not supported",
                    path=stored.metadata.path,
                    fqn=key,
                    expected=f"{_STATES}.<parameter>.<name>, {_GROUPS}.<parameter>.<option>",
                )


def _note_state(stored: _SavedState, found: Optimizers, key: str, name: TensorKey, state: str, tensor: Any) -> None:
    shape = stored.shapes.get(name)
    if not isinstance(tensor, ChunkedTensor) or tensor.number is not None:
        number = tensor.number if isinstance(tensor, ChunkedTensor) else tensor
        if not isinstance(number, int | float):
            raise stored.unexpected_entry(key, "a tensor or a number")
        found.states.agree([name.name], state, number, path=stored.metadata.path)
        return
    if tensor.entry.dtype not in (FLOAT32, BFLOAT16):
        raise NotFoundError(
            "this state's dtype needs scales or remainders, but they are not stored",
            path=stored.metadata.path,
            fqn=key,
            expected="float32 or bfloat16",
            found=tensor.entry.dtype,
            hint="train without --use-precision-aware-optimizer, or with states in fp32",
        )
    role = MASTER if state == _MASTER_STATE else state
    if role in (WEIGHT, BUFFER) or (role == MASTER and name.name in stored.masters):
        raise stored.unexpected_entry(key, "a state's name")
    if tensor.entry.shape == shape:
        _note(stored, name, role, tensor)
    elif shape is not None and name.half is not None and tensor.entry.shape == name.shape(shape):
        _note(stored, replace(name, half=None), role, tensor, copy=name.half)
    else:
        raise CorruptError(
            "an optimizer tensor's shape doesn't match its parameter",
            path=stored.metadata.path,
            fqn=key,
            expected="no tensor without a parameter" if shape is None else list(shape),
            found=list(tensor.entry.shape),
        )


def _note_groups(stored: _SavedState, found: Optimizers) -> None:
    optimizer = stored.rest.get(_OPTIMIZER, {})  # dicts are stored item by item
    for name, nested in optimizer.get(_GROUPS, {}).items():
        options = stored.options.setdefault(name, {})
        if not isinstance(nested, Mapping) or nested.keys() & options.keys():
            raise stored.unexpected_entry(f"{_OPTIMIZER}.{_GROUPS}.{name}", "a param group's options")
        options.update(nested)
    for group in with_same_options({stored.names[str(name)].name: own for name, own in stored.options.items()}):
        options = {option: plain(value) for option, value in group.options.items()}
        found.note_group(options, group.fqns, stored.metadata.path, by_all=True)
