"""Keys in Megatron's `torch_dist` format.

    decoder.layers.<rest>            a tensor for all layers, [layers, ...], if the layers are alike
    decoder.layers.3.<rest>          a single layer's, if they differ, or by choice
    ....mlp.experts.experts.linear_fc1.weight       all experts, [experts, ...] after the layer dim
    ....mlp.experts.experts.5.linear_fc1.weight_w   one expert; an MLP's gate rows, and `_v` its up rows
    ....self_attention.in_proj.weight.query         a section of a packed layer's rows (`splits.SECTIONS`)

A key has no rank, stage or model chunk. megatron-core's own layers use Transformer Engine's names, except for latent
attention. The norm before experts is still called `mlp.linear_fc1.layer_norm_weight`.

From megatron-core 0.16.1: transformer/transformer_block.py, transformer_layer.py, mlp.py, moe/experts.py,
multi_token_prediction.py (`sharded_state_dict` of each), models/gpt/gpt_layer_specs.py (`sharded_state_dict_keys_map`),
optimizer/distrib_optimizer.py, optimizer/optimizer.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from ckpt.base.errors import CorruptError
from ckpt.plan.checkpoint import MASTER
from ckpt.plan.tensors import Box, Extent, Shape
from converters.names.megatron.model.spelling import (
    LayerKind,
    Spelling,
    bare,
    layer_kinds,
    split_layer,
)
from converters.names.megatron.model.splits import packed

_STACKED = re.compile(r"decoder\.layers\.(?!\d+\.)(?P<rest>.+)")
_EXPERTS = re.compile(r"(?P<before>.*\.mlp\.experts\.)experts\.(?:(?P<expert>\d+)\.)?(?P<rest>.+)")
_LAYER = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
_EXPERT = re.compile(r"(?P<before>.*\.mlp\.experts\.)local_experts\.(?P<expert>\d+)\.(?P<rest>.+)")
_HALF = re.compile(r"(?P<name>.*\.linear_fc1\.(?:weight|bias|adapters?\.(?:.*\.)?linear_out\.weight))_(?P<half>[wv])")
_SECTION = re.compile(r"(?P<name>.*\.(?:in_proj|conv1d)\.(?:weight|bias))\.(?P<section>\w+)")
_FACTOR = re.compile(r".*\.adapters?\..*linear_(?:in|out)\.weight")
_FACTOR_DIMS = 2
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<state>[^.]+)\.(?P<key>.+)")
_OBJECT = re.compile(r"(?P<key>.+)/shard_(?P<offsets>\d+(?:\.\d+)*)_(?P<sizes>\d+(?:\.\d+)*)")

#: Masters: the distributed optimizer's since 0.15, and all others'.
MASTERS = ("param", "fp32_param")
_FUSED, _UNFUSED = "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."


def state_key(key: str) -> tuple[str, str] | None:
    """Return (role, model tensor's key)."""
    match = _STATE.fullmatch(key)
    if match is None:
        return None
    return MASTER if match["state"] in MASTERS else match["state"], match["key"]


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """Key of an element in an array of values."""

    key: str
    offsets: Shape
    sizes: Shape

    @classmethod
    def parse(cls, key: str) -> ObjectKey | None:
        match = _OBJECT.fullmatch(key)
        if match is None:
            return None
        numbers = (tuple(map(int, match[part].split("."))) for part in ("offsets", "sizes"))
        return cls(match["key"], *numbers)

    def __str__(self) -> str:
        return f"{self.key}/shard_{'.'.join(map(str, self.offsets))}_{'.'.join(map(str, self.sizes))}"


@dataclass(frozen=True, slots=True)
class TensorKey:
    """Parsed key. `name` has `{layer}` and `{expert}` if these are dims of the tensor.

    `half` is 0 for gate rows and 1 for up rows with their own key. `section` is a packed layer's name for rows with
    their own key; `rows` are the first row and the total.
    """

    name: str
    layers: bool = False
    experts: bool = False
    half: int | None = None
    section: str | None = None
    rows: tuple[int, int] | None = None

    @classmethod
    def parse(cls, key: str, num_dims: int = 0) -> TensorKey:
        """Use names of megatron-core's own layers.

        `num_dims` counts the tensor's dims: an adapter factor shared by experts has no expert dim.
        """
        half, section, key = None, None, bare(key)
        if (match := _SECTION.fullmatch(key)) and match["section"] in packed(match["name"]):
            key, section = match["name"], match["section"]
        if match := _HALF.fullmatch(key):
            key, half = match["name"], "wv".index(match["half"])
        layers = _STACKED.fullmatch(key)
        if layers:
            key = f"decoder.layers.{{layer}}.{layers['rest']}"
        experts = _EXPERTS.fullmatch(key)
        if experts and not experts["expert"] and _FACTOR.fullmatch(key) and num_dims == bool(layers) + _FACTOR_DIMS:
            return cls(f"{experts['before']}{experts['rest']}", bool(layers), False, half)
        if experts:
            key = f"{experts['before']}local_experts.{experts['expert'] or '{expert}'}.{experts['rest']}"
        return cls(key, bool(layers), bool(experts and not experts["expert"]), half, section)

    @property
    def num_dims(self) -> int:
        return self.layers + self.experts

    def shape(self, shape: Shape) -> Shape:
        inner = shape[self.num_dims :]
        if self.rows is not None:
            return (self.rows[1], *inner[1:])
        return inner if self.half is None else (2 * inner[0], *inner[1:])

    def parts(self, shape: Shape, box: Box, extent: Extent) -> Iterator[tuple[str, Box, Extent]]:
        count = self.num_dims
        inner = Box(box.offsets[count:], box.sizes[count:]) if count else box
        if first := self.rows[0] if self.rows else shape[count] if self.half else 0:
            inner = Box((inner.offsets[0] + first, *inner.offsets[1:]), inner.sizes)
        if not count:
            yield self.name, inner, extent
            return
        for index in product(*(range(n) for n in box.sizes[:count])):
            skip = sum(number * stride for number, stride in zip(index, extent.strides, strict=False))
            offset = extent.offset + skip * extent.dtype.itemsize
            numbers = tuple(a + b for a, b in zip(box.offsets, index, strict=False))
            place = Extent(extent.path, offset, extent.dtype, inner.sizes, extent.strides[count:])
            yield self.at(numbers), inner, place

    def names(self, shape: Shape) -> Iterator[str]:
        return map(self.at, product(*(range(n) for n in shape[: self.num_dims])))

    def at(self, index: Shape) -> str:
        name, numbers = self.name, list(index)
        for field, present in (("{layer}", self.layers), ("{expert}", self.experts)):
            if present:
                name = name.replace(field, str(numbers.pop(0)))
        return name


def with_rows(keys: Mapping[str, TensorKey], shapes: Mapping[str, Shape]) -> dict[str, TensorKey]:
    found, layers = dict(keys), dict[str, dict[str, str]]()
    for key, one in keys.items():
        if one.section is not None:
            layers.setdefault(one.name, {})[one.section] = key
    for name, held in layers.items():
        sections = packed(name)
        if missing := [section for section in sections if section not in held]:
            raise CorruptError(
                "a packed layer lacks a row section", fqn=name, expected=", ".join(sections), found=missing
            )
        sizes = [shapes[held[section]][keys[held[section]].num_dims] for section in sections]
        for number, section in enumerate(sections):
            key = held[section]
            found[key] = replace(keys[key], rows=(sum(sizes[:number]), sum(sizes)))
    return found


def canonical_names(names: Collection[str]) -> dict[str, str]:
    kinds = layer_kinds(names)
    own = Spelling(local_spec=True)
    found = {}
    for name in names:
        prefix, rest = split_layer(name)
        kind = kinds.get(prefix)
        if kind is not None and kind.moe and rest.startswith(_FUSED):
            found[name] = prefix + _UNFUSED + rest.removeprefix(_FUSED)
        else:
            found[name] = own.canonical(name, kind, 0, 0)
    return found


@dataclass(frozen=True, slots=True)
class KeyWriter:
    """Writer of keys. `local_spec` is for megatron-core's own layers."""

    stacked: bool
    local_spec: bool
    name_in_files: Callable[[str], str] = str
    before: str = ""

    def key(self, name: str, kind: LayerKind | None) -> tuple[str, Shape]:
        """Return the key and the index in its leading dims."""
        name = self._spelled(name, kind)
        index: Shape = ()
        if self.stacked and (match := _LAYER.fullmatch(name)):
            index, name = (int(match["layer"]),), f"decoder.layers.{match['rest']}"
        if match := _EXPERT.fullmatch(name):
            index, name = (*index, int(match["expert"])), f"{match['before']}experts.{match['rest']}"
        return self.before + self.name_in_files(name), index

    def _spelled(self, name: str, kind: LayerKind | None) -> str:
        if kind is None or not self.local_spec:
            return name
        if kind.latent:
            return Spelling(local_spec=True).spelled(name, kind, 0, 0)
        prefix, rest = split_layer(name)
        if rest.startswith(_UNFUSED):
            return prefix + _FUSED + rest.removeprefix(_UNFUSED)
        return name
