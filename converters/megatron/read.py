"""Reader for Megatron-LM's `torch` format: maps bytes in rank files to parts of tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, LossError, NotFoundError
from ckpt.base.text import pluralize
from ckpt.containers.sources import Sources
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.move.files import confined
from ckpt.plan.assemble import assemble
from ckpt.plan.checkpoint import BUFFER, WEIGHT, Key
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Extent, Fragment, Shape, Tensor
from converters.megatron.chunks import BUFFERS, ChunkPiece, pieces_of
from converters.megatron.entries import is_empty, plain_args
from converters.megatron.folder import MODEL, RANK_FOLDER, rank_folders
from converters.megatron.legacy_names import LANGUAGE_MODEL, core_names
from converters.names.megatron.model.axes import Grid, Rank, Stages
from converters.names.megatron.model.spelling import (
    EMBEDDING,
    ENCODER,
    LANGUAGE,
    OUTPUT,
    LayerKind,
    Spelling,
    bare,
    in_order,
    is_expert,
    is_outside_language_model,
    layer_kinds,
    registered,
    split_layer,
)
from converters.names.megatron.model.splits import (
    COLUMNS,
    GATED,
    GateBlocks,
    Split,
    full_shape,
    has_qkv_in_blocks,
    known_split,
    sections_of,
)
from converters.names.megatron.settings import CHANGES, COMPARED

#: Keeps the writer from assigning optimizer states to wrong parameters.
OTHER_ORDER = "the model's modules are in a different order than in megatron-core 0.16"
_WRAPPERS = re.compile(r"^(?:module\.)+")
_LAYER_NUMBER = re.compile(r"decoder\.layers\.(\d+)\.")
_GROUPED_GEMM = re.compile(r"(?P<layer>.*\.mlp\.experts\.)weight(?P<number>[12])")


def folder_name(rank: Rank, grid: Grid) -> str:
    """Return the rank folder's name: training/checkpointing.py, `get_checkpoint_name`."""
    name = f"mp_rank_{rank.tp:02d}"
    if grid.pp > 1:
        name += f"_{rank.pp:03d}"
    return f"{name}_{rank.ep:03d}" if grid.ep > 1 else name


# -- file ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalPart:
    """Part of the whole tensor `fqn`, with whole `shape`, in a rank's tensor."""

    fqn: str
    shape: Shape
    pieces: tuple[ChunkPiece, ...]


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """Tensor of a rank's chunk, under the chunk's own name.

    `shared` marks a copy of the embedding kept equal on two stages.
    """

    name: str
    stored: StoredTensor
    held: tuple[LocalPart, ...]
    is_expert: bool
    shared: bool = False

    @property
    def is_buffer(self) -> bool:
        return self.name.endswith(BUFFERS)

    @property
    def fqns(self) -> list[str]:
        return [one.fqn for one in self.held]


@dataclass(frozen=True, slots=True)
class RankContent:
    """Content of one rank's file. `chunks` are in module order."""

    rank: Rank
    path: str
    content: Mapping[Any, Any]
    chunks: tuple[tuple[LocalTensor, ...], ...]


@dataclass
class MegatronReading:
    folder: Path
    args: Mapping[str, Any] = field(default_factory=dict)
    grid: Grid = field(default_factory=Grid)
    stages: Stages = field(default_factory=lambda: Stages(0))
    sources: Sources = field(default_factory=Sources)
    parts: dict[Key, list[tuple[Shape, Fragment]]] = field(default_factory=dict)
    natives: dict[str, DType] = field(default_factory=dict)
    extra: dict[str, None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    own_module_order: bool = False
    in_larger: bool = False
    accepted: Collection[str] = ()
    raw_names: set[str] = field(default_factory=set)

    @property
    def tied(self) -> bool:
        return not self.args.get("untie_embeddings_and_output_weights")

    @cached_property
    def blocks(self) -> GateBlocks:
        """Row blocks for gate and up. Read it after the arguments."""
        return GateBlocks.of_args(self.args, self.accepted)

    def load(self, path: Path) -> Mapping[Any, Any]:
        root = self.sources.root(path)
        if not isinstance(root, Mapping | list | type(None)):
            raise CorruptError("this is not a Megatron checkpoint", path=path, found=type(root).__name__)
        return root  # type: ignore[return-value]

    def add(self, local: LocalTensor, role: str, extent: Extent, path: str, rank: Rank) -> None:
        if not extent.is_contiguous:
            raise CorruptError("a rank's tensor is not contiguous", path=path, rank=rank.number, fqn=local.name)
        for held in local.held:
            parts = self.parts.setdefault((held.fqn, role), [])
            parts += [(held.shape, piece.of(extent, rank.number)) for piece in held.pieces]

    def tensors(self) -> dict[Key, Tensor]:
        """Return tensors in model order. Parts on several ranks become replicas."""
        keys = sorted(self.parts, key=lambda key: registered(key[0]))
        return {key: assemble(*key, self.parts[key], self.natives.get(key[0])) for key in keys}


# -- files ---------------------------------------------------------------------------------------------------


def read_ranks(reading: MegatronReading) -> list[RankContent]:
    names = rank_folders(reading.folder)
    if not names:
        raise NotFoundError("no rank folders found", path=reading.folder, expected="mp_rank_00, ...")
    first = reading.load(_model_file(reading.folder, names[0]))
    reading.args = plain_args(first)
    reading.grid = _recorded_grid(reading, names)
    expected = {folder_name(rank, reading.grid): rank for rank in reading.grid.ranks()}
    _check_folders(reading, names, expected)
    contents = [(rank, _model_file(reading.folder, name)) for name, rank in expected.items()]
    loaded = [(rank, path, first if path.parent.name == names[0] else reading.load(path)) for rank, path in contents]
    _check_agreement(reading, loaded)
    _check_places(reading.grid, loaded)
    writers = {str(path): plain_args(content).get("rank") for _, path, content in loaded}
    reading.sources.check_distinct(((rank.number, str(path)) for rank, path, _ in loaded), writers)
    _check_version(reading, first)
    files = [
        RankContent(rank, str(path), content, tuple(_chunks(reading, rank, str(path), content)))
        for rank, path, content in loaded
    ]
    for file in files:
        for local in chain.from_iterable(file.chunks):
            reading.add(local, BUFFER if local.is_buffer else WEIGHT, local.stored.extent, file.path, file.rank)
            reading.natives |= dict.fromkeys(local.fqns, local.stored.dtype)
    check_encoder(reading.raw_names, reading.folder)
    check_larger(reading.in_larger, [fqn for fqn, _ in reading.parts], reading.folder)
    return files


def check_larger(in_larger: bool, fqns: Iterable[str], folder: Path) -> None:
    """Raise LossError if a larger model's other tensors are missing."""
    if in_larger and not any(map(is_outside_language_model, fqns)):
        raise LossError(
            "this language model belongs to a larger model, but no other known tensors are here",
            path=folder,
            expected="visual., vision_model., vision_tower. or multi_modal_projector. beside language_model.",
        )


def refuse_two_blocks(names: Collection[str], path: Path) -> None:
    found = next((name for name in names if name.startswith(ENCODER)), None)
    if found is not None and any(name.startswith("decoder.") for name in names):
        raise NotFoundError(
            "a megatron-core model with an encoder and a decoder (T5Model) is not supported",
            path=path,
            fqn=found,
            expected="GPTModel's names (embedding., decoder., mtp., output_layer.), or BertModel's (only encoder.)",
        )


def check_encoder(names: Collection[str], path: Path) -> None:
    """Raise NotFoundError for an encoder model other than a BertModel with both heads."""
    found = next((name for name in names if name.startswith(ENCODER)), None)
    if found is not None and "binary_head.weight" not in names:
        raise NotFoundError(
            "a megatron-core BertModel without its sentence-pair head is not supported",
            path=path,
            fqn=found,
            expected="binary_head. (from a run without --bert-no-binary-head)",
        )


def _model_file(folder: Path, name: str) -> Path:
    path = confined(folder, f"{name}/{MODEL}")
    if not path.is_file():
        if (folder / name / "model_rng.pt").is_file():
            raise NotFoundError(
                "Megatron-LM's layout from before 2023 (model_rng.pt beside optim.pt) is not supported",
                path=folder / name,
            )
        raise CorruptError(
            "a rank's file is missing: it has a part of every tensor",
            path=folder / name,
            rank=name,
            expected=MODEL,
            found="no file",
        )
    return path


def _recorded_grid(reading: MegatronReading, names: Sequence[str]) -> Grid:
    parts = {sum(number is not None for number in m.groups()) for name in names if (m := RANK_FOLDER.fullmatch(name))}
    if not reading.args:
        if parts != {1}:
            raise CorruptError(
                "the file records no arguments, so the axes numbered in the folder names are unknown",
                path=reading.folder / names[0] / MODEL,
                expected="args",
            )
        return Grid(tp=len(names))
    grid = Grid.recorded(reading.args, reading.folder)
    expected = 1 + (grid.pp > 1) + (grid.ep > 1)
    if parts != {expected}:
        raise CorruptError(
            "the rank folders don't match the recorded layout",
            path=reading.folder,
            expected=f"{pluralize(expected, 'number')} in each name: {_describe(grid)}",
            found=", ".join(names[:4]),
        )
    return grid


def _describe(grid: Grid) -> str:
    return f"TP {grid.tp}, PP {grid.pp}, EP {grid.ep}" + (f", expert TP {grid.etp}" if grid.etp != grid.tp else "")


def _check_folders(reading: MegatronReading, names: Sequence[str], expected: Mapping[str, Rank]) -> None:
    missing = [name for name in expected if name not in names]
    left_over = [name for name in names if name not in expected]
    if missing:
        raise CorruptError(
            "a rank's folder is missing: it has a part of every tensor",
            path=reading.folder / missing[0],
            rank=", ".join(missing[:8]),
            expected=f"{pluralize(len(expected), 'folder')} for {_describe(reading.grid)}",
            found=f"{pluralize(len(names), 'folder')}",
        )
    if left_over:
        raise CorruptError(
            "unexpected rank folders: the recorded layout doesn't have them",
            path=reading.folder / left_over[0],
            expected=f"{pluralize(len(expected), 'folder')} for {_describe(reading.grid)}",
            found=f"{pluralize(len(names), 'folder')}",
            hint="move the leftover rank files of a larger run out of the folder",
        )


#: Values that compare by content. Objects in a pickle do not.
_PLAIN = (bool, int, float, str, list, tuple, type(None))


def _agreed(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that describe the model: equal on all ranks of a run."""
    names = COMPARED | CHANGES.keys() | {"transformer_impl"}
    return {name: value for name, value in args.items() if name in names and isinstance(value, _PLAIN)}


def _check_agreement(reading: MegatronReading, loaded: Sequence[tuple[Rank, Path, Mapping[Any, Any]]]) -> None:
    said: dict[Any, str] = {}
    for _, path, content in loaded:
        said.setdefault(content.get("iteration"), f"{path.parent.name}: {content.get('iteration')}")
    if len(said) > 1:
        raise CorruptError(
            "ranks from different iterations in one folder",
            path=reading.folder,
            expected="the same iteration in every file",
            found=", ".join(said.values()),
        )
    agreed = _agreed(reading.args)
    for rank, path, content in loaded:
        args = plain_args(content)
        grid = Grid.of_args(args)
        own = _agreed(args)
        other = [name for name in sorted(own.keys() | agreed.keys()) if own.get(name) != agreed.get(name)]
        if args and (grid != reading.grid or other):
            raise CorruptError(
                "ranks from different runs in one folder",
                path=path,
                rank=rank.number,
                expected=_describe(reading.grid) if not other else f"{other[0]} {reading.args.get(other[0])!r}",
                found=_describe(grid) if not other else f"{args.get(other[0])!r}",
            )


def _check_places(grid: Grid, loaded: Sequence[tuple[Rank, Path, Mapping[Any, Any]]]) -> None:
    """Raise CorruptError if `args.rank` is not the folder's rank.

    Ranks are ordered tp-cp-ep-dp-pp, or with `use_tp_pp_dp_mapping` tp-cp-ep-pp-dp. Files converted by another program
    have equal arguments, which prove nothing.
    """
    said = [(rank, path, plain_args(content)) for rank, path, content in loaded]
    if len({args.get("rank") for _, _, args in said}) == 1:
        return
    for rank, path, args in said:
        number, world_size = args.get("rank"), args.get("world_size")
        if type(number) is not int or type(world_size) is not int:
            continue
        num_in_stage = max(1, world_size // grid.pp)
        in_order = number // num_in_stage == rank.pp or args.get("use_tp_pp_dp_mapping")
        if number % grid.tp != rank.tp or not in_order:
            raise CorruptError(
                "another rank wrote this rank's file (args.rank)",
                path=path,
                rank=rank.number,
                expected=f"a file from TP rank {rank.tp}" + (f" and PP rank {rank.pp}" if grid.pp > 1 else ""),
                found=f"args.rank {number} (world size {world_size}): TP rank {number % grid.tp}"
                + (f" and PP rank {number // num_in_stage}" if grid.pp > 1 else ""),
                hint="were files exchanged, or one copied over another?",
            )


def _check_version(reading: MegatronReading, content: Mapping[Any, Any]) -> None:
    """Raise NotFoundError before version 2.0, which orders QKV rows differently (`fix_query_key_value_ordering`)."""
    version = content.get("checkpoint_version", 0)
    if not isinstance(version, int | float) or version < 2:
        raise NotFoundError(
            "this Megatron-LM checkpoint version is not supported: it orders query, key and value differently",
            path=reading.folder,
            expected="checkpoint_version 2.0 or 3.0",
            found=f"checkpoint_version {version}",
            hint="load and save it with Megatron-LM to reorder them",
        )
    if has_qkv_in_blocks(reading.args):
        raise NotFoundError(
            "Megatron-DeepSpeed checkpoints since December 2024 (commit 676a482c) are not supported: a rank's "
            "query_key_value rows are all queries, then keys, then values",
            path=reading.folder,
            expected="rows by head, or by head group",
            found="the argument ds_sequence_parallel_fpdt, recorded by this version",
        )


# -- model ---------------------------------------------------------------------------------------------------


def _chunks(
    reading: MegatronReading, rank: Rank, path: str, content: Mapping[Any, Any]
) -> Iterator[tuple[LocalTensor, ...]]:
    if reading.grid.vpp == 1 and "model" in content:
        keys = ["model"]
    else:
        keys = [f"model{number}" for number in range(reading.grid.vpp)]
    strangers = [key for key in content if re.fullmatch(r"model\d*", str(key)) and key not in keys]
    missing = [key for key in keys if not isinstance(content.get(key), Mapping)]
    if strangers or missing:
        raise CorruptError(
            "the file holds other model chunks than the recorded layout has",
            path=path,
            rank=rank.number,
            expected=", ".join(keys),
            found=", ".join(str(key) for key in content if str(key).startswith("model")) or "none",
        )
    if not reading.stages.num_layers:
        reading.stages = _recorded_stages(reading, content, keys)
    for number, key in enumerate(keys):
        state = _flat_names(content[key])
        own = {_WRAPPERS.sub("", str(name)) for name in content[key]}
        reading.in_larger |= any(name.startswith(LANGUAGE) for name in own)
        refuse_two_blocks(own, Path(path))
        reading.raw_names |= own
        chunk = tuple(_Chunk(reading, rank, number, path, state).tensors())
        names = [local.name for local in chunk]
        if LANGUAGE_MODEL not in content[key] and names != in_order(names) and not reading.own_module_order:
            reading.notes.append(OTHER_ORDER)
            reading.own_module_order = True
        yield chunk


def _recorded_stages(reading: MegatronReading, content: Mapping[Any, Any], keys: Sequence[str]) -> Stages:
    if reading.args.get("num_layers"):
        return Stages.of_args(reading.args)
    if reading.grid.pp == 1:  # all layers are here
        names = [name for key in keys for name in _flat_names(content[key])]
        numbers = [int(m[1]) for name in names if (m := _LAYER_NUMBER.match(name))]
        return Stages(max(numbers, default=-1) + 1)
    raise CorruptError("the file records no layer count", path=reading.folder, expected="args.num_layers")


def _flat_names(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Return megatron-core's names without wrappers' prefixes."""
    if LANGUAGE_MODEL in state:
        return dict(core_names(state))
    return {bare(_WRAPPERS.sub("", str(name))): value for name, value in state.items()}


@dataclass(frozen=True)
class _Chunk:
    reading: MegatronReading
    rank: Rank
    vp: int
    path: str
    state: Mapping[str, Any]

    @cached_property
    def kinds(self) -> Mapping[str, LayerKind]:
        return layer_kinds(self.state)

    @cached_property
    def spelling(self) -> Spelling:
        return Spelling.of_names(self.state)

    @cached_property
    def layers(self) -> range:
        return self.reading.stages.layers(self.rank.pp, self.vp)

    @cached_property
    def num_experts(self) -> int:
        args = self.reading.args
        return (args.get("num_experts") or args.get("num_moe_experts") or 0) // self.reading.grid.ep

    def tensors(self) -> Iterator[LocalTensor]:
        self._check_layers()
        for name, value in self.state.items():
            if name.endswith("_extra_state"):
                self._note_extra(name, value)
                continue
            if not isinstance(value, StoredTensor):
                what = type(value).__name__
                raise CorruptError("a model entry is not a tensor", path=self.path, fqn=name, found=what)
            if match := _GROUPED_GEMM.fullmatch(name):
                yield LocalTensor(name, value, tuple(self._grouped_gemm(match, value)), True)
                continue
            canonical = self._canonical(name)
            if is_expert(canonical) and not self.num_experts:
                raise CorruptError("the file records no expert count", path=self.path, expected="args.num_experts")
            canonical, shared = self._shared(canonical)
            yield LocalTensor(
                name, value, (self._rank_pieces(name, canonical, value.shape),), is_expert(canonical), shared
            )

    def _check_layers(self) -> None:
        layers = self.layers
        found = {int(m[1]) for name in self.state if (m := _LAYER_NUMBER.match(name))}
        if found != set(range(len(layers))):
            dealt = (
                f"{pluralize(len(layers), 'layer')} ({layers.start} to {layers.stop - 1} in the model)"
                if layers
                else "none"
            )
            raise CorruptError(
                "a model chunk holds other layers than the recorded arguments deal to it",
                path=self.path,
                rank=self.rank.number,
                expected=dealt,
                found=pluralize(len(found), "layer"),
            )

    def _canonical(self, name: str) -> str:
        kind = self.kinds.get(split_layer(name)[0])
        return self.spelling.canonical(name, kind, self.layers.start, self.rank.ep * self.num_experts)

    def _note_extra(self, name: str, value: Any) -> None:
        canonical = self._canonical(name)
        if not is_empty(value):
            self.reading.notes.append(f"FP8 state is left out: {canonical}")
        self.reading.extra[canonical] = None

    def _shared(self, name: str) -> tuple[str, bool]:
        """Return the embedding's name, and True if two stages keep the copies equal.

        models/common/language_module/language_module.py, `setup_embeddings_and_output_layer`.
        """
        stages, tied = self.reading.stages, self.reading.tied
        if stages.pp == 1 or name not in (EMBEDDING, OUTPUT) or not (tied or stages.num_mtp):
            return name, False
        if name == OUTPUT:
            return (EMBEDDING, not stages.has_mtp(self.rank.pp, self.vp)) if tied else (OUTPUT, False)
        return EMBEDDING, True

    def _rank_pieces(self, name: str, canonical: str, shape: Shape) -> LocalPart:
        grid, rank = self.reading.grid, self.rank
        sections = sections_of(name, self._shape, gated=bool(self.reading.args.get("swiglu")))
        where = {"path": self.path, "rank": rank.number, "fqn": name}
        block = self.reading.blocks.of(canonical)
        split = known_split(canonical, sections=sections, local_spec=self.spelling.local_spec, block=block, **where)
        size, number = (grid.etp, rank.etp) if is_expert(canonical) else (grid.tp, rank.tp)
        full = full_shape(split, shape, size)
        return LocalPart(canonical, full, pieces_of(split, full, size, number))

    def _shape(self, name: str) -> Shape | None:
        value = self.state.get(name)
        return value.shape if isinstance(value, StoredTensor) else None

    def _grouped_gemm(self, match: re.Match[str], value: StoredTensor) -> Iterator[LocalPart]:
        """Yield the experts in a legacy grouped GEMM tensor.

        `weight1` [h, experts * rows] is (experts, h, rows) in memory, `weight2` (experts, columns, h). Each matrix is
        transposed (transformer/moe/experts.py, `GroupedMLP`).
        """
        first, count, numel = match["number"] == "1", self.num_experts, value.extent.numel
        other = self.state.get(f"{match['layer']}weight{'2' if first else '1'}")
        hidden = value.shape[0 if first else 1]
        width = numel // (count * hidden) if count and hidden else 0
        if not isinstance(other, StoredTensor) or width * count * hidden != numel:
            raise CorruptError(
                "grouped experts do not divide by their number", fqn=match[0], found=f"{list(value.shape)}"
            )
        gated = first and width * count == 2 * other.shape[0]
        block = self.reading.blocks.routed if gated else None
        split = Split(0, GATED if gated else (1,), block) if first else COLUMNS
        shape = full_shape(split, (width, hidden) if first else (hidden, width), self.reading.grid.etp)
        strides = (1, width) if first else (1, hidden)
        for expert in range(count):
            name = f"{match['layer']}local_experts.{expert}.linear_fc{1 if first else 2}.weight"
            pieces, at = [], expert * hidden * width
            for piece in pieces_of(split, shape, self.reading.grid.etp, self.rank.etp):
                pieces.append(ChunkPiece(piece.box, at, strides))
                at += piece.box.sizes[0] if first else 0
            yield LocalPart(self._canonical(name), shape, tuple(pieces))
