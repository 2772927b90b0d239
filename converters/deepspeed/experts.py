"""Experts of DeepSpeed's MoE layers (`deepspeed.moe.layer.MoE`), which expert parallel ranks share.

    layer_L_expert_E_mp_rank_00_model_states.pt

L counts the model's MoE layers in order, E the layer's experts.  Names in these files are those of the whole model.
Everywhere else a rank calls its experts by their place among its own: expert parallel rank e has experts `e * n` to
`e * n + n - 1` of a layer, n being the layer's experts by the number of such ranks (deepspeed 0.19.8,
runtime/engine.py, `_save_moe_checkpoint`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, IncompleteError
from ckpt.base.text import counted
from ckpt.containers.sources import RankFile, Sources
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.plan.checkpoint import BUFFER, WEIGHT, Key
from ckpt.plan.tensors import Tensor
from converters.deepspeed import model_file
from converters.deepspeed.keys import EXPERT
from converters.deepspeed.sharing import Sharing, numbered

#: Files of experts by the number of their layer and their own.
Files = Mapping[tuple[int, int], str]


def read_experts(files: Files, model: RankFile, sources: Sources) -> tuple[Sharing, dict[Key, Tensor]]:
    """The experts in the `files` of a step's folder, by their numbers, and the tensors of these files.

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
    return Sharing(model.path, counts=counts, is_in_rows=is_in_rows(model.content.get("ds_config"))), tensors


def is_in_rows(config: Any) -> bool:
    """Whether the data parallel ranks with the same experts are in a row, by a DeepSpeed config."""
    return isinstance(config, Mapping) and bool(config.get("use_data_before_expert_parallelism"))


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
            expected=f"{', '.join(map(str, recorded))} experts in {counted(len(recorded), 'layer')}",
            hint="move it away if it does not belong to this run",
        )
    if missing := [one for one in wanted if one not in files]:
        raise IncompleteError(
            "files of experts are missing",
            path=Path(model.path).parent,
            expected=f"{counted(len(wanted), 'file')}, among them "
            + "layer_{}_expert_{}_mp_rank_00_model_states.pt".format(*missing[0]),
            found=counted(len(wanted) - len(missing), "file"),
        )
    return recorded, wanted


def entries_of(content: Any, path: str) -> Iterable[tuple[Any, Any]]:
    if not isinstance(content, Mapping):
        raise CorruptError("this is no expert's file", path=path, expected="a dict", found=type(content).__name__)
    return content.items()


def _beginning(name: Any, expert: int, value: Any, path: str) -> str:
    """The prefix of names in an expert's file; CorruptError for a name that is not one of the expert's tensors."""
    match = EXPERT.fullmatch(name) if isinstance(name, str) else None
    if match is None or int(match[2]) != expert or not isinstance(value, StoredTensor):
        raise CorruptError(
            "an entry of an expert's file is not one of the expert's tensors",
            path=path,
            fqn=str(name),
            expected=f"a tensor of expert {expert}",
            found=type(value).__name__,
        )
    return match[1]
