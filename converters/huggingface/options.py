"""The option of `hf`."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.plan.options import option

HUB, OWN = "hub", "own"


@dataclass(frozen=True, slots=True)
class HfOptions:
    """Which names are written."""

    names: str = option(
        "hub: only what save_pretrained of the config's architecture would write, names and shapes. own: names that "
        "the architecture does not have are written as they are (value heads, added modules, code of the model's own).",
        default=HUB,
        choices=(HUB, OWN),
    )
