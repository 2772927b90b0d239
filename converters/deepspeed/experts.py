"""Experts in DeepSpeed's MoE layers (`deepspeed.moe.layer.MoE`), spread over expert-parallel ranks.

    layer_L_expert_E_mp_rank_00_model_states.pt

L counts the MoE layers, E a layer's experts. These files use whole-model names. Elsewhere a rank numbers its own
experts from 0: rank e has experts `e * n` to `e * n + n - 1`, with n per rank (deepspeed 0.19.8, runtime/engine.py,
`_save_moe_checkpoint`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, IncompleteError
from ckpt.base.text import pluralize
from ckpt.containers.sources import RankFile, Sources
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.plan.checkpoint import BUFFER, WEIGHT, Key
from ckpt.plan.tensors import Tensor
from converters.deepspeed import model_file
from converters.deepspeed.keys import EXPERT
from converters.deepspeed.sharing import Sharing, numbered

#: Files by layer and expert number.
Files = Mapping[tuple[int, int], str]


def read_experts(files: Files, model: RankFile, sources: Sources) -> tuple[Sharing, dict[Key, Tensor]]:
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
                "an expert file does not match the parameters in its layer",
                path=path,
                found=", ".join(begins) or "nothing",
            )
        stored |= content
    buffers = model_file.buffer_names(model)
    tensors: dict[Key, Tensor] = {}
    for name, value in stored.items():
        role = BUFFER if numbered(name, 0) in buffers else WEIGHT  # one rank's names are recorded
        tensors[name, role] = model_file.whole(name, role, value)
    return Sharing(model.path, counts=counts, is_in_rows=is_in_rows(model.content.get("ds_config"))), tensors


def is_in_rows(config: Any) -> bool:
    """Return True if data-parallel ranks with the same experts are consecutive."""
    return isinstance(config, Mapping) and bool(config.get("use_data_before_expert_parallelism"))


def check_files(files: Files, model: RankFile) -> tuple[Sequence[int], Sequence[tuple[int, int]]]:
    recorded = model.content.get("num_experts") or []
    if not isinstance(recorded, Sequence) or not all(type(count) is int for count in recorded):
        raise CorruptError("the expert numbers are not a list", path=model.path, found=recorded)
    wanted = [(layer, expert) for layer, count in enumerate(recorded) for expert in range(count)]
    if extra := sorted(files.keys() - set(wanted)):
        raise CorruptError(
            "an expert file has no expert in the model: left over from another run",
            path=files[extra[0]],
            expected=f"{', '.join(map(str, recorded))} experts in {pluralize(len(recorded), 'layer')}",
            hint="move it out of the folder if it does not belong to this run",
        )
    if missing := [one for one in wanted if one not in files]:
        raise IncompleteError(
            "expert files are missing",
            path=Path(model.path).parent,
            expected=f"{pluralize(len(wanted), 'file')}, among them "
            + "layer_{}_expert_{}_mp_rank_00_model_states.pt".format(*missing[0]),
            found=pluralize(len(wanted) - len(missing), "file"),
        )
    return recorded, wanted


def entries_of(content: Any, path: str) -> Iterable[tuple[Any, Any]]:
    if not isinstance(content, Mapping):
        raise CorruptError("this is not an expert file", path=path, expected="a dict", found=type(content).__name__)
    return content.items()


def _beginning(name: Any, expert: int, value: Any, path: str) -> str:
    match = EXPERT.fullmatch(name) if isinstance(name, str) else None
    if match is None or int(match[2]) != expert or not isinstance(value, StoredTensor):
        raise CorruptError(
            "an expert file has an entry from outside the expert",
            path=path,
            fqn=str(name),
            expected=f"a tensor of expert {expert}",
            found=type(value).__name__,
        )
    return match[1]
