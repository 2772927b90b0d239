"""Reader for Megatron's `torch_dist` format."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from ckpt.base.errors import CkptError, CorruptError, NotFoundError
from ckpt.base.text import pluralize
from ckpt.containers.dcp.metadata import read_metadata
from ckpt.containers.dcp.tensors import ChunkedTensor, DataFiles, Placed
from ckpt.containers.torchfile import read as torchfile
from ckpt.move.files import confined
from ckpt.move.json_files import read_json
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Key
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Box, Extent, Shape, Tensor, flat_boxes
from ckpt.runs.half_checkpoints import optimizer_alone
from converters.megatron.chunks import BUFFERS
from converters.megatron.dist.folder import BACKENDS, COMMON, MODULE, MODULE_1, is_nemo, is_nemo_1
from converters.megatron.dist.keys import ObjectKey, TensorKey, canonical_names, state_key, with_rows
from converters.megatron.entries import is_empty, plain_args
from converters.megatron.read import check_encoder, check_larger, refuse_two_blocks
from converters.names.megatron.model.axes import Grid
from converters.names.megatron.model.spelling import (
    HEADS,
    LANGUAGE,
    bare,
    is_expert,
    is_outside_language_model,
    registered,
)
from converters.names.megatron.model.splits import GateBlocks, in_model_order

#: Key for `common.pt`'s content since megatron-core 0.19.
_COMMON_STATE = "common_state"
_CLASSES = (
    "torch.distributed.checkpoint.metadata.Metadata",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",  # 0.15
)
_EXTRA = "._extra_state"
_MAX_NAMES = 1 << 20


@dataclass
class DistReading:
    """Parts of one iteration.

    `objects` are non-tensor values, by key and place in their array. `flat` are the distributed optimizer's buffers.
    `scales` are Transformer Engine's FP8 states by module name. `native` is the model's dtype if its weights are not
    stored.
    """

    folder: Path
    data: DataFiles = field(default_factory=DataFiles)
    common: Mapping[Any, Any] = field(default_factory=dict)
    shapes: dict[Key, tuple[Shape, DType]] = field(default_factory=dict)
    placed: dict[Key, Placed] = field(default_factory=dict)
    copies: dict[Key, list[Placed]] = field(default_factory=dict)
    objects: dict[str, dict[ObjectKey, Any]] = field(default_factory=dict)
    flat: dict[str, ChunkedTensor] = field(default_factory=dict)
    scales: dict[str, Any] = field(default_factory=dict)
    native: DType | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    accepted: Collection[str] = ()
    notes: list[str] = field(default_factory=list)

    @cached_property
    def blocks(self) -> GateBlocks:
        """Row blocks for gate and up on the ranks. Read it after the common state.

        Megatron-Bridge records no arguments there and stores all gate rows first.
        """
        return GateBlocks.of_args(plain_args(self.common), self.accepted)

    @property
    def args(self) -> Mapping[str, Any]:
        return plain_args(self.common) or self.settings

    @property
    def sharding(self) -> str | None:
        for content in (self.common.get("optimizer"), self.common.get("content_metadata")):
            for name in ("param_state_sharding_type", "distrib_optim_sharding_type"):
                if isinstance(content, Mapping) and isinstance(content.get(name), str):
                    return str(content[name])
        return None

    def add(self, key: Key, shape: Shape, dtype: DType, placed: Placed, copy: int = 0) -> None:
        """Record a tensor's or a copy's boxes."""
        known = self.shapes.setdefault(key, (shape, dtype))
        if known != (shape, dtype):
            raise CorruptError(
                f"keys hold different tensors under one name ({key[1]})",
                path=self.folder,
                fqn=key[0],
                expected=f"{known[1]} {list(known[0])}",
                found=f"{dtype} {list(shape)}",
            )
        if copy:
            self.copies.setdefault(key, []).append(placed)
        else:
            self.placed.setdefault(key, []).extend(placed)

    def add_stored(self, key: Key, shape: Shape, dtype: DType, placed: Placed, copy: int = 0) -> None:
        """Record boxes that may alternate gate and up rows in blocks."""
        if block := self.blocks.of(key[0]):
            grid = Grid.recorded(self.args, self.folder)
            size = grid.etp if is_expert(key[0]) else grid.tp
            placed = [
                (inner, extent.narrow(own))
                for box, extent in placed
                for own, inner in in_model_order(box, shape[0], size, block)
            ]
        self.add(key, shape, dtype, placed, copy)

    def tensors(self) -> dict[Key, Tensor]:
        found = {}
        order = {fqn: registered(fqn) for fqn in {fqn for fqn, _ in self.placed}}
        for key in sorted(self.placed, key=lambda key: order[key[0]]):
            shape, dtype = self.shapes[key]
            without = self.native if self.native and (key[0], MASTER) in self.shapes else dtype
            native = self.shapes.get((key[0], WEIGHT), (shape, without))[1]
            source = self.data.source(dtype, shape, self.placed[key])
            copies = tuple(self.data.source(dtype, shape, placed) for placed in self.copies.get(key, ()))
            found[key] = Tensor(*key, dtype, shape, source, native if native != dtype else None, copies)
        return found

    def read_common(self) -> Mapping[Any, Any]:
        """Return arguments, param groups and iteration. Call after `read_objects`."""
        stored = next(iter(self.objects.pop(_COMMON_STATE, {}).values()), None)
        path = self.folder / COMMON
        if stored is None and not path.is_file():
            raise CorruptError(
                "the file with the arguments and the optimizer's param groups is missing",
                path=self.folder,
                expected=COMMON,
                found="no file",
            )
        if stored is None:
            self.data.add_file(str(path))
            stored = torchfile.read(confined(self.folder, COMMON)).root
        if not isinstance(stored, Mapping):
            raise CorruptError("this is not a Megatron common state", path=path, found=type(stored).__name__)
        return stored

    def read_objects(self, values: Mapping[str, Any]) -> None:
        """Add non-tensor values, each a list of one. Keep only nonempty extra states."""
        scales: dict[str, Any] = {}
        for key, value in values.items():
            parsed = ObjectKey.parse(key)
            if parsed is None or not isinstance(value, list) or len(value) != 1:
                raise CorruptError("a value is not stored in Megatron's form", path=self.folder, fqn=key)
            if not parsed.key.endswith(_EXTRA):
                self.objects.setdefault(parsed.key, {})[parsed] = value[0]
            elif not is_empty(value[0]):
                one = TensorKey.parse(parsed.key)
                scales[one.at(parsed.offsets[: one.num_dims])] = value[0]
        self.scales = {canonical: scales[name] for name, canonical in canonical_names(scales.keys()).items()}

    def keep_nemos(self, found: Mapping[str, Any], release: int, prefix: str) -> dict[str, Any]:
        """Return NeMo's model by Megatron's own keys, and note that the rest is left out.

        Lightning's common file is also listed if readable: callbacks may store their own objects.
        """
        with suppress(CkptError):
            torchfile.read(confined(self.folder, COMMON))
            self.data.add_file(str(self.folder / COMMON))
        kept = {key.removeprefix(prefix): leaf for key, leaf in found.items() if key.startswith(prefix)}
        self.notes.append(
            f"NeMo {release} checkpoint: its training state is left out "
            f"({pluralize(len(found) - len(kept), 'item')} besides the model and {COMMON})"
        )
        return kept

    def read_keys(self, models: Collection[str], tensors: Mapping[str, ChunkedTensor]) -> None:
        meanings = {key: (BUFFER if key.endswith(BUFFERS) else WEIGHT, key) for key in models}
        meanings |= {key: known for key in tensors if (known := state_key(key)) is not None}
        shapes: dict[str, Shape] = {}
        for key, (_, model) in meanings.items():
            shapes.setdefault(model, tensors[key].entry.shape)
        parsed = {model: TensorKey.parse(model, len(shape)) for model, shape in shapes.items()}
        for model, one in parsed.items():
            self._check_dims(model, one, shapes[model])
        parsed = with_rows(parsed, shapes)
        names = canonical_names({name: None for key, one in parsed.items() for name in one.names(shapes[key])}.keys())
        for key, (role, model) in meanings.items():
            found, one, shape = tensors[key], parsed[model], shapes[model]
            by_name: dict[str, Placed] = {name: [] for name in one.names(shape)}
            for box, extent in self._unflattened(found, shape):
                for name, inner, place in one.parts(shape, box, extent):
                    if name not in by_name:
                        raise CorruptError(
                            "a part lies outside its tensor", path=self.folder, fqn=key, expected=shape, found=box
                        )
                    by_name[name].append((inner, place))
            for name, parts in by_name.items():
                self.add_stored((names[name], role), one.shape(shape), found.entry.dtype, parts)

    def _check_dims(self, key: str, parsed: TensorKey, shape: Shape) -> None:
        count = parsed.num_dims
        if (
            len(shape) <= count
            or ((parsed.half is not None or parsed.section) and len(shape) == count)
            or prod(shape[:count]) > _MAX_NAMES
        ):
            raise CorruptError(
                "the tensor's dims don't match its key",
                path=self.folder,
                fqn=key,
                expected=f"{pluralize(count, 'dim')} for the layers and experts, and the tensor's own",
                found=list(shape),
            )

    def _unflattened(self, found: ChunkedTensor, shape: Shape) -> Iterator[tuple[Box, Extent]]:
        """Yield the boxes for a parameter with this `shape`.

        `fully_sharded_model_space` stores ranges of a rank's flattened part: for parts [x, y] of a parameter [X, Y], a
        tensor [X / x, Y / y, x * y].
        """
        stored = found.entry.shape
        if stored == shape:
            yield from found.placed
            return
        parts, numel = stored[:-1], stored[-1] if stored else 0
        fits = len(parts) == len(shape) and all(n and not full % n for full, n in zip(shape, parts, strict=True))
        part = tuple(full // n for full, n in zip(shape, parts, strict=True)) if fits else ()
        if not fits or prod(part) != numel:
            raise CorruptError(
                "an optimizer tensor's shape doesn't match its parameter",
                path=self.folder,
                fqn=found.entry.key,
                expected=f"{list(shape)}, or its flattened parts",
                found=list(stored),
            )
        for box, extent in found.placed:
            for index in product(*(range(n) for n in box.sizes[:-1])):
                numbers = tuple(a + b for a, b in zip(box.offsets, index, strict=False))
                corner = tuple(number * size for number, size in zip(numbers, part, strict=True))
                skip = sum(number * stride for number, stride in zip(index, extent.strides, strict=False))
                yield from flat_pieces(part, corner, box.offsets[-1], extent.flat(skip, skip + box.sizes[-1]))


def read_folder(folder: Path, accepted: Collection[str] = ()) -> DistReading:
    """Raise NotFoundError for another backend's files."""
    _check_backends(folder)
    reading = DistReading(folder, accepted=accepted)
    metadata = read_metadata(folder, _CLASSES)
    found = dict(zip(metadata.keys, reading.data.read(metadata), strict=True))
    nemo = (2, MODULE) if is_nemo(folder) else (1, MODULE_1) if is_nemo_1(folder) else None
    if nemo:
        found = reading.keep_nemos(found, *nemo)
    tensors = {key: leaf for key, leaf in found.items() if isinstance(leaf, ChunkedTensor)}
    reading.data.count_ranks(folder)
    reading.read_objects({key: leaf for key, leaf in found.items() if key not in tensors})
    if not nemo:
        reading.common = reading.read_common()
    refuse_two_blocks(tensors.keys(), folder)
    check_encoder(tensors.keys(), folder)
    models = {key: None for key in tensors if is_models(bare(key))}
    reading.read_keys(models.keys(), tensors)
    if not models and any(state_key(key) for key in tensors):
        raise optimizer_alone(folder)  # verl with mbridge: the model is in huggingface/
    check_larger(any(key.startswith(LANGUAGE) for key in models), models, folder)
    reading.flat = {key: tensor for key, tensor in tensors.items() if ".gbuf_idx_" in key}
    strangers = [key for key in tensors if not (key in models or key in reading.flat or state_key(key))]
    if strangers:
        raise CorruptError(
            "a tensor belongs neither to a GPT model nor to its optimizer",
            path=metadata.path,
            fqn=strangers[0],
            expected="embedding., decoder., mtp., output_layer., optimizer.",
            found=f"{pluralize(len(strangers), 'unexpected key')}",
        )
    return reading


def is_models(key: str) -> bool:
    name = key.removeprefix(LANGUAGE)
    return name.startswith(("embedding.", "decoder.", "mtp.", "output_layer.", *HEADS)) or is_outside_language_model(
        name
    )


def _check_backends(folder: Path) -> None:
    path = folder / BACKENDS
    if not path.is_file():
        return
    said = read_json(confined(folder, BACKENDS), max_bytes=1 << 16)
    if not isinstance(said, dict) or not isinstance(said.get("sharded_backend"), str):
        raise CorruptError("this file doesn't name the checkpoint's backend", path=path, expected="sharded_backend")
    if said["sharded_backend"] != "torch_dist" or said.get("sharded_backend_version", 1) != 1:
        raise NotFoundError(
            "another backend wrote this checkpoint",
            path=path,
            expected="torch_dist, version 1",
            found=f"{said['sharded_backend']}, version {said.get('sharded_backend_version')}",
            hint="load and save it with Megatron-LM, --ckpt-format torch_dist",
        )


def flat_pieces(part: Shape, corner: Shape, start: int, extent: Extent) -> Iterator[tuple[Box, Extent]]:
    """Yield elements from `start` on in a flattened box with sizes `part` at `corner`."""
    done = 0
    for box in flat_boxes(part, start, start + extent.numel):
        offsets = tuple(a + b for a, b in zip(corner, box.offsets, strict=True))
        yield Box(offsets, box.sizes), extent.flat(done, done + box.numel).reshape(box.sizes)
        done += box.numel
