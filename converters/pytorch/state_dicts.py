"""Shared parts of full and per-rank state dicts, except the optimizer: storage places, ties, the step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt.base.errors import NotFoundError
from ckpt.containers.sources import Sources
from ckpt.containers.torchfile.values import is_part
from ckpt.move.files import confined
from ckpt.plan.checkpoint import WEIGHT, Key, TrainingState
from ckpt.plan.precision import CAST_SOURCES
from ckpt.plan.tensors import Tensor, TiedCopy
from converters.names.transformers.ties import declared_ties
from converters.optimizers.shapes import check_has_elements
from converters.optimizers.state_dicts import read_optimizer, take_apart
from converters.optimizers.states import OptimizerStates

_UNPROVED = (
    "{}: left out the optimizer states: they are numbered, and order and shapes don't map the numbers to parameters"
)


@dataclass
class Reading:
    folder: Path
    sources: Sources = field(default_factory=Sources)
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    items: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    states: OptimizerStates = field(default_factory=OptimizerStates)
    #: Reason for leaving out an optimizer that is there.
    unmapped: str = ""

    def leave_out_optimizer(self, why: str) -> None:
        self.unmapped = why
        self.notes.append(why)

    def load(self, name: str) -> tuple[str, Any]:
        path = str(confined(self.folder, name))
        return path, self.sources.root(path)

    def add_optimizer(
        self, content: Any, path: str, model: Mapping[Key, Tensor], ties: Mapping[str, str], order: Iterable[str] | None
    ) -> bool:
        """Add the states in an optimizer's file. `order` is the registration order of `model`'s parameters.

        Return False, with a note, for numbered states without proof.
        """
        shapes = {fqn: tensor.shape for (fqn, role), tensor in model.items() if role == WEIGHT}
        # Optimizers never hold integers. BatchNorm's count would fit a 0-dim parameter.
        floating = {fqn for (fqn, _), tensor in model.items() if tensor.dtype in CAST_SOURCES}
        proof = None if order is None else {fqn: shapes[fqn] for fqn in order if fqn in floating}
        optimizer = read_optimizer(content, path, proof=proof)
        if optimizer is None:
            check_has_elements(take_apart(content, path).states, shapes, path)
            self.leave_out_optimizer(_UNPROVED.format(Path(path).name))
            return False
        optimizer.check_known({*shapes, *ties}, path)
        for fqn, values in optimizer.states.items():
            owner = ties.get(fqn, fqn)
            if any(map(is_part, values.values())):
                raise NotFoundError("this file has only one rank's parts of the optimizer states", path=path, fqn=fqn)
            self.states.add(owner, shapes[owner], values, path)
        self.states.groups = optimizer.groups
        self.states.check_shapes(shapes, path)
        self.states.check_all_there(shapes, path)
        return True

    def state(self, step: int | None) -> TrainingState:
        return TrainingState.of_entries(
            "torch", self.items, step=step, per_rank=self.per_rank, **self.states.recorded()
        )


def tie_as_declared(
    tensors: dict[Key, Tensor],
    ties: dict[str, str],
    config: Mapping[str, Any] | None,
    trained: Collection[str] | None = None,
) -> None:
    """Join a parameter stored under two names, if the model's config ties them.

    Gathering (FSDP2), sharding (FSDP1) and DCP write a tied parameter under each name, without a record. The second
    becomes a replica of the first, unless it was trained separately: only the first may be in `trained`, the names in
    the optimizer's groups.
    """
    for alias, owner in declared_ties(config or {}).items():
        kept, again = tensors.get((str(owner), WEIGHT)), tensors.get((alias, WEIGHT))
        if kept is None or again is None or (kept.shape, kept.dtype) != (again.shape, again.dtype):
            continue
        if any(fqn == alias and role != WEIGHT for fqn, role in tensors):
            continue
        if trained is not None and (kept.fqn not in trained or alias in trained):
            continue
        copies = map(TiedCopy, (again.source, *again.replicas))
        tensors[kept.fqn, WEIGHT] = kept._replace(replicas=(*kept.replicas, *copies))
        del tensors[alias, WEIGHT]
        ties[alias] = kept.fqn


#: Step counts in trainers' dicts. `batch` is Composer's.
_COUNTS = ("step", "global_step", "global_steps", "batch", "iteration")


def step_of(items: Mapping[str, Any]) -> int | None:
    for place in (items, _inner(items, "train_state"), _inner(_inner(items, "timestamp"), "Timestamp")):
        for name in _COUNTS:
            if type(place.get(name)) is int:
                return int(place[name])
    return None


def _inner(items: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return inner if isinstance(inner := items.get(name), Mapping) else {}
