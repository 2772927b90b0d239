"""Namespaces: how the names of a model's tensors relate to those of the Hub's files, over which all ways lead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ckpt.plan.checkpoint import HUB, OWN, TRANSFORMERS, Checkpoint, Layout
from ckpt.plan.tensors import Box

#: torchtitan's names, under which its runs go on.
TORCHTITAN = "torchtitan"
#: Names between which a tensor is never cut or padded otherwise; a model of the user's own has no others.
OF_THE_MODEL = frozenset({OWN, HUB, TRANSFORMERS})


@dataclass(frozen=True)
class Namespace:
    """What is registered under a namespace's name.

    `to_hub` and `from_hub` give a checkpoint the other names; they raise LossError for a tensor that they do not place,
    CorruptError where one is missing or not as the config says.  `adapted` changes what a layout asks for within the
    namespace, `comparable` brings two of its checkpoints into the same shapes, and `padding` tells the parts of tensors
    that are padding, by fqn.  `tells` says whether the run's own record tells which tensors there are, as a config
    does; readers hold them against it.  `adapter_to_peft` and `adapter_from_peft` give an adapter without its model the
    names of PEFT's files, and take them from it; they are None where adapters have no names of the namespace.
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
    """The namespace in the words of a message."""
    known = {OWN: "the checkpoint's own names", HUB: "the Hub's names", TRANSFORMERS: "transformers' names"}
    return known.get(namespace, f"{namespace}'s names")
