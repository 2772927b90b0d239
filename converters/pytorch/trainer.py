"""Folders of HF Trainer and Accelerate, from runs on one process or with DDP.

    checkpoint-N/model.safetensors or shards, optimizer.pt, scheduler.pt, trainer_state.json       transformers 5.23
    model.safetensors or shards, optimizer.bin, scheduler.bin                                      accelerate 1.15

The weights have the Hub's names, and the optimizer numbers its parameters in the in-memory model's registration order.
The shapes prove the numbers (`ckpt.state.numbered`); otherwise the states are left out, with a note.

Trainer can resume the output. It loads `model.safetensors` by in-memory names (trainer.py, `_load_from_checkpoint`),
and `optimizer.pt` only by numbers, into its groups with and without weight decay.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path

from ckpt.base.errors import CkptError, LossError, UsageError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.containers.weights import (
    INDEX,
    MAX_INDEX,
    SINGLE,
    check_shard_set,
    is_shard_set,
    model_weights,
    parse_index,
    read_weights,
    weight_files,
)
from ckpt.move.files import confined
from ckpt.move.json_files import read_json
from ckpt.move.listing import names_in
from ckpt.plan.checkpoint import (
    HUB,
    MASTER,
    OWN,
    TRANSFORMERS,
    WEIGHT,
    Checkpoint,
    Format,
    Key,
    Layout,
    ParamGroup,
    QuantizedStates,
    ReadRequest,
    Target,
)
from ckpt.plan.tensors import Tensor
from ckpt.runs.finding import Steps, find_step, number_of, numbered
from ckpt.runs.model_files import read_config
from ckpt.runs.sentence_modules import by_module, module_weights, modules_in, registered
from ckpt.runs.steps import TRAINER_STATE, enclosing_folders, trainer_step
from ckpt.runs.trainer_files import run_companions
from ckpt.state.numbered import has_decay
from ckpt.state.skipped_states import listed
from converters.names.transformers.ties import kept_names, tied_names
from converters.pytorch.full import (
    FSDP_MODEL,
    OPTIMIZERS,
    SCHEDULERS,
    check_has_index,
    first,
    optimizer_name,
    own_state,
    state_files,
    trained_weights,
)
from converters.pytorch.optimizer_file import optimizer_file
from converters.pytorch.state_dicts import Reading
from converters.quantized.misnamed import with_plain_names

_UNORDERED = "the model's parameter order is unknown, and HF Trainer's optimizer needs it"
_NO_STATE = f"the source has no {TRAINER_STATE}: add one from the same step, because HF Trainer needs it to resume"


def _is_step(folder: Path) -> bool:
    has_optimizer = first(folder, OPTIMIZERS) is not None and not (folder / FSDP_MODEL).exists()
    return has_optimizer and (first(folder, (SINGLE, INDEX)) is not None or bool(_shards(folder)))


def _shards(folder: Path) -> list[str]:
    names = [name for name in names_in(folder) if name.endswith(".safetensors")]
    return names if is_shard_set(names) else []


_STEPS = Steps(_is_step)


class Trainer(Format):
    name = "trainer"
    title = "HF Trainer's and Accelerate's own"
    namespace = TRANSFORMERS
    always_has_optimizer = True
    splits_modules = True
    takes = ("world_size", "max_shard_size")

    def find(self, path: Path, tag: str | None) -> Path | None:
        """Find a folder with safetensors weights beside an optimizer file.

        Also accept one model's file in a save of several.
        """
        if path.is_file():
            is_one = path.suffix == ".safetensors" and number_of(path) is not None
            return path if is_one and first(path.parent, OPTIMIZERS) is not None else None
        return find_step(path, tag, _STEPS)

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        number = number_of(path)
        reading = Reading(path if path.is_dir() else path.parent)
        folders = tuple(p for p in (request.config, *enclosing_folders(reading.folder)) if p is not None)
        config = read_config(folders)
        _read_weights(reading, path.name if path.is_file() else SINGLE)
        modules = module_weights(folders, reading.sources)
        is_hub = config is not None and "model_type" in config
        reading.items |= own_state(reading)
        step = reading.items.pop("step", None)
        if scheduler := first(reading.folder, tuple(numbered(name, number or 0) for name in SCHEDULERS)):
            reading.items["lr_scheduler"] = reading.load(scheduler)[1]
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
        if config is not None:
            from converters.names.hub.expected_tensors import table_notes

            reading.notes += table_notes(found, modules)
        found = _with_optimizer(reading, found, modules, number)
        return replace(
            found,
            files=reading.sources.files,
            state=reading.state(step if (recorded := trainer_step(reading.folder)) is None else recorded),
            notes=tuple(reading.notes),
            computed=reading.states.computed,
            quantized=QuantizedStates(reading.states.quantized),
            unread=reading.states.left_out(),
            unmapped_optimizer=reading.unmapped,
        )

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        """Lay out weights, `optimizer.pt`, and files beside the step.

        Raise UsageError without an optimizer, LossError if Trainer's parameter numbers or groups would differ.
        """
        if not checkpoint.state.param_groups:
            raise UsageError(
                "the source has no optimizer, or its states have no names",
                path=checkpoint.path,
                hint="use `ckpt inspect` to list what was left out and the steps; use the format `hf` for the model "
                "only",
            )
        groups, notes = trainer_groups(checkpoint.state.param_groups, _order(checkpoint), _ambiguous_norms(checkpoint))
        numbers = {fqn: number for number, fqn in enumerate(fqn for group in groups for fqn in group.fqns)}
        names = kept_names(checkpoint)
        chosen = {names.get(fqn, fqn): choice for fqn, choice in trained_weights(checkpoint, layout).items()}
        for alias in checkpoint.ties:
            if alias not in names.values():
                chosen.pop(alias, None)
        model, *parts = by_module({name: chosen[name] for name in sorted(chosen)}, modules_in(checkpoint.folders))
        files = model_weights(model[1], layout.max_shard_size)
        for place, part in parts:
            files += weight_files(part, f"{place}/model", {})[0]
        states, dropped = state_files(checkpoint)
        beside = run_companions(checkpoint, layout.world_size, layout.dtype, deepspeed=False, own=states)
        missing = [] if any(file.name == TRAINER_STATE for file in beside.files) else [_NO_STATE]
        return Target(
            files=(
                *beside.files,
                *files,
                optimizer_file(OPTIMIZERS[1], checkpoint, groups, numbers),
            ),
            dropped=(*beside.dropped, *dropped),
            notes=(*notes, *missing, *beside.notes),
        )


TRAINER = Trainer()


def _read_weights(reading: Reading, single: str) -> None:
    names, weight_map, folder = [single], None, reading.folder
    if not (folder / single).is_file():
        if not os.path.lexists(folder / INDEX) and (found := _shards(folder)):
            check_shard_set(found, folder)
            check_has_index(folder, found[0])
        path = confined(folder, INDEX)
        weight_map = parse_index(read_json(path, unique=True, max_bytes=MAX_INDEX), path).weight_map
        names = sorted(set(weight_map.values()))
    reading.tensors, notes = with_plain_names(read_weights(folder, names, weight_map, reading.sources))
    reading.notes += notes


def in_memory(folder: Path, request: ReadRequest) -> Checkpoint:
    """Return `save_pretrained`'s weights under in-memory names."""
    from converters.names.transformers.relation import from_hub

    reading = Reading(folder)
    folders = tuple(place for place in (request.config, folder) if place is not None)
    config = read_config(folders)
    _read_weights(reading, SINGLE)
    is_hub = config is not None and "model_type" in config
    found = Checkpoint(
        path=str(folder),
        format=TRAINER.name,
        tensors=reading.tensors,
        files=reading.sources.files,
        namespace=HUB if is_hub else OWN,
        ties=tied_names(config, {fqn for fqn, _ in reading.tensors}) if config else {},
        config=config,
        folders=tuple(map(str, folders)),
        notes=tuple(reading.notes),
    )
    return from_hub(found) if is_hub else found


def _with_optimizer(
    reading: Reading, weights: Checkpoint, modules: Mapping[Key, Tensor], number: int | None
) -> Checkpoint:
    """Add `modules` and known states under in-memory names.

    One of the optimizer's tensors may be several tensors on the Hub.
    """
    from converters.names.module_order import in_order
    from converters.names.transformers.relation import from_hub, to_hub

    whole = replace(weights, tensors={**weights.tensors, **modules})
    name = optimizer_name(reading, number)
    if name is None:
        return whole
    path, content = reading.load(name)
    try:
        memory = from_hub(weights) if weights.namespace == HUB else weights
    except CkptError as error:
        reading.leave_out_optimizer(f"{name}: left out the optimizer states: {error.what}")
        return whole
    try:  # ckpt's own output has in-memory names
        hub = to_hub(memory) if weights.tensors.keys() == memory.tensors.keys() and weights.config else weights
    except CkptError:
        hub = weights
    order, more = in_order(hub, memory), registered([fqn for fqn, _ in modules], modules_in(weights.folders))
    order = None if order is None or more is None else order + more
    if not reading.add_optimizer(content, path, {**memory.tensors, **modules}, memory.ties, order):
        return whole
    return replace(memory, tensors={**memory.tensors, **modules, **reading.states.tensors})


# -- writing -------------------------------------------------------------------------------------------------


def _order(checkpoint: Checkpoint) -> list[str]:
    """Raise LossError if the registration order is unknown."""
    from converters.names.module_order import in_order
    from converters.names.transformers.relation import to_hub

    modules = modules_in(checkpoint.folders)
    more = [fqn for fqn, _ in checkpoint.tensors if fqn.startswith((*modules,))]
    order, last = None, registered(dict.fromkeys(more), modules)
    if checkpoint.config is not None and last is not None:
        try:
            memory = _weights_of(checkpoint)
            kept = {key: tensor for key, tensor in memory.tensors.items() if key[0] not in last}
            memory = replace(memory, tensors=kept)
            order = in_order(to_hub(memory), memory)
        except CkptError as error:
            raise LossError(_UNORDERED, path=checkpoint.path, found=error.what, hint=error.hint) from error
    if order is None:
        raise LossError(
            _UNORDERED,
            path=checkpoint.path,
            hint=Message(
                "give the Hub model's folder with {config}; for an architecture unknown to `ckpt`, install transformers"
                " (nothing proves the order of a model with its own code)"
            ),
        )
    return [*order, *(last or ())]


def _weights_of(checkpoint: Checkpoint) -> Checkpoint:
    """Use a master without a weight as the weight."""
    masters = {(t.fqn, WEIGHT): t._replace(role=WEIGHT) for t in checkpoint.with_role(MASTER)}
    return replace(checkpoint, tensors={**masters, **checkpoint.tensors})


def _ambiguous_norms(checkpoint: Checkpoint) -> set[str]:
    """Return 1-dim weights of unknown norms. Trainer decays no weight of `nn.LayerNorm`."""
    tensors = (*checkpoint.with_role(WEIGHT), *checkpoint.with_role(MASTER))
    vectors = {tensor.fqn for tensor in tensors if len(tensor.shape) == 1 and tensor.fqn.endswith(".weight")}
    return {fqn for fqn in vectors if has_decay(fqn)}


def trainer_groups(
    groups: Sequence[ParamGroup], order: Sequence[str], ambiguous_norms: Set[str] = frozenset()
) -> tuple[list[ParamGroup], list[str]]:
    """Return Trainer's param groups, with and without weight decay, and notes.

    A single group becomes two with its options. Other groupings raise LossError: the optimizer takes states by number
    and would not notice. For `ambiguous_norms` (GPT-2's `ln_1.weight`) two source groups show the decay. torch's Muon
    is passed to Trainer, so its groups stay unchanged.
    """
    if any("ns_steps" in group.options for group in groups):
        return list(groups), []
    trained = {fqn for group in groups for fqn in group.fqns}
    unsure = trained.intersection(ambiguous_norms)
    if len(groups) == 1 and unsure:
        raise LossError(
            "HF Trainer excludes nn.LayerNorm weights from weight decay, and the source does not mark them",
            expected="two param groups, with weight decay and without",
            found=f"one group, with {listed(sorted(unsure))} in it",
            hint="use the formats full or dcp to store them by name",
        )
    without = {fqn for fqn in trained if not has_decay(fqn)}
    for group in groups if len(groups) == 2 else ():
        if without < set(group.fqns) <= without | unsure:
            without = set(group.fqns)
            break
    decayed = [
        tuple(fqn for fqn in order if fqn in trained and (fqn not in without) == decay) for decay in (True, False)
    ]
    options = {frozenset(group.fqns): group.options for group in groups}
    if options.keys() <= {frozenset(fqns) for fqns in decayed}:
        return [ParamGroup(fqns, options.get(frozenset(fqns), groups[0].options)) for fqns in decayed], []
    if len(groups) == 1 and set().union(*decayed) == trained:
        note = "split the source's param group into two with the same options, for HF Trainer"
        return [ParamGroup(fqns, groups[0].options) for fqns in decayed], [note]
    raise LossError(
        "HF Trainer needs two param groups, with weight decay and without, and the source has others",
        expected=", ".join(f"{pluralize(len(fqns), 'parameter')}" for fqns in decayed),
        found=", ".join(f"{pluralize(len(group.fqns), 'parameter')}" for group in groups),
        hint="use the formats full or dcp to store them by name",
    )
