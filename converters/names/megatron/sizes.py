"""What a model's config.json says, as the tables need it: sizes by short names, and which layers are of which kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.base.errors import CorruptError

_MAX_SIZE = 1 << 40
_MAX_COUNT = 1 << 20


@dataclass(frozen=True)
class Config:
    """A config.json whose values are checked when they are asked for."""

    values: Mapping[str, Any]

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is stated, a positive integer; CorruptError where there is none and no default."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if type(value) is not int or not 0 < value < _MAX_SIZE:
                raise CorruptError("the config states no size", expected=f"{name}: a positive integer", found=value)
            return value
        if default is None:
            raise CorruptError("the config does not state a size", expected=names[0], found="no such entry")
        return default

    def count(self, *names: str, default: int | None = None) -> int:
        """`size` with a lower limit, for what is listed one by one: layers and experts.  CorruptError above it."""
        found = self.size(*names, default=default)
        if found > _MAX_COUNT:
            raise CorruptError("the config has too many of something", found=f"{names[0]} {found}")
        return found

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CorruptError("the config does not state a number", expected=name, found=value)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        return default if value is None else bool(value)

    def mapping(self, *names: str) -> Mapping[str, Any]:
        """The first of `names` that is stated and is an object; an empty one otherwise."""
        return next((self.values[n] for n in names if isinstance(self.values.get(n), Mapping)), {})

    def get(self, name: str) -> Any:
        return self.values.get(name)

    @property
    def num_layers(self) -> int:
        return self.count("num_hidden_layers", "n_layer")

    @property
    def rope(self) -> Mapping[str, Any]:
        """transformers 5's `rope_parameters`, or what older configs state in two places."""
        stated = self.mapping("rope_parameters")
        if stated:
            return stated
        scaling = self.mapping("rope_scaling")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        theta = {} if self.get("rope_theta") is None else {"rope_theta": self.get("rope_theta")}
        return {**scaling, "rope_type": kind, **theta}


@dataclass(frozen=True)
class Sizes:
    """What the names of a table are filled with.

    `dims` are sizes of dims by the short names that the rows use; `heads` attention heads in `groups` groups that
    share keys and values, of `head` elements.  `sparse` are the layers with experts.  `holds` says which rows there
    are, for those that not every model of the architecture has.
    """

    num_layers: int
    dims: Mapping[str, int]
    heads: int
    groups: int
    head: int
    tied: bool
    sparse: frozenset[int] = frozenset()
    num_experts: int = 0
    num_mtp: int = 0
    holds: frozenset[str] = frozenset()

    def shape(self, text: str) -> tuple[int, ...]:
        """`"f h"` as sizes; `2f` is twice `f`."""
        return tuple(multiple(word, self.dims) for word in text.split())


def multiple(word: str, dims: Mapping[str, int]) -> int:
    """`2f` as twice the size `f`; a number alone is itself."""
    name = word.lstrip("0123456789")
    factor = int(word.removesuffix(name) or 1)
    return factor * dims[name] if name else factor


def attention_sizes(config: Config, *, tied: bool = False, **more: Any) -> Sizes:
    """Sizes of a model with (grouped) attention, under the config entries that most architectures share.

    `tied`: whether the output layer is the embedding where the config does not say.
    """
    hidden = config.size("hidden_size", "n_embd")
    heads = config.size("num_attention_heads", "n_head")
    groups = config.size("num_key_value_heads", default=heads)
    if heads % groups:
        raise CorruptError("heads do not divide among groups", expected=f"a divisor of {heads}", found=groups)
    if config.get("head_dim") is None and hidden % heads:
        raise CorruptError(
            "the hidden size does not divide among heads", expected=f"a divisor of {hidden}", found=heads
        )
    head = config.size("head_dim", default=hidden // heads)
    ffn = config.size("intermediate_size", "n_inner", default=4 * hidden)
    dims = {"h": hidden, "a": heads * head, "k": groups * head, "d": head, "f": ffn, "v": config.size("vocab_size")}
    dims |= more.pop("dims", {})
    holds = frozenset(more.pop("holds", ()))
    is_tied = config.flag("tie_word_embeddings", tied)
    return Sizes(config.num_layers, dims, heads, groups, head, is_tied, holds=holds, **more)
