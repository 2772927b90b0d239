"""Experts of DeepSpeed's MoE layers (`deepspeed.moe.layer.MoE`), which expert parallel ranks share.

    layer_L_expert_E_mp_rank_00_model_states.pt

L counts the model's MoE layers in order, E the layer's experts.  Names in these files are those of the whole model.
Everywhere else a rank calls its experts by their place among its own: expert parallel rank e has experts `e * n` to
`e * n + n - 1` of a layer, n being the layer's experts by the number of such ranks (deepspeed 0.19.8,
runtime/engine.py, `_save_moe_checkpoint`).  Which data parallel ranks share the same experts, and flat buffers of them,
follows from utils/groups.py, `_create_expert_and_data_parallel`: every n-th one, or with
`use_data_before_expert_parallelism` as many in a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, IncompleteError, NotFoundError
from ckpt.containers.sources import RankFile, Sources
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.plan.checkpoint import BUFFER, WEIGHT, Key
from ckpt.plan.tensors import Shape, Tensor
from converters.deepspeed import model_file
from converters.deepspeed.keys import EXPERT

#: Files of experts by the number of their layer and their own.
Files = Mapping[tuple[int, int], str]


@dataclass(frozen=True)
class Experts:
    """The experts of a model: how many each layer has, by what their names begin with, and all that is in their files.

    `model` is the file in which their numbers are recorded.
    """

    model: RankFile
    counts: Mapping[str, int]
    tensors: Mapping[Key, Tensor]

    def tied(self, module: Mapping[str, StoredTensor]) -> dict[str, str]:
        """Entries of the module dict that are others of it again: none."""
        return {}

    def in_order(self, fqns: Iterable[str]) -> tuple[str, ...]:
        """As the model registers them, where all are of experts."""
        fqns = tuple(fqns)
        return in_order(fqns, self.counts) if all(map(EXPERT.fullmatch, fqns)) else fqns

    def shared(
        self, shapes: Mapping[str, Shape], count: int, num_ranks: int
    ) -> Iterator[tuple[range, dict[str, Shape]]]:
        """The ranks that share a flat buffer of a param group, and its parameters by their names in the whole model.

        `shapes` are recorded by rank 0, `count` is the number of ranks of `num_ranks` that share a buffer.  One buffer
        that all share, or one for each expert parallel rank.
        """
        matches = [EXPERT.fullmatch(fqn) for fqn in shapes]
        num_expert_parallel, rest = divmod(num_ranks, count)
        if not any(matches) and count == num_ranks:
            yield range(num_ranks), dict(shapes)
            return
        if not self.counts or not all(matches) or rest:
            raise NotFoundError(
                f"a parameter group partitioned over {count} of {num_ranks} ranks is not supported, unless it is "
                "DeepSpeed-MoE's, of experts alone",
                path=self.model.path,
            )
        self._check_local([match for match in matches if match], num_expert_parallel)
        for rank in range(num_expert_parallel):
            named = {self.of_rank(fqn, rank, num_expert_parallel): shape for fqn, shape in shapes.items()}
            yield sharing_ranks(rank, count, num_ranks, self.model), named

    def together(self, parts: Sequence[Mapping[Key, Tensor]], ranks: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """The tensors of which expert parallel ranks have `parts`: each has its own."""
        for part in parts:
            yield from part.values()

    def held_by(self, rank: int | None, num_ranks: int, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """What of `shapes` is of experts that one of so many expert parallel ranks has; None: what is of no expert."""
        return {fqn: shape for fqn, shape in shapes.items() if rank_of(fqn, self.counts, num_ranks) == rank}

    def of_rank(self, fqn: str, rank: int, num_expert_parallel: int) -> str:
        """What is called `fqn` on an expert parallel rank by its name in the whole model."""
        match = EXPERT.fullmatch(fqn)
        if match is None:
            return fqn
        return numbered(fqn, rank * (self.counts[match[1]] // num_expert_parallel) + int(match[2]))

    def _check_local(self, names: Sequence[re.Match[str]], num_expert_parallel: int) -> None:
        """CorruptError where a rank has other experts than the layer's number of them gives it."""
        for layer in dict.fromkeys(match[1] for match in names):
            here, count = sorted({int(match[2]) for match in names if match[1] == layer}), self.counts.get(layer, 0)
            if count % num_expert_parallel or not here[-1] < count // num_expert_parallel:
                raise CorruptError(
                    "a rank has experts that are none of the layer's",
                    path=self.model.path,
                    fqn=layer,
                    expected=f"{count} experts on {num_expert_parallel} expert parallel ranks",
                    found=f"experts {', '.join(map(str, here))} on rank 0",
                )


def in_order(fqns: Sequence[str], counts: Mapping[str, int]) -> tuple[str, ...]:
    """Parameters of experts as the model registers them, which has `counts` of them in its layers."""
    layers = list(counts)
    places = {match[0]: (layers.index(match[1]), int(match[2])) for match in map(EXPERT.fullmatch, fqns) if match}
    return tuple(sorted(fqns, key=places.__getitem__))


def rank_of(fqn: str, counts: Mapping[str, int], num_expert_parallel: int) -> int | None:
    """The expert parallel rank that has a parameter; None for one that is of no expert."""
    match = EXPERT.fullmatch(fqn)
    return int(match[2]) // (counts[match[1]] // num_expert_parallel or 1) if match else None


def numbered(fqn: str, number: int) -> str:
    return EXPERT.sub(rf"\g<1>{number}\g<3>", fqn)


def read_experts(files: Files, model: RankFile, sources: Sources) -> Experts:
    """The experts of which a step's folder has `files`, none for a model without such layers.

    Raises IncompleteError where an expert's file is missing, CorruptError where one holds something else.
    """
    recorded, wanted = check_files(files, model)
    counts: dict[str, int] = {}
    stored: dict[str, StoredTensor] = {}
    for layer, expert in wanted:
        path = files[layer, expert]
        content = sources.root(path, is_named=True)
        begins = {_beginning(name, expert, value, path) for name, value in entries_of(content, path)}
        for begin in begins:
            counts.setdefault(begin, recorded[layer])
        if list(counts)[layer:] != list(begins):
            raise CorruptError(
                "an expert's file does not hold the parameters of an expert of its layer",
                path=path,
                found=", ".join(begins) or "nothing",
            )
        stored |= content
    buffers = model_file.buffer_names(model)
    tensors: dict[Key, Tensor] = {}
    for name, value in stored.items():
        role = BUFFER if numbered(name, 0) in buffers else WEIGHT  # those of one rank are recorded
        tensors[name, role] = model_file.whole(name, role, value)
    return Experts(model, counts, tensors)


def sharing_ranks(rank: int, count: int, num_ranks: int, model: RankFile) -> range:
    """The `count` of `num_ranks` data parallel ranks that have what an expert parallel rank has: in a row, or not."""
    config = model.content.get("ds_config")
    if isinstance(config, Mapping) and config.get("use_data_before_expert_parallelism"):
        return range(rank * count, (rank + 1) * count)
    return range(rank, num_ranks, num_ranks // count)


def check_files(files: Files, model: RankFile) -> tuple[Sequence[int], Sequence[tuple[int, int]]]:
    """How many experts each layer has, and the layer and number of each, all of which have files.

    CorruptError or IncompleteError where there are others.
    """
    recorded = model.content.get("num_experts") or []
    if not isinstance(recorded, Sequence) or not all(type(count) is int for count in recorded):
        raise CorruptError("the numbers of experts are no list of them", path=model.path, found=recorded)
    wanted = [(layer, expert) for layer, count in enumerate(recorded) for expert in range(count)]
    if extra := sorted(files.keys() - set(wanted)):
        raise CorruptError(
            "a file of an expert that the model does not have: left over from another run",
            path=files[extra[0]],
            expected=f"{', '.join(map(str, recorded))} experts in {len(recorded)} layers",
            hint="move it away if it does not belong to this run",
        )
    if missing := [one for one in wanted if one not in files]:
        raise IncompleteError(
            "files of experts are missing",
            path=Path(model.path).parent,
            expected=f"{len(wanted)} files, among them "
            + "layer_{}_expert_{}_mp_rank_00_model_states.pt".format(*missing[0]),
            found=f"{len(wanted) - len(missing)} files",
        )
    return recorded, wanted


def entries_of(content: Any, path: str) -> Iterable[tuple[Any, Any]]:
    if not isinstance(content, Mapping):
        raise CorruptError("this is no expert's file", path=path, expected="a dict", found=type(content).__name__)
    return content.items()


def _beginning(name: Any, expert: int, value: Any, path: str) -> str:
    """What names in an expert's file begin with; CorruptError where this is none of the expert's tensors."""
    match = EXPERT.fullmatch(name) if isinstance(name, str) else None
    if match is None or int(match[2]) != expert or not isinstance(value, StoredTensor):
        raise CorruptError(
            "an entry of an expert's file is none of its tensors",
            path=path,
            fqn=str(name),
            expected=f"a tensor of expert {expert}",
            found=type(value).__name__,
        )
    return match[1]
