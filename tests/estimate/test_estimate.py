"""Estimated counts against transformers, and states against real ranks.

`ckpt/commands/estimate/table.py`, `memory.py`, `activations.py`, `text.py`, `command.py`, `options.py`,
`ckpt/state/parameters.py`, `converters/names/parameters.py`: the modules under test.
"""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from ckpt.base.words import on_command_line
from ckpt.commands.estimate import activations
from ckpt.commands.estimate import table as sizing
from ckpt.commands.estimate.memory import Memory, estimate, megatron
from ckpt.commands.estimate.setup import (
    DDP,
    FSDP1,
    FSDP2,
    FSDP2_OFFLOAD,
    MEGATRON,
    STRATEGIES,
    ZERO1,
    ZERO2,
    ZERO2_OFFLOAD,
    ZERO3,
    ZERO3_OFFLOAD,
    ZERO3_OFFLOAD_ALL,
    Setup,
    ZeroOptions,
)
from ckpt.errors import UsageError
from ckpt.state.parameters import Model, flops_per_token, num_elements
from converters.names.parameters import in_memory, megatron_stages
from converters.names.transformers import transformers_source
from tests.estimate.models import LLM_JP_13B, PUBLIC
from tests.support.commands import ckpt, process
from tests.support.engines import launch
from tests.support.pages import row_differs
from tests.support.places import REPOSITORY
from train.config import ARCHITECTURES
from train.models import sizes_of

GB = 10**9

LLAMA = PUBLIC["Llama-3-8B"][1]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


# -- parameters ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PUBLIC)
def test_public_models_have_as_many_parameters(name: str) -> None:
    count, config = PUBLIC[name]
    assert num_elements(in_memory(config).parameters) == count
    (stage,) = megatron_stages(config, tp=1, pp=1, vocab_multiple=1)
    assert num_elements(stage.parameters) == count


@pytest.mark.parametrize("model", [name + wide for name in ARCHITECTURES for wide in ("", "_wide")])
def test_shapes_and_adapters_are_those_of_transformers_and_peft(model: str) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model.removesuffix("_wide"), **sizes_of(model))
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(config)
    ours = in_memory(config.to_dict())
    assert Counter(p.shape for p in ours.parameters) == Counter(tuple(p.shape) for p in real.parameters())

    wrapped = get_peft_model(real, LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapters = sum(p.numel() for name, p in wrapped.named_parameters() if ".lora_" in name)
    setup = Setup(1, dtype="fp32", lora_rank=3)
    assert estimate(ours, DDP, setup).gradients == 4 * adapters


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("qwen2", {"attention_bias": False}),  # its class ignores this option
    ],
)
def test_biases_are_counted_where_transformers_has_them(model: str, more: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model, **{**sizes_of(model), **more})
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(config)
    ours = in_memory(config.to_dict())
    assert Counter(p.shape for p in ours.parameters) == Counter(tuple(p.shape) for p in real.parameters())


def test_ranks_of_megatron_hold_the_whole_between_them() -> None:
    count, config = PUBLIC["Qwen3-30B-A3B"]
    whole = num_elements(megatron_stages(config, tp=1, pp=1, vocab_multiple=1)[0].parameters)
    stages = megatron_stages(config, tp=1, pp=4, ep=8, vocab_multiple=1)
    assert whole == count
    experts = sum(p.numel for stage in stages for p in stage.parameters if p.kind == "expert")
    others = sum(p.numel for stage in stages for p in stage.parameters if p.kind != "expert")
    assert 8 * experts + others == count
    with pytest.raises(UsageError, match="heads do not divide"):
        megatron_stages(config, tp=8, pp=1)


def test_an_architecture_without_a_table_is_asked_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "granite", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "pad_token_id": 0}
    found = in_memory(config)
    assert num_elements(found.parameters) == 2 * 50 * 64 + 64 + 2 * (64 * (64 + 64) + 64 * 64 + 3 * 64 * 96 + 2 * 64)
    assert {p.layer for p in found.parameters} == {None, 0, 1}
    assert not found.blocks
    assert not in_memory({**config, "model_type": "phi3"}).blocks  # it has a table, and its activations are not known
    monkeypatch.setattr(transformers_source, "package", lambda: None)
    with pytest.raises(UsageError, match="unknown without transformers"):
        in_memory(config)


# -- activations ---------------------------------------------------------------------------------------------
_MATRICES = {"hidden_size": 64, "head_dim": 16}  # sizes supported by transformers' experts on CPUs
SAVED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gpt2": {},
    "gpt_neox": {},
    "qwen3_moe": {**_MATRICES, "moe_intermediate_size": 48, "mlp_only_layers": []},
}


def saved_bytes(model: str, layers: int, tokens: tuple[int, int], attention: str) -> tuple[int, dict[str, Any]]:
    """Return the bytes autograd saves in a forward pass of transformers' model, without parameters, and the config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    number = {"n_layer" if model == "gpt2" else "num_hidden_layers": layers}
    config = AutoConfig.for_model(model, **sizes_of(f"{model}_wide") | SAVED[model] | number)
    real = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*real.parameters(), *real.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            saved[tensor.untyped_storage().data_ptr()] = tensor  # kept, so that no other storage reuses its address
        return tensor

    ids = torch.randint(0, config.vocab_size, tokens)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = real(input_ids=ids, labels=ids).loss
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values()), config.to_dict()


@pytest.mark.parametrize(
    ("model", "attention"),
    [
        *((model, "sdpa") for model in SAVED),
        ("llama", "eager"),
        ("qwen3", "eager"),
        ("gpt_neox", "eager"),
        ("gpt2", "eager"),
    ],
)
def test_activations_of_a_layer_are_what_autograd_saves(model: str, attention: str) -> None:
    (few, _), (many, config) = (saved_bytes(model, layers, (2, 32), attention) for layers in (1, 3))
    predicted = activations.per_token(in_memory(config).blocks[0], 2, 32 if attention == "eager" else 0)
    assert (many - few) / 2 / 64 == pytest.approx(predicted, abs=1)  # an offset for each expert, and not each token


def test_activations_of_the_paper() -> None:
    """Korthikanti et al. 2022: 34 sbh bytes per GPT layer without the scores; two are dropout masks."""
    config = {"model_type": "gpt2", "n_embd": 1024, "n_head": 16, "n_layer": 4, "n_positions": 2048, "vocab_size": 512}
    blocks = in_memory(config).blocks
    found = activations.megatron(blocks, 1, 1024, 0, Setup(length=2048), 1, False)
    lse = 4 * 16 * 2048 * 4  # fused attention keeps one number per head instead of scores
    assert found.kept - lse == (34 - 2) * 2048 * 1024 * 4
    assert found.checkpointed == 2 * 2048 * 1024 * 4 + found.kept // 4
    halves = activations.megatron(blocks, 1, 1024, 0, Setup(length=2048), 2, False)
    assert halves.kept == found.kept // 2
    # Section 4.2.1: without sequence parallelism, 10 sbh (8 here, without dropout) are on every rank.
    whole = activations.megatron(blocks, 1, 1024, 0, Setup(length=2048, sequence_parallel=False), 2, False)
    assert whole.kept - halves.kept == 4 * (8 * 2048 * 1024) // 2
    assert whole.checkpointed - halves.checkpointed == (4 * 2 * 2048 * 1024 + 8 * 2048 * 1024) // 2
    # Section 5: scores take 5 as/h of 34 + 5 as/h (without dropout 2). Selective recomputation drops them all.
    eager = activations.megatron(blocks, 1, 1024, 0, Setup(length=2048, eager_attention=True), 1, False)
    assert eager.kept - found.kept + lse == 4 * 2 * 16 * 2048 * 2048
    selective = Setup(length=2048, eager_attention=True, recompute=("core_attn",))
    assert activations.megatron(blocks, 1, 1024, 0, selective, 1, False).kept == found.kept - lse


def peak_bytes(checkpointing: bool, vocabulary: int) -> tuple[int, activations.Activations]:
    """Return the peak allocation of forward and backward pass, without parameters and gradients, and the estimate."""
    from torch.profiler import ProfilerActivity, profile
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", **sizes, num_hidden_layers=8, vocab_size=vocabulary)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(0, vocabulary, (2, 128))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    setup = Setup(batch=ids.shape[0], length=ids.shape[1])
    return most, activations.transformers(in_memory(config.to_dict()).blocks, vocabulary, setup)


@pytest.mark.parametrize("vocabulary", [100, 4000])
def test_the_peak_of_a_step_is_as_estimated(vocabulary: int) -> None:
    """With a small vocabulary the layers set the peak, with a large one the loss does."""
    most, found = peak_bytes(False, vocabulary)
    assert most == pytest.approx(found.kept, rel=0.03)
    most, found = peak_bytes(True, vocabulary)
    assert most == pytest.approx(found.checkpointed, rel=0.03)


# -- states, by the published formulas -----------------------------------------------------------------------
def test_states_are_those_of_the_zero_paper() -> None:
    """Rajbhandari et al. 2020, figure 1: 16 bytes per parameter. The stages divide 12, 14 and all 16."""
    model = in_memory(LLAMA)
    count, ranks = num_elements(model.parameters), 64
    setup = Setup(ranks)
    expected = {ZERO1: 4 + 12 / ranks, ZERO2: 2 + 14 / ranks, ZERO3: 16 / ranks}
    for strategy, each in expected.items():
        found = estimate(model, strategy, setup).states
        # zero2 keeps whole gradients: here the output layer's
        assert found - 2 * 128256 * 4096 * (strategy == ZERO2) == pytest.approx(each * count, rel=0.004), strategy
    assert estimate(model, DDP, setup).states == 16 * count
    assert estimate(model, DDP, replace(setup, mixed=False)).states == 8 * count
    assert estimate(model, DDP, replace(setup, optimizer="sgd")).states == 8 * count
    assert estimate(model, DDP, replace(setup, optimizer="lion")).states == 12 * count


def test_states_are_those_of_megatrons_document() -> None:
    """Megatron-LM, docs distributed optimizer: 18 bytes in bf16 with float32 gradients, 6 + 12/d with it."""
    model = in_memory(LLAMA)
    count = num_elements(model.parameters)
    stages = megatron_stages(LLAMA, tp=1, pp=1)
    found = megatron(stages, model.blocks, model.vocabulary, Setup(8, distributed_optimizer=False), 1)
    assert found.states == 18 * count
    found = megatron(stages, model.blocks, model.vocabulary, Setup(8), 1)
    assert found.states == pytest.approx((6 + 12 / 8) * count, rel=1e-5)


def allocated(action: Callable[[], Any]) -> tuple[Any, int]:
    """Return `action`'s result, and the bytes it allocated and kept."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = action()
    events = profiled.profiler.kineto_results.events()
    return result, sum(event.nbytes() for event in events if event.name() == "[memory]")


def test_buckets_of_ddp_are_as_large_as_the_gradients() -> None:
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(3)))
        # Skip the first broadcast: another thread frees its copies at an unknown time.
        wrapped, buckets = allocated(lambda: torch.nn.parallel.DistributedDataParallel(model, init_sync=False))
        _, gradients = allocated(lambda: wrapped(torch.ones(1, 300)).sum().backward())
        wrapped = None  # as the group's last holder it could deadlock: it waits for a thread that may need the GIL
    finally:
        distributed.destroy_process_group()
    assert buckets == gradients == 4 * sum(parameter.numel() for parameter in model.parameters())


def test_offload_moves_states_to_the_host() -> None:
    model, setup = in_memory(LLAMA), Setup(4)
    for plain, offloaded in ((ZERO2, ZERO2_OFFLOAD), (ZERO3, ZERO3_OFFLOAD), (FSDP2, FSDP2_OFFLOAD)):
        before, after = estimate(model, plain, setup), estimate(model, offloaded, setup)
        assert after.masters == after.optimizer == after.gradients == 0
        assert after.host >= before.masters + before.optimizer
    assert estimate(model, ZERO3_OFFLOAD_ALL, setup).parameters == 0


@pytest.mark.parametrize("shape", [(64, 64), (4096, 1024), (100, 33)])
def test_four_bit_weights_are_as_large_as_those_of_bitsandbytes(shape: tuple[int, int]) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    data, state = functional.quantize_4bit(torch.randn(shape), quant_type="nf4", compress_statistics=True)
    parts = (data, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
    real = sum(part.numel() * part.element_size() for part in parts)
    setup = Setup(1, lora_rank=1, quantized=True)
    linear = replace(next(p for p in in_memory(LLAMA).parameters if p.kind == "linear"), shape=shape)
    found = estimate(Model("one", (linear,), (), 0, 0), DDP, setup)
    assert found.parameters - found.gradients == real


# -- the command ---------------------------------------------------------------------------------------------
def test_the_table_of_an_8b_model_on_4_gpus(llama: Path) -> None:
    done = ckpt("estimate", llama, "--gpus", "4")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == f"{llama}: llama, 8,030,261,248 parameters"
    rows = {line[:20].strip(): line.split()[-1] for line in lines[4:20]}
    assert max(len(line) for line in lines[1:]) <= 80
    assert list(rows)[:10] == list(STRATEGIES[:10])
    assert {name for name in rows if name.startswith("megatron")} == {f"megatron tp {tp} pp 1" for tp in (1, 2, 4)}
    assert {"ddp lora 16", "zero3 lora 16", "ddp lora 16 qlora"} <= set(rows)
    assert (rows["ddp"], rows["zero3"], rows["zero1"]) == ("no", "yes", "yes*")
    said = [line for line in lines if line.startswith("suggestion: ")]
    assert said[0].startswith("suggestion: fsdp2, data parallel 4: ")
    assert said[1].startswith("suggestion: with Megatron: megatron tp 2 pp 1, data parallel 2: ")


def test_the_document_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (_, config) in PUBLIC.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    document = (REPOSITORY / "docs" / "estimate.md").read_text()
    blocks = re.findall(r"^    \$ ckpt (estimate .*)\n((?:    .*\n|\n(?=    ))+)", document, re.MULTILINE)
    blocks = [(command, shown) for command, shown in blocks if "    ..." not in shown]  # tests/docs runs the others
    assert len(blocks) == 1
    for command, shown in blocks:
        assert ckpt(*command.split()).out == textwrap.dedent(shown)


def test_no_framework_is_imported(llama: Path) -> None:
    script = """
import sys
from ckpt.cli import app
try:
    app(sys.argv[1:])
except SystemExit as stop:
    assert not stop.code, stop.code
assert not {"torch", "transformers", "numpy", "huggingface_hub"} & set(sys.modules)
"""
    done = process("estimate", llama, "--gpus", "8", script=script)
    assert done.code == 0, done.err


def test_json_has_bytes(llama: Path) -> None:
    words = ["--gpus", "8", "--strategy", "zero3", "--strategy", "ddp", "--json"]
    done = ckpt("estimate", llama / "config.json", *words)
    content = json.loads(done.out)
    assert [row["strategy"] for row in content["rows"]] == ["zero3", "ddp"]
    for row in content["rows"]:
        states = sum(row[kind] for kind in ("parameters", "gradients", "optimizer", "masters"))
        assert row["total"] == states + max(row["gathered"] + row["buffers"] + row["activations"], row["step"])
        assert row["fits"] == (row["total"] <= 0.9 * content["gpu_memory"])
    assert content["parameters"] == 8_030_261_248


def suggestions(config: dict[str, Any], setup: Setup, memory: int, **axes: int) -> tuple[str, ...]:
    return sizing.size(sizing.Subject("model", in_memory(config), config), setup, memory, **axes).suggestions


def test_suggestions_go_from_data_to_tensor_to_pipeline_parallelism() -> None:
    small = {**LLAMA, "num_hidden_layers": 2, "vocab_size": 1000}
    (plain, over) = suggestions(small, Setup(4), 80 * GB)
    assert plain.startswith("ddp, data parallel 4:")
    assert over.startswith("with Megatron: megatron tp 1 pp 1, data parallel 4:")
    (sharded, _) = suggestions(LLAMA, Setup(4, length=512), 80 * GB)
    assert sharded.startswith("zero1, data parallel 4:")
    # A model too large for tensor parallelism in one node is cut into stages.
    large = {
        **LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
    }
    (sharded, over) = suggestions(large, Setup(32), 80 * GB)
    assert sharded.startswith("fsdp2 with activation checkpointing, data parallel 32:")
    assert over.startswith("with Megatron: megatron tp 8 pp 2, data parallel 2:")


def test_checkpointing_and_larger_data_parallelism_come_before_tensor_parallelism() -> None:
    """On 90 GB, tensor parallel size 2 fits without checkpointing, and the whole model fits with it."""
    rows = sizing.size(sizing.Subject("8B", in_memory(LLAMA), LLAMA), Setup(4), 90 * GB, [MEGATRON])
    assert rows.suggestions == (
        "with Megatron: megatron tp 1 pp 1 with activation checkpointing, data parallel 4: "
        "78.7 GB of 90.0 GB on each GPU",
    )
    (_, more) = suggestions(LLAMA, Setup(2), 40 * GB)  # on 6 GPUs Megatron fits without checkpointing
    assert more.startswith("on 6 GPUs: fsdp2 with activation checkpointing, data parallel 6: ")


def test_offloading_and_lora_come_before_tensor_parallelism() -> None:
    """On 8 GPUs with 24 GB an 8B model fits with offloading, LoRA, or tensor parallel size 8."""
    first, over = suggestions(LLAMA, Setup(8), 24 * GB)
    offloaded, _, lora = first.partition("; or with fewer trained parameters: ")
    assert offloaded.startswith("zero3-offload with activation checkpointing, data parallel 8: ")
    assert lora.startswith("zero3 lora 16 with activation checkpointing, data parallel 8: ")
    assert over.startswith("with Megatron: megatron tp 8 pp 1, data parallel 1: ")
    # Neither is suggested if data parallelism fits, or if the user asked for only some strategies.
    assert not any("lora" in one or "offload" in one for one in suggestions(LLAMA, Setup(8), 80 * GB))
    subject = sizing.Subject("8B", in_memory(LLAMA), LLAMA)
    assert sizing.size(subject, Setup(8), 24 * GB, [MEGATRON]).suggestions == (over,)


def test_fewer_tokens_are_suggested_only_where_all_else_would_fit() -> None:
    """States take 16, 16 and 32 GB on one 40 GB GPU: no length helps, but sharding does."""
    (ddp,) = sizing.size(
        sizing.Subject("8B", in_memory(LLAMA), LLAMA), Setup(1, mixed=False, length=1), 40 * GB, [DDP]
    ).suggestions
    assert "nothing fits on up to 4096 such GPUs: without any activations it is 64.2 GB of 40.0 GB" in ddp
    assert "sharding these states helps: on 3 GPUs: fsdp2, data parallel 3: " in ddp and "seq_len" not in ddp
    (other,) = suggestions(LLAMA, Setup(1, offload_optimizer="cpu", offload_params="cpu"), GB // 2)
    assert "seq_len" not in other and "LoRA (lora_r), optimizer='adamw_8bit' or larger GPUs" in other
    assert "LoRA (--lora-r), --optimizer adamw_8bit or larger GPUs" in on_command_line(other)
    for named in ([MEGATRON], [ZERO3, FSDP2]):
        subject = sizing.Subject("8B", in_memory(LLAMA), LLAMA)
        (longer,) = sizing.size(subject, Setup(8, length=1 << 24, mixed=False), 80 * GB, named).suggestions
        assert longer.endswith("a shorter seq_len or a smaller batch_size helps"), longer
        assert on_command_line(longer).endswith("a shorter --seq-len or a smaller --batch-size helps")


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "gpt2"])
def test_flops_are_those_that_torch_counts(model_type: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    if model_type == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    if model_type == "gpt2":
        sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    config = AutoConfig.for_model(model_type, **sizes)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **eager)
    tokens = torch.randint(0, 64, (2, 16))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    described = in_memory(config.to_dict())
    assert flops_per_token(described, 16) == counter.get_total_flops() / tokens.numel()
    assert flops_per_token(replace(described, blocks=()), 16) is None


def test_where_nothing_fits_offload_and_more_gpus_are_suggested() -> None:
    offloaded, more = suggestions(LLAMA, Setup(1), 48 * GB)
    assert offloaded.startswith("fsdp2-offload, data parallel 1:")
    assert "of host memory for each" in offloaded
    assert more.startswith("on 4 GPUs: ")
    (nothing,) = suggestions(PUBLIC["DeepSeek-V3"][1], Setup(1), GB // 2)
    assert nothing.startswith("nothing fits on up to")


def test_what_was_asked_for_is_looked_for_on_more_gpus() -> None:
    subject = sizing.Subject("13B", in_memory(LLM_JP_13B), LLM_JP_13B)
    (more,) = sizing.size(subject, Setup(2), 80 * GB, [ZERO2]).suggestions
    assert more.startswith("on 6 GPUs: zero2 with activation checkpointing, data parallel 6: 64.6 GB")
    fits, nothing_else = sizing.size(subject, Setup(2), 24 * GB, [DDP, ZERO3_OFFLOAD]).suggestions
    assert fits.startswith("zero3-offload with") and nothing_else.startswith("nothing else fits on up to 4096")


def test_lora_and_its_targets(llama: Path) -> None:
    model = in_memory(LLAMA)
    chosen = Setup(1, lora_rank=8, lora_targets=("q_proj", "v_proj"))
    assert estimate(model, DDP, chosen).gradients == 4 * 32 * 8 * (4096 + 4096 + 4096 + 1024)
    done = ckpt("estimate", llama, "--lora-r", "8", "--qlora", "--lora-target-modules", "q_proj,v_proj", "--json")
    rows = {row["strategy"]: row for row in json.loads(done.out)["rows"]}
    assert rows["ddp"]["gradients"] == estimate(model, DDP, chosen).gradients
    assert all(row["lora"] == 8 and row["qlora"] for row in rows.values())
    assert ckpt("estimate", llama, "--lora-r", "8", "--lora-target-modules", "query").code == 2


def test_a_checkpoint_without_a_config(tmp_path: Path) -> None:
    tensors = {f"layers.{n}.weight": torch.zeros(8, 4) for n in range(3)} | {"scale": torch.zeros(5)}
    save_file(tensors, tmp_path / "model.safetensors")
    done = ckpt("estimate", tmp_path, "--json")
    assert done.code == 0, done.err
    assert "there is no config.json" in done.err
    content = json.loads(done.out)
    assert content["parameters"] == 3 * 32 + 5
    assert all(row["activations"] is None and row["strategy"] != "megatron" for row in content["rows"])


def test_sharded_checkpoints_are_models_too(fixtures: Path) -> None:
    folders = [path for path in sorted(fixtures.iterdir()) if path.name.startswith(("zero", "dcp", "megatron"))]
    assert folders
    for folder in folders:
        run = folder / "run" if (folder / "run").is_dir() else folder  # other models are beside it
        done = ckpt("estimate", run, "--gpus", "2", "--json")
        if "the folder has several runs" in done.err:  # folders with several samples
            continue
        assert done.code == 0, (folder, done.err)
        assert json.loads(done.out)["parameters"] > 0


def test_a_lora_run_is_its_model(fixtures: Path, tmp_path: Path) -> None:
    """It is not listed as a model and its adapter: tables have lines for LoRA training anyway."""
    run = shutil.copytree(fixtures / "lora-zero3", tmp_path / "run")
    for config in run.rglob("config.json"):
        config.unlink()
    with_config, without = (ckpt("estimate", path, "--json") for path in (fixtures / "lora-zero3", run))
    assert "a LoRA run" in without.err and "there is no config.json" in without.err
    assert json.loads(without.out)["parameters"] == json.loads(with_config.out)["parameters"]


# -- states, by the ranks' real memory -----------------------------------------------------------------------
RANKS = 4
BUFFERS = ZeroOptions(reduce_bucket_size=100_000, param_persistence_threshold=40)  # the trainer's own values
TITLE = "bytes that the fullest of 4 ranks holds: estimated, and measured where that differs"
_OPTIMIZER, _PARAMS = ({f"offload_{what}": {"device": "cpu"}} for what in ("optimizer", "param"))
_BF16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
#: Changes to the trainer's DeepSpeed config, by run name.
DS_CONFIGS: dict[str, dict[str, Any]] = {
    "offload-optimizer": {"zero_optimization": _OPTIMIZER},
    "offload-params": {"zero_optimization": _PARAMS},
    "offload-all": {"zero_optimization": _OPTIMIZER | _PARAMS},
    "bf16-states": {"bf16": _BF16},
}
HALF = {"master_dtype": "bf16", "state_dtype": "bf16"}

#: Strategy, additional trainer options, and the estimate's options.
RUNS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (DDP, {}, {}),
    (ZERO1, {"accumulate": 2}, {}),
    (ZERO2, {"accumulate": 2}, {}),
    (ZERO1, {"ds_config": "offload-optimizer"}, {"offload_optimizer": "cpu"}),
    (ZERO2_OFFLOAD, {"ds_config": "offload-optimizer"}, {}),
    (ZERO2, {"ds_config": "bf16-states"}, HALF),
    (ZERO3, {}, {}),
    (ZERO3, {"dtype": "fp32", "optimizer": "momentum"}, {"dtype": "fp32", "optimizer": "momentum"}),
    (ZERO3, {"lora": 3}, {"lora_rank": 3}),
    (ZERO3_OFFLOAD_ALL, {"ds_config": "offload-all"}, {}),
    (ZERO3, {"ds_config": "offload-params"}, {"offload_params": "cpu"}),
    (ZERO3, {"ds_config": "bf16-states"}, HALF),
    (FSDP1, {}, {}),
    (FSDP2, {}, {}),
    (FSDP2, {"model": "qwen3_moe"}, {}),
    (FSDP2, {"lora": 3, "precision": "pure"}, {"lora_rank": 3, "mixed": False}),
]
MEGATRON_RUNS: list[dict[str, Any]] = [
    {"model": "llama_wide", "tp": 2, "pp": 2},
    {"model": "qwen3_moe_wide", "tp": 1, "pp": 2, "ep": 2, "etp": 1},
]


def title(strategy: str, options: dict[str, Any]) -> str:
    shown = [f"{k} {v}" for k, v in options.items() if k != "ds_config"]
    if "ds_config" in options and "-" not in strategy:
        shown.append(options["ds_config"])
    return " ".join([strategy, *shown])


def tiny(model: str) -> dict[str, Any]:
    from transformers import AutoConfig

    architecture = model.removesuffix("_wide")
    config: dict[str, Any] = AutoConfig.for_model(architecture, **sizes_of(model)).to_dict()
    return config


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Return the fullest rank's memory for each run, by kind."""
    folder = tmp_path_factory.mktemp("memory")
    jobs = []
    common = {"steps": 2, "weight_decay": 0.0, "length": 8}
    for strategy, options, _ in RUNS:
        options = dict(options)
        job = {
            "model": "llama",
            "strategy": strategy.partition("-")[0],
            "output": str(folder / title(strategy, options)),
        }
        if "ds_config" in options:
            path = folder / f"{options['ds_config']}.json"
            path.write_text(json.dumps(DS_CONFIGS[options["ds_config"]]))
            options["ds_config"] = str(path)
        jobs.append(common | job | options)
    for options in MEGATRON_RUNS:
        job = {"strategy": "megatron", "output": str(folder / title("megatron", options)), "batch": 8}
        jobs.append(common | job | options)
    launch(jobs, RANKS, folder, "tests.estimate.held_memory")
    found = {}
    for job in jobs:
        report = json.loads((Path(job["output"]) / "memory.json").read_text())
        assert len(report) == RANKS
        found[Path(job["output"]).name] = max(report, key=lambda rank: sum(rank.values()))
    return found


def show(tables: Any, name: str, found: Memory, real: dict[str, int]) -> None:
    """Record estimates, with different measured sizes in brackets, like docs/estimates.txt."""

    def cell(predicted: int, measured: int | None) -> str:
        return f"{predicted:,}" + ("" if measured in (None, predicted) else f" ({measured:,})")

    row, kinds = tables[TITLE][name], ("parameters", "gradients", "masters", "optimizer", "buffers")
    for kind in kinds:
        measured = real[kind] if not found.host and (kind != "buffers" or real[kind]) else None
        row[kind] = cell(getattr(found, kind), measured)
    if found.host:
        row["host"] = f"{found.host:,}"
        row["sum"] = cell(found.states + found.buffers + found.host, sum(real.values()))
    different = row_differs((REPOSITORY / "docs" / "estimates.txt").read_text(), name, row)
    assert not different, different


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "options", "told"), RUNS, ids=[title(s, o) for s, o, _ in RUNS])
def test_ranks_hold_what_is_estimated(
    strategy: str, options: dict[str, Any], told: dict[str, Any], ranks: dict[str, dict[str, int]], tables: Any
) -> None:
    setup = replace(Setup(RANKS, zero=BUFFERS), **told)
    found = estimate(in_memory(tiny(options.get("model", "llama"))), strategy, setup)
    real = ranks[title(strategy, options)]
    show(tables, title(strategy, options), found, real)
    if found.host:  # on CPUs the one memory is the other
        assert sum(real.values()) == found.states + found.buffers + found.host
        return
    assert real["parameters"] == found.parameters
    assert real["gradients"] == found.gradients
    assert real["masters"] == found.masters
    if strategy == FSDP1:  # no state for the padding between parameters (up to 7 elements each)
        assert 0 <= found.optimizer - real["optimizer"] <= 8 * 7 * 21
    else:
        assert real["optimizer"] == found.optimizer
    if strategy.startswith("zero"):
        assert real["buffers"] == found.buffers


@pytest.mark.slow
@pytest.mark.parametrize("options", MEGATRON_RUNS, ids=[title("megatron", options) for options in MEGATRON_RUNS])
def test_megatrons_ranks_hold_what_is_estimated(
    options: dict[str, Any], ranks: dict[str, dict[str, int]], tables: Any
) -> None:
    config = tiny(options["model"])
    tp, pp, ep = options["tp"], options.get("pp", 1), options.get("ep", 1)
    setup = Setup(RANKS)
    stages = megatron_stages(config, tp=tp, pp=pp, ep=ep, vocab_multiple=4)
    found = megatron(stages, (), 0, setup, tp, ep)  # without activations: they could make another stage the fullest
    real = ranks[title("megatron", options)]
    show(tables, title("megatron", options), found, real)
    assert real["parameters"] == found.parameters
    assert real["gradients"] == found.gradients
    # Padding in a rank's part of a buffer has neither master nor states: up to 63 elements after each parameter, and up
    # to 127 at the end.
    padding = sum(63 * p.count for stage in stages for p in stage.parameters) + 2 * 127
    assert 0 <= found.masters - real["masters"] <= 4 * padding
    assert real["optimizer"] == 2 * real["masters"]
