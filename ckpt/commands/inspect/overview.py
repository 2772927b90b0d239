"""Overview of a checkpoint without tensor data.

Names and values come from untrusted files: output is escaped and limited, and pickled objects never give their own
text.
"""

from __future__ import annotations

import os
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import prod
from typing import Any

from ckpt.base.text import one_line, pluralize, show_size
from ckpt.plan import registry, services
from ckpt.plan.checkpoint import AXES, BUFFER, MASTER, WEIGHT, Checkpoint, OneElement
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Tensor
from ckpt.runs.half_checkpoints import holds_model
from ckpt.runs.recorded_precision import quantization_of
from ckpt.state.summaries import FULL, JSON, MAX_MEMBERS, SHORT, Bounds, json_text, summarise

UnreadFiles = Sequence[Mapping[str, str]]

_MAX_LISTED = 20
_FEW_RANKS = 8
_MANY = 200_000  # tensors times ranks; more would take too long


def describe(
    checkpoint: Checkpoint, unread: UnreadFiles = (), *, tensors: bool = False, everything: bool = False
) -> dict[str, Any]:
    """Return plain JSON values: short, finite, without control characters.

    `everything` allows much longer values than frameworks save.
    """
    bounds = FULL if everything else SHORT
    found = {
        "path": one_line(checkpoint.path),
        "format": one_line(checkpoint.format),
        "framework": None if checkpoint.framework is None else one_line(checkpoint.framework),
        "step": summarise(checkpoint.state.step),
        "world_size": summarise(checkpoint.world_size),
        "mesh": mesh(checkpoint),
        "bytes_per_rank": _bytes_per_rank(checkpoint, everything),
        "names": one_line(checkpoint.namespace),
        "model": _model_facts(checkpoint),
        "parameters": _parameters(checkpoint),
        "quantized": _quantized_weights(checkpoint),
        "roles": _roles(checkpoint),
        "dtypes": _dtypes(checkpoint.tensors.values()),
        "files": {"count": len(checkpoint.files), "bytes": sum(file.size for file in checkpoint.files)},
        "ties": [{"alias": one_line(alias), "owner": one_line(owner)} for alias, owner in checkpoint.ties.items()],
        "training": _training(checkpoint, bounds),
        "notes": [
            one_line(note)
            for note in (*_half(checkpoint), *checkpoint.notes, *_quantized(checkpoint), *checkpoint.unread)
        ],
        "not_read": list(unread),
    }
    if tensors:
        found["tensors"] = [_tensor(tensor) for tensor in checkpoint.tensors.values()]
    return found


def _model_facts(checkpoint: Checkpoint) -> dict[str, JSON] | None:
    config = checkpoint.config
    if not isinstance(config, Mapping):
        return None
    found = {name: summarise(config[name]) for name in ("model_type", "architectures") if name in config}
    quantization = quantization_of(config, checkpoint.folders)
    if quantization is not None:
        found["quantization"] = quantization.title
    return found


def _parameters(checkpoint: Checkpoint) -> dict[str, Any]:
    """Count each parameter once. It is trainable if the optimizer lists it or has state for it."""
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
        "dtypes": {name: counts["elements"] for name, counts in _dtypes(parameters.values()).items()},
    }


def _quantized_weights(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return faults, bits per parameter, and sizes by method and plain dtype."""
    weights, blocks = services.quantization.quantized_weights(checkpoint, reads=False), checkpoint.blocks
    model = {fqn: tensor for (fqn, role), tensor in checkpoint.tensors.items() if role in (WEIGHT, BUFFER)}
    kinds = []
    if weights.owners or weights.faults:
        nbytes, counts = sum(model[part].nbytes for part in weights.parts), weights.num_parameters.values()
        count = None if None in counts else sum(filter(None, counts))
        kinds.append(_size_of_kind(weights.title, len(counts), count, nbytes))
    for kind in sorted({one.type for one in blocks.values()}):
        sizes = [(model[fqn].numel, one.nbytes) for fqn, one in blocks.items() if one.type == kind]
        kinds.append(_size_of_kind(kind, len(sizes), *map(sum, zip(*sizes, strict=True))))
    if not kinds:
        return None
    plain = (tensor for fqn, tensor in model.items() if fqn not in weights.parts and fqn not in blocks)
    for dtype, entry in _dtypes(plain).items():
        kinds.append(_size_of_kind(dtype, entry["tensors"], entry["elements"], entry["bytes"]))
    totals = [kind["parameters"] for kind in kinds]
    total = None if None in totals else sum(totals)
    bits = _per_parameter(sum(kind["bytes"] for kind in kinds), total)
    return {"bits_per_parameter": bits, "kinds": kinds, "faults": [one_line(str(fault)) for fault in weights.faults]}


def _size_of_kind(kind: str, num_weights: int, parameters: int | None, nbytes: int) -> dict[str, Any]:
    found = {"kind": one_line(kind), "weights": num_weights, "parameters": parameters, "bytes": nbytes}
    return {**found, "bits_per_parameter": _per_parameter(nbytes, parameters)}


def _per_parameter(nbytes: int, parameters: int | None) -> float | None:
    return 8 * nbytes / parameters if parameters else None


def mesh(checkpoint: Checkpoint) -> dict[str, int] | None:
    """Return the sizes of the parallel axes `tp`, `pp`, `ep`, `cp` and `dp`, or None if they are not recorded.

    ZeRO's axis is always `dp`.
    """
    args, world_size = checkpoint.state.args or {}, checkpoint.world_size
    found = {axis: size for axis, name in AXES.items() if type(size := args.get(name)) is int and size > 0}
    if "tp" not in found:
        return {"dp": world_size} if checkpoint.state.zero_stage and world_size else None
    inner = prod(found.get(axis, 1) for axis in ("tp", "pp", "cp"))
    if "dp" not in found and world_size and world_size % inner == 0:
        found["dp"] = world_size // inner
    return {axis: found[axis] for axis in ("tp", "pp", "ep", "cp", "dp") if axis in found}


def coordinates(checkpoint: Checkpoint) -> dict[int, dict[str, int]]:
    """Return each rank's coordinates on Megatron's mesh, or an empty dict if they are not recorded.

    As in megatron-core (`parallel_state.py`, `RankGenerator`), `tp` varies fastest, then `cp`, `dp` and `pp`. With
    `use_tp_pp_dp_mapping`, `pp` comes before `dp`. If one rank writes for the whole `dp` axis, its size is 1.
    """
    args, sizes = checkpoint.state.args or {}, dict(mesh(checkpoint) or {})
    if "tp" not in sizes or "pp" not in sizes or (ranks := registry.get(checkpoint.format).ranks_on_axes) is None:
        return {}
    if ranks == "model":
        if sizes.get("ep", 1) > 1 or sizes.get("cp", 1) > 1:
            return {}
        sizes["dp"] = 1
    elif prod(sizes.get(axis, 1) for axis in ("tp", "cp", "dp", "pp")) != checkpoint.world_size:
        return {}
    order = ("tp", "cp", "pp", "dp") if args.get("use_tp_pp_dp_mapping") else ("tp", "cp", "dp", "pp")
    found: dict[int, dict[str, int]] = {}
    for rank in range(prod(sizes.get(axis, 1) for axis in order)):
        rest, place = rank, {}
        for axis in order:
            rest, place[axis] = divmod(rest, sizes.get(axis, 1))
        found[rank] = place
    return found


def mesh_text(checkpoint: Checkpoint) -> str:
    found, stage, ranks = mesh(checkpoint), checkpoint.state.zero_stage, checkpoint.world_size
    if found is None:
        return ""
    text = " x ".join(f"{axis.upper()} {size}" for axis, size in found.items() if axis != "cp" or size > 1)
    text += f" on {pluralize(ranks, 'rank')}" if ranks else ""
    if found.get("ep", 1) > 1:
        text += ", experts spread within DP"
    if checkpoint.state.zero_stage:
        text += f"; ZeRO-{stage} partitions " + ("weights and optimizer" if stage == 3 else "the optimizer")
    return text


def _bytes_per_rank(checkpoint: Checkpoint, everything: bool) -> dict[str, int] | None:
    """Return None if ranks are unknown or counting would take long."""
    if not everything and len(checkpoint.tensors) * (checkpoint.world_size or 1) > _MANY:
        return None
    found: Counter[int] = Counter()
    for tensor in checkpoint.tensors.values():
        for source in (tensor.source, *tensor.replicas):
            for fragment in source.fragments(tensor.shape):
                if fragment.rank is not None:
                    found[fragment.rank] += fragment.extent.nbytes
    return {str(rank): found[rank] for rank in sorted(found)} or None


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


def _training(checkpoint: Checkpoint, bounds: Bounds) -> dict[str, JSON]:
    state = checkpoint.state
    return {
        "masters": any(role == MASTER for _, role in checkpoint.tensors),
        "optimizer_states": [one_line(name) for name in checkpoint.optimizer_states],
        "scalars": {one_line(name): _scalars(values) for name, values in state.scalars.items()},
        "param_groups": [
            {"parameters": len(group.fqns), "options": summarise(dict(group.options), bounds)}
            for group in state.param_groups
        ],
        "items": {one_line(name): summarise(value, bounds) for name, value in state.entries().items()},
    }


def _half(checkpoint: Checkpoint) -> list[str]:
    is_half = not holds_model(checkpoint) and (checkpoint.optimizer_states or checkpoint.state.param_groups)
    return ["half a checkpoint: this has only optimizer states, without the model of the same save"] if is_half else []


def _quantized(checkpoint: Checkpoint) -> Iterator[str]:
    for method, count in Counter(checkpoint.quantized.methods.values()).items():
        states = f"{pluralize(count, 'optimizer state')} {'is' if count == 1 else 'are'}"
        yield f"{states} stored quantized by {method}; shown here with the values computed from the blocks"


def _scalars(values: Mapping[str, Any]) -> dict[str, JSON]:
    values = {fqn: value.value if isinstance(value, OneElement) else value for fqn, value in values.items()}
    distinct = {type(value).__name__ + str(value): value for value in values.values() if _is_number(value)}
    others = any(not _is_number(value) for value in values.values())
    shown = [summarise(value) for value in islice(distinct.values(), MAX_MEMBERS)]
    return {"parameters": len(values), "values": None if others or len(distinct) > MAX_MEMBERS else shown}


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= 64)


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


def lines(
    checkpoint: Checkpoint, unread: UnreadFiles = (), *, everything: bool = False, width: int | None = None
) -> Iterator[str]:
    """Yield the description as text. If anything is shortened, the last line says so."""
    found = named_facts(checkpoint, unread, everything=everything)
    first = max(len(name) for name, _ in found) + 2
    if any("..." in text for _, text in found):
        found.append(("", "(--all shows in full what ends in ...)"))
    for name, text in found:
        folded = textwrap.wrap(text, max(20, width - first), break_on_hyphens=False) if width else [text]
        yield f"{name:{first}}{folded[0]}"
        yield from (" " * first + rest for rest in folded[1:])


def named_facts(checkpoint: Checkpoint, unread: UnreadFiles = (), *, everything: bool = False) -> list[tuple[str, str]]:
    """Return names and texts. A repeated name is empty."""
    facts = describe(checkpoint, unread, everything=everything)
    return [(name, text) for name, text in _facts(facts, mesh_text(checkpoint), everything) if text]


def _facts(facts: dict[str, Any], mesh_words: str, everything: bool) -> Iterator[tuple[str, str]]:
    limit = FULL.text if everything else SHORT.text

    def _named(name: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
        every = list(texts)
        for number, text in enumerate(every if everything else every[:_MAX_LISTED]):
            yield "" if number else name, text
        if len(every) > _MAX_LISTED and not everything:
            yield "", f"... and {len(every) - _MAX_LISTED} more"

    yield "path", facts["path"]
    yield "format", facts["format"]
    yield "framework", facts["framework"] or ""
    model = dict(facts["model"] or {})
    quantization = model.pop("quantization", None)
    yield "model", json_text(next(iter(model.values()), ""))
    yield "quantized", json_text(quantization or "")
    yield from _named("bits", _bits_texts(facts["quantized"]))
    yield from _named("damaged", (facts["quantized"] or {}).get("faults", ()))
    if facts["step"] is not None:
        yield "step", str(facts["step"])
    if facts["world_size"] is not None:
        yield "world size", str(facts["world_size"])
    yield "mesh", mesh_words
    yield "parameters", _parameters_text(facts["parameters"])
    yield "", _by_dtype_text(facts["parameters"]["dtypes"])
    yield "on disk", f"{show_size(facts['files']['bytes'])} in {pluralize(facts['files']['count'], 'file')}"
    yield from _named("per rank", _per_rank_texts(facts["bytes_per_rank"], everything))
    yield from _named("tensors", (_role_text(role, entry) for role, entry in facts["roles"].items()))
    yield from _named("ties", (f"{tie['alias']} is {tie['owner']}" for tie in facts["ties"]))
    training = facts["training"]
    states = training["optimizer_states"]
    yield "optimizer", ", ".join(states) if states else "no states"
    yield from _named("scalars", (_scalar_text(*entry) for entry in training["scalars"].items()))
    yield from _named("param groups", (_group_text(group, limit) for group in training["param_groups"]))
    yield from _named(
        "also stored", (f"{name}: {json_text(value, limit)}" for name, value in training["items"].items())
    )
    yield from _named("notes", facts["notes"])
    yield from _named("not read", (f"{one['name']}: {one['why']}" for one in facts["not_read"]))


def _parameters_text(counts: Mapping[str, Any]) -> str:
    text = f"{counts['elements']:,} in {pluralize(counts['tensors'], 'tensor')}"
    if counts["trainable"] is not None:
        text += f", {counts['trainable']:,} trainable and {counts['frozen']:,} frozen"
    return text


def _bits_texts(bits: Mapping[str, Any] | None) -> Iterator[str]:
    if bits is None:
        return
    if bits["bits_per_parameter"] is not None:
        yield f"{bits['bits_per_parameter']:.4g} per parameter"
    for kind in bits["kinds"]:
        size = f"{kind['kind']}: {show_size(kind['bytes'])} in {pluralize(kind['weights'], 'weight')}"
        if kind["parameters"] is None:
            yield f"{size}, number of parameters unknown"
        else:
            count = pluralize(kind["parameters"], "parameter", ",")
            yield f"{size}, {count} with {kind['bits_per_parameter']:.4g} bits"


def _by_dtype_text(elements: Mapping[str, int]) -> str:
    if len(elements) == 1:
        return f"all of them {next(iter(elements))}"
    return ", ".join(f"{count:,} {name}" for name, count in sorted(elements.items(), key=lambda item: -item[1]))


def _per_rank_texts(nbytes: Mapping[str, int] | None, everything: bool) -> list[str]:
    if not nbytes or len(nbytes) == 1:
        return []
    least, most = min(nbytes, key=lambda r: nbytes[r]), max(nbytes, key=lambda r: nbytes[r])
    if nbytes[least] == nbytes[most] and not everything:
        return [f"{show_size(nbytes[least])} of tensors on each of {len(nbytes)}"]
    if len(nbytes) <= _FEW_RANKS or everything:
        return [f"rank {rank}: {show_size(count)} of tensors" for rank, count in nbytes.items()]
    sizes = f"{show_size(nbytes[least])} of tensors (rank {least}) to {show_size(nbytes[most])} (rank {most})"
    return [f"{sizes} on {pluralize(len(nbytes), 'rank')} ..."]


def _role_text(role: str, entry: Mapping[str, Any]) -> str:
    dtypes = ", ".join(entry["dtypes"])
    return f"{role}: {pluralize(entry['tensors'], 'tensor')}, {show_size(entry['bytes'])}, {dtypes}"


def _scalar_text(name: str, entry: Mapping[str, Any]) -> str:
    values = "several values" if entry["values"] is None else " and ".join(map(json_text, entry["values"]))
    return f"{name}: {values}, for {pluralize(entry['parameters'], 'parameter')}"


def _group_text(group: Mapping[str, Any], limit: int) -> str:
    return f"{pluralize(group['parameters'], 'parameter')}: {json_text(group['options'], limit)}"


HEADS = ("name", "role", "dtype", "shape", "bytes", "fragments", "ranks")
RIGHT = ("bytes", "fragments")


def rows(checkpoint: Checkpoint) -> list[tuple[str, ...]]:
    return [_row(_tensor(tensor)) for tensor in checkpoint.tensors.values()]


def _row(tensor: Mapping[str, Any]) -> tuple[str, ...]:
    replicas = pluralize(tensor["replicas"], "replica") if tensor["replicas"] else ""
    holders = "; ".join(filter(None, (ranks_text(tensor["ranks"]), replicas)))
    return *(str(tensor[name]) for name in ("fqn", "role", "dtype", "shape", "bytes", "fragments")), holders


def csv_rows(checkpoint: Checkpoint) -> Iterator[tuple[str | int, ...]]:
    """Yield heads and rows for other programs: shapes as `2x3`, ranks and files one by one."""
    yield "fqn", "kind", "dtype", "shape", "bytes", "copies", "ranks", "files"
    for tensor in checkpoint.tensors.values():
        ranks: dict[int, None] = {}
        files: dict[str, None] = {}
        for source in (tensor.source, *tensor.replicas):
            for fragment in source.fragments(tensor.shape):
                files[os.path.basename(fragment.extent.path)] = None
                if fragment.rank is not None:
                    ranks[fragment.rank] = None
        shape, copies = "x".join(map(str, tensor.shape)), 1 + len(tensor.replicas)
        names = one_line(tensor.fqn), one_line(tensor.role), tensor.dtype.name
        yield *names, shape, tensor.nbytes, copies, " ".join(map(str, sorted(ranks))), " ".join(map(one_line, files))


def ranks_text(ranks: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
