"""Megatron's `torch_dcp` format: PyTorch's distributed checkpoint of a model under torch's FSDP2.

    <run>/latest_checkpointed_iteration.txt
    <run>/iter_0000100/.metadata, __0_0.distcp, ...    without megatron-core's files

    model.<name>                    parameters, in the model's dtype, under in-memory module names
    model.<module>._extra_state
    optimizer.fp32_from_fp16_params.0.3, optimizer.optimizer.state.3.exp_avg, ...      with numbers, no names
    args, iteration, checkpoint_version, opt_param_scheduler, rng_state.0, ...

Tensors are stored whole, cut among ranks, but tensor-parallel ranks use the same names for their shards. The optimizer
identifies parameters by order, like in the `torch` format (`converters.megatron.optimizer_read`).

Format facts: megatron-core 0.19.2, training/checkpointing.py (`generate_state_dict`), training/arguments.py
(`--use-torch-fsdp2`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, LossError
from ckpt.base.text import pluralize
from ckpt.containers.dcp.metadata import read_metadata
from ckpt.containers.dcp.nested import nest
from ckpt.containers.dcp.tensors import ChunkedTensor
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT
from ckpt.plan.tensors import Shape
from converters.megatron.chunks import BUFFERS, EXTRA
from converters.megatron.dist.fsdp import check_layers, value_of
from converters.megatron.dist.keys import ObjectKey
from converters.megatron.dist.read import DistReading, is_models
from converters.megatron.optimizer import Optimizers, belongs, check_alike
from converters.names.megatron.model.axes import Grid
from converters.names.megatron.model.spelling import Spelling, in_order, layer_kinds, split_layer

_MODEL, _OPTIMIZER = "model", "optimizer"
_RANDOM = "rng_state"  # same names on all ranks; all load the stored one
_MASTERS = "fp32_from_fp16_params"


def read_folder(folder: Path, accepted: Collection[str] = ()) -> tuple[DistReading, Optimizers]:
    """Raise LossError if parts of the model are missing."""
    reading, metadata = DistReading(folder, accepted=accepted), read_metadata(folder)
    found, steps = reading.data.read(metadata), metadata.steps
    reading.data.count_ranks(folder)
    rest = ((path, leaf) for path, leaf in zip(steps, found, strict=True) if path[0] not in (_MODEL, _OPTIMIZER))
    reading.common = nest(((path, value_of(reading, leaf)) for path, leaf in rest), metadata.path)
    if (random := reading.common.pop(_RANDOM, None)) is not None:
        reading.objects[_RANDOM] = {ObjectKey(_RANDOM, (0, 0), (1, 1)): random}
    _check_ranks(reading)
    tensors: dict[str, ChunkedTensor] = {}
    for path, leaf in zip(steps, found, strict=True):
        if path[0] != _MODEL or str(path[-1]).endswith(f".{EXTRA}"):
            continue
        if len(path) != 2 or not is_models(name := str(path[1])) or not isinstance(leaf, ChunkedTensor):
            raise CorruptError(
                "unexpected entry in a Megatron-LM checkpoint",
                path=metadata.path,
                fqn=".".join(map(str, path)),
                expected="a tensor in embedding., decoder., mtp. or output_layer.",
            )
        tensors[name] = leaf
    kinds, spelling = layer_kinds(tensors), Spelling.of_names(tensors.keys())
    names = {name: spelling.canonical(name, kinds.get(split_layer(name)[0]), 0, 0) for name in tensors}
    for name, tensor in tensors.items():
        _add_tensor(reading, names[name], BUFFER if name.endswith(BUFFERS) else WEIGHT, tensor)
    check_layers(reading)
    stored = ((path[1:], leaf) for path, leaf in zip(steps, found, strict=True) if path[0] == _OPTIMIZER)
    optimizer = nest(stored, metadata.path)
    found_optimizers = _read_optimizer(reading, optimizer, tensors, names) if optimizer else Optimizers()
    check_alike(reading.shapes, found_optimizers, reading.args, folder)
    return reading, found_optimizers


def _add_tensor(reading: DistReading, fqn: str, role: str, tensor: ChunkedTensor) -> None:
    reading.add_stored((fqn, role), tensor.entry.shape, tensor.entry.dtype, tensor.placed)


def _read_optimizer(
    reading: DistReading, outer: Mapping[Any, Any], tensors: Mapping[str, ChunkedTensor], names: Mapping[str, str]
) -> Optimizers:
    """Add masters and states. They must match the model's parameters in order."""
    found = Optimizers(grad_scaler=outer.get("grad_scaler"))
    inner = outer.get(_OPTIMIZER, outer)
    groups = inner.get("param_groups") if isinstance(inner, Mapping) else None
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise CorruptError("this is not a Megatron optimizer", path=reading.folder, expected="param_groups")
    order = [name for name in in_order(tensors) if not name.endswith(BUFFERS)]
    masters = outer.get(_MASTERS, [])
    for number, group in enumerate(groups):
        shapes = {name: tensors[name].entry.shape for name in order}
        ones = [n for n in order if len(groups) == 1 or belongs(n, len(shapes[n]), group, reading.args)]
        halves = [name for name in ones if tensors[name].entry.dtype.itemsize == 2]
        ids, held = group.get("params"), masters[number] if number < len(masters) else []
        if isinstance(ids, list) and len(ids) < len(ones):
            raise LossError(
                "frozen parameters are not recorded: the file's states have only numbers",
                path=reading.folder,
                expected=f"states for all {pluralize(len(ones), 'parameter')}",
                found=f"states for {len(ids)}",
                hint="save it with Megatron-LM, --ckpt-format torch_dist, to keep the states' names",
            )
        if not isinstance(ids, list) or len(ids) != len(ones) or len(held) not in (0, len(halves)):
            raise CorruptError(
                "a param group does not fit the model's parameters",
                path=reading.folder,
                expected=f"{pluralize(len(ones), 'parameter')}, {pluralize(len(halves), 'master')}",
                found=f"{len(ids) if isinstance(ids, list) else ids} parameters, {pluralize(len(held), 'master')}",
            )
        for name, master in zip(halves, held, strict=False):
            _note(reading, found, names[name], MASTER, master, shapes[name])
        for identity, name in zip(ids, ones, strict=True):
            for state, value in (inner["state"].get(str(identity)) or {}).items():
                _note(reading, found, names[name], str(state), value, shapes[name])
        found.note_group(group, [names[name] for name in ones], str(reading.folder))
    return found


def _note(reading: DistReading, found: Optimizers, fqn: str, role: str, value: Any, shape: Shape) -> None:
    if isinstance(value, ChunkedTensor) and value.number is None and value.entry.shape == shape:
        _add_tensor(reading, fqn, role, value)
    elif isinstance(number := value.number if isinstance(value, ChunkedTensor) else value, int | float):
        found.states.agree([fqn], role, number, path=reading.folder)
    else:
        raise CorruptError(
            f"the optimizer's {role!r} doesn't fit its parameter",
            path=reading.folder,
            fqn=fqn,
            expected=list(shape),
            found=list(value.entry.shape) if isinstance(value, ChunkedTensor) else type(value).__name__,
        )


def _check_ranks(reading: DistReading) -> None:
    if not reading.args or (size := Grid.recorded(reading.args, reading.folder).tp) != 1:
        raise LossError(
            "torch_dcp may hold only one tensor parallel rank's parts: all ranks use the same names",
            path=reading.folder,
            expected="args with --tensor-model-parallel-size 1",
            found=f"{size} tensor parallel ranks" if reading.args else "no args",
            hint="load and save it with Megatron-LM, --ckpt-format torch_dist",
        )
