"""Runs of the bundled trainer on megatron-core: real checkpoints in the `torch` format, and loads of written ones."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engines import Truth, launch

RANKS = 4
_WORKER = "tests.megatron_worker"


@dataclass(frozen=True)
class Run:
    """A model and a layout on four ranks; `options` are the trainer's own."""

    name: str
    model: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> str:
        """(TP, PP, EP, VPP) and what is special, for tables."""
        names = {"no_distributed_optimizer": "plain", "etp": "etp1", "mtp_layers": "mtp", "dtype": "fp32"}
        special = [
            names.get(o, o.replace("_", "-"))
            for o in self.options
            if o not in ("layers", "sequence_parallel", "vocab_multiple")
        ]
        return " ".join([f"{self.tp},{self.pp},{self.ep},{self.vpp}", *special])

    def job(self, output: Path, **more: Any) -> dict[str, Any]:
        return {
            "strategy": "megatron",
            "model": f"{self.model}_wide",
            "save": "torch",
            "tp": self.tp,
            "pp": self.pp,
            "ep": self.ep,
            "vpp": self.vpp,
            "batch": 8,
            "accumulate": self.pp if self.vpp > 1 else 1,
            "length": 8,
            "output": str(output),
            **self.options,
            **more,
        }


PLAIN = {"no_distributed_optimizer": True}
UNEVEN = {"first_stage_layers": 4, "last_stage_layers": 2}
RUNS = [
    Run("llama", "llama", tp=2, pp=2),
    Run("llama-vpp", "llama", pp=2, vpp=2),
    Run("llama-buckets", "llama", tp=2, options={"bucket_size": 3000}),
    Run("llama-uneven", "llama", pp=2, options={"layers": 5, "first_stage_layers": 2}),
    Run("llama-counted", "llama", pp=4, options={"layers": 6, "count_embedding": True, "count_loss": True}),
    Run("llama-uneven-vpp", "llama", pp=4, vpp=2, options={"layers": 10, **UNEVEN}),
    Run("llama-plain", "llama", tp=2, pp=2, options=PLAIN),
    Run("llama-fp32", "llama", tp=2, options={**PLAIN, "dtype": "fp32"}),
    Run("qwen2", "qwen2", tp=2, pp=2),
    Run("gpt2", "gpt2", tp=4),
    Run("qwen3_moe", "qwen3_moe", tp=2, pp=2, ep=2, options={"etp": 1, "sequence_parallel": True}),
    Run("qwen3_moe-ep4", "qwen3_moe", tp=2, ep=4, options={"etp": 1, "sequence_parallel": True}),
    Run("mixtral-plain", "mixtral", pp=2, ep=2, options=PLAIN),
    Run("gpt_oss", "gpt_oss", pp=2, ep=2),
    Run("gpt_neox", "gpt_neox", tp=2, pp=2, options=PLAIN),
    Run("deepseek_v3", "deepseek_v3", tp=2, pp=2, options={"mtp_layers": 1, "sequence_parallel": True}),
    Run("llama-mtp", "llama", tp=2, pp=2, options={"mtp_layers": 1}),
]
BY_NAME = {run.name: run for run in RUNS}


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="megatron-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def sample(name: str) -> Path:
    """The run folder of one of `RUNS`, with its truth; all are made at once."""
    folder = _folder() / "runs"
    if not folder.is_dir():
        launch([run.job(folder / run.name, steps=2) for run in RUNS], RANKS, folder, _WORKER)
    return folder / name


def truth(folder: Path) -> Truth:
    """What megatron-core gathered over its process groups when it wrote, or had loaded, a checkpoint."""
    return Truth.load(folder / "truth" / "truth.safetensors")


def without_padding(found: Truth) -> dict[tuple[str, str], tuple[str, tuple[int, ...], bytes]]:
    """The tensors with the rows of the vocabulary alone, whose padding depends on the number of ranks."""
    size, tensors = found.metadata["vocab_size"], dict(found.tensors)
    for (fqn, role), (dtype, shape, data) in found.tensors.items():
        if fqn in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tensors[fqn, role] = (dtype, (size, *shape[1:]), data[: len(data) // shape[0] * size])
    return tensors


def load_all(loads: Sequence[tuple[Run, Path]], folder: Path) -> list[Truth]:
    """The truth that megatron-core gathers after it has loaded checkpoints strictly into models of other layouts."""
    jobs = [run.job(folder / str(number), resume=str(path), steps=0) for number, (run, path) in enumerate(loads)]
    launch(jobs, RANKS, folder, _WORKER)
    return [truth(folder / str(number)) for number in range(len(jobs))]
