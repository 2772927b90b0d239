"""The option `--names` of several formats: the namespace that is written, and its nesting."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.plan.options import option

HUB, OWN, TORCHTITAN = "hub", "own", "torchtitan"


@dataclass(frozen=True, slots=True)
class NameOptions:
    """`names`: None is what the format itself asks for.  `flat_optimizer` is of `dcp` alone."""

    names: str | None = option(
        "hf: hub, the default, writes only what save_pretrained of the config's architecture would write, names and "
        "shapes; own writes names that the architecture does not have as they are (value heads, added modules, code of "
        "the model's own). dcp: torchtitan writes the names and the layout that torchtitan loads.",
        choices=(HUB, OWN, TORCHTITAN),
    )
    flat_optimizer: bool = option(
        "dcp: the optimizer as StateDictOptions(flatten_optimizer_state_dict=True) has it, with the options of a param "
        "group under each of its parameters (state.FQN.NAME, param_groups.FQN.NAME), for what loads such a state dict.",
        default=False,
    )
