"""HF Trainer's and Accelerate's own folders, of runs on one process or under DDP: read.

    checkpoint-N/model.safetensors or shards, optimizer.pt, scheduler.pt, trainer_state.json       transformers 5.23
    model.safetensors or shards, optimizer.bin, scheduler.bin                                      accelerate 1.15

The weights are under the Hub's names, and the optimizer numbers its parameters as the model in memory registers them.
Which has which number is proved by shapes (`ckpt.state.numbered`), or else the states are left out, which is said.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt.containers.weights import MAX_INDEX, parse_index, read_weights
from ckpt.errors import CkptError, UsageError
from ckpt.move.files import confined
from ckpt.plan.checkpoint import HUB, OWN, TRANSFORMERS, WEIGHT, Checkpoint, Layout, ReadRequest, Target
from ckpt.run_folder.companions import read_config, read_json
from ckpt.run_folder.steps import enclosing_folders, trainer_step
from converters.names.registered import in_order
from converters.names.transformers.relation import from_hub
from converters.names.transformers.ties import tied_names
from converters.pytorch.full import FSDP_MODEL, OPTIMIZERS, SCHEDULERS
from converters.pytorch.state_dicts import UNPROVED, Optimizer, Reading, read_optimizer, read_proved

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Trainer:
    name = "trainer"
    title = "HF Trainer's and Accelerate's own"
    reads = True
    writes = False
    carries_optimizer = True
    namespace: str | None = TRANSFORMERS

    def find(self, path: Path, tag: str | None) -> Path | None:
        """The folder `path`, or `tag` in it, with weights of safetensors beside an optimizer's file."""
        folder = path if tag is None else confined(path, tag)
        if not folder.is_dir() or _first(folder, OPTIMIZERS) is None or (folder / FSDP_MODEL).exists():
            return None
        return folder if _first(folder, (SINGLE, INDEX)) is not None else None

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        """Describe the weights, and the optimizer's states where it is known whose they are."""
        reading = Reading(path)
        folders = tuple(p for p in (request.config, *enclosing_folders(path)) if p is not None)
        config = read_config(folders)
        _read_weights(reading)
        is_hub = config is not None and "model_type" in config
        if scheduler := _first(path, SCHEDULERS):
            reading.items["lr_scheduler"] = reading.sources.root(str(confined(path, scheduler)))
        found = Checkpoint(
            path=str(path),
            format=self.name,
            tensors=reading.tensors,
            files=(),
            framework="transformers" if is_hub else None,
            namespace=HUB if is_hub else OWN,
            ties=tied_names(config, {fqn for fqn, _ in reading.tensors}) if config else {},
            config=config,
            folders=tuple(str(p) for p in folders),
        )
        found = _with_optimizer(reading, found)
        return replace(
            found,
            files=reading.sources.files,
            state=reading.state(trainer_step(path)),
            notes=tuple(reading.notes),
            computed=reading.states.computed,
            quantized=reading.states.quantized,
            unread=reading.states.unread.sentences,
        )

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        raise UsageError("the format 'trainer' cannot be written", hint="see `ckpt formats`")


TRAINER = Trainer()


def _first(folder: Path, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if os.path.lexists(folder / name)), None)  # a pipe is damage, and not nothing


def _read_weights(reading: Reading) -> None:
    names, weight_map, folder = [SINGLE], None, reading.folder
    if not (folder / SINGLE).is_file():
        path = confined(folder, INDEX)
        weight_map = parse_index(read_json(path, unique=True, max_bytes=MAX_INDEX), path).weight_map
        names = sorted(set(weight_map.values()))
    reading.tensors = read_weights(folder, names, weight_map, reading.sources)


def _with_optimizer(reading: Reading, weights: Checkpoint) -> Checkpoint:
    """The checkpoint of `weights` with the optimizer's states, under names of memory; as it is where these are unknown.

    A tensor that the optimizer takes for one may be several of the Hub's.
    """
    name = _first(reading.folder, OPTIMIZERS)
    assert name is not None
    path = str(confined(reading.folder, name))
    content = reading.sources.root(path)
    try:
        memory = from_hub(weights) if weights.namespace == HUB else weights
    except CkptError as error:
        reading.notes.append(f"{name}: the optimizer's states are left out: {error.what}")
        return weights
    optimizer = _named(content, path, weights, memory)
    if optimizer is None:
        reading.notes.append(UNPROVED.format(name))
        return weights
    shapes = {tensor.fqn: tensor.shape for tensor in memory.with_role(WEIGHT)}
    reading.add_states(optimizer, shapes, memory.ties, path)
    return replace(memory, tensors={**memory.tensors, **reading.states.tensors})


def _named(content: Any, path: str, weights: Checkpoint, memory: Checkpoint) -> Optimizer | None:
    """The optimizer's state by names that it records, or else by those that its shapes prove."""
    optimizer = read_optimizer(content, path)
    if optimizer is not None or (order := in_order(weights, memory)) is None:
        return optimizer
    return read_proved(content, path, {fqn: memory.tensors[fqn, WEIGHT].shape for fqn in order})
