"""The files of a run folder, apart from those that the engine writes itself.

plain     OUTPUT/{config.json, tokenizer.json, ..., latest, global_stepN/}
trainer   OUTPUT/checkpoint-N/{config.json, tokenizer.json, ..., trainer_state.json, latest, global_stepN/}
"""

import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from train import data
from train.config import Config, UserError


def checkpoint_folder(config: Config, step: int) -> Path:
    """The folder handed to the engine's save call."""
    output = Path(config.output)
    return output / f"checkpoint-{step}" if config.layout == "trainer" else output


def write_run_files(folder: Path, model: Any, config: Config) -> None:
    """What makes a folder loadable as a Hub model: config, generation config, tokenizer, adapter config."""
    if config.model == "toy":
        return
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    data.write_tokenizer(folder)
    if config.lora:
        model.peft_config["default"].save_pretrained(folder)


def write_trainer_files(folder: Path, step: int, losses: dict[int, float]) -> None:
    """What HF Trainer puts beside the engine's files: its state (rank 0) and each rank's random state."""
    if dist.get_rank() == 0:
        log = [{"step": number, "loss": loss} for number, loss in losses.items()]
        state = {"global_step": step, "max_steps": step, "best_model_checkpoint": None, "log_history": log}
        (folder / "trainer_state.json").write_text(json.dumps(state, indent=2) + "\n")
    suffix = f"_{dist.get_rank()}" if dist.get_world_size() > 1 else ""
    torch.save({"python": random.getstate(), "cpu": torch.get_rng_state()}, folder / f"rng_state{suffix}.pth")


def find_checkpoint(path: str) -> tuple[Path, str]:
    """The folder and the tag that a user means by a run folder, a Trainer checkpoint or one tag's folder."""
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"--resume {path}: no such folder")
    numbered = [child for child in folder.glob("checkpoint-*") if child.name.partition("-")[2].isdigit()]
    if numbered:
        folder = max(numbered, key=lambda child: int(child.name.partition("-")[2]))
    if (folder / "latest").is_file():
        return folder, (folder / "latest").read_text().strip()
    if any(folder.glob("*_model_states.pt")):
        return folder.parent, folder.name
    raise UserError(f"--resume {path}: no checkpoint in it (neither a file `latest` nor *_model_states.pt)")
