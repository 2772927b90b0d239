"""Metrics of a run to W&B, TensorBoard or trackio, each imported only when it is asked for.

The JSON-lines log of operations.py is written in any case; a tracker gets the same numbers. Nothing needs a network:
TensorBoard and trackio write files, and W&B is offline where WANDB_MODE does not say otherwise and either no API key
is known or its server is not reached. `wandb sync OUTPUT/wandb/offline-run-*` sends such a run later.
"""

import importlib.util
import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from train.config import Config, UserError

PACKAGES = ("wandb", "tensorboard", "trackio")
PROJECT = "ckpt-train"


def require(name: str) -> None:
    """UserError where a tracker's package is not installed. Called on every rank, though only the first one logs."""
    if name in PACKAGES and importlib.util.find_spec(name) is None:
        raise UserError(
            f"--track {name}: the package {name} is not installed here\n"
            f"hint: pip install {name}, or pip install -e '.[track]' for all trackers"
        )


def open_tracker(config: Config) -> Any:
    """The tracker of --track for this run, in its output folder: log(metrics, step) and finish(); or None."""
    output = Path(config.output)
    if config.track == "wandb":
        import wandb

        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", output.name),
            dir=str(output),
            mode=os.environ.get("WANDB_MODE") or ("online" if wandb_is_reachable() else "offline"),
            config=asdict(config),
        )
    if config.track == "trackio":
        os.environ.setdefault("TRACKIO_DIR", str(output / "trackio"))  # read while trackio is imported
        import trackio

        return trackio.init(project=PROJECT, name=output.name, config=asdict(config), embed=False)
    return TensorBoard(output / "tensorboard") if config.track == "tensorboard" else None


def flat(line: dict[str, Any]) -> dict[str, float]:
    """A line of the log as names and numbers: those of ranks as `rank_R/name`."""
    named = ("loss", "grad_norm", "lr", "tokens_per_second")
    found = {name: float(line[name]) for name in named if line[name] is not None}
    for name, values in line["ranks"].items():
        found |= {f"rank_{rank}/{name}": float(value) for rank, value in enumerate(values)}
    return found


def wandb_is_reachable(timeout: float = 3.0) -> bool:
    """Whether an API key is known and W&B's server answers within `timeout` seconds."""
    address = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    if not os.environ.get("WANDB_API_KEY") and not (netrc.is_file() and str(address.hostname) in netrc.read_text()):
        return False
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        with socket.create_connection((address.hostname or "", port), timeout):
            return True
    except OSError:
        return False


class TensorBoard:
    """TensorBoard's writer with the methods that the others have already."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()
