"""What is recorded of each checkpoint when every rank has saved: OUTPUT/records/step-N.json.

The files with their sizes, the run's settings and each rank's live state (see state.py), which `ckpt verify --run`
compares, the recent losses and the sequences left out.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "records"
VERSION = 1


@dataclass(frozen=True)
class Record:
    """One checkpoint of `output`; `facts` is the content of its file."""

    output: Path
    facts: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.facts["step"])

    @property
    def checkpoint(self) -> Path:
        """The folder that the engine wrote."""
        return self.output / str(self.facts["checkpoint"])


def file_of(output: Path, step: int) -> Path:
    """The record's path."""
    return output / FOLDER / f"step-{step}.json"


def read(output: Path, step: int) -> Record | None:
    """The record of a step; None where there is none that can be read."""
    try:
        facts = json.loads(file_of(output, step).read_text())
    except (OSError, ValueError):
        return None
    return Record(output, facts) if facts.get("version") == VERSION else None


def read_all(output: Path) -> list[Record]:
    """Every record of a run, oldest first."""
    steps = [int(path.stem.partition("-")[2]) for path in (output / FOLDER).glob("step-*.json")]
    return [record for step in sorted(steps) if (record := read(output, step)) is not None]


def write(output: Path, checkpoint: Path, facts: dict[str, Any]) -> None:
    """Records a checkpoint; called on one rank, when all have saved."""
    files = {str(path.relative_to(checkpoint)): path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()}
    content = {"version": VERSION, "checkpoint": str(checkpoint.relative_to(output)), "files": files} | facts
    path = file_of(output, facts["step"])
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content) + "\n")
    new.replace(path)


def last_good(output: Path) -> Record | None:
    """The newest checkpoint saved while no spike was on."""
    calm = [record for record in read_all(output) if record.facts["calm"]]
    return calm[-1] if calm else None


def keep(output: Path, number: int) -> list[Path]:
    """Deletes all recorded checkpoints but the newest `number` and the last good one; returns what was deleted."""
    good = last_good(output)
    deleted = []
    for record in read_all(output)[:-number]:
        if good and record.step == good.step:
            continue
        # The record first: what is half deleted is nobody's newest complete checkpoint.
        file_of(output, record.step).unlink()
        doomed = record.checkpoint.with_name(f".deleted-{record.checkpoint.name}")
        record.checkpoint.rename(doomed)
        shutil.rmtree(doomed)
        shutil.rmtree(output / "random_states" / record.checkpoint.name, ignore_errors=True)
        deleted.append(record.checkpoint)
    return deleted


def abandon_after(output: Path, step: int) -> list[Path]:
    """Takes the records of later steps away, as the run goes on from `step`; their checkpoints stay as they are."""
    later = [record for record in read_all(output) if record.step > step]
    for record in later:
        file = file_of(output, record.step)
        file.rename(file.with_suffix(".abandoned"))
    return [record.checkpoint for record in later]
