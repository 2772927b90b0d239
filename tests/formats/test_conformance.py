"""What every format must do.  A format takes part by declaring where a real sample comes from and what its truth is.

A sample is a checkpoint that the format's own framework wrote; its truth was gathered from the live engine, or is what
the framework's own loader returns.  A registered format without a declaration fails the suite.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt import registry
from ckpt.errors import CkptError, CorruptError, LossError, NotFoundError, UsageError
from ckpt.plan.checkpoint import BUFFER, MASTER, MEGATRON, WEIGHT, Checkpoint, Layout
from ckpt.plan.planner import check_source
from ckpt.verify import manifest
from ckpt.verify.manifest import MANIFEST
from tests.formats.test_universal import ds_to_universal
from tests.support import megatron_runs, pipeline_runs
from tests.support.describing import content
from tests.support.engines import Truth, raw
from tests.support.fsdp_runs import run_ranks

FIXTURES = Path(__file__).parents[2] / "fixtures"

Tensors = dict[tuple[str, str], tuple[str, tuple[int, ...], bytes]]


@dataclass(frozen=True)
class Declaration:
    """A format's sample.

    `make` puts the sample into an empty folder and returns its path and its truth: raw bytes by fqn and role.
    `vital` are glob patterns of files without which, or with half of which, nothing may be read.
    """

    format: str
    make: Callable[[Path], tuple[Path, Tensors]]
    vital: tuple[str, ...]


def from_fixture(name: str) -> Callable[[Path], tuple[Path, Tensors]]:
    """A committed run folder with `truth/<tag>.safetensors` beside its checkpoint."""

    def make(folder: Path) -> tuple[Path, Tensors]:
        run = folder / name
        shutil.copytree(FIXTURES / name, run)
        truth = Truth.load(next(p for p in (run / "truth").iterdir() if "logits" not in p.name))
        shutil.rmtree(run / "truth")
        return run, {key: value for key, value in truth.tensors.items() if key[0] not in truth.ties}

    return make


def saved_by_transformers(folder: Path) -> tuple[Path, Tensors]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 19, "hidden_size": 12, "intermediate_size": 7, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(torch.bfloat16)
    model.save_pretrained(folder / "model", max_shard_size="1kB")
    return folder / "model", {(fqn, WEIGHT): raw(t) for fqn, t in model.state_dict().items()}


def converted_by_deepspeed(folder: Path) -> tuple[Path, Tensors]:
    """A ZeRO-3 run, made universal by DeepSpeed's own converter (which fails on the toy model's 0-d parameter)."""
    run, truth = from_fixture("lora-zero3")(folder)
    output = folder / "universal" / "global_step2_universal"
    output.mkdir(parents=True)
    ds_to_universal(run / "global_step2", output)
    return output.parent, truth


def gathered_by_torch(folder: Path) -> tuple[Path, Tensors]:
    """The full state dicts of a model and its optimizer, as torch gathers and Accelerate names them."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 7, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    path = folder / "full"
    path.mkdir()
    torch.save(weights, path / "pytorch_model_fsdp.bin")
    torch.save(states, path / "optimizer.bin")
    truth = {(fqn, WEIGHT): raw(t) for fqn, t in weights.items()}
    for fqn, values in states["state"].items():
        truth |= {(fqn, name): raw(t) for name, t in values.items() if name != "step"}
    return path, truth


@functools.cache
def run_of_ranks() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fsdp-ranks-"))
    atexit.register(shutil.rmtree, folder)
    run_ranks("fsdp2", 2, folder)
    return folder


def saved_by_ranks(folder: Path) -> tuple[Path, Tensors]:
    """What two ranks of FSDP2 wrote, each by itself, with the full state dicts that they gathered."""
    import torch

    shutil.copytree(run_of_ranks(), folder, dirs_exist_ok=True)
    weights, states = (torch.load(folder / "full" / name) for name in ("pytorch_model_fsdp.bin", "optimizer.bin"))
    shutil.rmtree(folder / "full")
    ties = ckpt.open(folder / "ranks").ties
    truth = {(fqn, WEIGHT): raw(t) for fqn, t in weights.items() if fqn not in ties}
    for fqn, values in states["state"].items():
        truth |= {(fqn, name): raw(t) for name, t in values.items() if name != "step"}
    return folder / "ranks", truth


def saved_by_peft(folder: Path) -> tuple[Path, Tensors]:
    """An adapter with a bias of its own, and a module that was trained as a whole."""
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 7))
    lora = LoraConfig(r=2, target_modules=["0"], modules_to_save=["1"], lora_bias=True)
    wrapped = get_peft_model(model, lora)
    wrapped.save_pretrained(folder / "adapter")
    return folder / "adapter", {(fqn, WEIGHT): raw(t) for fqn, t in get_peft_model_state_dict(wrapped).items()}


def saved_by_megatron(folder: Path) -> tuple[Path, Tensors]:
    """Two pipeline stages of two tensor-parallel ranks each, with the distributed optimizer."""
    run = folder / "run"
    shutil.copytree(megatron_runs.sample("llama"), run, ignore=shutil.ignore_patterns("truth"))
    return run, megatron_runs.truth(megatron_runs.sample("llama")).tensors


def saved_by_pipeline(folder: Path) -> tuple[Path, Tensors]:
    """Two stages of DeepSpeed's pipeline on two data-parallel ranks each; the embedding is also the output layer."""
    run = folder / "run"
    shutil.copytree(pipeline_runs.sample("qwen2"), run, ignore=shutil.ignore_patterns("truth"))
    return run, pipeline_runs.truth("qwen2").tensors


DECLARATIONS = [
    *(
        Declaration(f"zero{stage}", from_fixture(f"toy-zero{stage}"), ("*/*_optim_states.pt", "*/*_model_states.pt"))
        for stage in (1, 2, 3)
    ),
    Declaration("universal", converted_by_deepspeed, ("*/*_model_states.pt", "*/zero/*/exp_avg.pt")),
    Declaration("megatron", saved_by_megatron, ("*/*/model_optim_rng.pt", "*/*/distrib_optim.pt")),
    Declaration(
        "megatron-dist",
        from_fixture("megatron-dist-flattened"),
        ("iter_0000002/.metadata", "iter_0000002/common.pt", "iter_0000002/__*_*.distcp"),
    ),
    Declaration(
        "megatron-deepspeed",
        saved_by_pipeline,
        ("*/layer_*-model_states.pt", "*/mp_rank_*_model_states.pt", "*/*_optim_states.pt"),
    ),
    Declaration("dcp", from_fixture("dcp-fsdp2"), ("step-2/__*_0.distcp", "step-2/.metadata")),
    Declaration("full", gathered_by_torch, ("pytorch_model_fsdp.bin",)),
    Declaration("fsdp-ranks", saved_by_ranks, ("model_world_size_2_rank_*.pt", "optim_world_size_2_rank_*.pt")),
    Declaration("hf", saved_by_transformers, ("model-*.safetensors",)),
    Declaration("peft", saved_by_peft, ("adapter_model.safetensors",)),
]
#: Samples that take several processes to make.
ENGINES = ("fsdp-ranks", "megatron", "megatron-deepspeed")

DEEPSPEED = ("zero1", "zero2", "zero3", "universal")
SHARDED = ("zero1", "zero2", "zero3", "dcp")
WRITABLE = [name for name in registry.names() if registry.get(name).writes]


def declared(one: Declaration) -> Any:
    return pytest.param(one, id=one.format, marks=[pytest.mark.slow] if one.format in ENGINES else [])


@pytest.fixture(params=[declared(one) for one in DECLARATIONS])
def sample(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Declaration, Path, Tensors]:
    folder = tmp_path / "sample"
    folder.mkdir()
    return (request.param, *request.param.make(folder))


Sample = tuple[Declaration, Path, Tensors]


def layout_for(checkpoint: Checkpoint, target: str) -> Layout:
    """The default layout, with a number of ranks where a sharded target needs one that the source does not have."""
    return Layout(world_size=2 if checkpoint.world_size is None and target in SHARDED else None)


def architecture(checkpoint: Checkpoint) -> bool:
    """Whether it is a whole model that Megatron has names for."""
    return checkpoint.namespace == MEGATRON or checkpoint.format == "hf"


def refused(checkpoint: Checkpoint, target: str) -> bool:
    """Whether this pair is one that is refused, which is checked here.

    Stage 3 has no place for an empty parameter; only what PEFT has wrapped holds an adapter, whose config is needed;
    Megatron's formats take models of known architectures.
    """
    if registry.get(target).namespace == MEGATRON and not architecture(checkpoint):
        with pytest.raises((UsageError, NotFoundError, LossError)):
            ckpt.plan(checkpoint, target, layout_for(checkpoint, target))
        return True
    if target == "peft" and checkpoint.format != "peft":
        with pytest.raises((UsageError, NotFoundError), match=r"no LoRA adapter|no adapter_config.json"):
            ckpt.plan(checkpoint, target, layout_for(checkpoint, target))
        return True
    if target != "zero3" or all(tensor.numel for tensor in checkpoint.with_role(WEIGHT)):
        return False
    with pytest.raises(LossError, match="goes nowhere"):
        ckpt.plan(checkpoint, target, layout_for(checkpoint, target))
    return True


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_every_format_is_declared() -> None:
    assert sorted(d.format for d in DECLARATIONS) == sorted(n for n in registry.names() if registry.get(n).reads)


def test_finding_opens_no_large_file(sample: Sample, opened: list[str]) -> None:
    """All are as large as real ones here; of a DCP `.metadata`, the names at its head tell Megatron's from others."""
    declaration, path, _ = sample
    for file in [file for pattern in declaration.vital for file in path.glob(pattern)]:
        os.truncate(file, 2 << 20)
    opened.clear()
    found = [name for name in registry.names() if registry.get(name).reads and registry.get(name).find(path, None)]
    assert declaration.format in found
    large = [name for name in opened if Path(name).is_file() and Path(name).stat().st_size > 1 << 20]
    assert {Path(name).name for name in large} <= {".metadata"}


def test_reads_the_truth_bit_for_bit(sample: Sample) -> None:
    declaration, path, truth = sample
    checkpoint = ckpt.open(path, declaration.format)
    assert checkpoint.format == declaration.format
    for key, tensor in checkpoint.tensors.items():
        check_source(tensor)
        assert content(tensor) == truth[key], key
    implied = {(fqn, WEIGHT) for fqn, role in checkpoint.tensors if role == MASTER}
    assert set(truth) - set(checkpoint.tensors) <= implied


def test_is_recognised_without_being_named(sample: Sample) -> None:
    declaration, path, _ = sample
    found = ckpt.open(path)
    assert found.format == declaration.format
    assert found.tensors.keys() == ckpt.open(path, declaration.format).tensors.keys()


def test_reading_and_converting_leave_the_source_as_it_was(sample: Sample, tmp_path: Path) -> None:
    _, path, _ = sample
    before = digests(path)
    checkpoint = ckpt.open(path)
    ckpt.plan(checkpoint, "hf").run(tmp_path / "out")
    assert ckpt.verify(checkpoint, ckpt.open(tmp_path / "out"), only="weights").equal
    assert digests(path) == before


def test_damage_is_found(sample: Sample) -> None:
    """A vital file that is missing, empty, cut short or zeroed at its end is exit 4, naming the folder or the file."""
    declaration, path, _ = sample
    files = [file for pattern in declaration.vital for file in sorted(path.glob(pattern))]
    assert files
    for file in files:
        original = file.read_bytes()
        tail = min(64, len(original) // 2)
        for damaged in (None, b"", original[:-1], original[: len(original) // 2], original[:-tail] + bytes(tail)):
            if damaged is None:
                file.unlink()
            else:
                file.write_bytes(damaged)
            if declaration.format in ("hf", "peft") and damaged is not None and len(damaged) == len(original):
                continue  # tensor data to the end: only a manifest or a second checkpoint could tell
            # Without its only file there is nothing left to recognise.
            kinds = (CorruptError, NotFoundError) if damaged is None and len(files) <= 2 else CorruptError
            with pytest.raises(kinds) as caught:
                ckpt.open(path, declaration.format)
            assert str(path) in str(caught.value)
        file.write_bytes(original)
    ckpt.open(path, declaration.format)


def test_mutations_raise_only_our_errors(sample: Sample) -> None:
    """Every 97th byte of vital files (300 of a large one), inverted: read as something, or one of our errors."""
    declaration, path, _ = sample
    outcomes = {"read": 0, "refused": 0}
    for file in [file for pattern in declaration.vital for file in sorted(path.glob(pattern))][:2]:
        original = file.read_bytes()
        for position in range(0, len(original), max(97, len(original) // 300)):
            damaged = bytearray(original)
            damaged[position] ^= 0xFF
            file.write_bytes(damaged)
            try:
                ckpt.open(path, declaration.format)
                outcomes["read"] += 1
            except CkptError:
                outcomes["refused"] += 1
        file.write_bytes(original)
    assert outcomes["refused"] > 0


@pytest.mark.parametrize("target", WRITABLE)
def test_converts_deterministically_and_as_planned(sample: Sample, target: str, tmp_path: Path) -> None:
    declaration, path, _ = sample
    checkpoint = ckpt.open(path, declaration.format)
    if refused(checkpoint, target):
        return
    layout = layout_for(checkpoint, target)
    conversion = ckpt.plan(checkpoint, target, layout)
    one, other = tmp_path / "one", tmp_path / "other"
    conversion.run(one)
    ckpt.plan(ckpt.open(path, declaration.format), target, layout).run(other)
    assert digests(one) == digests(other)
    planned = {file.name: file.size for file in conversion.plan.target.files}
    written = {str(f.relative_to(one)): f.stat().st_size for f in one.rglob("*") if f.is_file()}
    assert written.pop(MANIFEST)
    assert written == planned
    checked = manifest.check(one, registry.all_formats())
    assert checked.good and not checked.unknown


@pytest.mark.parametrize("target", WRITABLE)
def test_what_is_written_reads_back_equal(sample: Sample, target: str, tmp_path: Path) -> None:
    declaration, path, truth = sample
    checkpoint = ckpt.open(path, declaration.format)
    if refused(checkpoint, target):
        return
    conversion = ckpt.plan(checkpoint, target, layout_for(checkpoint, target))
    conversion.run(tmp_path / "out")
    back = ckpt.open(tmp_path / "out", target)
    named = conversion.plan.checkpoint
    if registry.get(target).namespace is None:  # it keeps names, whatever they are
        back = replace(back, namespace=named.namespace)
    report = ckpt.verify(checkpoint, back)
    # DeepSpeed flattens, so that a parameter which never had a gradient has zeros for states.
    stateless = set(checkpoint.parameters) - {
        f for f, role in checkpoint.tensors if role in checkpoint.optimizer_states
    }
    added = {result.b_fqn for result in report.results if result.status == "+"}
    assert report.equal or (target in DEEPSPEED and added and added <= stateless), "\n".join(report.lines())
    assert {result.status for result in report.results} <= {"=", "+"}
    renamed = MEGATRON in (checkpoint.namespace, named.namespace) and checkpoint.namespace != named.namespace
    weights = {fqn for fqn, role in (named.tensors if renamed else truth) if role in (WEIGHT, BUFFER)}
    assert {fqn for fqn, _ in back.tensors} == weights


def test_parameters_are_counted_once(sample: Sample) -> None:
    declaration, path, truth = sample
    checkpoint: Checkpoint = ckpt.open(path, declaration.format)
    expected = {fqn for fqn, role in truth if role == WEIGHT}
    assert set(checkpoint.parameters) == expected
