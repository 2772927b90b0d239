"""What models of transformers hold in memory, by a table for each model type: names and shapes from its config alone.

`fixtures/make_names.py` learned the tables of transformers 5.23 itself: it built each model without data from many
configs, and kept a table only where it foretells others as well.  `learned.json` has them; per model type:

    rows      names in memory, by their shape and the conditions on which they are there
    optional  the same of tied tensors, which files may have once more
    counts    how many there are of what a `#` in a name counts
    fixed     what the config must say for the table to hold: entries of which the script could not tell what they do
    seen      texts that it may say, alone or in a list, as the kinds of layers: the models had no others
    defaults  what the class takes where the config is silent; `null` and `lists` what where it says `null`

A shape is `hidden_size 2*intermediate_size+vocab_size/2`, each word a sum of products of config entries.  Conditions:

    attention_bias          true, or not 0 and not empty; `!` turns a condition round
    layer_types[#]=mamba    the entry of a layer; `hidden_act=relu`, `num_experts=0`, `head_dim=null` of the model
    #@mlp_only_layers       the layer is in the list
    #<first_k_dense_replace, #+1%decoder_sparse_step, #-attn_layer_offset%attn_layer_period
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ckpt.plan.tensors import Shape
from converters.names.hub.rows import DERIVED, Saved
from converters.names.transformers.installed import architectures
from converters.names.transformers.tables import declared

_MAX_SIZE = 1 << 40
_MAX_COUNT = 4096
_TERM = re.compile(r"([+-]?)([^+-]+)")


class NoAnswerError(Exception):
    """The config says what the table knows nothing of."""


@cache
def _file() -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("learned.json").read_text("utf-8"))
    return found


def table(model_type: str) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = _file().get(model_type)
    return found


def model_types() -> Collection[str]:
    return _file().keys()


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Entries of a config and of the configs in it, whose names stand before those of their entries."""
    for name, value in config.items():
        if isinstance(value, Mapping) and name.endswith("_config"):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def saved(config: Mapping[str, Any]) -> Saved | None:
    """What the class that the config names writes; None where no table has the answer."""
    found = table(str(config.get("model_type")))
    named = architectures(config)
    rules = declared(config)
    if found is None or rules is None or (named and named[0] != found["cls"]):
        return None
    try:
        here = scope(found, config)
        required = dict(tensors(found, found["rows"], here))
        every = {**required, **dict(tensors(found, found.get("optional", {}), here))}
    except NoAnswerError:
        return None

    def files(shapes: Mapping[str, Shape]) -> Mapping[str, Shape]:
        relation = rules.relation(shapes, "to_hub")
        return shapes if relation is None else relation.b_shapes

    required_files = files(required)
    optional = {} if every == required else {n: s for n, s in files(every).items() if n not in required_files}
    ignored = [f".*({pattern}).*" for pattern in found.get("ignored", ())]
    return Saved(found["cls"], required_files, optional, (*DERIVED, *ignored), found.get("base", ""))


@dataclass(frozen=True)
class Scope:
    """What words of a table mean: `values` are a config's entries, `null` and `lists` what stands for those of None."""

    values: Mapping[str, Any]
    null: Mapping[str, str]
    lists: Mapping[str, Sequence[Sequence[str]]]

    def value(self, name: str, index: int) -> Any:
        name, is_item, _ = name.partition("[#]")
        found = self.values.get(name)
        if found is None and not is_item:
            return self.number(self.null[name], index) if name in self.null else None
        if not is_item:
            return found
        if found is None and name in self.lists:
            return next(item for item, where in self.lists[name] if self.holds(where, index))
        if not isinstance(found, Sequence) or not 0 <= index < len(found):
            raise NoAnswerError(name)
        return found[index]

    def number(self, words: str, index: int = 0) -> int:
        """The value of a sum of products."""
        total = 0
        for sign, product in _TERM.findall(words):
            above, below = 1, 1
            for count, part in enumerate(product.split("/")):
                for factor in part.split("*") if not count else [part]:
                    size = int(factor) if factor.isdigit() else self.value(factor, index)
                    if type(size) is not int or not 0 <= size < _MAX_SIZE:
                        raise NoAnswerError(factor)
                    above, below = (above, below * size) if count else (above * size, below)
            if not below or above % below:
                raise NoAnswerError(product)
            total += -(above // below) if sign == "-" else above // below
        return total

    def holds(self, conditions: str, index: int) -> bool:
        return all(self._holds(condition, index) for condition in conditions.split())

    def _holds(self, condition: str, index: int) -> bool:
        if condition.startswith("!"):
            return not self._holds(condition[1:], index)
        if condition.startswith("#<"):
            return index < self.number(condition[2:], index)
        if condition.startswith("#@"):
            return index in (self.value(condition[2:], index) or ())
        if condition.startswith("#"):
            offset, _, period = condition[1:].partition("%")
            shift = self.number(offset.replace("-", "+"), index)
            every = self.number(period, index)
            if not every:
                raise NoAnswerError(period)
            return (index - shift if offset.startswith("-") else index + shift) % every == 0
        name, is_compared, wanted = condition.partition("=")
        value = self.value(name, index)
        if not is_compared:
            return bool(value)
        return ("null" if value is None else str(value)) == wanted


def scope(table: Mapping[str, Any], config: Mapping[str, Any]) -> Scope:
    """The config as the table needs it; NoAnswerError where it says what the table does not hold for."""
    alias = table.get("alias", {})
    stated: dict[str, Any] = {}
    for name, value in flat(config):
        name = alias.get(name, name)
        if stated.setdefault(name, value) != value:
            raise NoAnswerError(name)
    values = {**table["defaults"], **stated}
    for name, wanted in table.get("fixed", {}).items():
        if values.get(name, wanted) != wanted:
            raise NoAnswerError(name)
    for name, known in table.get("seen", {}).items():
        value = values.get(name)
        if not {v for v in (value if isinstance(value, list) else [value]) if isinstance(v, str)} <= set(known):
            raise NoAnswerError(name)
    return Scope(values, table.get("null", {}), table.get("lists", {}))


def tensors(table: Mapping[str, Any], rows: Mapping[str, Sequence[str]], scope: Scope) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of these rows; NoAnswerError where the config has no answer to what they ask."""
    for row, names in rows.items():
        words, _, where = row.partition("?")
        for name in names:
            before, counts, after = name.partition("#")
            count = scope.number(table["counts"][before]) if counts else 1
            if count > _MAX_COUNT:
                raise NoAnswerError(before)
            for index in range(count):
                if scope.holds(where, index):
                    shape = tuple(scope.number(word, index) for word in words.split())
                    if min(shape, default=1) < 1:
                        raise NoAnswerError(name)
                    yield f"{before}{index}{after}" if counts else name, shape
