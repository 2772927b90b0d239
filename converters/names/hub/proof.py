"""Proof that names and shapes equal the output of `save_pretrained`.

If the tables in `families` have no answer, or a mismatch, the installed transformers decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ckpt.base.errors import CkptError, LossError, UnknownArchitectureError, UsageError
from ckpt.base.text import Brief, pluralize
from ckpt.base.words import Message
from ckpt.plan.tensors import Shape
from converters.names.families import composites, encoders
from converters.names.families import tables as families
from converters.names.families.config import architectures
from converters.names.families.rows import Saved
from converters.names.hub import diffusers_models, save_pretrained
from converters.names.transformers.tables import declared
from converters.quantized.parts import UNKNOWN_SHAPE

OWN_NAMES = Message("{names=own} keeps every tensor's own name")
#: TRL's value head: TRL reads it, and `from_pretrained` skips it.
_VALUE_HEAD = re.compile(r"v_head\.(summary\.)?(weight|bias)")
PEFT = "base_model.model."
#: Suffixes in old files, and their current form (transformers 5.23, `conversion_mapping.py`, `legacy`).
_OLD_NAMES = {
    "LayerNorm.gamma": "LayerNorm.weight",
    "LayerNorm.beta": "LayerNorm.bias",
    ".weight_g": ".parametrizations.weight.original0",
    ".weight_v": ".parametrizations.weight.original1",
}
_TRANSFORMERS = "'transformers>=5'"
_SHOWN = 2


@dataclass(frozen=True)
class Differences:
    """Extra names, missing names, and names with another shape: (name, expected, found)."""

    extra: Sequence[str]
    missing: Sequence[str]
    shapes: Sequence[tuple[str, Shape, Shape]]

    def __len__(self) -> int:
        return len(self.extra) + len(self.missing) + len(self.shapes)

    def __str__(self) -> str:
        shapes = [f"{name} {list(found)} instead of {list(wanted)}" for name, wanted, found in self.shapes]
        kinds = {"too many": self.extra, "missing": self.missing, "of another shape": shapes}
        return "; ".join(f"{len(names)} {kind}: {_sample_names(names)}" for kind, names in kinds.items() if names)


def _sample_names(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def names_architecture(config: Mapping[str, Any]) -> bool:
    return bool(config.get("model_type") or config.get("architectures") or diffusers_models.class_name(config))


def prove(config: Mapping[str, Any], shapes: Mapping[str, Shape], path: str) -> Saved | None:
    """Prove that `shapes` are exactly the tensors saved by the config's class.

    None if the config names no class, and the names belong to another class than its model's default. `shapes` has
    quantized weights by their plain names (`QuantizedWeights.in_place`). Raise LossError if the tensors differ,
    UsageError if the class belongs to another model type, UnknownArchitectureError if it is unknown.
    """
    known: Saved | None = None
    for ask in chain(_TABLES, [save_pretrained.saved, diffusers_models.saved]):
        try:
            saved = ask(config)
        except CkptError:
            if known is None:
                raise
            continue
        if saved is not None and not compare(saved, shapes, config):
            return saved
        known = saved or known
    if known is None:
        raise _other_class(config, path) if _is_class_of_another_model(config) else _unknown(config, path)
    differ = compare(known, shapes, config)
    if not _names_class(config) and not differ.shapes and _shares_names(known, shapes):
        return None
    raise LossError(
        f"names or shapes don't match {known.cls}'s save_pretrained (the config's class): from_pretrained and others "
        "would not find their tensors",
        path=path,
        expected=f"{pluralize(len(known.required), 'tensor')} with the Hub's names",
        found=str(differ),
        hint=_hint(shapes, differ),
    )


def _names_class(config: Mapping[str, Any]) -> bool:
    return bool(_classes(config))


def _classes(config: Mapping[str, Any]) -> list[str]:
    own = diffusers_models.class_name(config)
    return architectures(config) if own is None else [own]


def _shares_names(saved: Saved, shapes: Mapping[str, Shape]) -> bool:
    """Return True if tensors have names of this class."""
    return any(name in saved.required or f"{saved.base}.{name}" in saved.required for name in shapes)


_TABLES: Sequence[Callable[[Mapping[str, Any]], Saved | None]] = (families.saved, encoders.saved, composites.saved)


def tables_differ(config: Mapping[str, Any] | None, shapes: Mapping[str, Shape]) -> list[str]:
    """Return a note if `shapes` differ from a table, without importing transformers."""
    found: list[str] = []
    for ask in _TABLES if config and _names_class(config) and not any(name.startswith(PEFT) for name in shapes) else ():
        try:
            saved = ask(config or {})
        except CkptError:
            continue  # reported elsewhere
        if saved is not None and not (wrong := compare(saved, shapes, config or {})):
            return []
        if saved is not None:
            found = [f"names or shapes don't match {saved.cls}'s save_pretrained: {wrong}"]
    return found


def closest_table(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> tuple[Saved, Differences] | None:
    """Return the table of the config's class with the fewest differences, or None for an unknown class."""
    found = []
    for ask in _TABLES if _names_class(config) else ():
        with suppress(CkptError):
            if (saved := ask(config)) is not None:
                found.append((saved, compare(saved, shapes, config)))
    return min(found, key=lambda one: len(one[1]), default=None)


def differences(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> str | None:
    """Describe differences. None without any, or for an unknown architecture."""
    if not names_architecture(config):
        return None
    try:
        prove(config, shapes, "")
    except LossError as error:
        return f"{error.what}: {error.found}"
    except CkptError:
        return None
    return None


def compare(saved: Saved, shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> Differences:
    """Compare `shapes` with `saved`.

    Base models may lack the prefix, and loading renames other releases' names.
    """
    if _lacks_prefix(saved, shapes):
        prefix = f"{saved.base}."
        prefixed = {name if name in saved.required else prefix + name: shape for name, shape in shapes.items()}
        if not (differences := _compare(saved, prefixed)):
            return differences
    differences = _compare(saved, shapes)
    current = {_current_name(name): shape for name, shape in shapes.items()} if differences else shapes
    if len(current) == len(shapes) and current.keys() != shapes.keys() and not (same := _compare(saved, current)):
        return same
    renamed = _renamed(shapes, differences, config) if differences else None
    return differences if renamed is None else _compare(saved, renamed)


def _current_name(name: str) -> str:
    """Rename like every `from_pretrained`."""
    for old, new in _OLD_NAMES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _renamed(
    shapes: Mapping[str, Shape], differences: Differences, config: Mapping[str, Any]
) -> Mapping[str, Shape] | None:
    """Return None unless `from_pretrained` renames all differing names.

    The Hub's files of Gemma 3 and LLaVA have `vision_tower.vision_model.`. transformers 5.6 and later write no
    `vision_model.` if the model was made from a config.
    """
    rules = declared(config)
    if rules is None or not differences.extra:
        return None
    try:
        memory = rules.relation(shapes, "to_memory")
        files = memory and rules.relation(memory.b_shapes, "to_hub")
    except CkptError:
        return None
    if memory is None or not memory.b_shapes.keys().isdisjoint(differences.extra):
        return None
    return files.b_shapes if files else memory.b_shapes


def _compare(saved: Saved, shapes: Mapping[str, Shape]) -> Differences:
    if shapes == saved.required:  # the usual case
        return Differences((), (), ())
    known = {**saved.optional, **saved.required}
    ignored = [_VALUE_HEAD, *(re.compile(pattern) for pattern in saved.ignored)]
    extra = [name for name in shapes if name not in known and not any(p.fullmatch(name) for p in ignored)]
    wrong = [
        (name, known[name], shape)
        for name, shape in shapes.items()
        if name in known and shape not in (UNKNOWN_SHAPE, known[name])
    ]
    return Differences(extra, [name for name in saved.required if name not in shapes], wrong)


def _lacks_prefix(saved: Saved, shapes: Mapping[str, Shape]) -> bool:
    """Return True for base model names, as in old GPT-2 files."""
    prefix = f"{saved.base}."
    return (
        bool(saved.base)
        and any(name.startswith(prefix) for name in saved.required)
        and not any(name.startswith(prefix) for name in shapes)
    )


def proof_notes(saved: Saved, shapes: Mapping[str, Shape], *, loads: bool = True) -> Iterator[str]:
    if _lacks_prefix(saved, shapes):
        yield f"names match the model without its head: {saved.cls} adds the prefix {saved.base!r}"
    elif _compare(saved, shapes):
        yield f"names match another release: {saved.cls} renames them during loading"
    if twice := [name for name in saved.optional if name in shapes]:
        yield f"written though save_pretrained leaves it out: {_sample_names(twice)}"
    if loads:
        yield Brief(f"from_pretrained finds every tensor: names and shapes match {saved.cls}")


def _unknown(config: Mapping[str, Any], path: str) -> UnknownArchitectureError:
    library, is_available = _library(config)
    return UnknownArchitectureError(
        "the names can't be proved: this architecture's files are unknown to ckpt",
        path=path,
        expected="an architecture known to ckpt" + (f" or to {library}" if is_available else ""),
        found=_described(config),
        hint=Message("{}; {}", ways_to_compare(config), OWN_NAMES),
    )


def _other_class(config: Mapping[str, Any], path: str) -> UsageError:
    return UsageError(
        "the names can't be proved: config.json names a class of another model_type",
        path=path,
        expected=f"a class of {config.get('model_type')!r}",
        found=_described(config),
        hint=Message("does the config belong to this checkpoint? {}", OWN_NAMES),
    )


def _described(config: Mapping[str, Any]) -> str:
    kind = [] if diffusers_models.class_name(config) else [f"model_type {config.get('model_type')!r}"]
    return ", ".join([*kind, *_classes(config)[:1]])


def _is_class_of_another_model(config: Mapping[str, Any]) -> bool:
    """Return True for a class of another `model_type`."""
    named = architectures(config)
    if not named or not config.get("model_type"):
        return False
    return families.knows_class(named[0]) or encoders.knows_class(named[0]) or save_pretrained.knows_class(named[0])


def _library(config: Mapping[str, Any]) -> tuple[str, bool]:
    if diffusers_models.class_name(config):
        return "diffusers", diffusers_models.is_available()
    return "transformers", save_pretrained.is_available()


def ways_to_compare(config: Mapping[str, Any]) -> str:
    library, is_available = _library(config)
    if is_available:
        return "load the output with the model's own code to compare them"
    return f"pip install {'diffusers' if library == 'diffusers' else _TRANSFORMERS} torch to compare them"


def not_compared(config: Mapping[str, Any]) -> str:
    cls = next(iter(_classes(config)), f"the model type {config.get('model_type')!r}")
    return f"the names are the run's own, not compared with {cls}: its files are unknown to ckpt"


def _hint(shapes: Mapping[str, Shape], differ: Differences) -> str:
    if any(name.startswith(PEFT) for name in shapes):
        return (
            "this is a model with PEFT adapters: `ckpt merge-lora PATH` merges them into the base, "
            "`ckpt convert auto peft PATH` takes them out; " + OWN_NAMES
        )
    if not differ.extra and not differ.shapes:
        return Message(
            "{complete_from=BASE} takes the missing tensors from the trained base model; or use a config.json "
            "without these parts; {}",
            OWN_NAMES,
        )
    return Message("does the config belong to this checkpoint? {}", OWN_NAMES)
