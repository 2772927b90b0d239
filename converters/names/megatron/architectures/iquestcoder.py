"""IQuest-Coder: Llama under another `model_type`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpt.base.errors import LossError
from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated

#: Supported by the release's own class, but not by Llama's.
_OWN = "clip_qkv"


def args(sizes: Sizes) -> dict[str, Any]:
    if sizes.config.get(_OWN):
        raise LossError(
            "ckpt supports this architecture only in Llama's form", found=f"{_OWN} {sizes.config.get(_OWN)}"
        )
    return gated(sizes, slides=False, epsilon=1e-5)


TABLE = replace(llama.TABLE, family=FAMILIES["iquestcoder"], args=args)
