"""Parser for the tables of tensors written by `save_pretrained`.

    self_attn.[k|v]_proj.bias k ? attention_bias
    |                         | |
    names, with alternatives  | conditions: a config entry is true, or the layer is of this kind; `!` negates one
          shape, in short size names (`2f` is twice `f`, a number is itself)

`{e}` in a name is an expert's number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.plan.tensors import Shape
from converters.names.families.config import Config

#: Layers with one MLP, or with experts.
DENSE, SPARSE = "dense", "sparse"

_CHOICE = re.compile(r"\[([^]]+)\]")
#: Found in older files but not needed.
DERIVED = (r"(.*\.)?rotary_emb\.inv_freq",)

Kinds = Callable[[Config, int], Collection[str]]
Dims = Callable[[Config, Mapping[str, int]], Mapping[str, int]]


@dataclass(frozen=True)
class Saved:
    """Tensors written by `save_pretrained`: exactly `required`.

    Files may also have `optional` ones (a second name of a tied output layer). `ignored` are patterns of names skipped
    on loading. `base` is the name prefix of the model without its head.
    """

    cls: str
    required: Mapping[str, Shape]
    optional: Mapping[str, Shape] = field(default_factory=dict)
    ignored: tuple[str, ...] = DERIVED
    base: str = ""


@dataclass(frozen=True)
class FamilyRow:
    name: str
    dims: tuple[str, ...]
    conditions: tuple[str, ...]


@cache
def parse(text: str) -> tuple[FamilyRow, ...]:
    return tuple(_parse_rows(text))


def lines(text: str) -> Iterator[str]:
    return filter(None, map(str.strip, text.splitlines()))


def _parse_rows(text: str) -> Iterator[FamilyRow]:
    for line in lines(text):
        what, _, conditions = line.partition("?")
        name, *dims = what.split()
        for spelled in choices(name):
            yield FamilyRow(spelled, tuple(dims), tuple(conditions.split()))


def choices(name: str) -> Iterator[str]:
    """Yield `k_proj` and `v_proj` for `[k|v]_proj`."""
    match = _CHOICE.search(name)
    if match is None:
        yield name
        return
    for choice in match[1].split("|"):
        yield from choices(name[: match.start()] + choice + name[match.end() :])


@dataclass(frozen=True)
class Sizes:
    """Sizes by short names, and the tensors in each layer.

    `top` has the tensors outside all layers. `layers` has each layer's tensors without the layer's prefix, with `{e}`
    for the expert. `predicted` are multi-token prediction layers, numbered after the others.
    """

    config: Config
    dims: Mapping[str, int]
    top: Mapping[str, Shape]
    layers: tuple[Mapping[str, Shape], ...]
    sparse: frozenset[int]
    predicted: tuple[Mapping[str, Shape], ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_experts(self) -> int:
        return self.dims.get("e", 0)

    @property
    def tied(self) -> bool:
        return self.config.flag("tie_word_embeddings")

    def has(self, name: str) -> bool:
        return any(name in layer for layer in self.layers)


@dataclass(frozen=True)
class Family:
    """One `model_type`. `stem` begins its class names (`LlamaForCausalLM`), `base` its tensor names.

    `layer` has the rows of each layer, `top` all others except heads. The class uses `defaults` for a missing or null
    entry, `absent` for a missing one, and never reads `unread`. `spelled` maps the config's own keys to the common ones
    (`{"d_model": "hidden_size"}`). `dims` adds sizes to attention's. The table does not cover configs with a true entry
    in `unknown`.

    Example:
        Family("GPTJ", "attn.[q|k|v|out]_proj.weight h h", defaults={"rotary_dim": 64})
    """

    stem: str
    layer: str
    top: str = "embed_tokens.weight v h"
    final: str = "norm.weight h"
    base: str = "model"
    layers: str = "layers"
    causal: str = "ForCausalLM"
    output: str = "lm_head.weight v h"
    classifier: str = "score.weight labels h"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    spelled: Mapping[str, str] = field(default_factory=dict)
    kinds: Kinds = lambda config, layer: (DENSE,)
    dims: Dims = lambda config, dims: {}
    experts: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    #: Rows for a multi-token prediction layer, added to a sparse layer's, or a dense layer's without experts. Releases
    #: have them, and transformers leaves them out.
    prediction: str = ""
    #: Name before such a layer's number. By default, these layers follow the others.
    predicted: str = ""
    #: Prefix of `layer`'s rows in such a layer, if it is beside the model.
    inside: str = ""
    #: Other names in transformers' memory, each before the Hub's. After `read`, files may have the name, but
    #: `save_pretrained` does not write it. `^` starts a name. Experts stack by themselves.
    memory: str = ""
    #: Layers' matrices are transformers' Conv1D, [in, out]. The rows have [out, in].
    conv1d: bool = False
    #: Class outside transformers, with unknown names in memory.
    own_code: bool = False

    def saved(self, config: Mapping[str, Any], cls: str) -> Saved | None:
        """Return the tensors saved by `cls`, or None if the table does not cover it.

        Raise CorruptError if a size is missing from the config or impossible.
        """
        read = self._config(config)
        heads = {
            self.causal: self.output,
            "ForSequenceClassification": self.classifier,
            "Model": "",
        }
        head = cls.removeprefix(self.stem)
        if head not in heads or not cls.startswith(self.stem) or any(read.flag(name) for name in self.unknown):
            return None
        sizes = self._sizes(read, heads[head])
        required = dict(sizes.top)
        for number, layer in enumerate(sizes.layers):
            required.update(spelled_out(layer, self.prefix(number), sizes.num_experts))
        optional: dict[str, Shape] = {}
        if head == self.causal and sizes.tied:
            tied = _tied_row(self.output)
            optional[tied.name] = shape_of(tied, sizes.dims)
        for number, layer in enumerate(sizes.predicted):
            optional.update(spelled_out(layer, self.predicted_prefix(number, sizes.num_layers), sizes.num_experts))
        if head == "Model":
            required = {name.removeprefix(f"{self.base}."): shape for name, shape in required.items()}
            optional = {}
        return Saved(cls, required, optional, (*DERIVED, *self.ignored), self.base)

    def sizes(self, config: Mapping[str, Any]) -> Sizes:
        return self._sizes(self._config(config), self.output)

    def rows(self) -> Iterator[str]:
        """Yield the Hub's names in module order, with `#` for numbers."""
        inside, layer = f"{self.base}.", self.prefix("#")
        for prefix, text in ((inside, self.top), (layer, self.layer), (inside, self.final), ("", self.output)):
            yield from (prefix + row.name.replace("{e}", "#") for row in parse(text))
        yield from (row.name for row in parse(self.classifier))

    def prefix(self, layer: int | str) -> str:
        return f"{self.base}.{self.layers}.{layer}."

    def predicted_prefix(self, number: int, num_layers: int) -> str:
        if self.inside:
            return self.predicted
        return f"{self.base}.{self.predicted}.{number}." if self.predicted else self.prefix(num_layers + number)

    def _config(self, config: Mapping[str, Any]) -> Config:
        """Add defaults, under common keys."""
        stated = {name: value for name, value in config.items() if value is not None and name not in self.unread}
        common = {name: stated[own] for own, name in self.spelled.items() if own in stated}
        absent = {name: value for name, value in self.absent.items() if name not in config}
        nested = {*Config(stated).mapping("rope_scaling"), *Config(stated).mapping("rope_parameters")}
        defaults = {name: value for name, value in self.defaults.items() if name not in nested}
        return Config({**defaults, **absent, **stated, **common})

    def _sizes(self, config: Config, head: str) -> Sizes:
        dims = _attention_sizes(config)
        if self.experts:
            dims["e"] = config.count(*self.experts)
        dims |= self.dims(config, dims)
        kinds = [self.kinds(config, number) for number in range(config.num_layers)]
        top = dict(filled(f"{self.top}\n{self.final}", config, dims, prefix=f"{self.base}."))
        top |= dict(filled(head, config, dims))
        if config.flag("tie_word_embeddings") and head == self.output:
            del top[_tied_row(self.output).name]
        layers = tuple(dict(filled(self.layer, config, dims, one)) for one in kinds)
        if self.conv1d:
            layers = tuple({name: shape[::-1] for name, shape in layer.items()} for layer in layers)
        predicted = config.get("num_nextn_predict_layers") if self.prediction else None
        count = config.count("num_nextn_predict_layers") if predicted else 0
        kind = (SPARSE if self.experts else DENSE,)
        behind = dict(filled(self.layer, config, dims, kind, self.inside)) if count else {}
        behind |= dict(filled(self.prediction, config, dims, kind)) if count else {}
        sparse = frozenset(number for number, one in enumerate(kinds) if SPARSE in one)
        return Sizes(config, dims, top, layers, sparse, (behind,) * count)


def _tied_row(output: str) -> FamilyRow:
    return next(row for row in parse(output) if row.dims == ("v", "h"))


def filled(
    text: str, config: Config, dims: Mapping[str, int], kinds: Collection[str] = (), prefix: str = ""
) -> Iterator[tuple[str, Shape]]:
    for row in parse(text):
        if all(_holds(condition, config, kinds) for condition in row.conditions):
            yield prefix + row.name, shape_of(row, dims)


def shape_of(row: FamilyRow, dims: Mapping[str, int]) -> Shape:
    return tuple(_multiple(word, dims) for word in row.dims)


def spelled_out(shapes: Mapping[str, Shape], prefix: str, num_experts: int) -> Iterator[tuple[str, Shape]]:
    for name, shape in shapes.items():
        before, is_expert, after = name.partition("{e}")
        if not is_expert:
            yield prefix + name, shape
            continue
        for expert in range(num_experts):
            yield f"{prefix}{before}{expert}{after}", shape


def _holds(condition: str, config: Config, kinds: Collection[str]) -> bool:
    if condition.startswith("!"):
        return not _holds(condition[1:], config, kinds)
    return condition in kinds or config.flag(condition)


def _multiple(word: str, dims: Mapping[str, int]) -> int:
    """Return `2f` as twice the size `f`, and a bare number as itself."""
    name = word.lstrip("0123456789")
    factor = int(word.removesuffix(name) or 1)
    return factor * dims[name] if name else factor


def _attention_sizes(config: Config) -> dict[str, int]:
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
    return {**dims, "heads": heads, "groups": groups, "labels": num_labels(config)}


def num_labels(config: Config, default: int = 2) -> int:
    """Return the number of labels. transformers writes `id2label`, but not `num_labels`."""
    return len(config.mapping("id2label")) or config.size("num_labels", default=default)
