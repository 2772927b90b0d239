"""The formats, one line each.  The core reaches converters only from here, by dotted name, when one is asked for.

Other packages add formats with the entry-point group `ckpt.formats`: the entry's name is the format's name, its value
`module:object`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import cast

from ckpt.checkpoint import Format
from ckpt.errors import UsageError

#: In the order in which a folder is asked what it is: what holds most comes first.
FORMATS = {
    "megatron-deepspeed": "converters.megatron_deepspeed:MEGATRON_DEEPSPEED",
    "zero1": "converters.zero:ZERO1",
    "zero2": "converters.zero:ZERO2",
    "zero3": "converters.zero:ZERO3",
    "universal": "converters.universal:UNIVERSAL",
    "megatron": "converters.megatron:MEGATRON",
    "megatron-dist": "converters.megatron_dist:MEGATRON_DIST",
    "dcp": "converters.dcp:DCP",
    "full": "converters.full:FULL",
    "fsdp-ranks": "converters.fsdp_ranks:FSDP_RANKS",
    "hf": "converters.hf:HF",
    "peft": "converters.peft:PEFT",
}

#: Other names that users type for these.
ALIASES = {"fsdp": "dcp"}

#: The module with `relation(config, shapes, direction)`: transformers' names in memory against those on the Hub.
TRANSFORMERS_NAMES = "converters.names.transformers_names"

#: The module with `describe(config, shapes, names)` and `has_conv1d(config)`: what a model's modules are.
TRANSFORMERS_MODULES = "converters.names.modules"

#: The module with `kept_names(checkpoint)`: which of its names a tied tensor has on the Hub.
TIED_NAMES = "converters.names.ties"

#: The module with `in_memory` and `megatron_stages`: the shapes of a model's parameters, from its config.
PARAMETERS = "converters.names.parameters"

#: The module with `to_hub`, `to_megatron`, `repadded` and `with_same_padding`: the Hub's names against megatron-core's.
MEGATRON_NAMES = "converters.names.megatron"

#: The module with `parts(names)`: which tensors are parts of weights that are stored quantized.
QUANTIZED = "converters.quantized"

#: The module with `dequantized(checkpoint, dtype)`: plain weights in place of these.
DEQUANTIZE = "converters.quantized.dequantize"


@cache
def _known() -> dict[str, str]:
    from importlib.metadata import entry_points  # takes longer to import than the rest of the command line

    return FORMATS | {entry.name: entry.value for entry in entry_points(group="ckpt.formats")}


def names() -> list[str]:
    """Names of all formats."""
    return list(_known())


def get(name: str) -> Format:
    """The format called `name`; UsageError if there is none."""
    known = _known()
    name = ALIASES.get(name, name)
    if name not in known:
        raise UsageError(f"there is no format called {name!r}", expected="one of " + ", ".join(known))
    module, _, attribute = known[name].partition(":")
    return cast(Format, getattr(import_module(module), attribute))


def all_formats() -> list[Format]:
    """Every format, in the order in which a folder is asked what it is."""
    return [get(name) for name in names()]
