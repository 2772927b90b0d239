"""How the tables of `families` are read: a line for each kind of tensor that `save_pretrained` writes.

    self_attn.[k|v]_proj.bias k ? attention_bias
    |                         | |
    names, with alternatives  | conditions: what the config says is true, or the layer's kind; `!` turns one round
                              the shape, in short names of sizes (`2f` is twice `f`, a number is itself)

`{e}` in a name is an expert's number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ckpt.plan.tensors import Shape
from converters.names.megatron.sizes import Config, attention_sizes, multiple

#: Kinds of layers: with one MLP, with experts.
DENSE, SPARSE = "dense", "sparse"

_CHOICE = re.compile(r"\[([^]]+)\]")
#: Frequencies of rotary positions, which older files hold and no model needs.
DERIVED = (r"(.*\.)?rotary_emb\.inv_freq",)

Kinds = Callable[[Config, int], Collection[str]]
Dims = Callable[[Config, Mapping[str, int]], Mapping[str, int]]


@dataclass(frozen=True)
class Saved:
    """What `save_pretrained` of the class `cls` writes: every name of `required`, and no other.

    `optional` may be there as well (a tied output layer once more), `ignored` are patterns of what loading passes over.
    `base` is what the names of the model without its head begin with.
    """

    cls: str
    required: Mapping[str, Shape]
    optional: Mapping[str, Shape] = field(default_factory=dict)
    ignored: tuple[str, ...] = DERIVED
    base: str = ""


@dataclass(frozen=True)
class Row:
    name: str
    dims: tuple[str, ...]
    conditions: tuple[str, ...]


@cache
def parse(text: str) -> tuple[Row, ...]:
    """The rows of a table, alternatives in full."""
    return tuple(_rows(text))


def _rows(text: str) -> Iterator[Row]:
    for line in filter(None, map(str.strip, text.splitlines())):
        what, _, conditions = line.partition("?")
        name, *dims = what.split()
        for spelled in _spelled(name):
            yield Row(spelled, tuple(dims), tuple(conditions.split()))


def _spelled(name: str) -> Iterator[str]:
    match = _CHOICE.search(name)
    if match is None:
        yield name
        return
    for choice in match[1].split("|"):
        yield from _spelled(name[: match.start()] + choice + name[match.end() :])


@dataclass(frozen=True)
class Family:
    """One `model_type`: `stem` begins the names of its classes (`LlamaForCausalLM`), `base` those of its tensors.

    `layer` are the rows of each layer, `top` all others but those of heads.  `defaults` are what the class takes where
    the config is silent.  `spelled` maps the config's own words to the common ones (`{"d_model": "hidden_size"}`).
    `kinds` says what a layer is, `dims` adds sizes to those of attention.  The table has no answer for a config in
    which one of `unknown` is true.
    """

    stem: str
    layer: str
    top: str = "embed_tokens.weight v h \n norm.weight h"
    base: str = "model"
    layers: str = "layers"
    causal: str = "ForCausalLM"
    output: str = "lm_head.weight v h"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    spelled: Mapping[str, str] = field(default_factory=dict)
    kinds: Kinds = lambda config, layer: (DENSE,)
    dims: Dims = lambda config, dims: {}
    experts: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    #: Rows of a layer of multi-token prediction, beside those of a sparse one: it stands behind the others in the
    #: files of a release, and transformers leaves it out.
    prediction: str = ""

    def saved(self, config: Mapping[str, Any], cls: str) -> Saved | None:
        """What the class `cls` of this family writes; None where the table has no answer.

        Raises CorruptError where the config lacks a size, or has one that is none.
        """
        stated = {name: value for name, value in config.items() if value is not None}
        common = {name: stated[own] for own, name in self.spelled.items() if own in stated}
        read = Config({**self.defaults, **stated, **common})
        heads = {
            self.causal: self.output,
            "ForSequenceClassification": "score.weight labels h",
            "Model": "",
        }
        head = cls.removeprefix(self.stem)
        if head not in heads or not cls.startswith(self.stem) or any(read.flag(name) for name in self.unknown):
            return None
        filling = self._filling(read)
        base = "" if head == "Model" else f"{self.base}."
        required = {**dict(self._model(filling, base)), **dict(filling.tensors(parse(heads[head]), ()))}
        optional = {}
        if head == self.causal and read.flag("tie_word_embeddings"):
            tied = parse(self.output)[0].name
            optional[tied] = required.pop(tied)
        if self.prediction and head != "Model" and read.get("num_nextn_predict_layers"):
            optional |= dict(self._prediction(filling, base, read.count("num_nextn_predict_layers")))
        return Saved(cls, required, optional, (*DERIVED, *self.ignored), self.base)

    def _filling(self, config: Config) -> Filling:
        sizes = attention_sizes(config)
        dims: dict[str, int] = {**sizes.dims, "heads": sizes.heads, "groups": sizes.groups, "labels": _labels(config)}
        if self.experts:
            dims["e"] = config.count(*self.experts)
        dims |= self.dims(config, dims)
        return Filling(config, dims, sizes.num_layers)

    def _model(self, filling: Filling, base: str) -> Iterator[tuple[str, Shape]]:
        yield from filling.tensors(parse(self.top), (), base)
        rows = parse(self.layer)
        for number in range(filling.num_layers):
            kinds = self.kinds(filling.config, number)
            yield from filling.tensors(rows, kinds, f"{base}{self.layers}.{number}.")

    def _prediction(self, filling: Filling, base: str, count: int) -> Iterator[tuple[str, Shape]]:
        for number in range(filling.num_layers, filling.num_layers + count):
            rows = (*parse(self.layer), *parse(self.prediction))
            yield from filling.tensors(rows, (SPARSE,), f"{base}{self.layers}.{number}.")


@dataclass(frozen=True)
class Filling:
    """What the names and shapes of rows are filled with."""

    config: Config
    dims: Mapping[str, int]
    num_layers: int

    def tensors(self, rows: tuple[Row, ...], kinds: Collection[str], prefix: str = "") -> Iterator[tuple[str, Shape]]:
        for row in rows:
            if not all(self._holds(condition, kinds) for condition in row.conditions):
                continue
            shape = tuple(multiple(word, self.dims) for word in row.dims)
            if "{e}" not in row.name:
                yield prefix + row.name, shape
                continue
            before, _, after = row.name.partition("{e}")
            for expert in range(self.dims["e"]):
                yield f"{prefix}{before}{expert}{after}", shape

    def _holds(self, condition: str, kinds: Collection[str]) -> bool:
        if condition.startswith("!"):
            return not self._holds(condition[1:], kinds)
        return condition in kinds or self.config.flag(condition)


def _labels(config: Config) -> int:
    """transformers writes `id2label`, and of `num_labels` nothing."""
    return len(config.mapping("id2label")) or config.size("num_labels", default=2)
