"""FSDP1's LOCAL_STATE_DICT: each rank's slices of flat parameters, read as the original tensors.

    pytorch_model_fsdp_rankR.bin, optimizer_0/    Accelerate with `fsdp_state_dict_type: LOCAL_STATE_DICT`

Each wrapped module has one 1-dim `_flat_param` (`converters.pytorch.flat_parameters`), with tied parameters once. A
rank's slice records its offset. With `use_orig_params` the file also lists the parameters by name, each with the rank's
elements of it. No file has their shapes. They come from the optimizer's states, if these were saved by name, and from
the model in the config.

Format facts: torch 2.13 (distributed/fsdp/_state_dict_utils.py, `_local_post_state_dict_hook`; _flat_param.py;
_optim_utils.py, which lists a flat parameter's members in order in the param groups), accelerate 1.15
(utils/fsdp_utils.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckpt.base.errors import CorruptError, IncompleteError, NotFoundError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.containers.sources import RankFile, structure
from ckpt.containers.torchfile.values import Record, StoredTensor
from ckpt.plan.assemble import assemble
from ckpt.plan.checkpoint import WEIGHT
from ckpt.plan.tensors import Extent, Fragment, Shape, Tensor, whole
from ckpt.state.naming import clean_names
from converters.pytorch.flat_parameters import Slice, from_slices, in_turn

_FLAT_PARAM = "_flat_param"
Shapes = Mapping[str, Shape]


@dataclass(slots=True)
class LocalState:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def read_local(files: Sequence[RankFile], recorded: Shapes, built: Shapes) -> LocalState:
    """Assemble slices, with shapes from either source, in registration order.

    `recorded` are the optimizer's states' shapes, `built` the config's. Raise NotFoundError if a shape is unknown.
    """
    names = clean_names(files[0].content, files[0].path)
    if odd := next((file for file in files if file.content.keys() != files[0].content.keys()), None):
        raise CorruptError("ranks store different tensors", **odd.where, expected=files[0].path)
    for fqn in recorded.keys() & built.keys():
        if recorded[fqn] != built[fqn]:
            raise CorruptError(
                "the config and the optimizer states belong to different models",
                path=files[0].path,
                fqn=fqn,
                expected=f"{list(recorded[fqn])}, like the states",
                found=f"{list(built[fqn])}",
            )
    shapes = {**built, **recorded}
    flats = {fqn[: -len(_FLAT_PARAM)]: name for name, fqn in names.items() if fqn.rpartition(".")[2] == _FLAT_PARAM}
    plain = {fqn: [file.content[name] for file in files] for name, fqn in names.items() if name not in flats.values()}
    found, places = LocalState(), dict[Any, str]()

    def owner(fqn: str) -> str:
        return max((prefix for prefix in flats if fqn.startswith(prefix)), key=len, default="")

    for prefix, name in flats.items():
        slices, length = _slices(files, name)
        rows = [fqn for fqn, values in plain.items() if owner(fqn) == prefix and all(map(_is_row, values))]
        if not any(fqn in shapes for fqn in rows):
            unit = [[fqn for fqn in known if owner(fqn) == prefix] for known in (recorded, built)]
            fitting = _only_fitting(unit, shapes, length, files[0], name)
            found.tensors |= {one.fqn: one for one in from_slices(slices, fitting, shapes, WEIGHT)}
            continue
        for fqn in sorted(rows, key=lambda fqn: fqn not in shapes):  # known shapes first; a tied name may have none
            own = [(file, value.extent) for file, value in zip(files, plain.pop(fqn), strict=True)]
            held = tuple(extent for _, extent in own if extent.numel)
            if held and places.setdefault(held, fqn) != fqn:
                found.ties[fqn] = places[held]
            elif fqn not in shapes:
                raise _unknown(files[0], f"the shape of {fqn}")
            else:
                found.tensors[fqn] = _from_rows(fqn, own, shapes[fqn])
    for fqn, values in plain.items():
        if all(isinstance(value, StoredTensor) for value in values):
            copies = [(v.shape, Fragment(whole(v.shape), v.extent, f.rank)) for f, v in zip(files, values, strict=True)]
            one = assemble(fqn, WEIGHT, copies)
            found.tensors[fqn] = one.rank_local() if flats else one  # FSDP only keeps flat parameters equal
        else:
            found.values[fqn] = values[0]
    return found


def _is_row(value: Any) -> bool:
    return isinstance(value, StoredTensor) and len(value.shape) == 1


def _slices(files: Sequence[RankFile], name: str) -> tuple[list[Slice], int]:
    """Return complete slices in order, and the length without padding."""
    found, lengths = [], set()
    for file in files:
        what = "this flat parameter matches no known version of torch"
        with structure(what, file.path, rank=file.rank, fqn=name):
            value = file.content[name]
            if not isinstance(value, Record) or value.name != "ShardedTensor":
                raise TypeError("it is not a ShardedTensor")
            shards, metadata = value.state[0], value.state[1].attributes
            (length,) = metadata["size"]
            lengths.add(length)
            for shard in shards:
                (start,) = shard.attributes["metadata"].attributes["shard_offsets"]
                found.append(Slice(file, start, shard.attributes["tensor"].extent))
    if len(lengths) > 1:
        raise CorruptError(
            "the folder mixes ranks from different models",
            path=files[0].path,
            fqn=name,
            found=f"lengths {sorted(lengths)}",
        )
    at = 0
    for one in found:
        if one.start != at:
            raise IncompleteError(
                "rank files are missing or exchanged: each has the next part of every flat parameter",
                **one.file.where,
                fqn=name,
                expected=f"a part from element {at} on",
                found=f"one from {one.start} on",
            )
        at += one.extent.numel
    if at != length:
        raise IncompleteError(
            "rank files are missing: each has a part of every flat parameter",
            path=files[-1].path,
            fqn=name,
            expected=f"{pluralize(length, 'element')}",
            found=f"{at} on {pluralize(len(files), 'rank')}",
        )
    return found, length


def _only_fitting(units: Sequence[list[str]], shapes: Shapes, length: int, file: RankFile, name: str) -> Sequence[str]:
    fitting = [unit for unit in units if unit and sum(prod(shapes[fqn]) for fqn in unit) == length]
    if not fitting:
        raise _unknown(file, f"no known group of parameters fits {name}, {pluralize(length, 'element')}")
    if any(unit != fitting[0] for unit in fitting):
        raise CorruptError(
            "the optimizer and the config order a flat parameter's parameters differently",
            path=file.path,
            fqn=name,
            expected=", ".join(fitting[0][:4]),
            found=", ".join(fitting[1][:4]),
        )
    return fitting[0]


def _unknown(file: RankFile, what: str) -> NotFoundError:
    return NotFoundError(
        f"the parameters inside FSDP1's flat parameters (LOCAL_STATE_DICT) are unknown: {what}",
        path=file.path,
        expected="named optimizer states in optimizer_0/, or a supported model's config",
        hint=Message(
            "pass a config.json with {config}; otherwise load it with the script that wrote it, and save with "
            "SHARDED_STATE_DICT or FULL_STATE_DICT"
        ),
    )


def _from_rows(fqn: str, own: Sequence[tuple[RankFile, Extent]], shape: Shape) -> Tensor:
    numel = sum(extent.numel for _, extent in own)
    if numel != prod(shape):
        raise CorruptError(
            "the ranks' parts do not add up to the parameter",
            path=own[0][0].path,
            fqn=fqn,
            expected=f"{pluralize(prod(shape), 'element')}, of {list(shape)}",
            found=f"{pluralize(numel, 'element')} on {pluralize(len(own), 'rank')}",
        )
    return assemble(fqn, WEIGHT, in_turn(shape, own))
