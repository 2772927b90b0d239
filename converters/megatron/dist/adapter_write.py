"""Writer for adapters in Megatron's `torch_dist` format, loaded by Megatron-Bridge into its own modules.

Format facts: see `converters.megatron.dist.adapter_run`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckpt.base.errors import LossError, UsageError
from ckpt.base.text import Brief, pluralize
from ckpt.base.words import Message, Note
from ckpt.containers.dcp.write import Writing
from ckpt.containers.torchfile.write import FromSource, torch_file
from ckpt.plan.checkpoint import Checkpoint, Layout, Target, TargetFile
from ckpt.plan.precision import Choice, choices, describe
from ckpt.plan.tensors import Box, Shape
from ckpt.runs.model_files import training_left_out
from ckpt.runs.steps import TRACKER
from converters.megatron.dist.adapter_run import CLASSES, OUTER, is_of_ranks, stored_rows
from converters.megatron.dist.folder import BACKENDS, COMMON, RUN_CONFIG
from converters.megatron.dist.keys import KeyWriter, ObjectKey
from converters.megatron.folder import iteration_folder
from converters.names.megatron.adapter import ModuleName, parse_name
from converters.names.megatron.facts import AdapterRun, MegatronFacts
from converters.names.megatron.options import MegatronOptions

_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def lay_out(checkpoint: Checkpoint, layout: Layout) -> Target:
    """Lay out a run folder: the iteration (or `release`) and the tracker.

    Raise LossError if layers are adapted differently, because one adapter class can't express it.
    """
    known = checkpoint.facts_of(MegatronFacts).adapter
    assert known is not None
    if known.kind not in CLASSES:
        raise UsageError(
            "an adapter with ms-swift's names can't be written directly",
            path=checkpoint.path,
            hint="run `ckpt convert megatron-dist peft` first, then convert its output to megatron-dist",
        )
    options = layout.read(MegatronOptions)
    tp = options.tp or known.tp
    if known.has_magnitudes and tp > 1:
        raise UsageError("DoRA is written for tensor parallel size 1", path=checkpoint.path, hint=Message("{tp=1}"))
    if known.expert_dim not in (None, known.dim):
        raise UsageError(
            "expert adapters and other adapters must have the same rank",
            path=checkpoint.path,
            expected=f"rank {known.dim}",
            found=f"rank {known.expert_dim} (normalize_moe_lora)",
            hint="use `ckpt convert megatron-dist peft`: it has a rank for each layer",
        )
    run = replace(known, tp=tp, ep=options.ep or known.ep, etp=options.etp or (options.tp or known.etp))
    if run.shares_outer and run.etp > 1:
        raise UsageError(
            "adapters with a factor shared by experts need expert tensor parallel size 1",
            path=checkpoint.path,
            hint=Message("{etp=1}"),
        )
    chosen = choices(checkpoint, layout.dtype)
    folder = iteration_folder(checkpoint.state.step)
    writing = Writing(1, f"{folder}/", is_nested=False)
    members = _by_key(chosen)
    for key, of in members.items():
        _add_key(writing, key, of, chosen, run)
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    common = {"checkpoint_version": 3.0, "iteration": checkpoint.state.step or 0, "content_metadata": metadata}
    step = checkpoint.state.step
    files = (
        *writing.files(),
        torch_file(f"{folder}/{COMMON}", common),
        TargetFile.of_bytes(f"{folder}/{BACKENDS}", json.dumps(_BACKENDS).encode()),
        TargetFile.of_bytes(f"{folder}/{RUN_CONFIG}", json.dumps(_config(run, chosen), indent=2).encode()),
        TargetFile.of_bytes(TRACKER, folder.encode() if step is None else str(step).encode()),
    )
    what = f"Megatron-Bridge {CLASSES[run.kind]} for any pipeline parallel size"
    notes: list[str] = [Brief(what)]
    if any(is_of_ranks(*_parsed(fqn), run) for fqn in chosen):
        only = f"{what}, and only for tensor parallel size {run.tp}"
        notes = [Note("{} ({tp}): linear_fc1's rows follow it", only)]
    if run.etp > 1 and any(_parsed(fqn)[0].is_expert for fqn in chosen):
        what = f"with expert tensor parallel size {run.etp}, Megatron-Bridge computes expert adapters differently"
        notes.append(Note("{} (Megatron-Bridge#5634); use {etp=1} for a run without it", what))
    return Target(
        files, dropped=tuple(training_left_out(checkpoint)), notes=(*notes, *describe(chosen, checkpoint, layout.dtype))
    )


def _parsed(fqn: str) -> tuple[ModuleName, str]:
    parsed = parse_name(fqn)
    assert parsed is not None
    return parsed


@dataclass(frozen=True)
class _Members:
    shape: Shape
    fqns: Mapping[Shape, str]

    @property
    def sizes(self) -> Shape:
        return tuple(max(numbers) + 1 for numbers in zip(*self.fqns, strict=True))


def _by_key(chosen: Mapping[str, Choice]) -> dict[str, _Members]:
    """Raise LossError unless each key covers every layer and expert."""
    keys = KeyWriter(stacked=True, local_spec=False)
    found: dict[str, dict[Shape, str]] = {}
    for fqn in chosen:
        key, index = keys.key(fqn, None)
        found.setdefault(key.replace(".mlp.experts.linear_", ".mlp.experts.experts.linear_"), {})[index] = fqn
    members = {}
    for key, fqns in found.items():
        one = _Members(chosen[next(iter(fqns.values()))].tensor.shape, fqns)
        if len(fqns) != prod(one.sizes) or len({chosen[fqn].tensor.shape for fqn in fqns.values()}) > 1:
            raise LossError(
                "layers have different adapters, but one stored tensor holds all layers",
                fqn=key,
                expected=f"{pluralize(prod(one.sizes), 'tensor')} with one shape",
                found=f"{pluralize(len(fqns), 'tensor')}",
            )
        members[key] = one
    return members


def _add_key(writing: Writing, key: str, of: _Members, chosen: Mapping[str, Choice], run: AdapterRun) -> None:
    name, kind = _parsed(next(iter(of.fqns.values())))
    tail = of.shape[1:]
    tiles = [
        (
            Box((*index, first, *(0,) * len(tail)), ((1,) * len(index)) + (number, *tail)),
            (FromSource(chosen[fqn].key, Box((place, *(0,) * len(tail)), (number, *tail))),),
        )
        for index, fqn in sorted(of.fqns.items())
        for first, place, number in stored_rows(name, kind, of.shape[0], run)
    ]
    (dtype,) = {chosen[fqn].dtype for fqn in of.fqns.values()}
    writing.add_tiles(key, dtype, of.sizes + of.shape, tiles)
    is_packed = run.shares_outer and name.is_expert and not name.is_shared  # a parameter, not a layer
    if kind.endswith(".weight") and not is_packed:
        for index in sorted(of.fqns):
            state = ObjectKey(f"{key.removesuffix('weight')}_extra_state", index or (0,), of.sizes or (1,))
            writing.add((str(state),), [None])


def _config(run: AdapterRun, chosen: Mapping[str, Choice]) -> dict[str, Any]:
    names = {_parsed(fqn)[0] for fqn in chosen}
    peft = {"_target_": f"megatron.bridge.peft.{run.kind}.{CLASSES[run.kind]}", "dim": run.dim, "alpha": run.alpha}
    peft |= {"dropout": run.dropout, "target_modules": sorted({_target(name) for name in names})}
    if run.shares_outer:
        peft[OUTER] = True
    model = {
        "num_layers": run.num_layers,
        "gated_linear_unit": run.gated,
        "hf_model_id": run.base,
        "tensor_model_parallel_size": run.tp,
        "expert_model_parallel_size": run.ep,
        "expert_tensor_parallel_size": run.etp,
    }
    return {"model": model, "peft": peft}


def _target(name: ModuleName) -> str:
    if name.part is None:
        return name.leaf
    return f"linear_{name.part}" if name.leaf == "linear_qkv" else f"{name.leaf}_{name.part}"
