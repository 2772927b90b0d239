"""DeepSpeed without ZeRO (stage 0): read.

One file, `mp_rank_00_model_states.pt`, has the module and the optimizer: torch's own in fp32, and under bf16 and fp16
one around it with float32 masters.  Format facts are from deepspeed 0.19.8: runtime/engine.py (`_save_checkpoint`),
runtime/fp16/unfused_optimizer.py (`state_dict`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt.containers.sources import RankFile, Sources
from ckpt.containers.torchfile.scalars import read_scalar
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.errors import CorruptError, UsageError
from ckpt.move.files import confined
from ckpt.plan.checkpoint import (
    BUFFER,
    MASTER,
    TRANSFORMERS,
    WEIGHT,
    Checkpoint,
    Key,
    Layout,
    ParamGroup,
    ReadRequest,
    Target,
    TrainingState,
)
from ckpt.plan.tensors import Tensor, Whole
from ckpt.run_folder.steps import LATEST, recorded_step
from ckpt.state.numbered import names_by_shapes
from converters.deepspeed import model_file
from converters.deepspeed.folder import is_universal, refuse_unsupported
from converters.deepspeed.rank_files import hyperparameters, known_structure

MODEL = "mp_rank_00_model_states.pt"
#: What of an optimizer's entries describes tensors; the others are training state.
_TENSORS = ("optimizer_state_dict", "fp32_groups", "fp32_groups_flat", "state", "param_groups")


class Stage0:
    name = "zero0"
    title = "DeepSpeed without ZeRO"
    reads = True
    writes = False
    carries_optimizer = True
    namespace: str | None = TRANSFORMERS

    def find(self, path: Path, tag: str | None) -> Path | None:
        """The step folder that `path` is, that `tag` names in it, or that its `latest` records.

        NotFoundError for what DeepSpeed writes and no format here is of.
        """
        if not path.is_dir():
            return None
        recorded = tag if tag is not None else recorded_step(path / LATEST)
        folders = [path, *([confined(path, recorded)] if recorded else [])]
        found = next((folder for folder in folders[:: -1 if tag else 1] if _is_step(folder)), None)
        for folder in folders if found is None else ():
            refuse_unsupported(folder)
        return found

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        """Describe a step; an optimizer's states under names that the shapes prove, or else left out, which is said."""
        sources = Sources()
        with known_structure(path):
            return _read(path, sources, sources.of_rank(confined(path, MODEL), 0, "DeepSpeed file"))

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        raise UsageError("the format 'zero0' cannot be written", hint="`zero1` resumes with any stage's config")


ZERO0 = Stage0()


def _is_step(folder: Path) -> bool:
    """Whether the folder has the one model file, and neither partitions, nor layers, nor files of other ranks.

    A universal checkpoint made of stage 1 or 2 has the same one.
    """
    names = [name for name in os.listdir(folder) if name.endswith("_states.pt")] if folder.is_dir() else []
    return names == [MODEL] and not is_universal(folder)


def _read(path: Path, sources: Sources, file: RankFile) -> Checkpoint:
    module, buffers = model_file.module(file), model_file.buffer_names(file)
    tensors: dict[Key, Tensor] = {}
    ties: dict[str, str] = {}
    owners: dict[Any, str] = {}
    for fqn, stored in module.items():
        if stored.extent.numel and owners.setdefault(stored.extent, fqn) != fqn:
            ties[fqn] = owners[stored.extent]
        else:
            role = BUFFER if fqn in buffers else WEIGHT
            tensors[fqn, role] = model_file.whole(fqn, role, stored, 0)
    optimizer = file.content.get("optimizer") or {}
    if not isinstance(optimizer, Mapping):
        raise CorruptError("this is no optimizer's state", path=file.path, found=type(optimizer).__name__)
    numbered = _Numbered(optimizer)
    if "optimizer_state_dict" in optimizer and not {"fp32_groups", "fp32_groups_flat"} & set(optimizer):
        raise CorruptError("the optimizer's masters are missing", path=file.path, expected="fp32_groups")
    strangers = set(numbered.states) - {number for numbers in numbered.groups for number in numbers}
    if strangers:
        raise CorruptError(
            "the optimizer has states of a parameter that is in no param group",
            path=file.path,
            found=", ".join(map(str, list(strangers)[:4])),
        )
    shapes = {fqn: tensor.shape for (fqn, role), tensor in tensors.items() if role == WEIGHT}
    names = names_by_shapes(shapes, numbered.shapes) if numbered.groups else []
    notes: list[str] = []
    scalars: dict[str, dict[str, Any]] = {}
    if names is None:
        notes.append(
            "the optimizer's states and masters are left out: DeepSpeed numbers them without names, and their shapes "
            "do not prove which parameter has which number"
        )
    for fqns, numbers, masters in zip(names or (), numbered.groups, numbered.masters, strict=False):
        for fqn, number, master in zip(fqns, numbers, masters, strict=True):
            values = {MASTER: master} if master is not None else {}
            for role, value in {**values, **numbered.states.get(number, {})}.items():
                if isinstance(value, StoredTensor) and value.extent.shape == shapes[fqn] and role != "step":
                    native = tensors[fqn, WEIGHT].dtype
                    tensors[fqn, role] = Tensor(
                        fqn, role, value.extent.dtype, shapes[fqn], Whole(value.extent, 0), native
                    )
                elif isinstance(value, StoredTensor) and value.extent.numel == 1:
                    scalars.setdefault(role, {})[fqn] = read_scalar(value.extent)
                elif isinstance(value, int | float):
                    scalars.setdefault(role, {})[fqn] = value
                else:
                    notes.append(f"the optimizer state {role} of {fqn} is left out: it is not of the parameter's shape")
    options = hyperparameters(numbered.base)
    step, version = file.content.get("global_steps"), file.content.get("ds_version")
    state = TrainingState.of_entries(
        "deepspeed",
        model_file.entries(file, {name: value for name, value in optimizer.items() if name not in _TENSORS}),
        step=step if isinstance(step, int) else None,
        param_groups=tuple(ParamGroup(fqns, opts) for fqns, opts in zip(names or (), options, strict=False)),
        scalars=scalars,
        engine_version=version,
    )
    return Checkpoint(
        path=str(path),
        format="zero0",
        tensors=tensors,
        files=sources.files,
        framework=f"deepspeed {version}" if version else "deepspeed",
        tag=path.name,
        ties=ties,
        state=state,
        folders=(str(path.parent),),
        notes=tuple(notes),
    )


class _Numbered:
    """An optimizer's `groups` of numbers, its `states` by number, and its `masters` beside the numbers of a group."""

    def __init__(self, optimizer: Mapping[str, Any]) -> None:
        self.base: Mapping[str, Any] = optimizer.get("optimizer_state_dict", optimizer)
        self.groups: list[Sequence[Any]] = [group["params"] for group in self.base.get("param_groups") or ()]
        self.states: Mapping[Any, Mapping[str, Any]] = self.base.get("state") or {}
        held = optimizer.get("fp32_groups")
        self.masters = held if held is not None else [[None] * len(numbers) for numbers in self.groups]

    @property
    def shapes(self) -> list[list[tuple[int, ...] | None]]:
        """The shape of each parameter by group: its master's, or else that of its first state with dims."""
        return [
            [self._shape(number, master) for number, master in zip(numbers, masters, strict=True)]
            for numbers, masters in zip(self.groups, self.masters, strict=True)
        ]

    def _shape(self, number: Any, master: Any) -> tuple[int, ...] | None:
        states = [value for name, value in self.states.get(number, {}).items() if name != "step"]
        stored = [value for value in (master, *states) if isinstance(value, StoredTensor)]
        return stored[0].extent.shape if stored else None
