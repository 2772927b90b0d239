"""Axolotl's YAML in place of a run folder, like in Axolotl's own commands."""

from __future__ import annotations

import sys
from pathlib import Path

from ckpt.base.errors import UsageError, printable
from ckpt.plan.groups import Config

SUFFIXES = (".yaml", ".yml")


def run_of(where: str, *, quiet: bool) -> tuple[str, str | None]:
    """Return the run folder in the YAML at `where`, and its base model if that is a local folder.

    Other paths are returned unchanged. Both folders are relative to the current one. Raise UsageError without
    `output_dir`.
    """
    path = Path(where)
    if path.suffix not in SUFFIXES or not path.is_file():
        return where, None
    from ckpt.runs.yaml_files import read_run_config

    content = read_run_config(path)
    run, base = content.get("output_dir"), content.get("base_model")
    if not isinstance(run, str) or not run:
        raise UsageError(
            "this YAML names no run folder",
            path=path,
            expected="Axolotl's output_dir",
            hint="give the run folder itself",
        )
    if not quiet:
        print(printable(f"note: using the run folder in {path}: {run}"), file=sys.stderr)
    return run, base if isinstance(base, str) and Path(base).is_dir() else None


def run_and_config(path: Path, config: Config, *, quiet: bool) -> tuple[Path, Config]:
    """Use the base's folder as the config if the run has none."""
    from ckpt.runs.model_files import CONFIG

    where, base = run_of(str(path), quiet=quiet)
    run = Path(where)
    if base is None or (run / CONFIG).is_file() or any(run.glob(f"*/{CONFIG}")):
        return run, config
    return run, config or base
