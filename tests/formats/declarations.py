"""Declarations of the formats in `converters`: a real sample for each, and its truth."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ckpt
from ckpt.errors import LossError, NotFoundError, UsageError
from ckpt.plan.checkpoint import MEGATRON, WEIGHT, Checkpoint
from ckpt.testing import Declaration, Refusal, Tensors
from tests.support import megatron_runs, pipeline_runs
from tests.support.engines import Truth, raw
from tests.support.places import FIXTURES
from tests.support.universal import ds_to_universal

if TYPE_CHECKING:
    import torch


def from_fixture(name: str) -> Callable[[Path], tuple[Path, Tensors]]:
    """Return a function that copies a committed run and loads its `truth/<tag>.safetensors`."""

    def make(folder: Path) -> tuple[Path, Tensors]:
        run = folder / name
        shutil.copytree(FIXTURES / name, run)
        truth = Truth.load(next(p for p in (run / "truth").iterdir() if "logits" not in p.name))
        shutil.rmtree(run / "truth")
        return run, {key: value for key, value in truth.tensors.items() if key[0] not in truth.ties}

    return make


def saved_by_trainer(folder: Path) -> tuple[Path, Tensors]:
    """Copy an HF Trainer step. Its experts are stacked both in memory and in the optimizer."""
    run, truth = from_fixture("trainer-plain")(folder)
    return run / "checkpoint-2", truth


def saved_by_transformers(folder: Path) -> tuple[Path, Tensors]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 19, "hidden_size": 12, "intermediate_size": 7, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(torch.bfloat16)
    model.save_pretrained(folder / "model", max_shard_size="1kB")
    return folder / "model", {(fqn, WEIGHT): raw(t) for fqn, t in model.state_dict().items()}


@functools.cache
def universal() -> Path:
    """Convert a ZeRO-3 run with DeepSpeed's own converter, which fails on the toy model's 0-d parameter."""
    folder = Path(tempfile.mkdtemp(prefix="universal-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    output = folder / "universal" / "global_step2_universal"
    output.mkdir(parents=True)
    ds_to_universal(FIXTURES / "lora-zero3" / "global_step2", output)
    return output.parent


def converted_by_deepspeed(folder: Path) -> tuple[Path, Tensors]:
    _, truth = from_fixture("lora-zero3")(folder)
    return Path(shutil.copytree(universal(), folder / "universal")), truth


def gathered_by_torch(folder: Path) -> tuple[Path, Tensors]:
    """Save full state dicts of model and optimizer, gathered by torch and named by Accelerate."""
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


def saved_by_ranks(folder: Path) -> tuple[Path, Tensors]:
    """Return the files written separately by two FSDP2 ranks, and the gathered full state dicts."""
    import torch

    source = FIXTURES / "verl-fsdp2"
    no_config = shutil.ignore_patterns("huggingface")  # transformers does not know the model
    shutil.copytree(source / "global_step_3/actor", folder / "actor", ignore=no_config)
    weights, states = (torch.load(source / "truth" / name) for name in ("pytorch_model_fsdp.bin", "optimizer.bin"))
    ties = ckpt.open(folder / "actor").ties
    truth = {(fqn, WEIGHT): raw(t) for fqn, t in weights.items() if fqn not in ties}
    for fqn, values in states["state"].items():
        truth |= {(fqn, name): raw(t) for name, t in values.items() if name != "step"}
    return folder / "actor", truth


def saved_by_torch_checkpointing(step: str) -> Callable[[Path], tuple[Path, Tensors]]:
    """Return a function that copies a step of two FSDP2 ranks, without the config."""

    def make(folder: Path) -> tuple[Path, Tensors]:
        source = FIXTURES / "torch-checkpointing"
        shutil.copytree(source / step, folder / step)
        return folder / step, Truth.load(source / "truth" / f"{step}.safetensors").tensors

    return make


def saved_by_peft(folder: Path) -> tuple[Path, Tensors]:
    """Save an adapter with its own bias and a fully trained module."""
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 7))
    lora = LoraConfig(r=2, target_modules=["0"], modules_to_save=["1"], lora_bias=True)
    wrapped = get_peft_model(model, lora)
    wrapped.save_pretrained(folder / "adapter")
    return folder / "adapter", {(fqn, WEIGHT): raw(t) for fqn, t in get_peft_model_state_dict(wrapped).items()}


def saved_by_megatron(folder: Path) -> tuple[Path, Tensors]:
    """Return a run with two pipeline stages, two tensor-parallel ranks each, and the distributed optimizer."""
    run = folder / "run"
    shutil.copytree(megatron_runs.sample("llama"), run, ignore=shutil.ignore_patterns("truth"))
    return run, megatron_runs.truth(megatron_runs.sample("llama")).tensors


def saved_by_pipeline(folder: Path) -> tuple[Path, Tensors]:
    """Return a run with two stages in DeepSpeed's pipeline, two data-parallel ranks each, and tied embeddings."""
    run = folder / "run"
    shutil.copytree(pipeline_runs.sample("qwen2"), run, ignore=shutil.ignore_patterns("truth"))
    return run, pipeline_runs.truth("qwen2").tensors


def written_by_llama_cpp(folder: Path) -> tuple[Path, Tensors]:
    """Copy a model from llama.cpp's converter, with its config and tokenizer, and what the gguf package reads."""
    from safetensors.torch import load_file

    run = folder / "gguf"
    shutil.copytree(FIXTURES / "gguf/llama", run, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copy(FIXTURES / "gguf/llama-bf16.gguf", run / "model.gguf")
    truth = load_file(FIXTURES / "gguf/truth/llama-bf16.safetensors")
    return run, {(fqn, WEIGHT): raw(tensor) for fqn, tensor in truth.items()}


def unknown_to_llama_cpp(sample: Declaration, _: Checkpoint) -> Refusal | None:
    """Expect an error for every model but llama.cpp's: a GGUF file holds an architecture and a tokenizer."""
    return None if sample.format == "gguf" else ((LossError, NotFoundError), "llama.cpp|tokenizer|config.json")


def unknown_to_megatron(sample: Declaration, checkpoint: Checkpoint) -> Refusal | None:
    """Return the refusal, if any: Megatron's formats need a known architecture."""
    known = checkpoint.namespace == MEGATRON or (
        sample.is_known_model and sample.format != "gguf"
    )  # its rotary scaling
    return None if known else ((UsageError, NotFoundError, LossError), None)


def unknown_to_pipelines(sample: Declaration, checkpoint: Checkpoint) -> Refusal | None:
    """Return the refusal, if any: Megatron-DeepSpeed has no place for query and key norms."""
    if any(fqn.endswith("q_norm.weight") for fqn, _ in checkpoint.tensors) and sample.is_known_model:
        return (LossError,), "no place"
    return unknown_to_megatron(sample, checkpoint)


def without_an_adapter(sample: Declaration, _: Checkpoint) -> Refusal | None:
    """Return the refusal, if any: only a PEFT model has an adapter and its config."""
    words = "no LoRA adapter|no adapter_config.json"
    return None if sample.format == "peft" else ((UsageError, NotFoundError), words)


def with_an_adapter(_: Declaration, checkpoint: Checkpoint) -> Refusal | None:
    """Return the refusal, if any: a transformers folder can't hold a PEFT-wrapped model."""
    wrapped = any(fqn.startswith("base_model.model.") for fqn, _ in checkpoint.tensors)
    return ((UsageError,), "ckpt merge-lora") if wrapped else None


def empty_parameters(_: Declaration, checkpoint: Checkpoint) -> Refusal | None:
    """Return the refusal, if any: stage 3 has no place for a parameter without elements."""
    empty = any(not tensor.numel for tensor in checkpoint.with_role(WEIGHT))
    return ((LossError,), "empty parameters") if empty else None


def without_an_order(sample: Declaration, checkpoint: Checkpoint) -> Refusal | None:
    """Return the refusal, if any: HF Trainer numbers its optimizer states in the architecture's order."""
    if not checkpoint.state.param_groups:
        return (UsageError,), "no optimizer"
    known = checkpoint.namespace == MEGATRON or sample.is_known_model
    return None if known else ((LossError,), "parameter order is unknown")


# -- other containers --------------------------------------------------------------------------------------------
#: Three tensors with one size and one with another. Equal placement in a container must not merge tensors.
ALIKE = ("layers.0.weight", "layers.1.weight", "layers.2.weight", "head.weight")


def alike() -> dict[str, torch.Tensor]:
    import torch

    torch.manual_seed(0)
    return {fqn: torch.randn(2 if fqn == "head.weight" else 6, 40) for fqn in ALIKE}


def saved_by_dcp(make: Callable[[Path], object], *, is_nested: bool = True) -> Callable[[Path], tuple[Path, Tensors]]:
    """Return a function that saves with torch's `dcp.save` through the storage writer from `make`."""

    def save(folder: Path) -> tuple[Path, Tensors]:
        import torch.distributed.checkpoint as dcp

        weights = alike()
        state = {"model": weights} if is_nested else weights
        dcp.save(state, storage_writer=make(folder / "step-1"), no_dist=True)  # type: ignore[arg-type]
        return folder / "step-1", {(fqn, WEIGHT): raw(t) for fqn, t in weights.items()}

    return save


def in_safetensors(folder: Path) -> object:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat

    return FileSystemWriter(folder, serialization_format=SerializationFormat.SAFETENSORS)


def in_shards(folder: Path) -> object:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    return HuggingFaceStorageWriter(str(folder), save_distributed=True)


def in_whole_tensors(folder: Path) -> object:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    places = {fqn: 1 + number % 2 for number, fqn in enumerate(ALIKE)}
    return HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=places)


def saved_by_torch(*, is_zip: bool, is_stream: bool = False) -> Callable[[Path], tuple[Path, Tensors]]:
    """Return a function that saves a state dict with `torch.save`: zip or legacy, to a path or a buffer."""

    def save(folder: Path) -> tuple[Path, Tensors]:
        import io

        import torch

        (folder / "full").mkdir()
        weights, stream = alike(), io.BytesIO()
        path = folder / "full" / "pytorch_model.bin"
        torch.save(weights, stream if is_stream else path, _use_new_zipfile_serialization=is_zip)
        if is_stream:
            path.write_bytes(stream.getvalue())
        return folder / "full", {(fqn, WEIGHT): raw(t) for fqn, t in weights.items()}

    return save


CONTAINERS = [
    Declaration(
        "dcp",
        saved_by_dcp(in_safetensors),
        ("*.distcp", ".metadata"),
        container="safetensors",
        reads_head=(".metadata",),
        is_unchecked_data=True,
    ),
    Declaration(
        "dcp",
        saved_by_dcp(in_safetensors, is_nested=False),
        ("*.distcp", ".metadata"),
        container="safetensors-of-a-model-alone",
        reads_head=(".metadata",),
        is_unchecked_data=True,
    ),
    Declaration(
        "dcp", saved_by_dcp(in_shards, is_nested=False), ("shard-*",), container="shards", is_unchecked_data=True
    ),
    Declaration(
        "hf",
        saved_by_dcp(in_whole_tensors, is_nested=False),
        ("model-*.safetensors",),
        container="of-torch",
        is_unchecked_data=True,
    ),
    Declaration(
        "torch-checkpointing",
        saved_by_torch_checkpointing("step-3"),
        ("model_*.safetensors", "optimizer_*.pt"),
        container="safetensors",
        reads_head=("metadata.pkl",),
        is_unchecked_data=True,
    ),
    Declaration("full", saved_by_torch(is_zip=False), ("*.bin",), container="old-file", is_unchecked_data=True),
    Declaration("full", saved_by_torch(is_zip=True, is_stream=True), ("*.bin",), container="stream"),
]

#: Samples that need several processes.
SLOW = (pytest.mark.slow,)

DECLARATIONS = [
    *(
        Declaration(
            f"zero{stage}",
            from_fixture(f"toy-zero{stage}"),
            ("*/*_optim_states.pt", "*/*_model_states.pt"),
            is_sharded=True,
            adds_states=True,
            **({"refuses": empty_parameters} if stage == 3 else {}),
        )
        for stage in (1, 2, 3)
    ),
    Declaration("zero0", from_fixture("toy-zero0"), ("*/*_model_states.pt",)),
    Declaration("universal", converted_by_deepspeed, ("*/*_model_states.pt", "*/zero/*/exp_avg.pt"), adds_states=True),
    Declaration(
        "megatron",
        saved_by_megatron,
        ("*/*/model_optim_rng.pt", "*/*/distrib_optim.pt"),
        marks=SLOW,
        refuses=unknown_to_megatron,
    ),
    Declaration(
        "megatron-dist",
        from_fixture("megatron-dist-flattened"),
        ("iter_0000002/.metadata", "iter_0000002/common.pt", "iter_0000002/__*_*.distcp"),
        reads_head=(".metadata",),  # the first names distinguish Megatron's checkpoints
        refuses=unknown_to_megatron,
    ),
    Declaration(
        "megatron-deepspeed",
        saved_by_pipeline,
        ("*/layer_*-model_states.pt", "*/mp_rank_*_model_states.pt", "*/*_optim_states.pt"),
        marks=SLOW,
        refuses=unknown_to_pipelines,
    ),
    Declaration(
        "dcp",
        from_fixture("dcp-fsdp2"),
        ("step-2/__*_0.distcp", "step-2/.metadata"),
        reads_head=(".metadata",),
        is_sharded=True,
    ),
    Declaration(
        "torch-checkpointing",
        saved_by_torch_checkpointing("step-2"),
        ("model_*.pt", "optimizer_*.pt"),
        reads_head=("metadata.pkl",),
        is_sharded=True,
    ),
    Declaration("full", gathered_by_torch, ("pytorch_model_fsdp.bin",)),
    Declaration(
        "fsdp-ranks", saved_by_ranks, ("model_world_size_2_rank_*.pt", "optim_world_size_2_rank_*.pt"), is_sharded=True
    ),
    Declaration(
        "trainer",
        saved_by_trainer,
        ("model.safetensors", "optimizer.pt"),
        is_unchecked_data=True,
        is_known_model=True,
        refuses=without_an_order,
    ),
    Declaration(
        "hf",
        saved_by_transformers,
        ("model-*.safetensors",),
        is_unchecked_data=True,
        is_known_model=True,
        refuses=with_an_adapter,
    ),
    Declaration(
        "peft", saved_by_peft, ("adapter_model.safetensors",), is_unchecked_data=True, refuses=without_an_adapter
    ),
    Declaration(
        "gguf",
        written_by_llama_cpp,
        ("model.gguf",),
        is_unchecked_data=True,
        is_known_model=True,
        refuses=unknown_to_llama_cpp,
    ),
]
