"""Real checkpoints from launches of the bundled trainer, and the truth gathered by the live engine."""

from __future__ import annotations

import functools
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tests.support.kept import make_once
from tests.support.places import REPOSITORY
from train.config import ARCHITECTURES

#: Imports before the fork, by the text of the jobs. A missing import costs only time.
PRELOADED = {
    r'"through": "trainer"': "tests.support.hf_trainer",
    r'"zero\d': "train.engines.zero",
    r'"(ddp|fsdp\d|hsdp|tp-fsdp)"': "train.engines.native",
    r'"megatron"': "tests.support.megatron_imports",
    r'"megatron-deepspeed"': "train.engines.pipeline",
}
#: megatron-core modules for its engine.
MEGATRON = (
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.dist_checkpointing.serialization",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
)
#: DeepSpeed without a build of its operation, which takes a minute, and its imports at the first engine's start.
DEEPSPEED = (
    *("deepspeed", "deepspeed.module_inject.auto_ep_layer", "deepspeed.runtime.zero.muon.muon_optimizer"),
    "tests.train.uncompiled",
)
#: Packages to preload for our own modules, by module prefix.
_BEHIND = {
    "train.engines": DEEPSPEED,
    "tests.support.hf_trainer": ("transformers.trainer",),
    "tests.support.megatron_imports": MEGATRON,
}
#: Imported by every engine sooner or later.
_SHARED = (
    *("torch.distributed.fsdp", "torch._dynamo", "setuptools"),
    "torch.distributed.checkpoint._fsspec_filesystem",
)
#: Imports for ranks that call `ckpt.resume`: all formats, because it detects the format.
RESUMING = (
    *("ckpt.commands.resume.resuming", "ckpt.move.run", "converters.names.torchtitan", "converters.pytorch.dcp"),
    *("converters.deepspeed.zero", "converters.deepspeed.universal", "converters.deepspeed.write"),
    *("converters.deepspeed.pipeline.format", "converters.deepspeed.stage0", "converters.megatron.format"),
    *("converters.megatron.dist.format", "converters.pytorch.full", "converters.pytorch.fsdp_ranks"),
    *("converters.pytorch.trainer", "converters.huggingface.hf", "converters.huggingface.peft"),
)
_OURS = ("train.", "tests.", "ckpt.", "converters.")


@dataclass(frozen=True)
class Truth:
    """Truth from the engine's own API: raw bytes by role and fqn, and metadata about the run."""

    tensors: dict[tuple[str, str], tuple[str, tuple[int, ...], bytes]]
    ties: dict[str, str]
    metadata: dict[str, Any]

    @classmethod
    def load(cls, path: Path) -> Truth:
        tensors = {}
        with safe_open(path, "pt") as file:
            metadata = {key: json.loads(value) for key, value in file.metadata().items() if key != "format"}
            for name in file.keys():  # noqa: SIM118 - safe_open has no iterator
                role, _, fqn = name.partition("/")
                tensors[fqn, role] = raw(file.get_tensor(name))
        return cls(tensors, metadata["ties"], metadata)


def raw(tensor: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return a torch tensor's dtype name, shape and bytes."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy().tobytes()


def launch(jobs: list[dict[str, Any]], world_size: int, folder: Path, module: str = "train") -> None:
    """Run the trainer, or another module with a job file, once on `world_size` processes for all jobs.

    Raise AssertionError with its output if it fails.
    """
    launch_in_turn([(world_size, jobs)], folder, module)


def launch_in_turn(starts: Iterable[tuple[int, list[dict[str, Any]]]], folder: Path, module: str = "train") -> None:
    """Run `launch` for several process counts in turn, forked from one process with the engines; cache the results."""
    texts = [(world_size, "".join(json.dumps(job) + "\n" for job in jobs)) for world_size, jobs in starts]
    make_once(folder, (module,), repr(texts), lambda: _launch(texts, folder, module))


def _launch(texts: list[tuple[int, str]], folder: Path, module: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    words, runs = "", []
    for number, (world_size, text) in enumerate(texts):
        file = folder / f"jobs-{number}-on-{world_size}.jsonl"
        file.write_text(text)
        words += text
        own = ["train.__main__", ["--jobs", str(file)]] if module == "train" else [module, [str(file)]]
        runs.append((world_size, *own))
    preload = [module for pattern, module in PRELOADED.items() if re.search(pattern, words)]
    preload += [modeling(name) for name in ARCHITECTURES if re.search(f'"model": "{name}(_wide|_even)?"', words)]
    if any('"strategy"' in line and '"model"' not in line for line in words.splitlines()):
        preload.append(modeling("llama"))
    fork(runs, preload, 1200 * len(runs))


def modeling(architecture: str) -> str:
    """Return transformers' module of an architecture. Importing it in each rank takes longer than training."""
    return f"transformers.models.{architecture}.modeling_{architecture}"


def forked(starts: Sequence[tuple[Any, ...]], preload: Sequence[str] = ()) -> list[str]:
    """Return the command to run modules' `main()` on ranks.

    A start is a number of ranks, a module and its arguments.
    """
    return [sys.executable, "-m", "tests.support.forked", ",".join(preload), json.dumps(starts)]


def fork(starts: Sequence[tuple[Any, ...]], preload: Sequence[str] = (), timeout: float = 1200) -> str:
    """Run the command of `forked` and return its stdout. Raise AssertionError with both streams if a rank fails."""
    code, out, err = outcome(starts, preload, timeout)
    assert code == 0, f"{json.dumps(starts)}\n{out[-2000:]}\n{err[-6000:]}"
    return out


def outcome(
    starts: Sequence[tuple[Any, ...]], preload: Sequence[str] = (), timeout: float = 1200
) -> tuple[int, str, str]:
    """Run the `forked` command and return its exit code and both streams."""
    # Compiling megatron-core's small fused functions takes longer than running them.
    env = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1"}
    env.pop("PYTEST_CURRENT_TEST", None)
    shared = [*_SHARED, *(name for name in preload if not name.startswith(_OURS))]
    for prefix, names in _BEHIND.items():
        shared += names if any(name.startswith(prefix) for name in preload) else ()
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("out", "err")]
        asked = {"preload": [*preload], "starts": starts, "shared": shared, "streams": [*map(str, streams)]}
        code = _server(frozenset(env.items())).do(asked, timeout)
        out, err = (stream.read_text() for stream in streams)
    return code, out, err


class _Server:
    """The parent process for launches."""

    def __init__(self, env: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "tests.support.forked"]
        where = {"cwd": REPOSITORY, "env": env, "start_new_session": True}
        self.process = subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, **where)

    def do(self, asked: dict[str, Any], timeout: float) -> int:
        """Run a launch and return its exit code."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(asked).encode() + b"\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise AssertionError(f"the process that ranks are forked from has ended: {self.process.wait()}")
        try:
            assert select.select([self.process.stdout], [], [], timeout)[0], (
                f"not within {timeout} s: {asked['starts']}"
            )
        except BaseException:  # Ctrl-C too
            os.killpg(int(line), signal.SIGKILL)
            raise
        finally:
            code = self.process.stdout.readline()
        return int(code)


@functools.cache
def _server(env: frozenset[tuple[str, str]]) -> _Server:
    """Start one server for each environment, because imports may depend on the environment."""
    return _Server(dict(env))


def fork_once(folder: Path, starts: Sequence[tuple[Any, ...]], preload: Sequence[str] = ()) -> None:
    """Run `fork` and cache the output of the ranks (`tests.support.kept`). They may write only to `folder`."""
    modules = tuple(dict.fromkeys(module for _, module, _ in starts))
    make_once(folder, modules, json.dumps(starts), lambda: fork(starts, preload, 1200 * len(starts)))
