"""Facts from transformers' source text, because an import costs seconds."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from converters.names.families.config import architectures

_MODEL_TYPE = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_CLASS = re.compile(r"^class (\w+)(?:\(([^)]*)\))?:", re.MULTILINE)
_TIED = re.compile(r"^    _tied_weights_keys(?::[^=\n]*)? = ", re.MULTILINE)
#: The same, set by a config option (Marian).
_TIED_IF = re.compile(r"^        if self\.config\.(\w+):\n            self\._tied_weights_keys = ", re.MULTILINE)
#: Module made by a class itself.
_MADE = re.compile(r"^        self\.(\w+) = (\w+)\(", re.MULTILINE)
#: Inner model. transformers chooses its class by an inner config.
_CHOSEN = re.compile(
    r"^ {8,}(?:self\.)?(\w+) = AutoModelFor(CausalLM|Seq2SeqLM)\.from_config\(config\.(\w+)", re.MULTILINE
)
#: Tables for this choice.
_CHOICES = {
    "CausalLM": re.compile(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = (.*?)^\)", re.MULTILINE | re.DOTALL),
    "Seq2SeqLM": re.compile(r"^MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES = (.*?)^\)", re.MULTILINE | re.DOTALL),
}
_PREFIX = re.compile(r"^    base_model_prefix(?:: str)? = [\"'](\w+)[\"']", re.MULTILINE)
#: Base models, without a head: `LlamaModel`, but not `GPT2LMHeadModel`.
_BASE_MODEL = re.compile(r"(?<!Head)(?<!Heads)Model$")
#: T5 and similar models scale the decoder's outputs if nothing is tied.
_COMPUTES_BY_TIE = re.compile(
    r"if self\.config\.tie_word_embeddings:(?:\n\s*#.*)*\n\s*(\w+) = \1 \*|^ {8}self\.tie_word_embeddings = True\b",
    re.MULTILINE,
)
_TIE_DEFAULT = re.compile(r"\btie_word_embeddings(?:: [^=\n]+)? ?= ?(True|False)\b")


@functools.cache
def package() -> Path | None:
    spec = importlib.util.find_spec("transformers")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0]) if locations else None


@functools.cache
def converted_identifiers() -> frozenset[str] | None:
    """Return model types and class names in transformers 5's tables (`conversion_mapping.py`).

    None without tables: transformers 4, or no transformers.
    """
    folder = package()
    path = folder / "conversion_mapping.py" if folder else None
    if path is None or not path.is_file():
        return None
    return frozenset(re.findall(r"[\"']([\w.-]+)[\"']", path.read_text("utf-8")))


def model_types(config: Mapping[str, Any]) -> Iterator[str]:
    own = config.get("model_type")
    if isinstance(own, str) and own:  # empty for other parts, for example MPT's attention
        yield own
    for value in config.values():
        if isinstance(value, Mapping):
            yield from model_types(value)


def is_base_model(config: Mapping[str, Any]) -> bool:
    """Return True for a class without a head. Its names lack the head's prefix."""
    named = architectures(config)
    return bool(named) and bool(_BASE_MODEL.search(named[0]))


@functools.cache
def model_folder(model_type: str) -> Path | None:
    root = package()
    if root is None or not _MODEL_TYPE.fullmatch(model_type):
        return None
    names = [model_type.replace("-", "_")]
    mappings = root / "models" / "auto" / "auto_mappings.py"
    if not (root / "models" / names[0]).is_dir() and mappings.is_file():
        names = re.findall(rf'\("{re.escape(model_type)}", "(\w+)"\)', mappings.read_text("utf-8"))
    return next((f for name in names if (f := root / "models" / name).is_dir()), None)


@functools.cache
def _source(model_type: str, kind: str) -> str:
    folder = model_folder(model_type)
    if folder is None:
        return ""
    return "\n".join(path.read_text("utf-8", "replace") for path in sorted(folder.glob(f"{kind}_*.py")))


@functools.cache
def _classes(model_type: str, kind: str) -> dict[str, tuple[tuple[str, ...], str]]:
    text = _source(model_type, kind)
    starts = list(_CLASS.finditer(text))
    ends = [m.start() for m in starts[1:]] + [len(text)] if starts else []
    return {
        m[1]: (tuple(base.strip() for base in (m[2] or "").split(",")), text[m.end() : end])
        for m, end in zip(starts, ends, strict=True)
    }


def mentions(model_type: str, word: str) -> bool | None:
    """Return True if the modeling files contain the word. None without such files."""
    text = _source(model_type, "modeling")
    return re.search(rf"\b{word}\b", text) is not None if text else None


def class_names(model_type: str) -> frozenset[str]:
    return frozenset(_classes(model_type, "modeling"))


def base_prefixes(config: Mapping[str, Any]) -> set[str]:
    """Return `base_model_prefix`, the name prefix under a head."""
    model_type = config.get("model_type")
    bodies = [body for _, body in _classes(model_type, "modeling").values()] if isinstance(model_type, str) else []
    return {match[1] for body in bodies if (match := _PREFIX.search(body))}


def tied_weights(config: Mapping[str, Any]) -> dict[str, str | None] | None:
    """Return alias patterns in `_tied_weights_keys`, with owners if known.

    transformers 5 maps alias to owner, and transformers 4 only lists aliases.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return None
    classes = _classes(model_type, "modeling")
    for name in architectures(config):
        seen: set[str] = set()
        while name in classes and name not in seen:
            seen.add(name)
            bases, body = classes[name]
            requested = next((m for m in _TIED_IF.finditer(body) if config.get(m[1])), None)
            found = _tied_literal(requested or _TIED.search(body))
            if found is not None:
                return found
            name = next((base for base in bases if base in classes), "")
        if seen:
            return {}
    return None


def all_tied_weights(config: Mapping[str, Any]) -> dict[str, str | None] | None:
    """Add inner models' `tied_weights` under the whole model's names."""
    found = tied_weights(config)
    if found is None:
        return None
    classes = _classes(str(config["model_type"]), "modeling")
    whole = next((name for name in architectures(config) if name in classes), None)
    return found if whole is None else {**_tied_inside(classes, whole, ()), **found}


def _tied_inside(
    classes: Mapping[str, tuple[tuple[str, ...], str]], name: str, around: tuple[str, ...]
) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for attribute, inner in _MADE.findall(classes[name][1]):
        if inner in classes and inner not in around:
            literal = _tied_literal(_TIED.search(classes[inner][1]))
            own = {**_tied_inside(classes, inner, (*around, name)), **(literal or {})}
            found |= {f"{attribute}.{alias}": owner and f"{attribute}.{owner}" for alias, owner in own.items()}
    return found


def _tied_literal(match: re.Match[str] | None) -> dict[str, str | None] | None:
    if match is None:
        return None
    lines = match.string[match.end() :].splitlines(keepends=True)
    for count in range(1, min(len(lines), 100) + 1):
        try:
            value = ast.literal_eval("".join(lines[:count]).strip())
        except (SyntaxError, ValueError):
            continue
        if isinstance(value, dict):
            return {str(alias): str(owner).removesuffix("$") for alias, owner in value.items()}  # I-BERT's is a pattern
        return dict.fromkeys(map(str, value or ()))
    return None


def chosen_inside(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return configs by attribute for inner models.

    Each config names the class from `AutoModelForCausalLM`, or else from `AutoModelForSeq2SeqLM`, for example in
    BLIP-2.
    """
    root, model_type = package(), config.get("model_type")
    classes = _classes(model_type, "modeling") if isinstance(model_type, str) else {}
    chosen = [found for name in architectures(config) if name in classes for found in _CHOSEN.findall(classes[name][1])]
    if root is None or not chosen:
        return {}
    text = (root / "models" / "auto" / "modeling_auto.py").read_text("utf-8")
    maps = {
        kind: dict(re.findall(r'\("([^"]+)", "(\w+)"\)', table[1])) if (table := pattern.search(text)) else {}
        for kind, pattern in _CHOICES.items()
    }
    inside: dict[str, dict[str, Any]] = {}
    for attribute, kind, key in sorted(chosen, key=lambda found: found[1]):
        inner = config.get(key)
        if isinstance(inner, Mapping) and inner.get("model_type") in maps[kind]:
            inside.setdefault(attribute, {**inner, "architectures": [maps[kind][inner["model_type"]]]})
    return inside


def computes_by_tie(model_type: str) -> bool:
    """Return True if an untied config computes differently, or is overruled."""
    return any(_COMPUTES_BY_TIE.search(_source(model_type, kind)) for kind in ("modeling", "configuration"))


def ties_by_default(model_type: str) -> bool:
    for _, body in _classes(model_type, "configuration").values():
        if re.search(rf'^    model_type(?:: str)? = "{re.escape(model_type)}"', body, re.MULTILINE):
            match = _TIE_DEFAULT.search(body)
            return match is not None and match[1] == "True"
    return False
