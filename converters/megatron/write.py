"""Megatron-LM's `torch` format: write, for any tensor, pipeline, expert and virtual pipeline sizes.

What is written is what a run of that layout would have saved: megatron-core's `load_state_dict(strict=True)`,
`optimizer.load_state_dict` and `load_parameter_state` take it.  Format facts: see `converters.megatron.format`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.containers.torchfile.values import Record, StoredDict
from ckpt.containers.torchfile.write import torch_file
from ckpt.errors import LossError
from ckpt.plan.checkpoint import Checkpoint, Layout, Slot, Target, TargetFile
from ckpt.plan.precision import CAST_SOURCES, describe
from ckpt.plan.tensors import Extent
from ckpt.run_folder.carried import model_files
from converters.megatron.buffers import bucket_sizes
from converters.megatron.chunks import EXTRA, Chunk, Model, describe_model
from converters.megatron.folder import RELEASE, TRACKER, iteration_folder
from converters.megatron.optimizer_write import RankOptimizers, new_tensor
from converters.megatron.read import DISTRIBUTED, MODEL, OTHER_ORDER, folder_name
from converters.names.megatron.model.axes import Grid, Rank

#: Entries that each rank has for itself.
_OF_RANKS = ("rng_state", "rerun_state_machine")
#: Formats whose other entries are Megatron's, and go into the file as they are.
_MEGATRON = ("megatron", "megatron-dist")


def lay_out(checkpoint: Checkpoint, layout: Layout) -> Target:
    """The files of a run folder: an iteration's folder (or `release`), the tracker, config and tokenizer.

    Raises UsageError for a layout that does not fit the model, LossError for what the format has no place for.
    """
    model = describe_model(checkpoint, layout)
    folder = iteration_folder(checkpoint.state.step)
    files: list[TargetFile] = []
    if model.has_optimizer and OTHER_ORDER in checkpoint.notes:
        raise LossError(
            f"{OTHER_ORDER}, and an optimizer knows parameters by their order alone",
            path=checkpoint.path,
            hint="convert the weights alone, by way of hf",
        )
    optimizer = RankOptimizers(model) if model.has_optimizer else None
    items, dropped = _items(model)
    models = _ModelFiles(model, optimizer, items)
    for rank in model.grid.ranks():
        name = f"{folder}/{folder_name(rank, model.grid)}"
        chunks = model.chunks(rank)
        files.append(models.file(f"{name}/{MODEL}", chunks, _of_rank(model, rank)))
        if optimizer is not None and optimizer.distributed:
            state = optimizer.distributed_state(rank, chunks)
            files.append(torch_file(f"{name}/{DISTRIBUTED}", state))
    tracker = RELEASE if checkpoint.state.step is None else str(checkpoint.state.step)
    return Target(
        files=(*files, *model_files(checkpoint, layout.dtype)[0], TargetFile.of_bytes(TRACKER, tracker.encode())),
        dropped=tuple(dropped),
        notes=tuple(_notes(model, layout, optimizer)),
    )


# -- the model's file ----------------------------------------------------------------------------------------


@dataclass
class _ModelFiles:
    """The ranks' model files: those that differ only in the boxes of tensors that they hold are laid out once."""

    model: Model
    optimizer: RankOptimizers | None
    items: Mapping[str, Any]
    forms: dict[Any, TargetFile] = field(default_factory=dict)

    def file(self, name: str, chunks: Sequence[Chunk], own: dict[str, Any]) -> TargetFile:
        """The file of a rank with these chunks, and with entries of its `own`."""
        if own or (self.optimizer is not None and not self.optimizer.distributed):
            return torch_file(name, self._root(chunks) | own)
        tensors = [(one, self.model.chosen[one.fqn]) for chunk in chunks for one in chunk.tensors]
        form = tuple((one.name, one.shape, len(one.pieces), choice.dtype) for one, choice in tensors)
        parts = [(choice.key, piece.box) for one, choice in tensors for piece in one.pieces]
        key = form, tuple((len(chunk.tensors), chunk.extra) for chunk in chunks)
        if key not in self.forms:
            first = self.forms[key] = torch_file(name, self._root(chunks))
            assert [(slot.key, slot.region) for slot in first.slots] == parts, f"{name}: tensors are in another order"
        known = self.forms[key]
        slots = tuple(
            Slot(key, box, Extent(name, at.extent.offset, at.extent.dtype, at.extent.shape, at.extent.strides))
            for (key, box), at in zip(parts, known.slots, strict=True)
        )
        return replace(known, name=name, slots=slots)

    def _root(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """training/checkpointing.py, `generate_state_dict`."""
        model = self.model
        root: dict[str, Any] = {
            "args": Record("argparse", "Namespace", (), state=dict(model.args)),
            "checkpoint_version": self.items.get("checkpoint_version", 3.0),
            "iteration": model.checkpoint.state.step or 0,
        }
        for chunk in chunks:
            state = StoredDict("OrderedDict")
            for one in chunk.tensors:
                choice = model.chosen[one.fqn]
                state[one.name] = new_tensor(one, choice.key, choice.dtype)
            state.update(dict.fromkeys(chunk.extra))
            root["model" if len(chunks) == 1 else f"model{chunk.vp}"] = state
        root |= {name: value for name, value in self.items.items() if name not in root}
        return root | ({"optimizer": self.optimizer.of_rank(chunks)} if self.optimizer else {})


def _items(model: Model) -> tuple[dict[str, Any], list[str]]:
    """Entries that are the same in every file, and what is not written."""
    kept: dict[str, Any] = {}
    dropped = []
    source = model.checkpoint
    for name, value in source.state.items.items():
        if name in ("args", EXTRA, "grad_scaler"):
            continue
        if name in _OF_RANKS:
            if not _keeps_ranks(model):
                dropped.append(f"{name} of {len(value)} ranks: the layout is another one; resume with --no-load-rng")
        elif source.format not in _MEGATRON and name not in ("checkpoint_version", "opt_param_scheduler"):
            dropped.append(f"training state {name}")
        else:
            try:
                torch_file(MODEL, value)
            except LossError as error:
                dropped.append(f"training state {name}: {error.what}")
            else:
                kept[name] = value
    if "grad_scaler" in source.state.items and not model.has_optimizer:
        dropped.append("training state grad_scaler")
    return kept, dropped


def _keeps_ranks(model: Model) -> bool:
    """Whether the target's ranks are the source's."""
    recorded = model.checkpoint.state.items.get("args")
    args = recorded if isinstance(recorded, Mapping) else {}
    return model.checkpoint.format == "megatron" and Grid.of_args(args) == model.grid


def _of_rank(model: Model, rank: Rank) -> dict[str, Any]:
    if not _keeps_ranks(model):
        return {}
    name = folder_name(rank, model.grid)
    items = model.checkpoint.state.items
    return {item: items[item][name] for item in _OF_RANKS if name in items.get(item, {})}


# -- notes ---------------------------------------------------------------------------------------------------


def _notes(model: Model, layout: Layout, optimizer: RankOptimizers | None) -> Iterator[str]:
    grid = model.grid
    sizes = f"TP {grid.tp}, PP {grid.pp}, EP {grid.ep}, VPP {grid.vpp}"
    yield f"Megatron for {sizes}" + (f", expert TP {grid.etp}" if grid.etp != grid.tp else "")
    if optimizer is None:
        yield from describe(model.chosen, model.checkpoint, layout.dtype)
    elif optimizer.distributed and next(bucket_sizes(model.args, 0, 0, 1)) is not None:
        yield "the distributed optimizer's buckets are those of the recorded --ddp-bucket-size and data parallel size"
    wide = [c for c in model.chosen.values() if c.dtype not in CAST_SOURCES]
    if wide:
        yield f"{len(wide)} tensors have a dtype that Megatron does not train: {wide[0].dtype}"
