"""Files in a run folder, except those written by the engine."""

import re
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from train import data, randomness
from train.config import ZERO, Config, UserError, read_ds_config


def write_run_files(folder: Path, model: Any, config: Config) -> None:
    if config.model == "toy":
        return
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    data.build_tokenizer().save_pretrained(folder)
    if config.lora:
        model.peft_config["default"].save_pretrained(folder)


def save_random_states(config: Config, folder: Path, tag: str) -> None:
    """Save this rank's random states if the engine saves none."""
    if config.saving == "zero":
        randomness.save(folder / "random_states" / tag)


def load_random_states(config: Config, folder: Path, tag: str) -> None:
    """Print a note if the states are missing, for example after a conversion."""
    if config.saving != "zero" or any(map(randomness.load, (folder / "random_states" / tag, folder))):
        return
    if dist.get_rank() == 0:
        print(f"note: {folder} has no random states from {tag}'s ranks; they start over", file=sys.stderr)


def existing_checkpoints(output: Path) -> list[str]:
    """Return the newest last. A new run would mix with them."""
    names = sorted(path.name for path in output.iterdir()) if output.is_dir() else []
    steps = [name for name in names if re.fullmatch(r"(checkpoint-|step-|global_step|iter_)\d+", name)]
    files = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")
    return steps[-2:] + [name for name in names if name in files]


def find_checkpoint(config: Config) -> tuple[Path, str]:
    """Resolve --resume to a folder and a tag. `ckpt resume` checks that the checkpoint fits the run.

    --resume is a run folder, a Trainer checkpoint or the folder of one tag.
    """
    assert config.resume is not None
    folder = Path(config.resume)
    if not folder.is_dir():
        raise UserError(f"--resume {folder}: no such folder")
    tracker = folder / "latest_checkpointed_iteration.txt"  # Megatron-DeepSpeed writes one beside `latest`
    if tracker.is_file() and config.strategy != "megatron-deepspeed":
        latest = tracker.read_text().strip()
        folder = folder / (latest if latest == "release" else f"iter_{int(latest):07d}")
    numbered = [child for child in folder.iterdir() if re.fullmatch(r"(checkpoint|step)-\d+", child.name)]
    if numbered:
        folder = max(numbered, key=lambda child: int(child.name.partition("-")[2]))
    tag = folder.resolve().name
    universal = config.strategy in ZERO and "load_universal" in read_ds_config(config.ds_config).get("checkpoint", {})
    pointers = ("latest_universal", "latest") if universal else ("latest", "latest_universal")
    if pointer := next((folder / name for name in pointers if (folder / name).is_file()), None):
        tag = pointer.read_text().strip()
        folder = folder / tag
    return folder.resolve().parent, tag
