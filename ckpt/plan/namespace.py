"""Namespaces: relations between a model's tensor names and the Hub's, the common intermediate; parts of its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt.plan.checkpoint import HUB, OWN, TRANSFORMERS, Checkpoint, Layout
from ckpt.plan.tensors import Box

#: Names used by runs of these trainers.
TORCHTITAN, OLMO_CORE = "torchtitan", "olmo-core"
OF_RUNS = frozenset({TORCHTITAN, OLMO_CORE})
#: Namespaces with equal tensors: nothing is cut or padded between them.
OF_THE_MODEL = frozenset({OWN, HUB, TRANSFORMERS})


@dataclass(frozen=True)
class Namespace:
    """Functions registered for a namespace.

    `to_hub` and `from_hub` raise LossError for a tensor without a place, CorruptError for a missing tensor or a
    contradiction to the config. `comparable` brings two checkpoints into the same shapes. `tells` returns True if the
    run's own record lists its tensors, like a config. The adapter functions are None if adapters have no names here.
    """

    to_hub: Callable[[Checkpoint], Checkpoint]
    from_hub: Callable[[Checkpoint, Layout], Checkpoint]
    adapted: Callable[[Checkpoint, Layout], Checkpoint] = lambda checkpoint, _: checkpoint
    comparable: Callable[[Checkpoint, Checkpoint], tuple[Checkpoint, Checkpoint]] = lambda a, b: (a, b)
    padding: Callable[[Checkpoint], Mapping[str, Box]] = lambda _: {}
    tells: Callable[[Checkpoint], bool] = lambda _: True
    adapter_to_peft: Callable[[Checkpoint], Checkpoint] | None = None
    adapter_from_peft: Callable[[Checkpoint, Layout], Checkpoint] | None = None


def in_words(namespace: str) -> str:
    known = {OWN: "the checkpoint's own names", HUB: "the Hub's names", TRANSFORMERS: "transformers' names"}
    return known.get(namespace, f"{namespace}'s names")


def config_parts(config: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return a model's config, followed by its `text_config` if it has one."""
    text = (config or {}).get("text_config")
    return [config or {}, *([text] if isinstance(text, Mapping) else [])]
