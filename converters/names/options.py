"""Option `--names`, shared by several formats: the namespace to write, and its nesting."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.plan.options import option

HUB, OWN, TORCHTITAN = "hub", "own", "torchtitan"


@dataclass(frozen=True, slots=True)
class NameOptions:
    """Options for names. `names` None uses the format's default. `flat_optimizer` is only for `dcp`."""

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
