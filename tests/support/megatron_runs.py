"""The bundled trainer's runs on megatron-core: real checkpoints in its formats, and loads of converted ones."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt.plan.checkpoint import MASTER, WEIGHT, Checkpoint
from ckpt.plan.planner import check_source
from tests.support import engines, sampling
from tests.support.describing import content
from tests.support.engines import Truth

RANKS = 4
PLAIN = {"no_distributed_optimizer": True}
SEQUENCE = {"sequence_parallel": True}
UNEVEN = {"first_stage_layers": 4, "last_stage_layers": 2}
COUNTED = {"layers": 6, "count_embedding": True, "count_loss": True}
#: Ways to save a run: the trainer's options by format, and by form of the optimizer state.
FORMS: dict[str, dict[str, Any]] = {
    "megatron": {"save": "torch"},
    "megatron-dist": {"save": "torch_dist"},
    "buckets": {"save": "torch_dist", "optimizer_format": "dp_reshardable"},
    "gathered": {"save": "torch_dist", "optimizer_format": "dp_zero_gather_scatter"},
    "fsdp": {"save": "fsdp_dtensor"},
    # megatron-core stores this form wrongly if there are several buckets.
    "shifted": {"save": "torch_dist", "optimizer_format": "fully_reshardable"},
}
BOTH = ("megatron", "megatron-dist")


@dataclass(frozen=True)
class Run:
    """A model and a layout on four ranks; `options` are the trainer's own, `forms` are keys in `FORMS`."""

    name: str
    model: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    forms: tuple[str, ...] = BOTH

    @property
    def layout(self) -> str:
        """(TP, PP, EP, VPP) and special options, for tables."""
        names = {
            "no_distributed_optimizer": "plain",
            "mtp_layers": "mtp",
            "first_stage_layers": "uneven",
            "count_embedding": "counted",
            "bucket_size": "buckets",
            "save": "fsdp",
        }
        special = [names[option] for option in self.options if option in names]
        special += [str(self.options[name]) for name in ("dtype",) if name in self.options]
        special += ["etp1"] if self.options.get("etp") else []
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


ETP1 = {"etp": 1, **SEQUENCE}
FSDP = {"layers": 2, **FORMS["fsdp"]}
ALL_RUNS = [
    Run("llama", "llama", tp=2, pp=2, forms=(*BOTH, "gathered")),
    Run("llama-buckets", "llama", tp=2, options={"bucket_size": 3000}, forms=("megatron", "buckets", "shifted")),
    Run("llama-uneven-vpp", "llama", pp=4, vpp=2, options={"layers": 10, **UNEVEN}),
    Run("llama-plain", "llama", tp=2, pp=2, options=PLAIN),
    Run("llama-fp32-tp4", "llama", tp=4, options={"dtype": "fp32"}),
    Run("llama-counted", "llama", pp=4, options=COUNTED),
    Run("llama-mtp", "llama", tp=2, pp=2, options={"mtp_layers": 1}),
    Run("mistral", "mistral", tp=4),
    # The tied embedding has its own bucket, so `fully_reshardable` would shift it.
    Run("qwen2", "qwen2", tp=2, pp=2, forms=("megatron", "buckets")),
    Run("qwen3", "qwen3", pp=2, vpp=2),
    Run("qwen3_moe", "qwen3_moe", tp=2, pp=2, ep=2, options=ETP1, forms=(*BOTH, "buckets")),
    Run("qwen3_moe-ep4", "qwen3_moe", tp=2, ep=4, options=ETP1),
    Run("mixtral", "mixtral", tp=2, ep=2, options=SEQUENCE),
    Run("mixtral-plain", "mixtral", pp=2, ep=2, options=PLAIN),
    Run("qwen3_next", "qwen3_next", tp=2, pp=2, ep=2, options=ETP1, forms=(*BOTH, "buckets")),
    Run("gpt2", "gpt2", tp=4),
    Run("gpt_neox", "gpt_neox", tp=2, pp=2, options=PLAIN),
    Run("gpt_oss", "gpt_oss", pp=2, ep=2),
    Run("deepseek_v3", "deepseek_v3", tp=2, pp=2, options={"mtp_layers": 1, **SEQUENCE}),
    # Megatron-FSDP saves with a collective per tensor, and has no pipeline stages to distribute layers.
    Run("mixtral-fsdp", "mixtral", tp=2, ep=2, options=SEQUENCE | FSDP, forms=("fsdp",)),
    Run("llama-vpp", "llama", pp=2, vpp=2),
    Run("llama-uneven", "llama", pp=2, options={"layers": 5, "first_stage_layers": 2}),
    Run("llama-fp32", "llama", tp=2, options={**PLAIN, "dtype": "fp32"}),
    Run("llama-fsdp", "llama", tp=2, options=FSDP, forms=("fsdp",)),
    Run("qwen2-fsdp", "qwen2", options=FSDP, forms=("fsdp",)),
]


def facets(run: Run) -> Iterator[object]:
    """Yield a run's model, its options, its ranks if it has experts, and the forms in which it is saved."""
    yield run.model
    yield from run.options
    yield run.options.get("dtype"), run.options.get("no_distributed_optimizer")
    yield (run.tp, run.pp, run.ep) if run.ep > 1 else None
    yield from ((form, run.ep > 1) for form in run.forms)


#: Only these are made. The first ones are those of other test files.
RUNS = sampling.sample(ALL_RUNS, facets)
BY_NAME = {run.name: run for run in RUNS}


@functools.cache
def scratch() -> Path:
    """Return a folder for this process, removed when it ends."""
    folder = Path(tempfile.mkdtemp(prefix="megatron-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def sample(name: str, form: str = "megatron") -> Path:
    """Return a folder from `RUNS` in one of its forms, with its truth. The first call makes all runs."""
    folder = scratch() / "runs"
    if not folder.is_dir():
        launch([run.job(folder / run.name, steps=2, saves={f: FORMS[f] for f in run.forms}) for run in RUNS], folder)
    return folder / name / form


def truth(folder: Path) -> Truth:
    """Return the truth gathered by megatron-core over its process groups at a save or after a load."""
    return Truth.load(folder / "truth" / "truth.safetensors")


def without_rounded(held: Truth) -> Truth:
    """Drop weights that have a master: Megatron-FSDP saves only the master."""
    tensors = {
        key: value for key, value in held.tensors.items() if key[1] != WEIGHT or (key[0], MASTER) not in held.tensors
    }
    return replace(held, tensors=tensors)


def check_read(checkpoint: Checkpoint, expected: Truth) -> None:
    """Assert that a description equals the engine's state: every tensor's bits, ties, steps and param groups."""
    for key, tensor in checkpoint.tensors.items():
        check_source(tensor)
        assert content(tensor) == expected.tensors[key], key
    assert checkpoint.tensors.keys() == expected.tensors.keys()
    assert dict(checkpoint.ties) == expected.ties
    assert checkpoint.state.step == expected.metadata["step"]
    assert set(checkpoint.state.scalars["step"].values()) == {expected.metadata["adam_step"]}
    groups = {frozenset(group["names"]) for group in expected.metadata["param_groups"]}
    assert {frozenset(group.fqns) for group in checkpoint.state.param_groups} == groups - {frozenset()}


def without_padding(found: Truth) -> dict[tuple[str, str], tuple[str, tuple[int, ...], bytes]]:
    """Return the tensors without vocabulary padding, because it depends on the number of ranks."""
    size, tensors = found.metadata["vocab_size"], dict(found.tensors)
    for (fqn, role), (dtype, shape, data) in found.tensors.items():
        if fqn in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tensors[fqn, role] = (dtype, (size, *shape[1:]), data[: len(data) // shape[0] * size])
    return tensors


def launch(jobs: list[dict[str, Any]], folder: Path) -> None:
    """Run jobs for `tests.support.megatron_worker` in one process group.

    Raise AssertionError with its output if it fails.
    """
    engines.launch(jobs, RANKS, folder, "tests.support.megatron_worker")
