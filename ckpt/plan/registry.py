"""Formats and namespaces, one line each.

The core reaches converters only through this table and `ckpt.plan.services`, by dotted name, on demand. Other packages
register theirs through entry points, each with a name and the value `module:object`:

    ckpt.formats          an object that implements `ckpt.plan.checkpoint.Format`
    ckpt.format_options   by the format's name, the dataclass that declares its options (`ckpt.plan.options`)
    ckpt.namespaces       a `ckpt.plan.namespace.Namespace`
    ckpt.pickle_names     names that pickles may hold (`ckpt.containers.torchfile.table`)
    ckpt.declarations     by the format's name, a function that returns its `ckpt.testing.Declaration`
    ckpt.stores           by a URL's scheme, a function that makes a `ckpt.stores.objects.Store` from the URL's root
    ckpt.store_declarations   by the scheme, a function that returns its `ckpt.testing.StoreDeclaration`
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any, cast

from ckpt.base.entries import entries, load
from ckpt.base.errors import UsageError
from ckpt.base.text import did_you_mean
from ckpt.base.words import CommandHelp, Keyword, Message, joined
from ckpt.plan.checkpoint import Format, Layout
from ckpt.plan.namespace import Namespace
from ckpt.plan.options import OF_FILES, Option, options_of

#: Detection order: the format with the most content comes first.
FORMATS = {
    "megatron-deepspeed": "converters.deepspeed.pipeline.format:MEGATRON_DEEPSPEED",
    "zero1": "converters.deepspeed.zero:ZERO1",
    "zero2": "converters.deepspeed.zero:ZERO2",
    "zero3": "converters.deepspeed.zero:ZERO3",
    "zero0": "converters.deepspeed.stage0:ZERO0",
    "universal": "converters.deepspeed.universal:UNIVERSAL",
    "megatron": "converters.megatron.format:MEGATRON",
    "megatron-dist": "converters.megatron.dist.format:MEGATRON_DIST",
    "dcp": "converters.pytorch.dcp:DCP",
    "torch-checkpointing": "converters.pytorch.torch_checkpointing:TORCH_CHECKPOINTING",
    "full": "converters.pytorch.full:FULL",
    "fsdp-ranks": "converters.pytorch.fsdp_ranks:FSDP_RANKS",
    "trainer": "converters.pytorch.trainer:TRAINER",
    "gguf": "converters.gguf.format:GGUF",
    "hf": "converters.huggingface.hf:HF",
    "peft": "converters.huggingface.peft:PEFT",
}

_MEGATRON = "converters.names.megatron.options:MegatronOptions"
OPTIONS = {
    "megatron": _MEGATRON,
    "megatron-dist": f"{_MEGATRON} converters.names.megatron.options:DistOptions "
    "converters.megatron.dist.options:SlotOptions",
    "megatron-deepspeed": _MEGATRON,
    "hf": "converters.names.options:NameOptions converters.names.options:ProofOptions",
    "dcp": "converters.names.options:NameOptions",
    "torch-checkpointing": "converters.names.options:NameOptions converters.pytorch.ranks_options:MeshOptions",
    "universal": "converters.deepspeed.options:UniversalOptions",
    **dict.fromkeys(("zero1", "zero2"), "converters.deepspeed.options:ExpertOptions"),
    "fsdp-ranks": "converters.pytorch.ranks_options:RanksOptions converters.pytorch.ranks_options:MeshOptions",
    "peft": "converters.huggingface.peft_options:ServerOptions",
}

#: Parameters for every format.
_OF_ALL = {
    "convert": ("format", "tag", "config", "accept_settings", "dtype", "dequantize", *OF_FILES),
    "resume": ("format", "tag", "config", "dtype", "world_size", "model_only", "missing_ok"),
}

NAMESPACES = {
    "transformers": "converters.names.hub.module_prefix:NAMESPACE",
    "megatron": "converters.names.megatron.namespace:NAMESPACE",
    "torchtitan": "converters.names.torchtitan:NAMESPACE",
    "olmo-core": "converters.names.olmo_core:NAMESPACE",
    "gguf": "converters.gguf.names:NAMESPACE",
}


def _registered(own: Mapping[str, str], group: str) -> dict[str, str]:
    """Raise UsageError if another package uses one of our names."""
    others = entries(group)
    for name in others.keys() & own.keys():
        raise UsageError(
            f"an installed package registers {name!r} in {group}, but this name belongs to ckpt",
            found=others[name],
            hint="uninstall that package",
        )
    return {**own, **others}


def names() -> list[str]:
    """Return all format names in detection order, other packages' first: their format may be a special kind of ours."""
    return sorted(_registered(FORMATS, "ckpt.formats"), key=lambda name: name in FORMATS)


def words() -> list[str]:
    return sorted({word for one in all_formats() for word in (one.name, *one.aliases)})


def named(word: str) -> list[Format]:
    """Return the format called `word`, or all formats with this alias. Raise UsageError if there is none."""
    known = _registered(FORMATS, "ckpt.formats")
    if word in known:
        return [cast(Format, load(known[word]))]
    if not (found := [one for one in all_formats() if word in one.aliases]):
        hint = did_you_mean(word, words())
        what, expected = f"unknown format {word!r}", "one of " + ", ".join(known)
        raise UsageError(what, expected=expected, hint=hint, code="unknown-format")
    return found


def get(word: str) -> Format:
    """Raise UsageError if there is no such format, or if several share the alias."""
    found = named(word)
    if len(found) > 1:
        several = "one of " + ", ".join(one.name for one in found)
        raise UsageError(f"{word!r} means several formats", expected=several, hint="give its full name")
    return found[0]


def namespace(name: str) -> Namespace:
    """Raise UsageError if there is no such namespace."""
    known = _registered(NAMESPACES, "ckpt.namespaces")
    if name not in known:
        raise UsageError(f"unknown naming scheme {name!r}", expected="one of hub, " + ", ".join(known))
    return cast(Namespace, load(known[name]))


def declarations() -> list[Any]:
    return [load(where)() for where in entries("ckpt.declarations").values()]


def store_declarations() -> list[Any]:
    return [load(where)() for where in entries("ckpt.store_declarations").values()]


def declared_options() -> dict[type, list[str]]:
    """Return dataclasses with options, each with its formats' names."""
    found: dict[type, list[str]] = {}
    for name, where in _registered(OPTIONS, "ckpt.format_options").items():
        for declaration in where.split():
            found.setdefault(load(declaration), []).append(name)
    return found


def options_for_reading() -> dict[str, Option]:
    return {one.name: one for owner in declared_options() for one in options_of(owner) if one.is_for_reading}


def check_layout(format: Format, layout: Layout) -> None:
    """Raise UsageError if `layout` sets an option without effect on the files of `format`."""
    for name, value in layout.of_files().items():
        if name in format.takes:
            continue
        option = Keyword.without_value(name, value)
        others = ", ".join(one.name for one in all_formats() if one.writes and name in one.takes)
        raise UsageError(
            Message("the format {!r} takes no {}: {}", format.name, option, OF_FILES[name]),
            hint=Message("leave {} out; it is an option of {}", option, others),
            code="option-not-taken",
        )
    if layout.quantize is not None and layout.quantize not in format.quantizes:
        writers = [one.name for one in all_formats() if layout.quantize in one.quantizes]
        raise UsageError(
            Message("the format {!r} takes no {quantize}", format.name, quantize=layout.quantize),
            expected=" or ".join(format.quantizes) or None,
            hint=Message("leave {quantize} out; {} can be written with it", " and ".join(writers) or "no format"),
            code="option-not-taken",
        )
    if layout.options:
        check_options(format.name, layout.options)


def check_options(format: str, requested: Mapping[str, Any], command: str = "convert") -> None:
    """Raise UsageError if `format` does not declare a given option or allow its value."""
    declared = declared_options()
    of_owner = {owner: {one.name: one for one in options_of(owner) if not one.is_for_reading} for owner in declared}
    known = dict(ChainMap(*(of_owner[owner] for owner, formats in declared.items() if format in formats)))
    if not (others := [name for name in requested if name not in known]):
        for name, value in requested.items():
            known[name].check(value)
        return
    owners = {owner: formats for owner, formats in declared.items() if of_owner[owner].keys() & {*others}}
    if not owners:
        reading = options_for_reading() if command == "convert" else ()
        hint = did_you_mean(others[0], [*known, *reading, *_OF_ALL[command]]) or Message("see {}", CommandHelp(command))
        raise UsageError(f"the format {format!r} has no option {others[0]!r}", hint=hint)
    of = [getattr(owner, "about", "the options of " + ", ".join(formats)) for owner, formats in owners.items()]
    raise UsageError(
        f"the format {format!r} does not support {' or '.join(of)}",
        found=joined(" ", (Message("{}", Keyword.without_value(name, requested[name])) for name in others)),
        hint=Message("see {}", CommandHelp(command)),
        code="option-not-taken",
    )


def all_formats() -> list[Format]:
    return [get(name) for name in names()]
