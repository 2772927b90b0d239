"""A large model's layers, some at a time, as smaller models of the same width.

Each window is a whole model: it also has the embedding, the last norm and the head, with the same bits every time.
A cut window has only the first experts of each layer and the first rows of the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, gcd, prod
from typing import Any

Shape = tuple[int, ...]

_LAYER = re.compile(r"((?:^|\.)(?:layers|h)\.)(\d+)(?=\.)")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
#: Rows of a cut vocabulary, and the part of the whole that Megatron's padding sees.
_ROWS, _PADDED = 2048, 1024
#: Config entries with a value for each layer.
_LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "hybrid_override_pattern", "no_rope_layers")
#: Config entries that list layers by number.
_NUMBERS = ("mlp_only_layers",)
#: Config entries that count layers from the first.
_COUNTS = ("first_k_dense_replace", "max_window_layers")
#: Config entries that repeat in steps, so a window must start at a multiple of them.
_STEPS = ("decoder_sparse_step", "moe_layer_freq", "full_attention_interval", "interleave_moe_layer_step")
#: Config entries that a narrow model has a part of.
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "num_attention_heads")


@dataclass(frozen=True)
class Window:
    """Layers `start` to `stop`, with the first `experts` and `rows` of the vocabulary, or all."""

    start: int
    stop: int
    experts: int | None = None
    rows: int | None = None

    @property
    def cut(self) -> bool:
        return (self.experts, self.rows) != (None, None)

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config of these layers alone. Raise ValueError if they can't stand alone."""
        if isinstance(config.get("text_config"), Mapping):
            return {**config, "text_config": self.config(config["text_config"])}
        if (self.start, self.stop) == (0, num_layers(config)) and not self.cut:
            return dict(config)
        found = {**config, "num_hidden_layers": self.stop - self.start}
        for key in found.keys() & set(_STEPS):
            if isinstance(found[key], int) and self.start % found[key]:
                raise ValueError(f"a window can't start at layer {self.start}, because {key} is {found[key]}")
        for key in found.keys() & set(_LISTS):
            found[key] = found[key] and found[key][self.start : self.stop]
        for key in found.keys() & set(_NUMBERS):
            found[key] = [layer - self.start for layer in found[key] if self.start <= layer < self.stop]
        for key in found.keys() & set(_COUNTS):
            found[key] = min(max(0, found[key] - self.start), self.stop - self.start)
        if self.experts is not None:
            found |= {key: self.experts for key in _EXPERTS if key in found}
        if self.rows is not None:
            tokens = {key: token for key, token in found.items() if key.endswith("_token_id")}
            found |= {key: None for key, token in tokens.items() if not isinstance(token, int) or token >= self.rows}
            found["vocab_size"] = self.rows
        return found

    def shape(self, config: Mapping[str, Any], name: str, shape: Shape) -> Shape | None:
        """Return a tensor's shape in the window, or None if it is outside."""
        layer, expert = _LAYER.search(name), _EXPERT.search(name)
        if layer is not None and not self.start <= int(layer[2]) < self.stop:
            return None
        if expert is not None and self.experts is not None and int(expert[0]) >= self.experts:
            return None
        whole, number = (num_experts(config), self.experts) if layer else (num_rows(config), self.rows)
        stacked = layer is None or re.search(r"expert|router|gate\.", name)
        return (
            (number, *shape[1:]) if number is not None and expert is None and stacked and shape[0] == whole else shape
        )

    @staticmethod
    def layer(name: str) -> str:
        """Return a name's layer, or an empty string."""
        found = _LAYER.search(name)
        return "" if found is None else name[: found.end()]

    def name(self, name: str) -> str:
        """Return a tensor's name in the whole model."""
        return _LAYER.sub(lambda found: f"{found[1]}{int(found[2]) + self.start}", name, count=1)


def narrowed(config: Mapping[str, Any], by: int) -> dict[str, Any]:
    """Return the config with one in `by` of the attention's heads and of the MLPs' inner width. Hidden sizes stay.

    A vision tower has one in `by` layers, and all heads.
    """
    if isinstance(config.get("text_config"), Mapping):
        vision = {**config["vision_config"]}
        vision |= {key: vision[key] // by for key in ("depth", "intermediate_size")}
        if taps := vision.get("deepstack_visual_indexes"):
            vision["deepstack_visual_indexes"] = [layer // by for layer in taps]
        return {**config, "text_config": narrowed(config["text_config"], by), "vision_config": vision}
    if uneven := {key: config[key] for key in _WIDTHS if config.get(key, 0) % by}:
        raise ValueError(f"{by} does not divide {uneven}")
    found = {**config, **{key: config[key] // by for key in _WIDTHS if key in config}}
    found["num_key_value_heads"] = gcd(config["num_key_value_heads"], found["num_attention_heads"])
    if "kv_lora_rank" not in config:
        found.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return found


def num_layers(config: Mapping[str, Any]) -> int:
    number: int = config.get("text_config", config)["num_hidden_layers"]
    return number


def num_experts(config: Mapping[str, Any]) -> int | None:
    text = config.get("text_config", config)
    return next((text[key] for key in _EXPERTS if key in text), None)


def num_rows(config: Mapping[str, Any]) -> int:
    number: int = config.get("text_config", config)["vocab_size"]
    return number


def windows(config: Mapping[str, Any], shapes: Mapping[str, Shape], most: int) -> list[Window]:
    """Return few, even windows with at most `most` elements each."""
    layers, outside = num_layers(config), 0
    sizes = [0] * layers
    for name, shape in shapes.items():
        found = _LAYER.search(name) if "vision" not in name else None
        if found is not None and int(found[2]) < layers:
            sizes[int(found[2])] += prod(shape)
        else:
            outside += prod(shape)
    step = _step(config)
    for count in range(1, layers + 1):
        length = ceil(ceil(layers / count) / step) * step
        made = [Window(start, min(start + length, layers)) for start in range(0, layers, length)]
        if all(outside + sum(sizes[one.start : one.stop]) <= most for one in made):
            return made
    raise ValueError(f"a layer and the rest outside have {outside + max(sizes):,} elements, more than {most:,}")


def part(config: Mapping[str, Any], shapes: Mapping[str, Shape], most: int) -> list[Window]:
    """Return windows with each kind of layer once, and at most `most` elements.

    Two layers or all kinds together are better than one window per kind, then many experts, then all rows.
    """
    kinds, step = _kinds(config, shapes), _step(config)
    rows = _ROWS + num_rows(config) % _PADDED
    for spans in _spans(kinds, step):
        for experts in _halves(config):
            for number in (None, rows):
                made = [replace(one, experts=experts, rows=number) for one in spans]
                if all(_elements(config, shapes, one) <= most for one in made):
                    return made
    raise ValueError(f"a layer with {_elements(config, shapes, made[0]):,} elements is more than {most:,}")


def _spans(kinds: list[Any], step: int) -> Iterator[list[Window]]:
    every = set(kinds)
    shortest = next(
        Window(start, start + length)
        for length in range(step, len(kinds) + 1)
        for start in range(0, len(kinds) - length + 1, step)
        if set(kinds[start : start + length]) == every
    )
    if shortest.stop - shortest.start == 1 < len(kinds):
        yield [Window(shortest.start, shortest.stop + 1)]
    yield [shortest]
    firsts = sorted({kinds.index(kind) // step * step for kind in every})
    if len(firsts) > 1:
        yield [Window(first, min(first + step, len(kinds))) for first in firsts]


def _kinds(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> list[Any]:
    """Return each layer's names, shapes and config entries."""
    text = config.get("text_config", config)
    held: list[set[Any]] = [{(key, text[key][n]) for key in _LISTS if text.get(key)} for n in range(num_layers(config))]
    for name, shape in shapes.items():
        if found := _LAYER.search(name):
            held[int(found[2])].add((_EXPERT.sub("", name[found.end() :]), shape))
    return [frozenset(one) for one in held]


def _halves(config: Mapping[str, Any]) -> Iterator[int | None]:
    """Yield all experts as None, a half, a quarter, but at least as many as a token uses."""
    yield None
    number, text = num_experts(config), config.get("text_config", config)
    while number is not None and number % 2 == 0 and number // 2 >= text["num_experts_per_tok"]:
        number //= 2
        yield number


def _elements(config: Mapping[str, Any], shapes: Mapping[str, Shape], window: Window) -> int:
    return sum(prod(window.shape(config, name, shape) or (0,)) for name, shape in shapes.items())


def _step(config: Mapping[str, Any]) -> int:
    return max((value for key in _STEPS if isinstance(value := config.get(key), int)), default=1)
