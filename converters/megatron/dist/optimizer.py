"""Optimizer in Megatron's `torch_dist` format.

States are stored by the metadata's `distrib_optim_sharding_type`:

    none                        not distributed: optimizer.state.{fp32_param,exp_avg,...}.<model's key>
    fully_reshardable           optimizer.state.{param,exp_avg,exp_avg_sq}.<model's key>
    fully_sharded_model_space   the same with fp32_param, each rank's range of the flattened parameter (up to 0.15)
    dp_reshardable              optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(...).bucket_idx_0.exp_avg
    dp_zero_gather_scatter      a value optimizer.distributed.dp_group_idx_0.param_state: content of distrib_optim.pt

The last two store every model-parallel rank's buffers without parameter names. The elements' owners follow from the
model, the axis sizes, and the lengths of buckets or buffers.

Shifted states: up to 0.19.0 megatron-core wrote `fully_reshardable` from buffers without the padding after each bucket,
using offsets from padded buffers. States in all buckets but the first are shifted, and some are lost. There are several
buckets with `overlap_grad_reduce`, and if pipeline stages share the embedding. A shifted master does not round to its
parameter, so `_drop_shifted` finds it.

Format facts: megatron-core 0.16.1, optimizer/distrib_optimizer.py (`sharded_param_state_*`,
`load_parameter_state_from_*`), optimizer/__init__.py (`data_parallel_group_idx`).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.base.errors import CorruptError, LossError, NotFoundError
from ckpt.base.text import pluralize
from ckpt.containers.dcp.tensors import Placed
from ckpt.move.files import translate_os_errors
from ckpt.move.source import opened, read_up_to
from ckpt.plan.assemble import whole_copies
from ckpt.plan.checkpoint import BUFFER, MASTER, MEGATRON, WEIGHT, Checkpoint, Key, Layout, TrainingState
from ckpt.plan.dtypes import BFLOAT16, FLOAT16, FLOAT32
from ckpt.plan.tensors import Box, Extent
from converters.megatron.buffers import ALIGNMENT, bucket_sizes, by_buffer, find_buffer, gathered
from converters.megatron.chunks import ChunkTensor, MegatronModel, are_experts_apart, describe_model
from converters.megatron.dist.keys import MASTERS
from converters.megatron.dist.read import DistReading, flat_pieces
from converters.megatron.optimizer import (
    KINDS,
    OF_MATRICES,
    Optimizers,
    belongs,
    check_alike,
    check_kind,
    is_known,
    is_of_matrices,
    is_partly_distributed,
    stepped_by,
)
from converters.megatron.remainders import are_gathered, refuse_gathered
from converters.names.megatron.facts import MegatronFacts
from converters.names.megatron.model.axes import Grid, Rank
from converters.names.megatron.model.spelling import (
    Spelling,
    is_expert,
    is_outside_language_model,
    layer_kinds,
    split_layer,
)

_OBJECT = re.compile(
    r"(?:chained_(?P<number>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.(?P<what>\w+)"
)
_BUCKET = re.compile(
    r"(?:chained_(?P<number>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)"
    r"\.gbuf_idx_(?P<buffer>\d+)\.dtype_\([^)]*\)\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)"
)
#: Megatron-LM loads these only on the same ranks: their buckets depend on the world size.
OF_BUFFERS = ("dp_reshardable", "dp_zero_gather_scatter")
_KNOWN = (None, "fully_reshardable", "fully_sharded_model_space", *OF_BUFFERS)
#: Elements compared between a parameter and its master.
_COMPARED = 64


def read_optimizer(reading: DistReading) -> Optimizers:
    """Return param groups, and add buffers' states to `reading`. Return nothing if states are shifted."""
    if reading.sharding not in _KNOWN:
        raise NotFoundError(
            "this distributed optimizer layout is not supported",
            path=reading.folder,
            expected=", ".join(str(name) for name in _KNOWN[1:]),
            found=reading.sharding,
            hint="load and save it with Megatron-LM, --dist-ckpt-optim-fully-reshardable",
        )
    _refuse_transposed(reading)
    if reading.flat or reading.sharding == "dp_zero_gather_scatter":
        _read_buffers(reading)
    found = Optimizers()
    contents = list(_contents(reading))
    if _drop_shifted(reading) or _drop_unknown(reading, contents):
        return found
    trained = _trained(reading)
    for content in contents:
        if found.grad_scaler is None:
            found.grad_scaler = content.get("grad_scaler")
        if _groups(content):
            _note_groups(reading, trained, found, content.get("optimizer", content))
    check_alike(reading.shapes, found, reading.args, reading.folder)
    return found


def _groups(content: Mapping[Any, Any]) -> Sequence[Any]:
    inner = content.get("optimizer", content)
    groups = inner.get("param_groups") if isinstance(inner, Mapping) else None
    return groups if isinstance(groups, list) else ()


def _contents(reading: DistReading) -> Iterator[Mapping[Any, Any]]:
    """Yield non-tensor content from the common state, or per data-parallel group."""
    common = reading.common.get("optimizer")
    if isinstance(common, Mapping):
        chained = [value for key, value in common.items() if type(key) is int and isinstance(value, Mapping)]
        yield from chained or [common]
    by_place: dict[str, dict[str, Any]] = {}
    for key, values in reading.objects.items():
        if match := _OBJECT.fullmatch(key):
            content = by_place.setdefault(key.removesuffix(match["what"]), {})
            content[match["what"]] = next(iter(values.values()))
    yield from by_place.values()


def is_optimizers(key: str) -> bool:
    return _OBJECT.fullmatch(key) is not None


def _refuse_transposed(reading: DistReading) -> None:
    """Refuse the legacy grouped GEMM's transposed weights."""
    args = reading.args
    legacy = args.get("transformer_impl") == "local" or args.get("moe_use_legacy_grouped_gemm")
    if args.get("moe_grouped_gemm") and legacy and reading.sharding == "fully_sharded_model_space":
        raise NotFoundError(
            "the optimizer's transposed state for experts in the legacy grouped GEMM is not supported",
            path=reading.folder,
            hint="save it with megatron-core 0.15, --dist-ckpt-optim-fully-reshardable",
        )


# -- groups --------------------------------------------------------------------------------------------------


def _trained(reading: DistReading) -> dict[str, str]:
    """Map trained parameters to the run's own names."""
    weights = [name for name, role in reading.placed if role == WEIGHT]
    trained = {name for name, role in reading.placed if role not in (WEIGHT, BUFFER)} or set(weights)
    kinds = layer_kinds(weights)
    spelling = Spelling(local_spec=reading.args.get("transformer_impl") == "local")
    return {name: spelling.spelled(name, kinds.get(split_layer(name)[0]), 0, 0) for name in weights if name in trained}


def _note_groups(reading: DistReading, trained: Mapping[str, str], found: Optimizers, inner: Mapping[Any, Any]) -> None:
    groups = [group for group in inner["param_groups"] if isinstance(group, Mapping)]
    if len(groups) != len(inner["param_groups"]):
        raise CorruptError("a param group is not a dict", path=reading.folder)
    state = inner.get("state")
    common_step = state.get("common_step") if isinstance(state, Mapping) else None
    claimed: set[str] = set()
    for group in groups:
        members = list(_members(reading, trained, group, len(groups) == 1 and not is_of_matrices(reading.args)))
        if not claimed.isdisjoint(members):
            raise NotFoundError(
                "the parameters in each param group are not recorded, and can't be derived from the groups' options",
                path=reading.folder,
                expected="groups with different weight decay, experts, decoupled learning rate or optimizer",
                found=f"{pluralize(len(groups), 'group')}",
                hint="Megatron-LM itself loads it; to read the weights here, save them with --no-save-optim",
            )
        claimed.update(members)
        found.note_group(group, members, str(reading.folder), common_step)


def _members(reading: DistReading, trained: Mapping[str, str], group: Mapping[str, Any], alone: bool) -> Iterator[str]:
    experts = are_experts_apart(Grid.of_args(reading.args), reading.args)
    for name, own in trained.items():
        if experts and is_expert(name) != bool(group.get("is_expert_parallel")):
            continue
        if alone or belongs(own, len(reading.shapes[name, WEIGHT][0]), group, reading.args):
            yield name


# -- buffers -------------------------------------------------------------------------------------------------

_Name = tuple[int, int, int]  # (optimizer, data-parallel group, buffer)


@dataclass(frozen=True, slots=True)
class _StoredBuffer:
    """Stored buffer. Its buckets are separate if `apart`."""

    apart: bool
    buckets: Mapping[int, Mapping[str, Placed]]

    @property
    def lengths(self) -> list[int]:
        states = [next(iter(self.buckets[number].values())) for number in sorted(self.buckets)]
        return [max((box.offsets[0] + box.sizes[0] for box, _ in placed), default=0) for placed in states]


@dataclass(frozen=True, slots=True)
class _Buffer:
    name: _Name
    pp: int
    vp: int
    chunk_numel: int
    members: tuple[ChunkTensor, ...]

    def places(self, stored: _StoredBuffer, args: Mapping[str, Any]) -> Sequence[tuple[int, int]] | None:
        """Return each parameter's (bucket, first element)."""
        numels = [one.numel for one in self.members]
        if stored.apart:
            return bucket_places(numels, stored.lengths)
        sizes = list(bucket_sizes(args, self.pp, self.vp, self.chunk_numel))
        found = find_buffer(numels, [one.shared for one in self.members], sizes, *stored.lengths)
        return None if found is None else [(0, start) for start in found.starts]


def _read_buffers(reading: DistReading) -> None:
    if not reading.args:
        raise LossError(
            "the optimizer's state is stored in buffers by rank, but the ranks are not recorded",
            path=reading.folder,
            expected="args in the common state, or Megatron-Bridge's run_config.yaml",
            hint="load and save it with Megatron-LM, --dist-ckpt-optim-fully-reshardable",
        )
    if beside := next((fqn for fqn, _ in reading.placed if is_outside_language_model(fqn)), None):
        raise NotFoundError(
            "the optimizer's buffers follow the module order, but this module is not Megatron's own",
            path=reading.folder,
            fqn=beside,
            hint="load and save it with Megatron-LM, --dist-ckpt-optim-fully-reshardable",
        )
    if reading.sharding == "dp_zero_gather_scatter":
        refuse_gathered(reading.args, reading.folder)
    is_partly = is_partly_distributed(reading.args) and reading.sharding == "dp_reshardable"
    check_kind(reading.args, reading.folder, (*KINDS, *OF_MATRICES) if is_partly else KINDS)
    Grid.recorded(reading.args, reading.folder)
    model = _megatron_model(reading)
    known = _buckets(reading) | dict(_gathered(reading))
    held: dict[Key, list[tuple[Box, Placed]]] = {}
    for buffer in _buffers(model):
        stored = known.pop(buffer.name, None)
        if stored is None:
            raise _misfit(reading, "optimizer {}, group {}, buffer {}".format(*buffer.name), "no such buffer")
        places = buffer.places(stored, reading.args)
        if places is None:
            expected = f"{pluralize(sum(one.numel for one in buffer.members), 'element')} and gaps"
            raise _misfit(reading, expected, f"bucket sizes {stored.lengths}")
        for one, (bucket, start) in zip(buffer.members, places, strict=True):
            for state, elements in stored.buckets[bucket].items():
                role = MASTER if state in MASTERS else state
                held.setdefault((one.fqn, role), []).extend(_pieces(one, elements, start))
    if known:
        raise _misfit(reading, "no further buffer", "optimizer {}, group {}, buffer {}".format(*next(iter(known))))
    for key, parts in held.items():
        shape = model.chosen[key[0]].tensor.shape
        for copy, placed in enumerate(whole_copies(parts)):
            pieces = [part for one in placed for part in one]
            reading.add(key, shape, pieces[0][1].dtype if pieces else FLOAT32, pieces, copy)


def _megatron_model(reading: DistReading) -> MegatronModel:
    tensors = {key: tensor for key, tensor in reading.tensors().items() if key[1] in (WEIGHT, BUFFER)}
    state = TrainingState(args=dict(reading.args))
    facts = MegatronFacts(blocks=reading.blocks)
    found = Checkpoint(str(reading.folder), "megatron-dist", tensors, (), namespace=MEGATRON, state=state, facts=facts)
    return describe_model(found, Layout())


def _buckets(reading: DistReading) -> dict[_Name, _StoredBuffer]:
    found: dict[_Name, dict[int, dict[str, Placed]]] = {}
    for key, tensor in reading.flat.items():
        match = _BUCKET.fullmatch(key)
        if match is None or len(tensor.entry.shape) != 1:
            raise CorruptError("this is not a distributed optimizer bucket", path=reading.folder, fqn=key)
        name = int(match["number"] or 0), int(match["group"]), int(match["buffer"])
        placed = sorted(tensor.placed, key=lambda part: part[0].offsets)
        found.setdefault(name, {}).setdefault(int(match["bucket"]), {})[match["state"]] = placed
    return {name: _StoredBuffer(True, buckets) for name, buckets in found.items()}


def _gathered(reading: DistReading) -> Iterator[tuple[_Name, _StoredBuffer]]:
    for key, values in reading.objects.items():
        match = _OBJECT.fullmatch(key)
        if match is None or match["what"] != "param_state":
            continue
        for state in values.values():
            for number, flat in gathered(state, path=reading.folder, fqn=key).items():
                states = {name: [(Box((0,), extent.shape), extent)] for name, extent in flat.items()}
                yield (int(match["number"] or 0), int(match["group"]), number), _StoredBuffer(False, {0: states})


def _buffers(model: MegatronModel) -> Iterator[_Buffer]:
    """Yield every buffer once. Data-parallel ranks share it, and for dense parameters expert-parallel ranks, too.

    The layer-wise matrix optimizer comes first and has no buffers.
    """
    is_partly = is_partly_distributed(model.args)
    apart = model.has_expert_optimizer and not is_partly
    done: set[_Name] = set()
    for rank in model.grid.ranks():
        chunks = model.chunks(rank)
        for number in range(is_partly, 1 + (apart or is_partly)):
            own = (
                (chunk.vp, model.chosen[one.fqn].dtype, one)
                for chunk in chunks
                for one in chunk.tensors
                if model.chosen[one.fqn].tensor.role != BUFFER
                and (
                    stepped_by(one.fqn, len(one.shape), model.args) is not None
                    if is_partly
                    else (apart and is_expert(one.fqn)) == bool(number)
                )
            )
            for index, (vp, _, ones) in enumerate(by_buffer(own)):
                name = number, _group(rank, model.grid, apart and bool(number)), index
                if name not in done:
                    done.add(name)
                    numel = sum(one.numel for one in chunks[vp].tensors)
                    yield _Buffer(name, rank.pp, vp, numel, tuple(ones))


def _group(rank: Rank, grid: Grid, experts: bool) -> int:
    """Return a rank's number within the ranks that together hold each parameter once."""
    if experts:
        return rank.pp * grid.etp * grid.ep + rank.ep * grid.etp + rank.etp
    return rank.pp * grid.tp + rank.tp


def bucket_places(numels: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return each parameter's (bucket, first element), in model order, or None if they do not fit."""
    places = [(0, 0)] * len(numels)
    bucket = at = 0
    for index in reversed(range(len(numels))):
        if bucket >= len(lengths):
            return None
        at += -at % ALIGNMENT
        places[index] = (bucket, at)
        at += numels[index]
        if at > lengths[bucket]:
            return None
        # A shared embedding ends the bucket before it, at its own place.
        if lengths[bucket] in (at, at + -at % ALIGNMENT):
            bucket, at = bucket + 1, 0
    return places if bucket == len(lengths) else None


def _pieces(one: ChunkTensor, chunks: Placed, start: int) -> Iterator[tuple[Box, Placed]]:
    firsts = [box.offsets[0] for box, _ in chunks]
    for piece in one.pieces:
        begin, end = start + piece.offset, start + piece.offset + piece.box.numel
        placed: Placed = []
        for box, extent in chunks[max(0, bisect_right(firsts, begin) - 1) :]:
            first, last = max(begin, box.offsets[0]), min(end, box.offsets[0] + box.sizes[0])
            if box.offsets[0] >= end:
                break
            if first < last:
                part = extent.flat(first - box.offsets[0], last - box.offsets[0])
                placed += flat_pieces(piece.box.sizes, piece.box.offsets, first - begin, part)
        yield piece.box, placed


def _misfit(reading: DistReading, expected: object, found: object) -> CorruptError:
    return CorruptError(
        "the distributed optimizer's buffers don't fit this model on the recorded ranks",
        path=reading.folder,
        expected=expected,
        found=found,
        hint="frozen parameters are not known from the checkpoint; save with Megatron-LM, "
        "--dist-ckpt-optim-fully-reshardable",
    )


# -- shifts --------------------------------------------------------------------------------------------------


def _drop_shifted(reading: DistReading) -> bool:
    """Drop the optimizer's state, with a note, if megatron-core shifted it (see above)."""
    is_remainder = are_gathered(reading.args)
    if reading.sharding != "fully_reshardable" or not (is_remainder or _has_buckets(reading.args)):
        return False
    shifted = [fqn for fqn, role in reading.placed if role == MASTER and not _is_rounded(reading, fqn)]
    if not shifted:
        return False
    if is_remainder:
        _leave_out(
            reading,
            f"the masters of {pluralize(len(shifted), 'parameter')} ({shifted[0]}, ...) have only 16 bits; "
            "megatron-core itself can't load them (--use-precision-aware-optimizer with fully_reshardable)",
        )
        return True
    _leave_out(
        reading,
        f"the masters of {pluralize(len(shifted), 'parameter')} ({shifted[0]}, ...) don't round to their "
        "weights; with several buckets and fully_reshardable, megatron-core up to 0.19.0 shifts them "
        "(NVIDIA/Megatron-LM#5077)",
    )
    return True


def _drop_unknown(reading: DistReading, contents: Sequence[Mapping[Any, Any]]) -> bool:
    """Drop the optimizer's state if its parameters are unknown.

    Before 0.18 the groups of parameters that Muon does not step have no optimizer name.
    """
    groups = [group for content in contents for group in _groups(content)]
    named = any(isinstance(group, Mapping) and group.get("optimizer") for group in groups)
    if not groups or (is_known(reading.args) and (named or not is_of_matrices(reading.args))):
        return False
    _leave_out(reading, f"the parameters stepped by --optimizer {reading.args.get('optimizer')} are unknown")
    return True


def _leave_out(reading: DistReading, why: str) -> None:
    for key in [key for key in reading.placed if key[1] not in (WEIGHT, BUFFER)]:
        del reading.placed[key], reading.shapes[key]
    reading.notes.append(f"the optimizer's state is left out: {why}")


def _has_buckets(args: Mapping[str, Any]) -> bool:
    shared = not args.get("untie_embeddings_and_output_weights") or bool(args.get("mtp_num_layers"))
    return not args or args.get("overlap_grad_reduce") is not False or (shared and Grid.of_args(args).pp > 1)


def _is_rounded(reading: DistReading, fqn: str) -> bool:
    """Compare the first elements of weight and rounded master."""
    weight, master = ((fqn, role) in reading.placed and _first(reading.placed[fqn, role]) for role in (WEIGHT, MASTER))
    if not weight or not master or weight.dtype not in (BFLOAT16, FLOAT16) or master.dtype != FLOAT32:
        return True
    import numpy as np  # late: numpy

    from ckpt.move.casts import cast_bits, storage_dtype

    def bits(extent: Extent) -> Any:
        return np.frombuffer(_read_elements(extent, count), storage_dtype(extent.dtype))

    count = min(weight.shape[-1], master.shape[-1], _COMPARED) if weight.shape and master.shape else 1
    return bool(np.array_equal(cast_bits(bits(master), master.dtype, weight.dtype), bits(weight)))


def _first(placed: Placed) -> Extent | None:
    return next((extent for box, extent in placed if not any(box.offsets)), None)


def _read_elements(extent: Extent, count: int) -> bytes:
    with opened(extent.path) as descriptor, translate_os_errors(extent.path):
        return read_up_to(descriptor, extent.offset, extent.dtype.itemsize * count)
