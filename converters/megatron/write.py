"""Writer for Megatron-LM's `torch` format with any tensor, pipeline, expert and virtual pipeline sizes.

megatron-core loads the output with `load_state_dict(strict=True)`, `optimizer.load_state_dict` and
`load_parameter_state`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.base.errors import LossError
from ckpt.base.text import Brief, pluralize
from ckpt.containers.torchfile.values import Record, StoredDict
from ckpt.containers.torchfile.write import torch_file
from ckpt.plan.checkpoint import Checkpoint, Layout, Slot, Target, TargetFile
from ckpt.plan.precision import CAST_SOURCES, describe
from ckpt.plan.tensors import Extent
from ckpt.runs.steps import TRACKER
from ckpt.runs.trainer_files import model_files
from converters.megatron.buffers import bucket_sizes
from converters.megatron.chunks import Chunk, MegatronModel, describe_model
from converters.megatron.entries import to_write
from converters.megatron.folder import DISTRIBUTED, MODEL, RELEASE, iteration_folder
from converters.megatron.optimizer_write import RankOptimizers, new_tensor
from converters.megatron.read import OTHER_ORDER, folder_name
from converters.names.megatron.facts import MegatronFacts
from converters.names.megatron.model.axes import Grid


def lay_out(checkpoint: Checkpoint, layout: Layout) -> Target:
    model = describe_model(checkpoint, layout)
    folder = iteration_folder(checkpoint.state.step)
    files: list[TargetFile] = []
    if model.has_optimizer and checkpoint.facts_of(MegatronFacts).own_module_order:
        raise LossError(
            f"{OTHER_ORDER}, and the optimizer identifies parameters only by their order",
            path=checkpoint.path,
            hint="convert the weights alone: to hf first, then to this format",
        )
    optimizer = RankOptimizers(model) if model.has_optimizer else None
    per_rank = _per_rank(model)
    items, dropped = to_write(model, per_rank, without_random="resume with --no-load-rng")
    models = ModelFiles(model, optimizer, items)
    for rank in model.grid.ranks():
        of_rank, chunks = folder_name(rank, model.grid), model.chunks(rank)
        name, own = f"{folder}/{of_rank}", {item: one[of_rank] for item, one in per_rank.items() if of_rank in one}
        files.append(models.file(f"{name}/{MODEL}", chunks, own))
        if optimizer is not None and optimizer.distributed:
            files.append(torch_file(f"{name}/{DISTRIBUTED}", optimizer.distributed_state(rank, chunks)))
    tracker = RELEASE if checkpoint.state.step is None else str(checkpoint.state.step)
    return Target(
        files=(*files, *model_files(checkpoint, layout.dtype)[0], TargetFile.of_bytes(TRACKER, tracker.encode())),
        dropped=tuple(dropped),
        notes=tuple(_megatron_notes(model, layout, optimizer)),
    )


@dataclass
class ModelFiles:
    """Builder of the ranks' model files. Files that differ only in their tensors' boxes are laid out once."""

    model: MegatronModel
    optimizer: RankOptimizers | None
    items: Mapping[str, Any]
    forms: dict[Any, TargetFile] = field(default_factory=dict)

    def file(self, name: str, chunks: Sequence[Chunk], own: dict[str, Any]) -> TargetFile:
        if own or (self.optimizer is not None and not self.optimizer.distributed):
            return torch_file(name, self.root(chunks) | own)
        tensors = [(one, self.model.chosen[one.fqn]) for chunk in chunks for one in chunk.tensors]
        form = tuple((one.name, one.shape, len(one.pieces), choice.dtype) for one, choice in tensors)
        parts = [(choice.key, piece.box) for one, choice in tensors for piece in one.pieces]
        key = form, tuple((len(chunk.tensors), chunk.extra) for chunk in chunks)
        if key not in self.forms:
            first = self.forms[key] = torch_file(name, self.root(chunks))
            assert [(slot.key, slot.region) for slot in first.slots] == parts, f"{name}: tensors are in another order"
        known = self.forms[key]
        slots = tuple(
            Slot(key, box, Extent(name, at.extent.offset, at.extent.dtype, at.extent.shape, at.extent.strides))
            for (key, box), at in zip(parts, known.slots, strict=True)
        )
        return replace(known, name=name, slots=slots)

    def root(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Return a model file's content: training/checkpointing.py, `generate_state_dict`."""
        model = self.model
        root: dict[str, Any] = {
            "args": Record("argparse", "Namespace", (), state=dict(model.args)),
            "checkpoint_version": self.items.get("checkpoint_version", 3.0),
            "iteration": model.checkpoint.state.step or 0,
        }
        name_of = model.name_in_files
        for chunk in chunks:
            state = StoredDict("OrderedDict")
            for one in chunk.tensors:
                choice = model.chosen[one.fqn]
                state[name_of(one.name)] = new_tensor(one, choice.key, choice.dtype)
            state.update(dict.fromkeys(map(name_of, chunk.extra)))
            root["model" if len(chunks) == 1 else f"model{chunk.vp}"] = state
        root |= {name: value for name, value in self.items.items() if name not in root}
        return root | ({"optimizer": self.optimizer.of_rank(chunks)} if self.optimizer else {})


def _per_rank(model: MegatronModel) -> Mapping[str, Mapping[str, Any]]:
    """Return the ranks' own entries, if the target has the same ranks."""
    state, names = model.checkpoint.state, {folder_name(rank, model.grid) for rank in model.grid.ranks()}
    is_same = state.engine == "megatron" and Grid.of_args(state.args or {}) == model.grid
    return state.per_rank if is_same and all(values.keys() <= names for values in state.per_rank.values()) else {}


def _megatron_notes(model: MegatronModel, layout: Layout, optimizer: RankOptimizers | None) -> Iterator[str]:
    grid = model.grid
    sizes = f"TP {grid.tp}, PP {grid.pp}, EP {grid.ep}, VPP {grid.vpp}"
    yield Brief(f"Megatron for {sizes}" + (f", expert TP {grid.etp}" if grid.etp != grid.tp else ""))
    if optimizer is None:
        yield from describe(model.chosen, model.checkpoint, layout.dtype)
    elif optimizer.distributed and next(bucket_sizes(model.args, 0, 0, 1)) is not None:
        yield Brief("the distributed optimizer's buckets follow the recorded --ddp-bucket-size and data parallel size")
    wide = [c for c in model.chosen.values() if c.dtype not in CAST_SOURCES]
    if wide:
        yield f"Megatron doesn't train in {wide[0].dtype}, the dtype of {pluralize(len(wide), 'tensor')}"
