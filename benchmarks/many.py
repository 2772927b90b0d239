"""754 billion parameters on 1, 8 and 48 processes: the cost of each process, the shares, and the same bytes.

The plan has DeepSeek-V3's sizes in sparse files, with six more layers. Bytes are compared for DeepSeek-V3's 46,183
tensors with small sizes and random values, also after one process was killed. The processes meet like those of mpirun
on one node.
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
from benchmarks.runner import Bench, verdict
from ckpt.move.files import staging_folder
from ckpt.move.journal import holds_pieces

SOURCES: Sequence[str] = ()
SIZES = (1, 8, 48)
RANKS = 48  # of the target
LAYERS = 67
_TOY = Path(__file__).parents[1] / "fixtures" / "toy-zero3"
_WAIT = 0.01  # seconds between looks at the output


def measure(bench: Bench) -> str:
    real, tiny = (bench.folder / f"many-{kind}" for kind in ("real", "tiny"))
    output, other = bench.scratch("many-output"), bench.scratch("many-other")
    if not bench.keep:
        bench.made += [real, tiny]
    if not real.exists():
        call("benchmarks.deepseek_v3", real, LAYERS)
    if not tiny.exists():
        call("benchmarks.deepseek_v3", tiny, "tiny")
    index = json.loads((real / "model.safetensors.index.json").read_text())
    size = f"{len(index['weight_map']):,} tensors, {index['metadata']['total_size'] / 1e12:.2f} TB"
    lines = [
        f"DeepSeek-V3 with {LAYERS} layers: {size}",
        f"{'most of one process':<38}{'seconds':>8}{'cpu s':>8}{'peak MB':>9}",
    ]

    def add(name: str, command: Sequence[str | Path], sizes: Sequence[int], goals: tuple[float, float] | None) -> None:
        for size in sizes:
            runs = together([*CKPT, "convert", *command, "-q"], size)
            cpu, peak = max(run.cpu_seconds for run in runs), max(run.peak_mb for run in runs)
            seconds = max(run.seconds for run in runs)
            label = f"{name}, {size} process{'es' if size > 1 else ''}"
            said = f"{label:<38}{seconds:>8.1f}{cpu:>8.1f}{peak:>9.0f}"
            if goals:
                said += f"  cpu {verdict(cpu <= goals[0], f'<= {goals[0]:g} s')}"
                said += f"; memory {verdict(peak <= goals[1], f'<= {goals[1]:g} MB')}"
            lines.append(said)
            print(said, flush=True)
            if "--dry-run" not in command:
                _keep(output, other)

    zero3 = ["hf", "zero3", real, "--world-size", str(RANKS), "--dry-run", "-o", output]
    try:
        add("start, toy model", ["zero3", "hf", _TOY, "-o", output], SIZES[-1:], (1, 400))
        remove([other])
        add("plan hf -> zero3", zero3, SIZES, (15, 400))
        add("plan hf -> hf", ["hf", "hf", real, "--dry-run", "-o", output], SIZES[:2], (15, 400))
        add("hf -> hf, tiny", ["hf", "hf", tiny, "-o", output], SIZES, None)
        lines.append("  the files are the same from 1, 8 and 48 processes")
        lines.append(f"  {_killed([*CKPT, 'convert', 'hf', 'hf', tiny, '-o', output], output)}")
        _keep(output, other)
        lines.append("  and the files are the same")
        lines += [f"  {call('benchmarks.shares', real, to, RANKS)}" for to in ("zero3", "hf", "dcp")]
    finally:
        remove([output, other])
    return "\n".join(lines)


def _keep(output: Path, other: Path) -> None:
    """Move `output` to `other`. Raise CalledProcessError if an older output there has other files."""
    if other.exists():
        subprocess.run(["diff", "-r", output, other], check=True)
        remove([other])
    output.rename(other)


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
    """Kill the last of 48 processes while they write, then continue on 8. Return what the first one said."""
    processes = started(command, SIZES[-1])
    while processes[-1].poll() is None and not holds_pieces(staging_folder(output)):
        time.sleep(_WAIT)
    processes[-1].send_signal(signal.SIGKILL)
    killed = time.perf_counter()
    told = processes[0].communicate()[1]
    codes = {process.wait() for process in processes}
    seconds = time.perf_counter() - killed
    error = next(line for line in told.splitlines() if "has ended" in line)
    again = started(command, SIZES[1])
    goes_on = next(line for line in again[0].communicate()[1].splitlines() if "continuing" in line)
    if codes != {7, -signal.SIGKILL} or any(process.wait() for process in again):
        raise RuntimeError(f"{codes}: {told}")
    return f"rank 47 killed: the others ended after {seconds:.1f} s; {error}; then {goes_on}"
