"""Notes on a run's content that a weights folder can't hold."""

from __future__ import annotations

from collections.abc import Collection

from ckpt.base.sizes import show_size
from ckpt.base.text import Brief, pluralize
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint
from ckpt.runs.model_files import run_files


def training_left_out(checkpoint: Checkpoint) -> list[str]:
    lines: list[str] = []
    if names := checkpoint.optimizer_states:
        tensors = list(checkpoint.with_role(*set(names) - {WEIGHT, MASTER, BUFFER}))
        size = show_size(sum(t.nbytes for t in tensors))
        much = f"({pluralize(len(tensors), 'tensor')}, {size})"
        lines.append(Brief(f"optimizer states {', '.join(names)} {much}", f"optimizer states {much}"))
    if groups := checkpoint.state.param_groups:
        lines.append(f"hyperparameters of {pluralize(len(groups), 'param group')}")
    step = [] if checkpoint.state.step is None else [f"step {checkpoint.state.step}"]
    if state := step + sorted(checkpoint.state.entries()):
        lines.append(
            Brief(f"training state {', '.join(state)}", " ".join(["training state", *("of " + one for one in step)]))
        )
    return lines


def run_files_left_out(checkpoint: Checkpoint, carried: Collection[str] = ()) -> list[str]:
    read = {file.path for file in checkpoint.files} if checkpoint.optimizer_states else set()
    names = [name for name in run_files(checkpoint.run_folders, read) if name not in carried]
    short = pluralize(len(names), "file") + " of the run"
    return [Brief(f"files of the run {', '.join(names)}", short)] if names else []
