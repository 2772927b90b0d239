"""Writer for Megatron's `torch_dist` format.

megatron-core's `dist_checkpointing.load` loads the output at any sizes; only the recorded arguments contain them. The
optimizer's state is stored as `fully_reshardable`, or as a non-distributed optimizer's if the arguments say so.

An engine requests an extra state for every module that has one, so each gets an empty one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

from ckpt.base.errors import LossError
from ckpt.base.text import Brief, pluralize
from ckpt.containers.dcp.write import Writing, dim0_boxes
from ckpt.containers.torchfile.values import Record
from ckpt.containers.torchfile.write import number, torch_file
from ckpt.plan.checkpoint import Checkpoint, Key, Layout, Target, TargetFile
from ckpt.plan.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from ckpt.plan.precision import describe
from ckpt.plan.tensors import Box, Shape
from ckpt.runs.steps import TRACKER
from ckpt.runs.trainer_files import model_files
from converters.megatron.chunks import EXTRA, MegatronModel, describe_model, modules_with_extra
from converters.megatron.dist.bridge import bridge_files, notes_on
from converters.megatron.dist.folder import BACKENDS, COMMON
from converters.megatron.dist.keys import KeyWriter, ObjectKey
from converters.megatron.entries import FP8, RANDOM, RERUN, to_write
from converters.megatron.folder import iteration_folder
from converters.megatron.optimizer import MegatronOptimizer, is_partly_distributed
from converters.megatron.remainders import are_gathered
from converters.names.megatron.facts import MegatronFacts
from converters.names.megatron.model.axes import Grid
from converters.names.megatron.model.spelling import split_layer
from converters.names.megatron.model.splits import packed

#: Content of `BACKENDS`.
KIND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_PLACE = re.compile(r"shard_(\d+(?:\.\d+)*)_(\d+(?:\.\d+)*)")


def lay_out(checkpoint: Checkpoint, layout: Layout) -> Target:
    model = describe_model(checkpoint, layout)
    folder = iteration_folder(checkpoint.state.step)
    writing = Writing(model.args["world_size"], f"{folder}/", is_nested=False)
    tensors = add_model(model, writing)
    per_rank = _per_rank(model)
    bridge = checkpoint.facts_of(MegatronFacts).bridge
    own = ["content_metadata", FP8] + ([] if f"{RERUN}_state" in per_rank else [RERUN])
    if bridge:
        own.append("args")  # replaced by a separate file
    anew = "Megatron-Bridge draws new ones from rng.seed" if bridge else "Megatron-LM draws new ones from --seed"
    kept, dropped = to_write(model, per_rank, *own, without_random=anew)
    for name, values in per_rank.items():
        for place, value in values.items():
            writing.add((f"{name}/{place}",), [value])
    optimizer = MegatronOptimizer(model) if model.has_optimizer else None
    if optimizer is not None:
        tensors.add_states(optimizer)
    args = dict(model.args, ckpt_format="torch_dist")
    args |= dict.fromkeys(args.keys() & {"use_torch_fsdp2", "use_megatron_fsdp"}, False)  # their files have other forms
    if RANDOM not in per_rank:
        args["no_save_rng"] = True  # otherwise Megatron-LM requests them per rank
    common = _common(model, tensors.keys, optimizer, kept, args)
    if bridge:
        del common["args"]
    beside = model_files(checkpoint, layout.dtype)[0]
    if bridge:
        beside = list(bridge_files(bridge, model, folder, beside, random=RANDOM in per_rank))
    notes = [*_dist_notes(model, layout, tensors.keys, optimizer), *(notes_on(bridge, model) if bridge else ())]
    step = checkpoint.state.step
    files = (
        *writing.files(),
        torch_file(f"{folder}/{COMMON}", common),
        TargetFile.of_bytes(f"{folder}/{BACKENDS}", json.dumps(KIND).encode()),
        *beside,
        TargetFile.of_bytes(TRACKER, folder.encode() if step is None else str(step).encode()),
    )
    return Target(files, dropped=tuple(dropped), notes=tuple(notes))


def add_model(model: MegatronModel, writing: Writing, before: str = "") -> ModelTensors:
    keys = KeyWriter(_is_stacked(model), model.spelling.local_spec, model.name_in_files, before)
    scales = model.checkpoint.state.private.get("megatron", {}).get(FP8, {})
    for entry, value in _extra_states(model, keys, scales):
        writing.add((entry,), [value])
    tensors = ModelTensors(model, keys, writing)
    tensors.add()
    return tensors


class ModelTensors:
    def __init__(self, model: MegatronModel, keys: KeyWriter, writing: Writing) -> None:
        self.model, self.keys, self.writing = model, keys, writing
        self.members: dict[str, dict[Shape, str]] = {}
        for fqn in model.chosen:
            key, index = keys.key(fqn, model.kinds.get(split_layer(fqn)[0]))
            self.members.setdefault(key, {})[index] = fqn

    def add(self) -> None:
        for key, members in self.members.items():
            chosen = {index: self.model.chosen[fqn] for index, fqn in members.items()}
            self._add(key, {index: one.key for index, one in chosen.items()}, {one.dtype for one in chosen.values()})

    def add_states(self, optimizer: MegatronOptimizer) -> None:
        for key, members in self.members.items():
            trained = {index: fqn for index, fqn in members.items() if fqn in optimizer.masters}
            if not trained:
                continue
            first = next(iter(trained.values()))
            if optimizer.is_distributed(optimizer.has(first)):
                self._add_masters(f"optimizer.state.param.{key}", trained, optimizer)
            elif self.model.chosen[first].dtype in (BFLOAT16, FLOAT16):
                self._add_masters(f"optimizer.state.fp32_param.{key}", trained, optimizer)
            roles = dict.fromkeys(role for fqn in trained.values() for role in optimizer.states[fqn])
            for role in roles:
                states = {index: optimizer.states[fqn].get(role) for index, fqn in trained.items()}
                dtypes = {state.dtype for state in states.values() if state is not None}
                keys = {index: (trained[index], role) for index, state in states.items() if state is not None}
                self._add(f"optimizer.state.{role}.{key}", keys, dtypes)

    def _add_masters(self, key: str, trained: Mapping[Shape, str], optimizer: MegatronOptimizer) -> None:
        self._add(key, {index: optimizer.masters[fqn].key for index, fqn in trained.items()}, {FLOAT32})

    def _add(self, key: str, members: Mapping[Shape, Key], dtypes: Iterable[DType]) -> None:
        """Stack all layers and experts. A packed layer has a key per row section."""
        shapes = {self.model.checkpoint.tensors[member].shape for member in members.values()}
        sizes = tuple(max(numbers) + 1 for numbers in zip(*members, strict=True))
        (dtype, *others), (shape, *other_shapes) = dtypes, shapes
        if others or other_shapes or len(members) != prod(sizes):
            raise LossError(
                "tensors stored together differ, or are missing for some layers or experts",
                fqn=key,
                expected=f"{pluralize(prod(sizes), 'tensor')}, {dtype} {list(shape)}",
                found=f"{len(members)}, with {len(others)} other dtypes and {len(other_shapes)} other shapes",
            )
        first = 0
        for name, rows in self._sections(key, next(iter(members.values()))[0], shape):
            section = (rows, *shape[1:]) if shape else shape
            # Cut matrices for tensor-parallel ranks: an engine reads whole boxes.
            cut = dim0_boxes(section, self.model.grid.tp if len(shape) > 1 else 1)
            boxes = [  # equal sizes for all members
                (box.offsets, (1,) * len(sizes) + box.sizes, _moved(box, first)) for box in cut
            ]
            tiles = (
                (Box(index + offsets, inner), self.model.fill(members[index], box))
                for index in sorted(members)
                for offsets, inner, box in boxes
            )
            self.writing.add_tiles(name, dtype, sizes + section, tiles)
            first += rows

    def _sections(self, key: str, fqn: str, shape: Shape) -> Iterator[tuple[str, int]]:
        names = packed(fqn)
        if not names:
            yield key, shape[0] if shape else 1
            return
        for name, rows in zip(names, self.model.sections(fqn), strict=True):
            yield f"{key}.{name}", rows


def _moved(box: Box, rows: int) -> Box:
    return Box((box.offsets[0] + rows, *box.offsets[1:]), box.sizes) if rows else box


def _is_stacked(model: MegatronModel) -> bool:
    """Return True if an engine expects all layers in one tensor (transformer_block.py, `sharded_state_dict`)."""
    args = model.args
    known = model.checkpoint.state.private.get("megatron", {}).get("content_metadata")
    metadata = known if isinstance(known, Mapping) else {}
    if metadata.get("non_homogeneous_layers") or metadata.get("singleton_local_shards"):
        return False
    for name in ("moe_layer_freq", "linear_attention_freq"):
        value = args.get(name)
        if isinstance(value, list | tuple | str) or (type(value) is int and value > 1):
            return False
    if (
        args.get("hybrid_override_pattern")
        or args.get("hetereogenous_dist_checkpoint")
        or args.get("heterogeneous_layers_config_path")
    ):
        return False
    layers: dict[str, set[tuple[str, Shape, DType]]] = {}
    for fqn, choice in model.chosen.items():
        if match := _LAYER.fullmatch(fqn):
            layers.setdefault(match[1], set()).add((match[2], choice.tensor.shape, choice.dtype))
    return len({frozenset(members) for members in layers.values()}) <= 1


def _extra_states(model: MegatronModel, keys: KeyWriter, scales: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Write the source's FP8 scales, or None."""
    names = dict.fromkeys(f"{module}.{EXTRA}" for module in modules_with_extra(model.chosen, model.spelling))
    # MambaModel and BertModel request their output layer's extra state; GPTModel drops it.
    if "decoder.final_norm.weight" in model.chosen or model.encodes:
        names[f"output_layer.{EXTRA}"] = None
    places: dict[str, dict[Shape, Any]] = {}
    for name in names | dict.fromkeys(scales):
        key, index = keys.key(name, model.kinds.get(split_layer(name)[0]))
        places.setdefault(key, {})[index or (0,)] = scales.get(name)
    for key, values in places.items():
        sizes = tuple(max(numbers) + 1 for numbers in zip(*values, strict=True))
        yield from ((str(ObjectKey(key, index, sizes)), value) for index, value in values.items())


def content_metadata(keys: KeyWriter) -> dict[str, Any]:
    """Return metadata for megatron-core's choice of keys."""
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    return metadata if keys.stacked else metadata | {"non_homogeneous_layers": True}


def _common(
    model: MegatronModel,
    keys: KeyWriter,
    optimizer: MegatronOptimizer | None,
    items: Mapping[str, Any],
    args: Mapping[str, Any],
) -> dict[str, Any]:
    """Follow training/checkpointing.py, `generate_state_dict`."""
    metadata = content_metadata(keys)
    if optimizer is None or optimizer.distributed or is_partly_distributed(args):
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    common: dict[str, Any] = {
        "args": Record("argparse", "Namespace", (), state=dict(args)),
        "checkpoint_version": items.get("checkpoint_version", 3.0),
        "iteration": model.checkpoint.state.step or 0,
        "content_metadata": metadata,
    }
    if optimizer is not None:
        common["optimizer"] = _optimizer(model, optimizer)
    return common | {name: value for name, value in items.items() if name not in common}


def _optimizer(model: MegatronModel, optimizer: MegatronOptimizer) -> dict[Any, Any]:
    contents: list[dict[str, Any]] = []
    has_half = any(choice.dtype in (BFLOAT16, FLOAT16) for choice in model.chosen.values())
    for groups in optimizer.chained:
        inner: dict[str, Any] = {"param_groups": [dict(group.options) for group in groups]}
        if any(optimizer.is_distributed(group.optimizer) for group in groups):
            content: dict[str, Any] = {"optimizer": inner, "param_state_sharding_type": "fully_reshardable"}
        else:
            kinds = {group.optimizer for group in groups}
            steps = model.checkpoint.state.scalars.get("step", {})
            step = next((step for fqn, step in steps.items() if optimizer.has(fqn) in kinds), None)
            inner = {"state": {} if step is None else {"common_step": number(step)}, **inner}
            content = {"optimizer": inner} if has_half else inner
        contents.append(content | optimizer.scaler)
    return contents[0] if len(contents) == 1 else dict(enumerate(contents))


def _per_rank(model: MegatronModel) -> dict[str, Mapping[str, Any]]:
    """Return ranks' entries, if target ranks have the same places.

    Random states have one entry per stage and tensor rank, loaded by all data-parallel ranks.
    """
    state, args = model.checkpoint.state, model.checkpoint.state.args or {}
    if state.engine != "megatron":
        return {}
    source, grid = Grid.of_args(args), model.grid
    is_same = source == grid and args.get("world_size") == model.args["world_size"]
    of_stages = f"_{grid.pp}.{grid.tp}" if (source.pp, source.tp) == (grid.pp, grid.tp) else None

    def fits(name: str, place: str, value: Any) -> bool:
        if _PLACE.fullmatch(place) is None:
            return False
        is_shared = name == RANDOM and isinstance(value, list) and len(value) == 1
        return is_same or (is_shared and of_stages is not None and place.endswith(of_stages))

    return {
        name: values
        for name, values in state.per_rank.items()
        if all(fits(name, place, value) for place, value in values.items())
    }


def _dist_notes(
    model: MegatronModel, layout: Layout, keys: KeyWriter, optimizer: MegatronOptimizer | None
) -> Iterator[str]:
    form = "layers in one tensor" if keys.stacked else "layers one by one"
    yield Brief(f"Megatron for any parallel sizes, {form}; recorded: TP {model.grid.tp}, PP {model.grid.pp}")
    if any(map(model.blocks.of, model.chosen)):
        sizes = f"expert TP {model.grid.etp}, TP {model.grid.tp}"
        yield (f"the experts' gate and up rows alternate in blocks: Megatron-LM loads them correctly only with {sizes}")
    if are_gathered(model.args) and optimizer is not None:
        yield (
            "megatron-core loads these masters only without --use-precision-aware-optimizer: with it, "
            "megatron-core expects 16 bits per master, and only from dp_reshardable and the same ranks"
        )
    if optimizer is None:
        yield from describe(model.chosen, model.checkpoint, layout.dtype)
