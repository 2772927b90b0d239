"""Describe one checkpoint: what it is, what it holds, and what it needs on disk.  No tensor data is read.

Names and values come from files that somebody else wrote, so everything shown is escaped and bounded, and no object
that a reader made of a pickle is asked for its own text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint, OneElement, ParamGroup
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Tensor
from ckpt.sizes import show_size
from ckpt.text import JSON, MAX_MEMBERS, counted, json_text, one_line, summarise

_MAX_LISTED = 20  # ties, groups, items and notes shown as text


def describe(checkpoint: Checkpoint, tensors: bool = False) -> dict[str, Any]:
    """The checkpoint as plain values for JSON: bounded, finite, and free of control characters.

    `tensors` adds one entry for each of them.
    """
    found = {
        "path": one_line(checkpoint.path),
        "format": one_line(checkpoint.format),
        "framework": None if checkpoint.framework is None else one_line(checkpoint.framework),
        "step": summarise(checkpoint.state.step),
        "world_size": summarise(checkpoint.world_size),
        "names": one_line(checkpoint.namespace),
        "model": _model(checkpoint.config),
        "parameters": _parameters(checkpoint),
        "roles": _roles(checkpoint),
        "dtypes": _dtypes(checkpoint.tensors.values()),
        "files": {"count": len(checkpoint.files), "bytes": sum(file.size for file in checkpoint.files)},
        "ties": [{"alias": one_line(alias), "owner": one_line(owner)} for alias, owner in checkpoint.ties.items()],
        "training": _training(checkpoint),
        "notes": [one_line(note) for note in (*checkpoint.notes, *_quantized(checkpoint), *checkpoint.unread)],
    }
    if tensors:
        found["tensors"] = [_tensor(tensor) for tensor in checkpoint.tensors.values()]
    return found


def _model(config: Mapping[str, Any] | None) -> dict[str, JSON] | None:
    if not isinstance(config, Mapping):
        return None
    found = {name: summarise(config[name]) for name in ("model_type", "architectures") if name in config}
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        found["quantization"] = summarise(quantization.get("quant_method"))
    return found


def _parameters(checkpoint: Checkpoint) -> dict[str, int | None]:
    """Numbers of tensors and elements, each parameter counted once.

    A parameter is trainable where an optimizer keeps something for it or lists it; None where no optimizer is stored.
    """
    trained = {fqn for fqn, role in checkpoint.tensors if role not in (WEIGHT, BUFFER)}
    trained.update(fqn for values in checkpoint.state.scalars.values() for fqn in values)
    trained.update(fqn for group in checkpoint.state.param_groups for fqn in group.fqns)
    parameters = checkpoint.parameters
    total = sum(tensor.numel for tensor in parameters.values())
    trainable = sum(tensor.numel for fqn, tensor in parameters.items() if fqn in trained) if trained else None
    return {
        "tensors": len(parameters),
        "elements": total,
        "trainable": trainable,
        "frozen": None if trainable is None else total - trainable,
    }


def _roles(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    by_role: dict[str, list[Tensor]] = {}
    for tensor in checkpoint.tensors.values():
        by_role.setdefault(tensor.role, []).append(tensor)
    return {
        one_line(role): {
            "tensors": len(tensors),
            "bytes": sum(tensor.nbytes for tensor in tensors),
            "dtypes": sorted({tensor.dtype.name for tensor in tensors}),
        }
        for role, tensors in by_role.items()
    }


def _dtypes(tensors: Iterable[Tensor]) -> dict[str, dict[str, int]]:
    found: dict[DType, dict[str, int]] = {}
    for tensor in tensors:
        counts = found.setdefault(tensor.dtype, {"tensors": 0, "elements": 0, "bytes": 0})
        counts["tensors"] += 1
        counts["elements"] += tensor.numel
        counts["bytes"] += tensor.nbytes
    return {dtype.name: counts for dtype, counts in found.items()}


def _training(checkpoint: Checkpoint) -> dict[str, JSON]:
    state = checkpoint.state
    return {
        "masters": any(role == MASTER for _, role in checkpoint.tensors),
        "optimizer_states": [one_line(name) for name in checkpoint.optimizer_states],
        "scalars": {one_line(name): _scalars(values) for name, values in state.scalars.items()},
        "param_groups": [_group(group) for group in state.param_groups],
        "items": {one_line(name): summarise(value) for name, value in state.entries().items()},
    }


def _quantized(checkpoint: Checkpoint) -> Iterator[str]:
    """That states are smaller in the files than the plain values which everything else here is of."""
    for method, count in Counter(checkpoint.quantized.values()).items():
        yield f"{count} optimizer states are stored quantized by {method}; here they are the values computed of them"


def _scalars(values: Mapping[str, Any]) -> dict[str, JSON]:
    """How many parameters have the scalar, and its values if they are few."""
    values = {fqn: value.value if isinstance(value, OneElement) else value for fqn, value in values.items()}
    distinct = {type(value).__name__ + str(value): value for value in values.values() if _is_number(value)}
    others = any(not _is_number(value) for value in values.values())
    shown = [summarise(value) for value in islice(distinct.values(), MAX_MEMBERS)]
    return {"parameters": len(values), "values": None if others or len(distinct) > MAX_MEMBERS else shown}


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= 64)


def _group(group: ParamGroup) -> dict[str, JSON]:
    return {"parameters": len(group.fqns), "options": summarise(dict(group.options))}


def _tensor(tensor: Tensor) -> dict[str, Any]:
    num_fragments, ranks, files = 0, set(), set()
    for fragment in tensor.fragments():
        num_fragments += 1
        ranks.add(fragment.rank)
        files.add(fragment.extent.path)
    return {
        "fqn": one_line(tensor.fqn),
        "role": one_line(tensor.role),
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "bytes": tensor.nbytes,
        "fragments": num_fragments,
        "files": len(files),
        "ranks": sorted(rank for rank in ranks if rank is not None),
        "replicas": len(tensor.replicas),
    }


def lines(checkpoint: Checkpoint, tensors: bool = False) -> Iterator[str]:
    """The description as text, with `tensors` followed by a table of them."""
    facts = describe(checkpoint, tensors)
    rows = [(name, text) for name, text in _facts(facts) if text]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        yield f"{name:{width}}  {text}"
    if tensors:
        yield ""
        yield from _table(facts["tensors"])


def _facts(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and texts of everything known; a further line of the same kind has no name."""
    yield "path", facts["path"]
    yield "format", facts["format"]
    yield "framework", facts["framework"] or ""
    model = dict(facts["model"] or {})
    quantization = model.pop("quantization", None)
    yield "model", json_text(next(iter(model.values()), ""))
    yield "quantized", json_text(quantization or "")
    if facts["step"] is not None:
        yield "step", str(facts["step"])
    if facts["world_size"] is not None:
        yield "world size", str(facts["world_size"])
    yield "parameters", _parameters_text(facts["parameters"])
    yield "on disk", f"{show_size(facts['files']['bytes'])} in {counted(facts['files']['count'], 'file')}"
    yield from _named("tensors", (_role_text(role, entry) for role, entry in facts["roles"].items()))
    yield from _named("ties", (f"{tie['alias']} is {tie['owner']}" for tie in facts["ties"]))
    training = facts["training"]
    states = training["optimizer_states"]
    yield "optimizer", ", ".join(states) if states else "no states"
    yield from _named("scalars", (_scalar_text(*entry) for entry in training["scalars"].items()))
    yield from _named("param groups", (_group_text(group) for group in training["param_groups"]))
    yield from _named("also stored", (f"{name}: {json_text(value)}" for name, value in training["items"].items()))
    yield from _named("notes", facts["notes"])


def _named(name: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The first text under `name` and the others under nothing, up to a bound."""
    every = list(texts)
    for number, text in enumerate(every[:_MAX_LISTED]):
        yield "" if number else name, text
    if len(every) > _MAX_LISTED:
        yield "", f"... and {len(every) - _MAX_LISTED} more"


def _parameters_text(counts: Mapping[str, Any]) -> str:
    text = f"{counts['elements']:,} in {counted(counts['tensors'], 'tensor')}"
    if counts["trainable"] is not None:
        text += f", {counts['trainable']:,} trainable and {counts['frozen']:,} frozen"
    return text


def _role_text(role: str, entry: Mapping[str, Any]) -> str:
    dtypes = ", ".join(entry["dtypes"])
    return f"{role}: {counted(entry['tensors'], 'tensor')}, {show_size(entry['bytes'])}, {dtypes}"


def _scalar_text(name: str, entry: Mapping[str, Any]) -> str:
    values = "several values" if entry["values"] is None else " and ".join(map(json_text, entry["values"]))
    return f"{name}: {values}, for {counted(entry['parameters'], 'parameter')}"


def _group_text(group: Mapping[str, Any]) -> str:
    return f"{counted(group['parameters'], 'parameter')}: {json_text(group['options'])}"


_HEADS = ("name", "role", "dtype", "shape", "bytes", "fragments", "ranks")
_RIGHT = ("bytes", "fragments")


def _table(tensors: list[dict[str, Any]]) -> Iterator[str]:
    rows = [_HEADS] + [
        (
            tensor["fqn"],
            tensor["role"],
            tensor["dtype"],
            str(tensor["shape"]),
            str(tensor["bytes"]),
            str(tensor["fragments"]),
            _holders_text(tensor),
        )
        for tensor in tensors
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    for row in rows:
        cells = [
            text.rjust(width) if head in _RIGHT else text.ljust(width)
            for text, width, head in zip(row, widths, _HEADS, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def _holders_text(tensor: Mapping[str, Any]) -> str:
    ranks = ranks_text(tensor["ranks"])
    replicas = counted(tensor["replicas"], "replica") if tensor["replicas"] else ""
    return "; ".join(filter(None, (ranks, replicas)))


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks as runs: `0-3, 6`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
