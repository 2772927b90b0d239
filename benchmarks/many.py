"""754 billion parameters on 1, 8 and 48 processes: the cost of each process, the shares, and the same bytes.

DeepSeek-V3's sizes, as published and with six more layers, are only planned, in sparse files. Bytes are compared for
its 46,183 tensors with small sizes and random values, also after one process was killed. The processes meet like those
of mpirun on one node.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import CKPT, Run, call, environment, remove
from benchmarks.runner import Bench, within
from ckpt.move.files import staging_folder
from ckpt.move.journal import holds_pieces

SOURCES: Sequence[str] = ()
SIZES = (1, 8, 48)
RANKS = 48  # of the target
PUBLISHED, LARGER = 61, 67  # layers
SAME = f"the same files as from {SIZES[0]} process"
_TOY = Path(__file__).parents[1] / "fixtures" / "toy-zero3"
_START, _PLAN = (1, 400), (15, 400)  # goals of each process: processor seconds and megabytes
_WAIT = 0.01  # seconds between looks at the output


def measure(bench: Bench) -> str:
    published, larger, tiny = (bench.folder / f"many-{kind}" for kind in (PUBLISHED, LARGER, "tiny"))
    output, other = bench.scratch("many-output"), bench.scratch("many-other")
    for source in (published, larger, tiny):
        if not bench.keep:
            bench.made.append(source)
        if not source.exists():
            call("benchmarks.deepseek_v3", source, source.name.removeprefix("many-"))
    lines = [
        f"DeepSeek-V3 with {PUBLISHED} layers ({_size(published)}) and with {LARGER} ({_size(larger)})",
        f"{'most of one process':<46}{'seconds':>8}{'cpu s':>8}{'peak MB':>9}",
    ]

    def add(
        name: str, command: Sequence[str | Path], sizes: Sequence[int], goals: tuple[float, float] | None = None
    ) -> None:
        for size in sizes:
            runs = together([*CKPT, "convert", *command, "-q"], size)
            cpu, peak = max(run.cpu_seconds for run in runs), max(run.peak_mb for run in runs)
            seconds = max(run.seconds for run in runs)
            label = f"{name}, {size} process{'es' if size > 1 else ''}"
            said = f"per process: {within(cpu, peak, goals)}" if goals else ""
            if "--dry-run" not in command:
                said += _kept(output, other)
            lines.append(f"{label:<46}{seconds:>8.1f}{cpu:>8.1f}{peak:>9.0f}  {said}".rstrip())
            print(lines[-1], flush=True)

    plan = ["--dry-run", "-o", output]
    move = ["hf", "hf", tiny, "-o", output]
    try:
        add("whole conversion of a toy", ["zero3", "hf", _TOY, "-o", output], SIZES[-1:], _START)
        remove([other])
        for source, layers, sizes in ((published, PUBLISHED, SIZES[:1]), (larger, LARGER, SIZES)):
            zero3 = ["hf", "zero3", source, "--world-size", str(RANKS), *plan]
            add(f"plan hf -> zero3, {layers} layers", zero3, sizes, _PLAN)
        add(f"plan hf -> hf, {PUBLISHED} layers", ["hf", "hf", published, *plan], SIZES[:2], _PLAN)
        add("hf -> hf, tiny", move, SIZES)
        killed = _killed([*CKPT, "convert", *move], output)
        lines.append(f"  hf -> hf, tiny, {killed}; {_kept(output, other)}")
        shares = (call("benchmarks.shares", larger, to, RANKS) for to in ("zero3", "hf", "dcp"))
        lines += [f"  {LARGER} layers, {share}" for share in shares]
    finally:
        remove([output, other])
    return "\n".join(lines)


def _size(source: Path) -> str:
    """Return the numbers of tensors and of parameters. The few fp32 biases count as bf16."""
    index = json.loads((source / "model.safetensors.index.json").read_text())
    return f"{len(index['weight_map']):,} tensors, {index['metadata']['total_size'] / 2e9:.0f} B parameters"


def _kept(output: Path, other: Path) -> str:
    """Move `output` to `other`. Return `SAME` after comparing it with an older output there.

    Raise CalledProcessError if the files differ.
    """
    said = ""
    if other.exists():
        subprocess.run(["diff", "-r", output, other], check=True)
        remove([other])
        said = SAME
    output.rename(other)
    return said


def started(command: Sequence[str | Path], size: int) -> list[subprocess.Popen[str]]:
    """Start `size` processes with Open MPI's variables. Only the first one's messages are read."""
    name = f"benchmark-{os.getpid()}-{time.monotonic_ns()}"
    sizes = {"OMPI_COMM_WORLD_SIZE": str(size), "OMPI_COMM_WORLD_LOCAL_SIZE": str(size), "PMIX_NAMESPACE": name}
    return [
        subprocess.Popen(
            command,
            env=environment() | sizes | {"OMPI_COMM_WORLD_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(size)
    ]


def together(command: Sequence[str | Path], size: int) -> list[Run]:
    """Run one conversion on `size` processes, and measure each."""
    start, runs = time.perf_counter(), []
    processes = started(command, size)
    assert processes[0].stderr is not None
    told = processes[0].stderr.read()
    for process in processes:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
        runs.append(Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6))
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{[process.returncode for process in processes]}: {told[-2000:]}")
    return runs


def _killed(command: Sequence[str | Path], output: Path) -> str:
    """Kill the last of 48 processes while they write, then continue on 48. Return what the first ones said."""
    processes = started(command, SIZES[-1])
    while processes[-1].poll() is None and not holds_pieces(staging_folder(output)):
        time.sleep(_WAIT)
    processes[-1].send_signal(signal.SIGKILL)
    killed = time.perf_counter()
    told = processes[0].communicate()[1]
    codes = {process.wait() for process in processes}
    seconds = time.perf_counter() - killed
    error = next(line for line in told.splitlines() if "has ended" in line)
    again = started(command, SIZES[-1])
    goes_on = next(line for line in again[0].communicate()[1].splitlines() if "continuing" in line)
    if codes != {7, -signal.SIGKILL} or any(process.wait() for process in again):
        raise RuntimeError(f"{codes}: {told}")
    ended = f"rank {SIZES[-1] - 1} of {SIZES[-1]} killed: the others ended after {seconds:.1f} s; {error}"
    return f"{ended}; then {SIZES[-1]} processes: {goes_on.replace(f'{output.parent}/', '')}"
