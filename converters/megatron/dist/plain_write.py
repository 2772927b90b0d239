"""Writer for Megatron's `torch_dcp` and `fsdp_dtensor`, read by `converters.megatron.dist.torch_dcp` and `fsdp`.

An engine requests each entry of its own state dict and fails if one is missing. So all possible options of its param
groups are written, even if the source does not record them (megatron-core 0.19.2, training/checkpointing.py,
`load_checkpoint`, `_load_base_checkpoint`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ckpt.base.errors import LossError, UsageError
from ckpt.base.text import Brief
from ckpt.base.words import Keyword, Message, joined
from ckpt.containers.dcp.metadata import Path_
from ckpt.containers.dcp.write import SourceTensor, Writing, flatten
from ckpt.containers.torchfile.values import Record
from ckpt.containers.torchfile.write import NewTensor, state_number
from ckpt.plan.checkpoint import BUFFER, MASTER, Checkpoint, Key, Layout, Target, TargetFile
from ckpt.plan.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from ckpt.plan.tensors import Box, Shape
from ckpt.runs.steps import TRACKER
from ckpt.runs.trainer_files import model_files
from ckpt.state import adam
from converters.megatron.chunks import Chunk, ChunkTensor, MegatronModel, describe_model, refuse_encoder
from converters.megatron.entries import RANDOM, RERUN, to_write
from converters.megatron.folder import iteration_folder
from converters.megatron.optimizer import ADAM, MegatronOptimizer
from converters.megatron.optimizer_write import RankOptimizers
from converters.megatron.read import OTHER_ORDER
from converters.names.megatron.facts import MegatronFacts
from converters.names.megatron.model.axes import Grid
from converters.names.megatron.model.splits import GATED
from converters.names.megatron.options import FSDP_DTENSOR, TORCH_DCP

_AXES = ("tp", "pp", "ep", "etp", "vpp")
_ONLY = "shard_0.0_1.1"  # single stage and tensor-parallel rank
_HALF = ("_w", "_v")
_FC1 = re.compile(r".*\.mlp\.(?:(?:experts\.local_experts\.\d+|shared_experts)\.)?linear_fc1\.(?:weight|bias)")
_GROUPED_FC1 = re.compile(r".*\.mlp\.experts\.linear_fc1\.(?:weight|bias)\d+")
#: Group options in Transformer Engine's Adam, missing from torch's.
_OF_ENGINE = {"bias_correction": True}


def lay_out(checkpoint: Checkpoint, layout: Layout, form: str) -> Target:
    requested = {name: value for name in _AXES if (value := layout.options.get(name)) not in (None, 1)}
    if requested:
        raise UsageError(
            f"{form} needs tensor, pipeline and expert parallel size 1",
            expected="sizes of 1",
            found=joined(", ", (Message("{}", Keyword(name, value)) for name, value in requested.items())),
            hint=Message("leave these out, or {ckpt_format=torch_dist}"),
        )
    ones = Layout(layout.dtype, layout.max_shard_size, layout.world_size, {**layout.options, **dict.fromkeys(_AXES, 1)})
    model = describe_model(checkpoint, ones)
    refuse_encoder(model, form)
    ours = {"ckpt_format": form, "use_torch_fsdp2": form == TORCH_DCP, "use_megatron_fsdp": form == FSDP_DTENSOR}
    ours["use_distributed_optimizer"] = form == FSDP_DTENSOR
    model = replace(model, args={**model.args, **ours})
    (chunk,) = model.chunks(next(iter(model.grid.ranks())))
    folder = iteration_folder(checkpoint.state.step)
    random = _random_states(model)
    without = "resume with --no-load-rng"
    of_torch_dist = ("content_metadata", RERUN)
    per_rank = {} if random is None else {RANDOM: random}
    kept, dropped = to_write(model, per_rank, *of_torch_dist, without_random=without)
    if form == FSDP_DTENSOR and model.has_optimizer and checkpoint.state.grad_scaler is not None:
        dropped.append("training state grad_scaler: Megatron-FSDP doesn't save it, so the loss scale starts over")
    writing = Writing(model.args["world_size"], f"{folder}/")
    write = _torch_dcp if form == TORCH_DCP else _fsdp_dtensor
    writing.add_all(write(model, chunk, random))
    common = {
        "args": Record("argparse", "Namespace", (), state=dict(model.args)),
        "checkpoint_version": kept.get("checkpoint_version", 3.0),
        "iteration": checkpoint.state.step or 0,
        "num_floating_point_operations_so_far": kept.get("num_floating_point_operations_so_far", 0),
    }
    writing.add_all(flatten(common | {name: value for name, value in kept.items() if name not in common}))
    step = checkpoint.state.step
    files = (
        *writing.files(),
        *model_files(checkpoint, layout.dtype)[0],
        TargetFile.of_bytes(TRACKER, folder.encode() if step is None else str(step).encode()),
    )
    notes: list[str] = [Brief(f"Megatron, {form}: for any number of ranks")]
    if form == FSDP_DTENSOR and not model.args.get("swiglu") and GATED in map(model.sections, model.chosen):
        notes.append("only for TP 1: without SwiGLU, Megatron-FSDP stores a gated MLP's rows by tensor parallel rank")
    return Target(files, dropped=tuple(dropped), notes=tuple(notes))


def _random_states(model: MegatronModel) -> Any:
    """Return the random states, if the source has a single stage and tensor rank."""
    state = model.checkpoint.state
    source, places = Grid.of_args(state.args or {}), state.per_rank.get(RANDOM, {})
    if state.engine != "megatron" or (source.tp, source.pp) != (1, 1) or set(places) != {_ONLY}:
        return None
    return places[_ONLY]


# -- under torch's FSDP2 -------------------------------------------------------------------------------------


class _WholeOptimizer(RankOptimizers):
    def new_tensor(self, one: ChunkTensor, key: Key, dtype: DType) -> Any:
        return _source(self.model, key, dtype, one.shape)

    def _state_of(self, one: ChunkTensor, step_in_group: bool) -> dict[str, Any]:
        return super()._state_of(one, step_in_group=False)  # torch's Adam requires it here

    def _options(self, options: dict[str, Any], *kind: Any) -> dict[str, Any]:
        return _with_all_options(super()._options(options, *kind))


def _with_all_options(options: dict[str, Any]) -> dict[str, Any]:
    return {**_OF_ENGINE, **adam.missing_for_torch(options, None), **options}


def _torch_dcp(model: MegatronModel, chunk: Chunk, random: Any) -> Iterator[tuple[Path_, Any]]:
    """Yield the state dict's leaves."""
    if not model.has_optimizer or random is None:
        raise LossError(
            "Megatron-LM always needs optimizer and random states to load torch_dcp",
            path=model.checkpoint.path,
            expected="optimizer states, and random states from one stage and one tensor parallel rank",
            found="no optimizer" if not model.has_optimizer else "no matching random states",
            hint=Message("{ckpt_format=torch_dist}"),
        )
    if model.checkpoint.facts_of(MegatronFacts).own_module_order:
        raise LossError(
            f"{OTHER_ORDER}, and the optimizer identifies parameters only by their order",
            hint=Message("{ckpt_format=torch_dist}"),
        )
    if model.tied:
        raise LossError(
            "Megatron-LM's --use-torch-fsdp2 needs a model with untied embeddings",
            path=model.checkpoint.path,
            hint=Message("{ckpt_format=torch_dist}"),
        )
    for one in chunk.tensors:
        choice = model.chosen[one.fqn]
        yield ("model", one.name), _source(model, choice.key, choice.dtype, one.shape, choice.tensor.role != BUFFER)
    yield from ((("model", name), None) for name in chunk.extra)
    yield from flatten(_WholeOptimizer(model).of_rank([chunk]), ("optimizer",))
    yield from flatten(random, (RANDOM,))


# -- under Megatron-FSDP -------------------------------------------------------------------------------------


def _fsdp_dtensor(model: MegatronModel, chunk: Chunk, random: Any) -> Iterator[tuple[Path_, Any]]:
    """Yield the state dict's leaves. Its parameters are the masters."""
    optimizer = MegatronOptimizer(model) if model.has_optimizer else None
    steps = model.checkpoint.state.scalars.get("step", {})
    for one in chunk.tensors:
        choice = model.chosen[one.fqn]
        if choice.tensor.role == BUFFER:
            yield ("model", f"module.{one.name}"), SourceTensor(choice.key, choice.dtype, one.shape, cut=False)
            continue
        if choice.dtype not in (BFLOAT16, FLOAT16):
            raise LossError(
                "Megatron-LM trains a model under Megatron-FSDP in 16 bits",
                path=model.checkpoint.path,
                fqn=one.fqn,
                expected="bfloat16 or float16",
                found=choice.dtype,
                hint=Message("{dtype=bf16}, or {ckpt_format=torch_dist}"),
            )
        kept = (one.fqn, MASTER)  # also without states: SGD, or before the first step
        master = kept if kept in model.checkpoint.tensors else choice.key
        yield from _halves(
            model, one, ("model", f"module.{one.name}"), {(): _source(model, master, FLOAT32, one.shape)}
        )
        if optimizer is None:
            continue
        states: dict[Path_, Any] = {
            (role,): _source(model, (one.fqn, role), optimizer.states[one.fqn][role].dtype, one.shape) for role in ADAM
        }
        if one.fqn in steps:
            states["step",] = state_number("step", steps[one.fqn])
        name = f"module.module.module.{one.name}"
        yield from _halves(model, one, ("optimizer", "state", name), states)
        kind = optimizer.kind(one.name, one.fqn, len(one.shape))
        (group,) = (group for group in optimizer.groups if group.kind == kind)
        options = _with_all_options(dict(group.options))
        yield from flatten(options, ("optimizer", "param_to_group_meta", name))
    if random is not None:
        yield from flatten({"(0, 0)": random}, (RANDOM,))


def _halves(
    model: MegatronModel, one: ChunkTensor, path: Path_, leaves: Mapping[Path_, Any]
) -> Iterator[tuple[Path_, Any]]:
    """Copy the `leaves` for gate and up rows of a SwiGLU MLP's first layer."""
    is_gated = model.args.get("swiglu") and (_FC1.fullmatch(one.name) or _GROUPED_FC1.fullmatch(one.name))
    for half, ending in enumerate(_HALF if is_gated else ("",)):
        for rest, leaf in leaves.items():
            mine = _half(model, leaf, half) if is_gated and isinstance(leaf, SourceTensor) else leaf
            yield (*path[:-1], f"{path[-1]}{ending}", *rest), mine


def _source(model: MegatronModel, key: Key, dtype: DType, shape: Shape, cut: bool = True) -> SourceTensor:
    in_blocks = model.blocks.of(key[0]) is not None
    return SourceTensor(key, dtype, shape, cut, partial(_rows, model, key, dtype, 0) if in_blocks else None)


def _half(model: MegatronModel, tensor: SourceTensor, half: int) -> SourceTensor:
    rows = tensor.shape[0] // 2
    part = partial(_rows, model, tensor.key, tensor.dtype, half * rows)
    return replace(tensor, shape=(rows, *tensor.shape[1:]), part=part)


def _rows(model: MegatronModel, key: Key, dtype: DType, first: int, box: Box) -> NewTensor:
    start, *others = box.offsets
    return NewTensor(dtype, box.sizes, model.fill(key, Box((start + first, *others), box.sizes)))
