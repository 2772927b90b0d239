"""Builds models without data from configs that differ, for `fixtures/make_names.py`."""

from __future__ import annotations

import ast
import functools
import json
import random
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

import torch

from converters.names.hub.asked import in_memory
from converters.names.hub.learned import flat
from tests.support.architectures import model_class, tiny_config

ABSENT = "<absent>"
#: Entries that no shape of any model depends on.
NEVER = re.compile(
    r"(.*\.)?(.*token_id|.*token_index|.*dropout.*|.*_pdrop|.*_eps|.*epsilon|rope_.*|.*theta|.*init.*|.*_coef|use_cache|"
    r".*dtype|transformers_version|architectures|model_type|.*label.*|problem_type|return_dict|output_.*|attribute_map|"
    r"sub_configs_defaults|chunk_size.*|"
    r"_name_or_path|auto_map|attn_implementation|quantization_config|is_encoder_decoder|name_or_path|.*softcap.*|"
    r".*_scale|.*_multiplier|.*loss.*|task_specific_params|finetuning_task|torchscript|pruned_heads|gradient_check.*|"
    r"sliding_window|.*_plan|max_window_layers|experts_implementation|.*_act|.*activation.*|.*temperature.*|"
    r"pretraining_tp)"
)


@dataclass
class Sample:
    """A config, and what its model holds: each name's shape, of those that must be there and of those that may."""

    values: dict[str, Any]
    required: dict[str, tuple[int, ...]]
    optional: dict[str, tuple[int, ...]]
    #: What the class makes of the entries of its config.
    made: Mapping[str, Any] = field(default_factory=dict)


class NotLearnedError(Exception):
    pass


def default(cls: Any, name: str) -> Any:
    found = cls.__dataclass_fields__.get(name)
    if found is None:
        return ABSENT
    if found.default is not MISSING:
        return found.default
    return found.default_factory() if found.default_factory is not MISSING else ABSENT


class Lab:
    """Builds models of one architecture from configs that differ."""

    def __init__(self, model_type: str) -> None:
        self.random = random.Random(model_type)
        made = tiny_config(model_type)
        self.model_type, self.config_class = model_type, type(made)
        self.cls = model_class(made)
        whole = json.loads(json.dumps(made.to_dict(), default=str))
        self.kinds = {"": type(made)}  # config classes by the prefix of their entries
        for name in getattr(type(made), "sub_configs", {}):
            part = getattr(made, name, None)
            if part is not None and name.endswith("_config"):
                self.kinds[f"{name}."] = type(part)
        self.base = dict(flat(whole))
        self.source = "\n".join(map(sources, dict.fromkeys(cls.__module__ for cls in (*self.kinds.values(), self.cls))))
        self.fixed_parts = {n: v for n, v in self.base.items() if n.endswith("model_type") and n != "model_type"}
        for prefix, cls in self.kinds.items():
            for name in cls.__dataclass_fields__:
                if not name.endswith("_config"):
                    self.base.setdefault(prefix + name, ABSENT)
            for name, value in popped(cls).items():
                self.base.setdefault(prefix + name, value)
        self.defaults: dict[str, Any] = {}
        for name in self.base:
            prefix = self.prefix(name)
            found = default(self.kinds[prefix], name.removeprefix(prefix))
            if found == ABSENT:
                found = popped(self.kinds[prefix]).get(name.removeprefix(prefix), ABSENT)
            self.defaults[name] = None if found == ABSENT else json.loads(json.dumps(found, default=str))
        self.layers = {
            prefix: next(
                (
                    prefix + n
                    for n in ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
                    if self.base.get(prefix + n, ABSENT) not in (ABSENT, None)
                ),
                None,
            )
            for prefix in self.kinds
        }
        self.fields = [n for n in self.base if not NEVER.fullmatch(n) and self.is_mentioned(n)]
        self.accepted: dict[str, list[Any]] = {}
        self.samples: list[Sample] = []
        self.nulls: dict[str, str] = {}

    def prefix(self, name: str) -> str:
        return max((p for p in self.kinds if name.startswith(p)), key=len)

    def is_mentioned(self, name: str) -> bool:
        last = name.rpartition(".")[2]
        return re.search(rf"\b{re.escape(last)}\b", self.source) is not None

    def build(self, values: Mapping[str, Any]) -> Sample | None:
        nested: dict[str, Any] = {}
        for name, value in values.items():
            if value == ABSENT and isinstance(value, str):
                continue
            prefix, _, last = name.rpartition(".")
            (nested.setdefault(prefix, {}) if prefix else nested)[last] = value
        try:
            made = self.config_class.from_dict(json.loads(json.dumps(nested)))
            with torch.device("meta"):
                model = self.cls(made)
            required, optional = in_memory(model)
        except Exception:
            return None
        self.ignored = list(model._keys_to_ignore_on_load_unexpected or ())
        self.base_prefix = model.base_model_prefix
        values = {n: None if isinstance(v, str) and v == ABSENT else v for n, v in values.items()}
        asks = any(values.get(n) is None for n in self.base if self.is_per_layer(n))
        effective = dict(flat(json.loads(json.dumps(made.to_dict(), default=str)))) if asks else {}
        return Sample(values, required, optional, effective)

    def is_per_layer(self, name: str) -> bool:
        count = self.layers[self.prefix(name)]
        value = self.base[name]
        return (
            isinstance(value, list)
            and count is not None
            and len(value) == self.base[count]
            and all(isinstance(item, (str, int)) for item in value)
            and bool(value)
        )

    def candidates(self, name: str) -> list[Any]:
        value, prefix = self.base[name], self.prefix(name)
        kind = self.kinds[prefix].__dataclass_fields__.get(name.removeprefix(prefix))
        stated = str(kind.type) if kind else ""
        none = [None] if ("None" in stated and value is not None) else []
        count = self.layers[prefix]
        can_be_none = not re.search(
            r"(hidden_size|vocab|position|head_dim|_heads|embd|d_model|image_size|patch|channels)", name
        )
        layers = self.base[count] if count else 0
        if isinstance(value, bool):
            return [not value, *none]
        if isinstance(value, int):
            return (
                [value * 2, value + 1, *([1] if value > 2 else []), *([0] if can_be_none else []), *none]
                if name != count
                else [3, 4]
            )
        if isinstance(value, float):
            return [value * 2]
        if isinstance(value, str) and value != ABSENT:
            return [word for word in literals(self.source, name.rpartition(".")[2]) if word != value][:4]
        if isinstance(value, list) and self.is_per_layer(name):
            words = (
                literals(self.source, name.rpartition(".")[2].rstrip("s"))
                if isinstance(value[0], str)
                else [0, 1, value[0] * 2]
            )
            whole = self.defaults[name] or []
            words = [w for w in dict.fromkeys([*value, *whole, *words]) if type(w) is type(value[0])]
            return (
                [[word, *value[1:]] for word in words if word != value[0]][:6]
                + [[*value[:-1], w] for w in words if w != value[-1]][:6]
                + none
            )
        if (isinstance(value, list) and not value) or (value in (None, ABSENT) and "list[int]" in stated):
            return [[0], [layers - 1], *([[]] if value != [] else []), *none] if layers else []
        if value is None or value == ABSENT:
            if "bool" in stated:
                return [True, False]
            if "str" in stated:
                return literals(self.source, name.rpartition(".")[2])[:4]
            return [2, 8, 1] if "int" in stated or not stated else []
        return none

    def probe(self) -> None:
        """One entry changed at a time: which values are accepted, and what they change."""
        base = self.build(self.base)
        if base is None:
            raise NotLearnedError("the tiny config is not accepted again")
        self.samples.append(base)
        for name in self.fields:
            for value in self.candidates(name):
                values = self.with_lists({**self.base, name: value}, name)
                sample = self.build(values)
                if sample is not None:
                    self.accepted.setdefault(name, []).append(value)
                    self.samples.append(sample)

    def with_lists(self, values: dict[str, Any], but: str = "", draw: bool = False) -> dict[str, Any]:
        """The lists of layers as long as there are layers."""
        for name in self.base:
            count = self.layers[self.prefix(name)]
            if name == but or not count or not self.is_per_layer(name):
                continue
            want, old = values[count], self.base[name]
            words = list(dict.fromkeys([*old, *(w for v in self.accepted.get(name, ()) if v for w in v)]))
            if draw and self.random.random() < 0.7 and name in self.accepted:
                nones = [None] if None in self.accepted[name] and self.random.random() < 0.3 else []
                values[name] = None if nones else [self.random.choice(words) for _ in range(want)]
            elif want != len(old):
                values[name] = (old * want)[:want]
        return values

    def draw(self, share: float, drop: float = 0.0) -> Sample | None:
        """Several entries changed, and some left out, of which the sample then says nothing."""
        for attempt in range(6):
            values = dict(self.base)
            for name, accepted in self.accepted.items():
                if not self.is_per_layer(name) and self.random.random() < share / (1 + attempt / 2):
                    count = self.layers[self.prefix(name)]
                    value = self.random.choice(accepted)
                    if isinstance(value, list) and count and value in ([0], [self.base[count] - 1]):
                        value = sorted(self.random.sample(range(values[count]), self.random.randint(1, values[count])))
                    values[name] = value
            values = self.with_lists(values, draw=True)
            out = [n for n in self.fields if n not in self.layers.values() and self.random.random() < drop]
            sample = self.build({n: v for n, v in values.items() if n not in out})
            if sample is not None:
                return sample
        return None


def sources(module: str) -> str:
    folder = Path(sys.modules[module].__file__ or "").parent
    return "\n".join(
        path.read_text("utf-8")
        for pattern in ("modeling_*.py", "configuration_*.py")
        for path in sorted(folder.glob(pattern))
    )


@functools.cache
def popped(cls: Any) -> dict[str, Any]:
    """Entries that a config class takes beside those that it declares, and that models ask for, and their defaults."""
    found = {}
    for name, value in re.findall(
        r"(?:kwargs\.(?:pop|get)\(|getattr\((?:self\.)?config,)\s*\"(\w+)\"(?:, ([\w.\"-]+))?", sources(cls.__module__)
    ):
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = ABSENT
    return {n: ABSENT if v is None else v for n, v in found.items()}


def literals(source: str, word: str) -> list[str]:
    lines = [line for line in source.splitlines() if re.search(rf"\b{re.escape(word)}", line)]
    return list(dict.fromkeys(w for line in lines for w in re.findall(r"[\"']([\w-]+)[\"']", line)))
