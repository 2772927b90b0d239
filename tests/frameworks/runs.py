"""Tiny Megatron-LM runs with the training setup of LLM-jp v4."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.engines import raw
from tests.support.places import REPOSITORY

#: A qwen3_moe model with LLM-jp v4's arguments: untied, and heads x head_dim differs from the hidden size.
MODEL = """
    --num-layers 10 --hidden-size 32 --num-attention-heads 8 --group-query-attention --num-query-groups 2
    --kv-channels 8 --ffn-hidden-size 64 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 16 --qk-layernorm
    --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall --moe-router-dtype fp32
    --disable-bias-linear --swiglu --normalization RMSNorm --position-embedding-type rope --rotary-base 500000
    --untie-embeddings-and-output-weights --seq-length 8 --max-position-embeddings 32
    --attention-dropout 0 --hidden-dropout 0 --vocab-size 128
    --tokenizer-type NullTokenizer
"""
TRAINING = """
    --bf16 --micro-batch-size 1 --global-batch-size 24 --train-iters 8 --lr 2e-3 --min-lr 2e-4 --lr-decay-style WSD
    --lr-wsd-decay-style linear --lr-wsd-decay-iters 2 --lr-warmup-iters 1 --weight-decay 0.1 --adam-beta1 0.9
    --adam-beta2 0.95 --clip-grad 1.0 --ckpt-format torch_dist --eval-iters 0 --save-interval 1000
"""
#: Megatron-LM options for a machine without GPU and Transformer Engine.
MACHINE = """
    --distributed-backend gloo --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion --no-bias-dropout-fusion
    --cross-entropy-fusion-impl native --distributed-timeout-minutes 5
"""
#: Transformer Engine's Python sources, installed by `make test-frameworks`.
ENGINE = Path(sys.prefix) / "transformer-engine"
#: Options with Transformer Engine: grouped GEMM and optional parts of an expert layer.
WITH_ENGINE = """
    --transformer-impl transformer_engine --moe-grouped-gemm --moe-shared-expert-intermediate-size 16
    --moe-shared-expert-gate --moe-router-score-function sigmoid --moe-router-enable-expert-bias
"""
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
COUNTED = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"


@dataclass(frozen=True)
class Job:
    """One run of `tests.frameworks.worker`."""

    name: str
    ranks: int
    arguments: str = DISTRIBUTED
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    tp: int = 1
    steps: int = 0
    load: Path | None = None
    save: Path | None = None
    fails: bool = False
    engine: bool = False
    frozen: str | None = None

    def line(self, folder: Path) -> dict[str, Any]:
        sizes = f"--tensor-model-parallel-size {self.tp} --pipeline-model-parallel-size {self.pp} "
        sizes += f"--expert-model-parallel-size {self.ep} --expert-tensor-parallel-size 1"
        # Megatron-LM's rule, scaled down: at least 40 million elements, and a million for each data parallel rank.
        sizes += f" --ddp-bucket-size {1000 * (self.ranks // (self.tp * self.pp))}"
        if self.tp > 1:
            sizes += " --sequence-parallel"
        if self.vpp > 1:
            sizes += f" --num-virtual-stages-per-pipeline-rank {self.vpp} {COUNTED}"
        engine = WITH_ENGINE if self.engine else ""
        words = " ".join([MODEL, TRAINING, MACHINE, engine, self.arguments, sizes]).split()
        words += ["--save", str(self.save)] if self.save else []
        job = {"ranks": self.ranks, "arguments": words, "steps": self.steps, "fails": self.fails, "frozen": self.frozen}
        return job | {"output": str(folder / self.name), "load": str(self.load) if self.load else None}


@dataclass(frozen=True)
class Held:
    """Final state on all ranks: raw tensor bytes by role and fqn, and other facts needed to resume."""

    tensors: Mapping[tuple[str, str], tuple[str, tuple[int, ...], bytes]] = field(repr=False)
    facts: Mapping[str, Any]


def run(jobs: Sequence[Job], folder: Path) -> dict[str, Held]:
    """Run `jobs` and return their final states by name. Either all jobs use Transformer Engine's layers or none do."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "jobs.jsonl"
    file.write_text("".join(json.dumps(job.line(folder)) + "\n" for job in jobs))
    worker = "engine_worker" if jobs[0].engine else "worker"
    command = [sys.executable, "-m", f"tests.frameworks.{worker}", str(file)]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=600 * len(jobs),
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return {job.name: held(folder / job.name) for job in jobs}


def held(folder: Path) -> Held:
    from safetensors import safe_open

    errors = [path.read_text() for path in sorted(folder.glob("error-*.txt"))]
    if errors:
        return Held({}, {"error": "\n".join(errors)})
    tensors = {}
    with safe_open(folder / "truth.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - safe_open has no iterator
            role, _, fqn = name.partition("/")
            tensors[fqn, role] = raw(file.get_tensor(name))
    return Held(tensors, json.loads((folder / "facts.json").read_text()))
