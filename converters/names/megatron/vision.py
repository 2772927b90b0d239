"""Tables of models with images: the language model's table, plus transformers' own modules around it.

Megatron-Bridge builds such models in this way. megatron-core's GPTModel is its `language_model`, and names here omit
this prefix (`model.spelling`). Vision tower and projector are transformers' modules, whole on every tensor-parallel
rank of the first pipeline stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ckpt.base.errors import LossError
from converters.names.families.composites import COMPOSITES
from converters.names.families.config import Config
from converters.names.families.rows import Sizes
from converters.names.megatron.table import Table

#: Additions to a text model's Megatron-LM arguments.
More = Callable[[Config], dict[str, Any]]


def multimodal_table(
    model_type: str, texts: Mapping[str, Table], kept: str, more: More = lambda config: {}, **parts: Any
) -> Table:
    """Return the table of a model with images. `kept` are the rows around the language model.

    All rows come from the last text model, and fit the others. `parts` override its rows.
    """
    composite, (*_, text) = COMPOSITES[model_type], texts.values()
    lines = [line.split() for line in text.top.strip().splitlines()]
    top = "\n".join(f"{megatron} {composite.name(hub)} {kind}" for megatron, hub, kind in lines)

    def args(sizes: Sizes) -> dict[str, Any]:
        kind = str(sizes.config.get("model_type"))
        if kind not in texts:
            raise LossError("Megatron's formats don't support this text model", expected=", ".join(texts), found=kind)
        return texts[kind].args(sizes) | more(sizes.config)

    prediction = text.prediction if any(one.prediction for one in composite.texts.values()) else ""
    top = f"{kept}\n{top}"
    return replace(text, family=composite, args=args, top=top, prediction=prediction, prefix="", **parts)
