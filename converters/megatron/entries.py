"""Entries in Megatron's files other than model and optimizer: arguments, schedule, random states, counters."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from ckpt.base.errors import LossError
from ckpt.base.text import pluralize
from ckpt.containers.torchfile.values import Record, StoredTensor
from ckpt.containers.torchfile.write import torch_file
from ckpt.plan.checkpoint import TrainingState
from converters.megatron.chunks import EXTRA, MegatronModel
from converters.megatron.optimizer import Optimizers
from converters.names.megatron.facts import MegatronFacts

#: Per-rank entries. In `torch_dist`, the second is partly equal on all ranks.
RANDOM, RERUN = "rng_state", "rerun_state_machine"
OF_RANKS = (RANDOM, RERUN)
#: Transformer Engine's FP8 scales by module name.
FP8 = "fp8_state"
#: Entries described elsewhere.
_KNOWN = re.compile(r"optimizer|args|iteration|model\d*")

#: torch.save(None): the pickle in the archive.
_PICKLED_NONE = b"\x80\x02N."


def plain_args(content: Mapping[Any, Any]) -> Mapping[str, Any]:
    args = content.get("args")
    if isinstance(args, Record):
        return args.attributes
    return args if isinstance(args, Mapping) else {}


def is_empty(value: Any) -> bool:
    """Return True if Transformer Engine's module state is empty, because FP8 is not used."""
    if isinstance(value, StoredTensor):
        return not value.extent.numel
    if isinstance(value, Record) and value.name == "BytesIO":
        content = value.state[0] if isinstance(value.state, tuple) and value.state else b""
        return isinstance(content, bytes) and (not content or _PICKLED_NONE in content)
    return value is None


def read_state(
    content: Mapping[Any, Any],
    args: Mapping[str, Any],
    optimizers: Optimizers,
    fqns: Collection[str],
    per_rank: Mapping[str, Mapping[str, Any]],
) -> TrainingState:
    step = content.get("iteration")
    return TrainingState.of_entries(
        "megatron",
        {
            str(k): value
            for k, value in content.items()
            if not _KNOWN.fullmatch(str(k)) and k not in per_rank and value is not None
        },
        step=step if type(step) is int else None,
        param_groups=optimizers.param_groups(fqns),
        scalars=optimizers.states.scalars,
        grad_scaler=optimizers.grad_scaler,
        args=dict(args) or None,
        per_rank={name: values for name, values in per_rank.items() if values},
    )


def to_write(
    model: MegatronModel, per_rank: Mapping[str, Any], *own: str, without_random: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the entries that are equal on all ranks, and notes on dropped ones.

    `per_rank` is written per rank; `own` are rebuilt by the format. `without_random` tells how to resume without random
    states.
    """
    kept: dict[str, Any] = {}
    dropped = []
    state = model.checkpoint.state
    for name, value in state.entries().items():
        if name in ("args", "grad_scaler", EXTRA, *own) or name in per_rank:
            continue
        if name == FP8:
            dropped.append(f"FP8 state ({pluralize(len(value), 'module')}): its scales start over")
        elif name in state.per_rank:
            advice = f"; {without_random}" if name == RANDOM else ""
            dropped.append(f"{name} from {pluralize(len(value), 'rank')}: the layout differs{advice}")
        elif state.engine != "megatron" and name not in ("checkpoint_version", "opt_param_scheduler"):
            dropped.append(f"training state {name}")
        else:
            try:
                torch_file(name, value)
            except LossError as error:
                dropped.append(f"training state {name}: {error.what}")
            else:
                kept[name] = value
    if model.checkpoint.facts_of(MegatronFacts).bridge and "args" not in own:
        dropped.append("run_config.yaml and train_state.pt: only settings with a Megatron-LM argument are kept")
    if state.grad_scaler is not None and not model.has_optimizer:
        dropped.append("training state grad_scaler")
    return kept, dropped
