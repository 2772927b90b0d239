"""Pipeline layers in Megatron-DeepSpeed and GPT-NeoX.

The names in a layer show its kind, not its number. Megatron-DeepSpeed, BLOOM's version of it and GPT-NeoX have
different numbers of functions, which have no files, before the first transformer layer.

Follows deepspeedai/Megatron-DeepSpeed, megatron/model/gpt_model.py (`GPTModelPipe`), language_model.py
(`EmbeddingPipe`, `LMHeadPipe`), transformer.py; EleutherAI/gpt-neox, megatron/model/gpt2_model.py
(`GPT2ModelPipe.init_specs` and `to_sequential`), transformer.py, word_embeddings.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from ckpt.base.errors import CorruptError, LossError
from converters.names.megatron.model.spelling import EMBEDDING, OUTPUT


class Kind(Enum):
    """Kind of a pipeline layer, in model order."""

    EMBEDDING = "embedding"
    TRANSFORMER = "transformer"
    NORM = "final norm"
    OUTPUT = "output layer"


_EMBEDDING = {
    "word_embeddings.weight": EMBEDDING,
    "position_embeddings.weight": "embedding.position_embeddings.weight",
}
_NORM = {
    f"{prefix}{name}": f"decoder.final_layernorm.{name}" for prefix in ("", "norm.") for name in ("weight", "bias")
}
_OUTPUT = {"lm_head.weight": OUTPUT, "final_linear.weight": OUTPUT}
_TRANSFORMER = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm_",
    "self_attention.query_key_value": "self_attention.linear_qkv.",
    "self_attention.dense": "self_attention.linear_proj.",
    "post_attention_layernorm": "mlp.linear_fc1.layer_norm_",
    "mlp.dense_h_to_4h": "mlp.linear_fc1.",
    "mlp.dense_4h_to_h": "mlp.linear_fc2.",
}
_ATTENTION = re.compile(r"(?:self_)?attention\.")
#: Rotary frequencies, recomputed by every model.
_RECOMPUTED = re.compile(r"(?:self_)?attention\.rotary_emb\.inv_freq")
#: Entries in module order, by the rest of the whole-model name.
_ENTRIES = {
    canonical + parameter: f"{module}.{parameter}"
    for module, canonical in _TRANSFORMER.items()
    for parameter in ("weight", "bias")
}
_LAYER = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<rest>.+)")
#: Both libraries' key for the tied embedding.
_TIE = "embed"
_TIED = re.compile(r"tied_modules\.(?P<key>[^.]+)\.(?P<rest>.+)")
_NUMBERED = re.compile(r"(?P<layer>\d+)\.(?P<rest>.+)")
_SEQUENTIAL = re.compile(r"sequential\.(\d+)\.(.+)")


def is_recomputed(name: str) -> bool:
    return _RECOMPUTED.fullmatch(name) is not None


def sequential(fqn: str) -> tuple[int, str] | None:
    match = _SEQUENTIAL.fullmatch(fqn)
    return (int(match[1]), match[2]) if match else None


def is_neox(names: Collection[str]) -> bool:
    """Return True if a transformer layer uses GPT-NeoX's names: `attention`, not `self_attention`."""
    return any(name.startswith("attention.") for name in names)


def kind_of(names: Collection[str]) -> Kind | None:
    if "word_embeddings.weight" in names:
        return Kind.EMBEDDING
    if any(_ATTENTION.match(name) for name in names):
        return Kind.TRANSFORMER
    if any(name in _OUTPUT for name in names):
        return Kind.OUTPUT
    return Kind.NORM if names and all(name in _NORM for name in names) else None


@dataclass(frozen=True, slots=True)
class Layers:
    """Kinds by pipeline number, ascending."""

    kinds: Mapping[int, Kind]
    neox: bool = False

    @classmethod
    def of_model(cls, num_layers: int, *, tied: bool) -> Layers:
        """Count like Megatron-DeepSpeed: layer 0 is a function."""
        order = [Kind.EMBEDDING, *[Kind.TRANSFORMER] * num_layers, Kind.NORM, *([] if tied else [Kind.OUTPUT])]
        return cls(dict(enumerate(order, 1)))

    @classmethod
    def of_neox(cls, num_layers: int, *, tied: bool) -> Layers:
        """Count like GPT-NeoX: with a function before and after transformer layers."""
        kinds = {0: Kind.EMBEDDING, **dict.fromkeys(range(2, num_layers + 2), Kind.TRANSFORMER)}
        kinds[num_layers + 3] = Kind.NORM
        return cls(kinds if tied else {**kinds, num_layers + 4: Kind.OUTPUT}, neox=True)

    @classmethod
    def of_names(cls, names: Mapping[int, Iterable[str]], path: str) -> Layers:
        """Raise LossError for an unknown layer."""
        kinds = {}
        for layer in sorted(names):
            entries = list(names[layer])
            kind = kind_of(entries)
            if kind is None:
                raise LossError(
                    "unknown pipeline layer: neither Megatron-DeepSpeed nor GPT-NeoX has it",
                    path=path,
                    expected="word_embeddings, transformer layers, a final norm, lm_head or final_linear",
                    found=f"layer {layer}: " + ", ".join(entries[:4]),
                )
            kinds[layer] = kind
        order = list(Kind)
        places = [order.index(kind) for kind in kinds.values()]
        transformers = [layer for layer, kind in kinds.items() if kind is Kind.TRANSFORMER]
        single = all(list(kinds.values()).count(kind) == 1 for kind in (Kind.EMBEDDING, Kind.NORM))
        gaps = set(range(min(transformers, default=0), max(transformers, default=-1) + 1)) - set(transformers)
        if gaps:
            raise CorruptError(
                "the files are missing for a transformer layer", path=path, expected=f"layer_{min(gaps):02d}"
            )
        if places != sorted(places) or not single or list(kinds.values()).count(Kind.OUTPUT) > 1:
            raise CorruptError(
                "the layer files do not form a model",
                path=path,
                expected="an embedding, transformer layers, a final norm and perhaps an output layer",
                found=", ".join(f"{layer} {kind.value}" for layer, kind in kinds.items()),
            )
        return cls(kinds, any(is_neox(list(names[layer])) for layer in transformers))

    @property
    def transformers(self) -> list[int]:
        return [layer for layer, kind in self.kinds.items() if kind is Kind.TRANSFORMER]

    @property
    def tied(self) -> bool:
        return Kind.OUTPUT not in self.kinds.values()

    def canonical(self, layer: int, name: str) -> str | None:
        kind = self.kinds.get(layer)
        if kind is Kind.TRANSFORMER:
            prefix = f"decoder.layers.{layer - self.transformers[0]}."
            module, _, parameter = name.rpartition(".")
            if module.startswith("attention."):
                module = f"self_{module}"
            if module not in _TRANSFORMER or parameter not in ("weight", "bias"):
                return None
            return prefix + _TRANSFORMER[module] + parameter
        tables = {Kind.EMBEDDING: _EMBEDDING, Kind.NORM: _NORM, Kind.OUTPUT: _OUTPUT}
        return tables[kind].get(name) if kind else None

    def of_parameter(self, name: str) -> str | None:
        """Return the whole-model name of `3.mlp...` or `tied_modules.embed...`."""
        if match := _TIED.fullmatch(name):
            return _EMBEDDING.get(match["rest"])
        match = _NUMBERED.fullmatch(name)
        return self.canonical(int(match["layer"]), match["rest"]) if match else None

    def place(self, fqn: str) -> tuple[int, str] | None:
        """Invert `canonical`."""
        if match := _LAYER.fullmatch(fqn):
            transformers, layer = self.transformers, int(match["layer"])
            name = _ENTRIES.get(match["rest"])
            if name is None or layer >= len(transformers):
                return None
            return transformers[layer], name.removeprefix("self_") if self.neox else name
        for kind, names in ((Kind.EMBEDDING, _EMBEDDING), (Kind.NORM, _NORM), (Kind.OUTPUT, _OUTPUT)):
            spelled = [name for name, known in names.items() if known == fqn]
            if spelled and kind in self.kinds.values():
                number = next(number for number, one in self.kinds.items() if one is kind)
                return number, spelled[-1 if self.neox else 0]
        return None

    def parameter(self, fqn: str) -> str:
        """Invert `of_parameter`."""
        number, name = self._placed(fqn)
        return f"tied_modules.{_TIE}.{name}" if self._is_tied(number) else f"{number}.{name}"

    def order(self, fqn: str) -> tuple[int, int, int]:
        """Return a sort key for module order.

        Tied modules come first (deepspeed, runtime/pipe/module.py, `__init__`).
        """
        number, name = self._placed(fqn)
        entries = list(_ENTRIES if self.kinds[number] is Kind.TRANSFORMER else _EMBEDDING | _NORM | _OUTPUT)
        match = _LAYER.fullmatch(fqn)
        position = entries.index(match["rest"] if match else name)
        return (0 if self._is_tied(number) else 1, number, position)

    def _placed(self, fqn: str) -> tuple[int, str]:
        place = self.place(fqn)
        if place is None:
            raise LossError("Megatron-DeepSpeed pipelines have no place for this tensor", fqn=fqn)
        return place

    def _is_tied(self, number: int) -> bool:
        return self.tied and self.kinds[number] is Kind.EMBEDDING


def is_tied(name: str) -> bool:
    """Return True if several stages have copies of the parameter's module."""
    return _TIED.fullmatch(name) is not None
