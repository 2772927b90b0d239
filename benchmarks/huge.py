"""DeepSeek-V3 in bf16, 1.37 TB -> Megatron with TP 8, PP 16, EP 8: time, rate and memory.

Source and output are sparse files. The final norm and the last layer's router are not zero; torch alone compares them.
It takes ten minutes or more.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.deepseek_v3 import PIPELINE
from benchmarks.measure import PYTHON, Case, call, run
from benchmarks.runner import Bench, verdict

SOURCES = ()
PEAK_MB = 2000


def measure(bench: Bench) -> str:
    source, output = bench.scratch("huge-source"), bench.scratch("huge-output")
    made = call("benchmarks.deepseek_v3", source)
    call("benchmarks.huge_run", "fill", source)
    layout = ["--tp", "8", "--pp", "16", "--ep", "8", "--pipeline-model-parallel-layout", PIPELINE]
    command = [PYTHON, "-m", "benchmarks.huge_run", "convert", "hf", "megatron", source, *layout, "--no-manifest", "-q"]
    one = run(Case("huge", [*command, "-o", output], (output,)))
    same = call("benchmarks.huge_run", "compare", source, output)
    moved = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    lines = [
        f"DeepSeek-V3 in bf16 ({made}) -> megatron, TP 8, PP 16, EP 8, sparse files",
        f"{one.seconds:.0f} s, {one.cpu_seconds:.0f} s of cpu, {moved / one.seconds / 1e9:.2f} GB/s, "
        f"peak {one.peak_mb:.0f} MB {verdict(one.peak_mb <= PEAK_MB, f'<= {PEAK_MB} MB')}; "
        f"{_taken(output) / 1e6:.0f} MB of the output are no holes",
        f"{same} tensors that are no zeros are the same in all files that hold them",
    ]
    return "\n".join(lines)


def _taken(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
