"""Megatron's `torch_dcp` format: PyTorch's distributed checkpoint of a model under torch's FSDP2.

    <run>/latest_checkpointed_iteration.txt
    <run>/iter_0000100/.metadata, __0_0.distcp, ...    and no file of megatron-core's

    model.<name>                    parameters, in the model's dtype, under the names of the modules in memory
    model.<module>._extra_state
    optimizer.fp32_from_fp16_params.0.3, optimizer.optimizer.state.3.exp_avg, ...      which have numbers and no names
    args, iteration, checkpoint_version, opt_param_scheduler, rng_state.0, ...

The model is read.  Its tensors are whole, cut among ranks; tensor parallel ranks save theirs under the same names.

Format facts: megatron-core 0.19.2, training/checkpointing.py (`generate_state_dict`), training/arguments.py
(`--use-torch-fsdp2`).
"""

from __future__ import annotations

from pathlib import Path

from ckpt.base.errors import CorruptError, LossError
from ckpt.containers.dcp.metadata import read_metadata
from ckpt.containers.dcp.nested import nest
from ckpt.containers.dcp.tensors import FoundTensor
from ckpt.plan.checkpoint import BUFFER, WEIGHT
from converters.megatron.chunks import BUFFERS, EXTRA
from converters.megatron.dist.fsdp import check_layers
from converters.megatron.dist.read import DistReading, is_models
from converters.names.megatron.model.axes import Grid
from converters.names.megatron.model.spelling import Spelling, layer_kinds, split_layer

_MODEL, _ARGS = "model", "args"
#: What is not read: the optimizer, and each rank's random states.
_LEFT_OUT = ("optimizer", "rng_state")


def read_folder(folder: Path) -> DistReading:
    """The folder of one iteration.

    Raises CorruptError for one that contradicts itself, LossError for one that does not hold all of the model.
    """
    reading, metadata = DistReading(folder), read_metadata(folder)
    found, steps = reading.data.read(metadata), metadata.steps
    reading.data.count_ranks(folder)
    reading.common = nest(
        ((path, leaf) for path, leaf in zip(steps, found, strict=True) if path[0] not in (_MODEL, *_LEFT_OUT)),
        metadata.path,
    )
    _check_ranks(reading)
    tensors: dict[str, FoundTensor] = {}
    for path, leaf in zip(steps, found, strict=True):
        if path[0] != _MODEL or str(path[-1]).endswith(f".{EXTRA}"):
            continue
        if len(path) != 2 or not is_models(name := str(path[1])) or not isinstance(leaf, FoundTensor):
            raise CorruptError(
                "an entry is not what Megatron-LM stores there",
                path=metadata.path,
                fqn=".".join(map(str, path)),
                expected="a tensor of embedding., decoder., mtp. or output_layer.",
            )
        tensors[name] = leaf
    kinds, spelling = layer_kinds(tensors), Spelling.of_names(tensors.keys())
    for name, tensor in tensors.items():
        canonical = spelling.canonical(name, kinds.get(split_layer(name)[0]), 0, 0)
        role = BUFFER if name.endswith(BUFFERS) else WEIGHT
        reading.add((canonical, role), tensor.entry.shape, tensor.entry.dtype, tensor.placed)
    check_layers(reading)
    reading.notes.append("the optimizer's state is left out: torch_dcp has numbers and no names of its parameters")
    return reading


def _check_ranks(reading: DistReading) -> None:
    """LossError where nothing says that there was one tensor parallel rank."""
    if not reading.args or (size := Grid.recorded(reading.args, reading.folder).tp) != 1:
        raise LossError(
            "the parts of one tensor parallel rank may stand for those of all: torch_dcp has them under the same names",
            path=reading.folder,
            expected="args that record --tensor-model-parallel-size 1",
            found=f"{size} tensor parallel ranks" if reading.args else "no args",
            hint="load and save it with Megatron-LM, --ckpt-format torch_dist",
        )
