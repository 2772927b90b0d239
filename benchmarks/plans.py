"""Plans for many small tensors, and checkpoints with many items: the cost without bytes to move.

Each row runs once. Real sizes are in sparse files. Written tensors are compared with the source, read by transformers
or DeepSpeed's rule, unless they are holes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.measure import CKPT, Case, call, run
from benchmarks.models import STEP
from benchmarks.runner import Bench, within
from benchmarks.zero import PEER, by_peer

SOURCES: Sequence[str] = ()
TITLE = "Qwen3-235B-A22B (36,945 tensors in hf, 1,037 in zero3), unless a row names something else"

MILLION = "a Megatron-FSDP folder of a million items"
#: ckpt's arguments after the format, the source, and the limits for processor seconds and megabytes.
_GOALS: dict[str, tuple[list[str], str, float, float]] = {
    "hf -> zero3, 32 ranks": (["hf", "zero3", "--world-size", "32"], "tiny", 12, 700),
    "zero3, 32 ranks -> hf": (["zero3", "hf"], "32", 6, 700),
    "zero3, 32 ranks -> 48, with Adam's states": (["zero3", "zero3", "--world-size", "48"], "32", 40, 700),
    "zero3, 512 ranks -> hf": (["zero3", "hf"], "512", 60, 700),
    "hf -> zero3, 24 ranks, real sizes, --dry-run": (
        ["hf", "zero3", "--world-size", "24", "--dry-run"],
        "real",
        15,
        600,
    ),
    MILLION: (["inspect"], "fsdp", 10, 4000),
    "LLM-jp v4 291B, 288 ranks, inspect": (["inspect"], "llm-jp-291b", 15, 400),
    "LLM-jp v4 291B, 288 ranks, check": (["check"], "llm-jp-291b", 15, 400),
    "LLM-jp v4 291B, DP 48 -> 40, --dry-run": (
        ["megatron-dist", "megatron-dist", "--world-size", "240", "--dry-run"],
        "llm-jp-291b",
        15,
        400,
    ),
    "LLM-jp v4 291B -> hf, --dry-run": (["megatron-dist", "hf", "--dry-run"], "llm-jp-291b", 15, 400),
    "LLM-jp v4 332B, 256 ranks, inspect": (["inspect"], "llm-jp-332b", 15, 400),
    "LLM-jp v4 332B, 256 ranks, check": (["check"], "llm-jp-332b", 15, 400),
    "LLM-jp v4 332B, DP 32 -> 24, --dry-run": (
        ["megatron-dist", "megatron-dist", "--world-size", "192", "--dry-run"],
        "llm-jp-332b",
        15,
        400,
    ),
    "LLM-jp v4 332B -> hf, --dry-run": (["megatron-dist", "hf", "--dry-run"], "llm-jp-332b", 15, 400),
}


def measure(bench: Bench) -> str:
    lines = [TITLE, f"{'':<46}{'seconds':>9}{'cpu s':>8}{'peak MB':>9}"]

    def add(case: Case, said: Callable[[float, float], str] = lambda *_: "") -> None:
        one = run(case)
        figures = f"{one.seconds:>9.1f}{one.cpu_seconds:>8.1f}{one.peak_mb:>9.0f}"
        lines.append(f"{case.name:<46}{figures}  {said(one.cpu_seconds, one.peak_mb)}".rstrip())
        print(lines[-1], flush=True)

    output = bench.scratch("plans-output")
    for name, (arguments, kind, *_) in _GOALS.items():
        source = source_of(bench, kind)
        command = [*CKPT, "convert", *arguments[:2], source, *arguments[2:], "-q", "-o", output]
        if len(arguments) == 1:
            command = [*CKPT, *arguments, source, "--json"]
        elif kind.startswith("llm-jp"):
            command += ["--config", source]
        add(Case(name, command, (output,)), partial(judged, name))
        if same := _compared(kind, arguments, source, output):
            lines.append(f"  {same}")
        if kind == "32" and arguments[1] == "hf":
            add(by_peer(source, output, f"{PEER}, 32 ranks"))
    return "\n".join(lines)


def judged(name: str, cpu_seconds: float, peak_mb: float) -> str:
    """Return the goals of the row `name`, marked if missed."""
    return within(cpu_seconds, peak_mb, goals(name))


def goals(name: str) -> tuple[float, float]:
    return _GOALS[name][2:]


def _compared(kind: str, arguments: Sequence[str], source: Path, output: Path) -> str | None:
    """Return the number of compared tensors. None for --dry-run and holes."""
    is_tiny, step = kind == "tiny" or kind.isdecimal(), f"global_step{STEP}"
    if is_tiny and arguments[:2] == ["hf", "zero3"]:
        written = next(output.glob("global_step*"))
        return f"{call('benchmarks.equal', 'zero3-loaded', source, written)} masters are what transformers loads"
    if is_tiny and arguments[:2] == ["zero3", "hf"]:
        same = call("benchmarks.equal", "zero3-loaded", output, source / step)
        return f"{same} tensors that transformers loads are the masters, put together by DeepSpeed's rule"
    if is_tiny:
        same = call("benchmarks.equal", "zero3", output / step, source / step)
        return f"{same} masters and states are the same, put together by DeepSpeed's rule"
    return None


def source_of(bench: Bench, kind: str) -> Path:
    path = bench.folder / f"plans-{kind}"
    if not bench.keep:
        bench.made.append(path)
    if not (path / "complete").exists():
        if kind == "fsdp":
            call("benchmarks.megatron_fsdp_source", path / "iter_0000002")
        elif kind.startswith("llm-jp"):
            call("benchmarks.megatron_dist_source", path, kind.removeprefix("llm-jp-"))
        else:
            call("benchmarks.moe_source", path, kind)
        (path / "complete").touch()
    return path
