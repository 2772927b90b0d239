"""Trackers for a run's metrics: W&B, TensorBoard or trackio, imported only if requested.

No tracker needs a network. W&B runs offline if WANDB_MODE is unset and there is no API key or no connection to its
server. Upload such a run later with `wandb sync OUTPUT/wandb/offline-run-*`.
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
    """Raise UserError if the tracker's package is missing. Called on every rank, though only rank 0 logs."""
    if name in PACKAGES and importlib.util.find_spec(name) is None:
        raise UserError(
            f"--track {name}: the package {name} is not installed here\n"
            f"hint: pip install {name}, or pip install -e '.[track]' for all trackers"
        )


def open_tracker(config: Config) -> Any:
    """Return a tracker with log(metrics, step) and finish(), or None."""
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
        os.environ.setdefault("TRACKIO_DIR", str(output / "trackio"))  # read during import
        import trackio

        return trackio.init(project=PROJECT, name=output.name, config=asdict(config), embed=False)
    return TensorBoard(output / "tensorboard") if config.track == "tensorboard" else None


def flat(line: dict[str, Any]) -> dict[str, float]:
    """Name a rank's values `rank_R/name`."""
    named = ("loss", "grad_norm", "lr", "tokens_per_second")
    found = {name: float(line[name]) for name in named if line[name] is not None}
    for name, values in line["ranks"].items():
        found |= {f"rank_{rank}/{name}": float(value) for rank, value in enumerate(values)}
    return found


def wandb_is_reachable(timeout: float = 3.0) -> bool:
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
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()
