"""llama.cpp's tensor names, and their relation to the Hub's.

Names are llama.cpp's (`gguf-py/gguf/constants.py`, `tensor_mapping.py`), and changes of shape are its converter's
(`conversion/`). Rows of llama's q and k are interleaved, experts are stacked, and gemma's norms are stored plus one.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ckpt.base.errors import CkptError, CorruptError, IncompleteError, LossError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.plan.checkpoint import HUB, WEIGHT, Checkpoint, Layout
from ckpt.plan.dtypes import FLOAT32
from ckpt.plan.namespace import Namespace
from ckpt.plan.relation import Link, Relation, translate
from ckpt.plan.tensors import Box, Extent, Shape, Tensor, Whole, stepped, whole
from converters.gguf.facts import GgufFacts
from converters.gguf.metadata import ROPE_FACTORS, check_recorded, rope_factors
from converters.gguf.quantize import quantized
from converters.gguf.tokenizer import OTHER_WAY
from converters.names.families import tables
from converters.names.shifts import shifted
from converters.names.transformers.ties import tied_names

NAME = "gguf"
#: llama.cpp's architectures by transformers' model type.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "gemma": "gemma",
}

_MODULES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
    "mlp.gate": "ffn_gate_inp",
}
_GPT_OSS_LAYER = {**_LAYER, "post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"}

_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
#: Keys of sizes in GGUF, without the architecture's prefix, by config entry.
_SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
}

_HUB = re.compile(r"(?:model\.layers\.(?P<layer>\d+)\.)?(?P<module>.+)\.(?P<kind>weight|bias)")
_GGUF = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>.+)\.(?P<kind>weight|bias)")
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(weight|bias)")
#: gpt-oss: tensors of all experts, and attention sinks.
_STACKED = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?")
_SINKS = re.compile(r"model\.layers\.(\d+)\.self_attn\.sinks")
_GGUF_SINKS = re.compile(r"blk\.(\d+)\.attn_sinks\.weight")


def architecture(config: Mapping[str, Any] | None, path: str) -> str:
    model_type = (config or {}).get("model_type")
    if model_type not in ARCHITECTURES:
        raise LossError(
            "llama.cpp's names for this architecture are not known",
            path=path,
            expected="one of " + ", ".join(ARCHITECTURES),
            found=f"model_type {model_type!r}",
            hint=OTHER_WAY,
        )
    return ARCHITECTURES[model_type]


def relation(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Relation:
    """Return the relation from the Hub's tensors, with these shapes, to llama.cpp's."""
    arch = ARCHITECTURES[config["model_type"]]
    links: list[Link] = []
    for name, shape in shapes.items():
        links += _links(name, shape, arch, config)
    written: dict[str, Shape] = {}
    for link in links:
        ends = written.get(link.b, link.b_box.ends)
        written[link.b] = tuple(map(max, ends, link.b_box.ends))
    return Relation(tuple(links), dict(shapes), written)


def check_tensors(recorded: Mapping[str, Any], shapes: Mapping[str, Shape], path: str) -> None:
    """Raise an error if a model lacks a tensor, or has another shape, by its own hyperparameters.

    llama.cpp also calls Mixtral and other models `llama`: models with experts there are skipped.
    """
    arch = str(recorded.get("general.architecture"))
    model_type = next((one for one, name in ARCHITECTURES.items() if name == arch), None)
    values = {name: recorded.get(f"{arch}.{key}") for name, key in _SIZES.items()}
    experts = recorded.get(f"{arch}.expert_count", 0)
    is_whole = recorded.get("general.type", "model") == "model" and _EMBEDDING in shapes
    if model_type is None or not is_whole or not all(type(one) is int for one in (*values.values(), experts)):
        return
    if arch == "llama" and experts:
        return
    config: dict[str, Any] = {"model_type": model_type, **values, "vocab_size": shapes[_EMBEDDING][0]}
    config["num_key_value_heads"] = recorded.get(f"{arch}.attention.head_count_kv", config["num_attention_heads"])
    config["head_dim"] = recorded.get(f"{arch}.attention.key_length")
    config["head_dim"] = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    config |= dict.fromkeys(("num_experts", "num_local_experts"), experts)
    config["moe_intermediate_size"] = recorded.get(f"{arch}.expert_feed_forward_length")
    config["tie_word_embeddings"] = _OUTPUT not in shapes
    try:
        saved = tables.saved(config)
    except CkptError:
        return
    expected = relation(config, saved.required).b_shapes if saved is not None else {}
    if missing := [name for name in expected if name not in shapes]:
        raise IncompleteError(
            "a tensor is missing from the GGUF model",
            path=path,
            fqn=missing[0],
            expected=f"{pluralize(len(expected), 'tensor')} of {pluralize(config['num_hidden_layers'], 'layer')}",
            found=f"{len(expected) - len(missing)} of them",
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise CorruptError(
                "the shape contradicts the file's hyperparameters",
                path=path,
                fqn=name,
                expected=list(shape),
                found=list(shapes[name]),
            )


def _links(name: str, shape: Shape, arch: str, config: Mapping[str, Any]) -> Iterator[Link]:
    if expert := _EXPERT.fullmatch(name):
        layer, number, module = expert.groups()
        place = Box((int(number), *(0,) * len(shape)), (1, *shape))
        into = f"blk.{layer}.ffn_{module}_exps.weight"
        yield Link(name, whole(shape), into, place, tuple(range(1, len(shape) + 1)))
    elif stacked := _STACKED.fullmatch(name) if arch == "gpt-oss" else None:
        yield from _stacked_links(name, shape, *stacked.groups())
    elif sinks := _SINKS.fullmatch(name) if arch == "gpt-oss" else None:
        yield Link.rename(name, f"blk.{sinks[1]}.attn_sinks.weight", shape)
    else:
        found = _HUB.fullmatch(name)
        modules = _MODULES if found is None or found["layer"] is None else _layer_names(arch)
        if found is None or found["module"] not in modules:
            raise LossError(
                "llama.cpp has no name for this tensor",
                fqn=name,
                found=f"architecture {arch}",
                hint=OTHER_WAY,
            )
        prefix = "" if found["layer"] is None else f"blk.{found['layer']}."
        into = f"{prefix}{modules[found['module']]}.{found['kind']}"
        heads = _heads(config, found["module"]) if arch == "llama" else None
        yield from [Link.rename(name, into, shape)] if heads is None else _interleaved(name, into, shape, heads)


def _layer_names(arch: str) -> Mapping[str, str]:
    return _GPT_OSS_LAYER if arch == "gpt-oss" else _LAYER


def _stacked_links(name: str, shape: Shape, layer: str, module: str, bias: str | None) -> Iterator[Link]:
    """Yield gpt-oss's links: gate and up alternate in the last dim, and weights are transposed."""
    kind, dims = ("bias", (0, 1)) if bias else ("weight", (0, 2, 1))
    if module == "down":
        yield Link(name, whole(shape), f"blk.{layer}.ffn_down_exps.{kind}", whole(_turned(shape, dims)), dims)
        return
    size = (*shape[:-1], shape[-1] // 2)
    for first, one in enumerate(("gate", "up")):
        box = stepped((*(0,) * (len(shape) - 1), first), size, (*(1,) * (len(shape) - 1), 2))
        yield Link(name, box, f"blk.{layer}.ffn_{one}_exps.{kind}", whole(_turned(size, dims)), dims)


def _turned(shape: Shape, dims: tuple[int, ...]) -> Shape:
    return tuple(shape[dim] for dim in dims)


def _heads(config: Mapping[str, Any], module: str) -> int | None:
    heads = config.get("num_attention_heads")
    if module == "self_attn.k_proj":
        return config.get("num_key_value_heads") or heads
    return heads if module == "self_attn.q_proj" else None


def _interleaved(name: str, into: str, shape: Shape, heads: int) -> Iterator[Link]:
    """Yield the links of llama's q or k: the halves of each head alternate row by row."""
    if shape[0] % (2 * heads):
        raise CorruptError(
            "the rows don't divide into the config's heads", fqn=name, expected=f"{heads} heads", found=list(shape)
        )
    half = shape[0] // heads // 2
    rest, dims = shape[1:], tuple(range(len(shape)))
    zeros, ones = (0,) * len(rest), (1,) * len(rest)
    for head in range(heads):
        start = head * 2 * half
        for part in range(2):
            box = stepped((start + part, *zeros), (half, *rest), (2, *ones))
            yield Link(name, Box((start + part * half, *zeros), (half, *rest)), into, box, dims)


def hub_shapes(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the Hub's tensors for llama.cpp's tensors with these shapes."""
    arch = ARCHITECTURES[config["model_type"]]
    names = {new: old for old, new in _layer_names(arch).items()}
    names |= {"ffn_gate_inp": "mlp.router" if arch == "gpt-oss" else "mlp.gate"}
    top = {new: old for old, new in _MODULES.items()}
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if experts := _EXPERTS.fullmatch(name):
            found |= _hub_experts(arch, shape, *experts.groups())
        elif sinks := _GGUF_SINKS.fullmatch(name):
            found[f"model.layers.{sinks[1]}.self_attn.sinks"] = shape
        else:
            one = _GGUF.fullmatch(name)
            modules = top if one is None or one["layer"] is None else names
            if one is None or one["module"] not in modules:
                raise LossError("the Hub's name for this tensor is not known", fqn=name, found=f"architecture {arch}")
            prefix = "" if one["layer"] is None else f"model.layers.{one['layer']}."
            found[f"{prefix}{modules[one['module']]}.{one['kind']}"] = shape
    return found


def _hub_experts(arch: str, shape: Shape, layer: str, module: str, kind: str) -> dict[str, Shape]:
    prefix = f"model.layers.{layer}.mlp.experts."
    if arch != "gpt-oss":
        return {f"{prefix}{number}.{module}_proj.{kind}": shape[1:] for number in range(shape[0])}
    turned = shape if kind == "bias" else _turned(shape, (0, 2, 1))
    suffix = "_bias" if kind == "bias" else ""
    if module == "down":
        return {f"{prefix}down_proj{suffix}": turned}
    return {f"{prefix}gate_up_proj{suffix}": (*turned[:-1], 2 * turned[-1])}


# -- the namespace --------------------------------------------------------------------------------------------------


def _from_hub(checkpoint: Checkpoint, layout: Layout) -> Checkpoint:
    arch = architecture(checkpoint.config, checkpoint.path)
    config = checkpoint.config
    assert config is not None
    if arch == "gemma":
        checkpoint = shifted(checkpoint, _norms(checkpoint), 1, FLOAT32)
    named = translate(checkpoint, relation(config, checkpoint.shapes), NAME)
    return quantized(named, layout)


def _check_config(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Raise CorruptError if the config is of another model than the file."""
    arch, facts = architecture(config, checkpoint.path), checkpoint.facts_of(GgufFacts)
    if facts.architecture not in (None, arch):
        raise CorruptError(
            "the config is of another architecture",
            path=checkpoint.path,
            expected=f"{facts.architecture!r}, like general.architecture",
            found=f"model_type {config.get('model_type')!r}",
            hint=Message("give the config of this model with {config}"),
        )
    has_factors = (ROPE_FACTORS, WEIGHT) in checkpoint.tensors
    check_recorded(config, arch, {**facts.recorded, ROPE_FACTORS: has_factors}, checkpoint.path)


def _to_hub(checkpoint: Checkpoint) -> Checkpoint:
    arch, config = architecture(checkpoint.config, checkpoint.path), checkpoint.config
    assert config is not None
    _check_config(checkpoint, config)
    tensors, notes = dict(checkpoint.tensors), checkpoint.notes
    if tensors.pop((ROPE_FACTORS, WEIGHT), None) is not None:
        notes += (f"{ROPE_FACTORS} is left out: transformers computes it from the config",)
    plain = replace(checkpoint, tensors=tensors, notes=notes)
    there = relation(config, hub_shapes(config, plain.shapes))
    named = translate(plain, there.inverse(), HUB)
    if arch == "gemma":
        named = shifted(named, _norms(named), -1, FLOAT32)
    return replace(named, ties=tied_names(config, {fqn for fqn, _ in named.tensors}))


def _view(content: bytes) -> memoryview:
    return memoryview(content)


def _comparable(a: Checkpoint, b: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Check a file's numbers against the other side's config, or note those that differ between two files."""
    config = next((side.config for side in (a, b) if side.config), None)
    files = [side for side in (a, b) if side.facts_of(GgufFacts).architecture is not None]
    if config is not None and len(files) == 1:
        _check_config(files[0], config)
    if len(files) == 2:
        one, other = (file.facts_of(GgufFacts).recorded for file in files)
        keys = [key for key in one if key not in _OF_FILES and other.get(key) not in (None, one[key])]
        if keys:
            found = ", ".join(f"{key} {one[key]} and {other[key]}" for key in keys)
            note = f"only tensors are compared, and the files record other numbers in A and B: {found}"
            b = replace(b, notes=(*b.notes, note))
    return _with_factors(a, b)


def _with_factors(a: Checkpoint, b: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Add llama 3's factors to the side without them: they follow from the config."""
    sides, key = [a, b], (ROPE_FACTORS, WEIGHT)
    for this, other in ((0, 1), (1, 0)):
        side = sides[this]
        factors = rope_factors(side.config) if side.config else None
        if factors and key in sides[other].tensors and key not in side.tensors:
            content = struct.pack(f"<{len(factors)}f", *factors)
            extent = Extent.contiguous(ROPE_FACTORS, 0, FLOAT32, (len(factors),))
            tensors = {**side.tensors, key: Tensor(*key, FLOAT32, extent.shape, Whole(extent))}
            computed = {ROPE_FACTORS: partial(_view, content)}
            sides[this] = replace(side, tensors=tensors, computed={**side.computed, **computed})
    return sides[0], sides[1]


#: Numbers of a file, not of its model.
_OF_FILES = ("general.file_type", "general.quantization_version", "split.count", "split.no", "split.tensors.count")


def _tells(checkpoint: Checkpoint) -> bool:
    return checkpoint.facts_of(GgufFacts).architecture in ARCHITECTURES.values()


NAMESPACE = Namespace(_to_hub, _from_hub, adapted=quantized, comparable=_comparable, tells=_tells)


def _norms(checkpoint: Checkpoint) -> list[str]:
    return [fqn for fqn in checkpoint.shapes if fqn.endswith("norm.weight")]
