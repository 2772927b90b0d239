"""Options for names, shared by several formats: the namespace to write, its proof, and its nesting."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.plan.options import option

HUB, OWN, TORCHTITAN = "hub", "own", "torchtitan"


@dataclass(frozen=True, slots=True)
class NameOptions:
    """Options for names. `names` None uses the format's default. `flat_optimizer` is not for `hf`."""

    names: str | None = option(
        "hf: hub (default) writes only names and shapes known to the config's architecture; own keeps all "
        "other names unchanged (value heads, added modules, custom code). dcp, torch-checkpointing: torchtitan "
        "writes torchtitan's names and layout.",
        choices=(HUB, OWN, TORCHTITAN),
    )
    flat_optimizer: bool = option(
        "dcp, torch-checkpointing: write the optimizer in the form of "
        "StateDictOptions(flatten_optimizer_state_dict=True): every parameter repeats its param group's options "
        "(state.FQN.NAME, param_groups.FQN.NAME). transformers' load_optimizer_distributed needs it.",
        default=False,
    )


@dataclass(frozen=True, slots=True)
class ProofOptions:
    strict: bool = option(
        "Refuse names that can't be compared with the config's architecture, instead of writing a note.",
        default=False,
    )
