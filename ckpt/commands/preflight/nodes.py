"""Comparison of a job's nodes within a minute: `srun ckpt preflight RUN_FOLDER` (docs/training.md).

All nodes send their facts to the first node, at the port for training. It reports each difference. No framework is
imported: imports are slow, and may fail on one node.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ckpt.base.errors import NotFoundError

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "megatron-core", "peft", "numpy", "ckpt-toolkit")
_PIECE = 1 << 20


@dataclass(frozen=True)
class Job:
    """`number` is this node's index in `names`. By default, `names` come from Slurm's step."""

    folder: Path
    data: Sequence[Path] = ()
    need_gb: float = 1
    timeout: float = 40
    names: Sequence[str] = ()
    number: int = 0
    port: int = 29400


def preflight(job: Job) -> tuple[int, list[str]] | None:
    """Return the number of nodes and the problems, or None on all but the first node.

    Raise NotFoundError if a node can't reach the first one.
    """
    names = job.names or _nodes_of_the_job()
    deadline = time.monotonic() + job.timeout
    facts = look(job.folder, job.data, job.need_gb)
    if job.number:
        _tell(names[job.number], (names[0], job.port), facts, deadline)
        return None
    problems, heard = gather(names, job.port, facts, deadline, job.timeout)
    return len(names), problems + compare(heard)


def look(folder: Path, data: Sequence[Path], need_gb: float) -> dict[str, Any]:
    same: dict[str, str | int] = {f"data in {path}": digest(path) for path in data}
    same |= {name: _version(name) for name in PACKAGES}
    same |= {"python": platform.python_version(), "GPUs": _gpus(), "NVIDIA driver": _driver()}
    places = dict.fromkeys((_existing(folder), Path(tempfile.gettempdir())))
    return {"same": same, "problems": [line for place in places if (line := _no_space(place, need_gb))]}


def digest(path: Path) -> str:
    """Digest names, sizes, and each file's first and last MiB."""
    total = hashlib.sha256()
    files = sorted(found for found in path.rglob("*") if found.is_file()) if path.is_dir() else [path]
    for file in files:
        try:
            size = file.stat().st_size
            total.update(f"{file.relative_to(path)}\0{size}\0".encode())
            with file.open("rb") as opened:
                for start in (0, max(0, size - _PIECE)):
                    opened.seek(start)
                    total.update(opened.read(_PIECE))
        except OSError as error:
            return f"unreadable ({error.strerror}: {file})"
    return total.hexdigest()[:12]


def gather(
    names: Sequence[str], port: int, facts: dict[str, Any], deadline: float, patience: float
) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Return connection problems and all facts."""
    problems: list[str] = []
    heard = {names[0]: facts}
    waiting: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("", port), backlog=len(names), reuse_port=False))
        while len(heard) < len(names) and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                connection = stack.enter_context(listener.accept()[0])
                connection.settimeout(max(0.1, deadline - time.monotonic()))
                message = json.loads(connection.makefile().readline())
            except (OSError, ValueError):  # ignore an incomplete message
                continue
            heard[message["node"]] = message["facts"]
            waiting.append(connection)
            if error := _reach(message["node"], message["port"]):
                problems.append(
                    f"{message['node']}: cannot be reached from {names[0]} at port {message['port']}: {error}"
                )
        for connection in waiting:  # the nodes keep their ports open until then
            with contextlib.suppress(OSError):
                connection.sendall(b"thanks\n")
    why = f"its task did not start, or it cannot reach {names[0]} at port {port}"
    problems += [f"{name}: not heard of within {patience:.0f} s; {why}" for name in names if name not in heard]
    return problems, heard


def compare(heard: dict[str, dict[str, Any]]) -> list[str]:
    """Return differences from most nodes, or from the first."""
    lines = [f"{node}: {problem}" for node, facts in heard.items() for problem in facts["problems"]]
    first = next(iter(heard))
    for matter in heard[first]["same"]:
        values = {node: facts["same"].get(matter) for node, facts in heard.items()}
        usual, count = Counter(values.values()).most_common(1)[0]
        if 2 * count <= len(values):
            usual = values[first]
        others = next(node for node, value in values.items() if value == usual)
        for node, value in values.items():
            if value != usual:
                lines.append(f"{node}: {matter} {value}, and {usual} on {others}")
    return lines


def _tell(node: str, first: tuple[str, int], facts: dict[str, Any], deadline: float) -> None:
    """Send this node's facts, and wait until the first node has tested the way back."""
    error: Exception = TimeoutError()
    with socket.create_server(("", 0)) as listener:
        message = {"node": node, "port": listener.getsockname()[1], "facts": facts}
        while (left := deadline - time.monotonic()) > 0:
            try:
                with socket.create_connection(first, timeout=left) as connection:
                    connection.sendall(json.dumps(message).encode() + b"\n")
                    if connection.recv(16):
                        return
                    raise NotFoundError(f"{node}: the first node has left", path=None, found=first[0])
            except OSError as raised:  # the first node may not have started yet
                error = raised
                time.sleep(0.2)
    raise NotFoundError(f"{node}: cannot reach {first[0]} at port {first[1]}", found=str(error))


def _reach(node: str, port: int) -> str:
    try:
        socket.create_connection((node, port), timeout=5).close()
    except OSError as error:
        return str(error)
    return ""


def _nodes_of_the_job() -> list[str]:
    listed = os.environ.get("SLURM_STEP_NODELIST") or os.environ["SLURM_JOB_NODELIST"]
    shown = subprocess.run(["scontrol", "show", "hostnames", listed], capture_output=True, text=True, check=True)
    return shown.stdout.split()


def _existing(folder: Path) -> Path:
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())


def _no_space(place: Path, need_gb: float) -> str:
    """Return the problem, or "". Write a MiB to detect quotas."""
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".preflight-") as file:
            file.write(random.randbytes(_PIECE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"no space in {place}: {error.strerror}"
    free = shutil.disk_usage(place).free / 1e9
    return f"no space in {place}: {free:.1f} GB free, and {need_gb:g} are needed" if free < need_gb else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _gpus() -> int:
    """Return the driver's number, whatever this task may use."""
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def _driver() -> str:
    file = Path("/proc/driver/nvidia/version")
    return file.read_text().splitlines()[0] if file.is_file() else "none"
