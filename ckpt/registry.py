"""The formats, one line each.  The core reaches converters only from here, by dotted name, when one is asked for.

Other packages add formats with the entry-point group `ckpt.formats`: the entry's name is the format's name, its value
`module:object`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from functools import cache
from glob import glob
from importlib import import_module
from typing import cast

from ckpt.errors import UsageError
from ckpt.plan.checkpoint import Format

#: In the order in which a folder is asked what it is: what holds most comes first.
FORMATS = {
    "megatron-deepspeed": "converters.deepspeed.pipeline.format:MEGATRON_DEEPSPEED",
    "zero1": "converters.deepspeed.zero:ZERO1",
    "zero2": "converters.deepspeed.zero:ZERO2",
    "zero3": "converters.deepspeed.zero:ZERO3",
    "universal": "converters.deepspeed.universal:UNIVERSAL",
    "megatron": "converters.megatron.format:MEGATRON",
    "megatron-dist": "converters.megatron.dist.format:MEGATRON_DIST",
    "dcp": "converters.pytorch.dcp:DCP",
    "full": "converters.pytorch.full:FULL",
    "fsdp-ranks": "converters.pytorch.fsdp_ranks:FSDP_RANKS",
    "hf": "converters.huggingface.hf:HF",
    "peft": "converters.huggingface.peft:PEFT",
}

#: Other names that users type for these.
ALIASES = {"fsdp": "dcp"}

#: The module with `relation(config, shapes, direction)`: transformers' names in memory against those on the Hub.
TRANSFORMERS_NAMES = "converters.names.transformers.relation"

#: The module with `describe(config, shapes, names)` and `has_conv1d(config)`: what a model's modules are.
TRANSFORMERS_MODULES = "converters.names.transformers.modules"

#: The module with `kept_names(checkpoint)`: which of its names a tied tensor has on the Hub.
TIED_NAMES = "converters.names.transformers.ties"

#: The module with `in_memory` and `megatron_stages`: the shapes of a model's parameters, from its config.
PARAMETERS = "converters.names.parameters"

#: The module with `to_hub`, `to_megatron`, `repadded` and `with_same_padding`: the Hub's names against megatron-core's.
MEGATRON_NAMES = "converters.names.megatron.relation"

#: The module with `parts(names)`: which tensors are parts of weights that are stored quantized.
QUANTIZED = "converters.quantized"

#: The module with `dequantized(checkpoint, dtype)`: plain weights in place of these.
DEQUANTIZE = "converters.quantized.dequantize"


@cache
def _known() -> dict[str, str]:
    if not _has_other_formats():
        return FORMATS
    from importlib.metadata import entry_points

    return FORMATS | {entry.name: entry.value for entry in entry_points(group="ckpt.formats")}


def _has_other_formats() -> bool:
    """Whether an installed package may add formats: `importlib.metadata` takes longer to say so than most runs plan."""
    for folder in sys.path:
        if os.path.isfile(folder):  # a zip file
            return True
        for path in glob(os.path.join(folder, "*-info", "entry_points.txt")):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                if b"[ckpt.formats]" in file.read():
                    return True
    return False


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
