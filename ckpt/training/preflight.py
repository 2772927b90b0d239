"""Looks over the nodes of a job within a minute: `srun python -m ckpt.training.preflight RUN_FOLDER`.

    n2: deepspeed 0.18.1, and 0.19.8 on n1
    n2: no space in /shared/outputs: No space left on device
    n2: other data in corpus: 8c1f3c0d6e2a, and 51b7d1a80c44 on n1
    n3: not heard of within 40 s; its task did not start, or it cannot reach n1 at port 24017

One task runs on each node. All tell the first what they have, over the port that training will meet at, and the first
tries the way back. What differs is named by its node. It imports no framework: it is to be fast, and to find one that
does not import.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "megatron-core", "peft", "numpy", "ckpt-toolkit")
_PIECE = 1 << 20


def main(words: Sequence[str] | None = None) -> int:
    """What is wrong, a line for each node and matter, on the first node's stderr; 0 where nothing is, else 1."""
    options = _parser().parse_args(words)
    names = options.nodes.split(",") if options.nodes else _nodes_of_the_job()
    deadline = time.monotonic() + options.timeout
    facts = look(options.folder, options.data, options.need_gb)
    if options.number:
        return _tell(names[options.number], (names[0], options.port), facts, deadline)
    problems, heard = gather(names, options.port, facts, deadline, options.timeout)
    problems += compare(heard)
    for line in problems:
        print(f"preflight: {line}", file=sys.stderr)
    print(f"preflight: {len(names)} nodes, {len(problems)} problems", file=sys.stderr)
    return 1 if problems else 0


def look(folder: Path, data: Sequence[Path], need_gb: float) -> dict[str, Any]:
    """What this node has: facts that are to be the same on all nodes, and its own problems."""
    same: dict[str, Any] = {f"data in {path}": digest(path) for path in data}
    same |= {name: _version(name) for name in PACKAGES}
    same |= {"python": platform.python_version(), "GPUs": _gpus(), "NVIDIA driver": _driver()}
    places = dict.fromkeys((_existing(folder), Path(tempfile.gettempdir())))
    return {"same": same, "problems": [line for place in places if (line := _no_space(place, need_gb))]}


def digest(path: Path) -> str:
    """A digest of a file or of a folder's files: their names, sizes, and the first and the last MiB of each."""
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
    """On the first node: problems of reaching each other, and the facts of all nodes that were heard of."""
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
                told = json.loads(connection.makefile().readline())
            except (OSError, ValueError):  # of a node that told nothing whole, nothing was heard
                continue
            heard[told["node"]] = told["facts"]
            waiting.append(connection)
            if error := _reach(told["node"], told["port"]):
                problems.append(f"{told['node']}: cannot be reached from {names[0]} at port {told['port']}: {error}")
        for connection in waiting:  # the nodes keep their ports open until then
            with contextlib.suppress(OSError):
                connection.sendall(b"thanks\n")
    why = f"its task did not start, or it cannot reach {names[0]} at port {port}"
    problems += [f"{name}: not heard of within {patience:.0f} s; {why}" for name in names if name not in heard]
    return problems, heard


def compare(heard: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each node and matter in which it differs from most others, or from the first where most is nobody."""
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


def _tell(node: str, first: tuple[str, int], facts: dict[str, Any], deadline: float) -> int:
    """On another node: tells the first one what is here, and waits until it has tried the way back."""
    error: Exception = TimeoutError()
    with socket.create_server(("", 0)) as listener:
        told = {"node": node, "port": listener.getsockname()[1], "facts": facts}
        while (left := deadline - time.monotonic()) > 0:
            try:
                with socket.create_connection(first, timeout=left) as connection:
                    connection.sendall(json.dumps(told).encode() + b"\n")
                    return 0 if connection.recv(16) else 1
            except OSError as raised:  # the first node may not be there yet
                error = raised
                time.sleep(0.2)
    print(f"preflight: {node}: cannot reach {first[0]} at port {first[1]}: {error}", file=sys.stderr)
    return 1


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
    """What keeps this node from writing so much there; a MiB is written, because quotas are not seen otherwise."""
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
    """GPUs that the driver knows, whatever this task was given."""
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def _driver() -> str:
    file = Path("/proc/driver/nvidia/version")
    return file.read_text().splitlines()[0] if file.is_file() else "none"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ckpt.training.preflight", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where checkpoints will be written")
    parser.add_argument("--data", type=Path, nargs="*", default=(), help="files or folders of the dataset")
    parser.add_argument("--need-gb", type=float, default=1, help="free space needed in GB (%(default)s)")
    parser.add_argument("--timeout", type=float, default=40, help="seconds to wait for all nodes (%(default)s)")
    parser.add_argument("--nodes", help="names of all nodes with commas between them; by default those of Slurm's step")
    parser.add_argument("--number", type=int, default=int(os.environ.get("SLURM_NODEID", "0")), help="this node's")
    parser.add_argument("--port", type=int, default=int(os.environ.get("MASTER_PORT", "29400")), help="(%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
