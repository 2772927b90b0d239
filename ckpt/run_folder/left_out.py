"""Notes to the user on the parts of a run that have no place in a folder of weights."""

from __future__ import annotations

from ckpt.base.sizes import show_size
from ckpt.base.text import counted
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint
from ckpt.run_folder.companions import run_files


def training_left_out(checkpoint: Checkpoint) -> list[str]:
    """Optimizer states, hyperparameters and training state of `checkpoint`, a line per kind that it has."""
    lines = []
    if names := checkpoint.optimizer_states:
        tensors = list(checkpoint.with_role(*set(names) - {WEIGHT, MASTER, BUFFER}))
        size = show_size(sum(t.nbytes for t in tensors))
        lines.append(f"optimizer states {', '.join(names)} ({counted(len(tensors), 'tensor')}, {size})")
    if groups := checkpoint.state.param_groups:
        lines.append(f"hyperparameters of {counted(len(groups), 'param group')}")
    step = [] if checkpoint.state.step is None else [f"step {checkpoint.state.step}"]
    if state := step + sorted(checkpoint.state.entries()):
        lines.append(f"training state {', '.join(state)}")
    return lines


def run_files_left_out(checkpoint: Checkpoint) -> list[str]:
    """A line with the files of the run beside `checkpoint`, but for those that its optimizer was read from."""
    read = {file.path for file in checkpoint.files} if checkpoint.optimizer_states else set()
    names = run_files(checkpoint.run_folders, read)
    return [f"files of the run {', '.join(names)}"] if names else []
