"""IQuest-Coder: Llama under another `model_type`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpt.base.errors import LossError
from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated

#: What the release's own class computes and those of Llama do not.
_OWN = ("clip_qkv", "use_sliding_window")


def args(sizes: Sizes) -> dict[str, Any]:
    stated = {name: sizes.config.get(name) for name in _OWN if sizes.config.get(name)}
    if stated:
        raise LossError(
            "ckpt knows this architecture as Llama's", expected="neither " + " nor ".join(_OWN), found=stated
        )
    return gated(sizes, slides=False, epsilon=1e-5)


TABLE = replace(llama.TABLE, family=FAMILIES["iquestcoder"], args=args)
