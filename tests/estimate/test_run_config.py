"""`ckpt/commands/estimate/run_config.py`, `setup.py`, `ckpt/runs/yaml_files.py`: options read from configs.

`ckpt estimate` reads configs of DeepSpeed, Axolotl, Accelerate and FSDP, and its own options.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt.commands.estimate import deepspeed_settings
from ckpt.commands.estimate.memory import estimate
from ckpt.commands.estimate.run_config import RunConfig, understand
from ckpt.commands.estimate.setup import DDP, FSDP1, FSDP2, MEGATRON, ZERO2, ZERO3, Setup, ZeroOptions
from ckpt.errors import CkptError, UsageError
from ckpt.runs.yaml_files import read_run_config
from converters.names.parameters import in_memory
from tests.estimate.models import PUBLIC
from tests.support.commands import ckpt

LLAMA = PUBLIC["Llama-3-8B"][1]
HIDDEN = 4096

#: From axolotl examples/gpt-oss/gpt-oss-20b-sft-lora-singlegpu.yaml.
GPT_OSS_LORA = """
base_model: openai/gpt-oss-20b
plugins:
  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin
sequence_len: 4096
adapter: lora
lora_r: 8
lora_target_linear: true
micro_batch_size: 1
optimizer: adamw_torch_8bit
bf16: true
gradient_checkpointing: true
activation_offloading: true
"""


def read(tmp_path: Path, text: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(textwrap.dedent(text))
    return understand(read_run_config(path), path, HIDDEN)


def test_axolotl_lora(tmp_path: Path) -> None:
    found = read(tmp_path, GPT_OSS_LORA)
    assert (found.model, found.strategy) == ("openai/gpt-oss-20b", DDP)
    assert Setup(**found.setup) == Setup(
        optimizer="adamw_8bit", mixed=False, lora_rank=8, fused_loss=True, activation_offload=True
    )


def test_axolotl_with_fsdp_deepspeed_and_liger(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        """
        base_model: a/b
        bf16: auto
        optimizer: paged_adamw_8bit
        liger_fused_linear_cross_entropy: true
        context_parallel_size: 4
        fsdp_version: 2
        fsdp_config: {offload_params: true, reshard_after_forward: false}
        """,
    )
    assert found.strategy == FSDP2
    assert Setup(**found.setup) == Setup(
        optimizer="adamw_8bit", fused_loss=True, context_parallel=4, offload_params="cpu", reshard=False
    )
    (tmp_path / "zero3.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    found = read(tmp_path, "{base_model: a/b, fp16: true, deepspeed: zero3.json, adapter: qlora, lora_r: 4}")
    assert found.strategy == ZERO3
    assert Setup(**found.setup) == Setup(dtype="fp16", lora_rank=4, quantized=True)


def test_accelerate(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        """
        distributed_type: FSDP
        mixed_precision: bf16
        num_processes: 12
        fsdp_config: {fsdp_version: 1, fsdp_offload_params: true, fsdp_sharding_strategy: FULL_SHARD}
        parallelism_config: {parallelism_config_cp_size: 2}
        """,
    )
    assert found.strategy == FSDP1
    assert Setup(**found.setup) == Setup(12, context_parallel=2, offload_params="cpu")
    found = read(
        tmp_path,
        """
        distributed_type: DEEPSPEED
        mixed_precision: fp16
        deepspeed_config: {zero_stage: 3, offload_optimizer_device: nvme, offload_param_device: none}
        """,
    )
    assert (found.strategy, Setup(**found.setup)) == (ZERO3, Setup(dtype="fp16", offload_optimizer="nvme"))
    found = read(
        tmp_path,
        """
        distributed_type: MEGATRON_LM
        megatron_lm_config: {megatron_lm_tp_degree: 2, megatron_lm_pp_degree: 3}
        """,
    )
    assert (found.strategy, found.axes) == (MEGATRON, {"tp": 2, "pp": 3})
    found = read(tmp_path, "{fsdp_version: 2, offload_params: true}")
    assert (found.strategy, Setup(**found.setup)) == (FSDP2, Setup(offload_params="cpu"))


def test_deepspeed(tmp_path: Path) -> None:
    """Names have their prefix or not, and transformers replaces "auto"."""
    zero = {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "overlap_comm": True,
        "max_live_parameters": 5e8,
        "param_persistence_threshold": "auto",
        "offload_optimizer": {"device": "nvme", "buffer_count": 5},
        "offload_param": {"device": "cpu"},
    }
    content = {
        "zero_optimization": zero,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        "optimizer": {"type": "AdamW"},
        "train_micro_batch_size_per_gpu": 4,
    }
    found = read(tmp_path, json.dumps(content))
    sizes = ZeroOptions(HIDDEN * HIDDEN, True, 500_000_000, 10 * HIDDEN, optimizer_buffers=5)
    assert (found.strategy, Setup(**found.setup)) == (
        ZERO3,
        Setup(
            optimizer="adamw",
            batch=4,
            zero=sizes,
            master_dtype="bf16",
            state_dtype="bf16",
            offload_optimizer="nvme",
            offload_params="cpu",
        ),
    )
    prefixed = {"stage3_max_live_parameters": 5e8, "stage3_param_persistence_threshold": 7}
    found = read(tmp_path, json.dumps({"zero_optimization": prefixed}))
    assert (found.strategy, found.setup["zero"]) == (
        None,
        ZeroOptions(max_live_parameters=500_000_000, param_persistence_threshold=7),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "not a run config"),
        ("{a: 1}", "not a run config"),
        ("{a: [", "neither YAML nor JSON"),
        ("{base_model: x, optimizer: adafactor}", "unknown optimizer"),
        ("{base_model: x, adapter: lora}", "rank is missing"),
        ("{base_model: x, adapter: llama-adapter}", "support this adapter type"),
        ("{base_model: x, adapter: lora, lora_r: 1, lora_target_modules: .*proj}", "must be a list"),
        ("{base_model: x, adapter: lora, lora_r: 1, load_in_8bit: true}", "support 8-bit weights"),
        ("{base_model: x, tensor_parallel_size: 2}", "only for Megatron"),
        ("{base_model: x, deepspeed: none/here.json}", "DeepSpeed config not found"),
        ("{distributed_type: XLA}", "support this kind of run"),
        ("{distributed_type: FSDP, fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}}", "shards across all GPUs"),
        ("{zero_optimization: {stage: 0}}", "support DeepSpeed without ZeRO"),
        ("{zero_optimization: {stage: 4}}", "unknown ZeRO stage"),
        ("{zero_optimization: {stage: 3, offload_param: {device: tape}}}", "unknown offload device"),
    ],
)
def test_what_is_not_estimated_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CkptError, match=said):
        read(tmp_path, text)


# -- the command ---------------------------------------------------------------------------------------------
@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path / "model"


def rows(*words: Any) -> list[dict[str, Any]]:
    done = ckpt("estimate", *words, "--json")
    assert done.code == 0, done.err
    found: list[dict[str, Any]] = json.loads(done.out)["rows"]
    return found


def test_an_axolotl_config_is_a_model_too(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(GPT_OSS_LORA.replace("openai/gpt-oss-20b", str(llama)))
    (row,) = rows(path)
    assert row == rows(llama, "--run-config", path)[0]
    setup = Setup(optimizer="adamw_8bit", mixed=False, lora_rank=8, fused_loss=True, activation_offload=True)
    assert row["total_checkpointed"] == estimate(in_memory(LLAMA), DDP, setup).total(checkpointing=True)
    # Options override the config.
    (row,) = rows(path, "--strategy", "zero3", "--lora-r", "16", "--gpus", "2")
    assert (row["strategy"], row["lora"]) == ("zero3", 16)
    assert ckpt("estimate", path, "--run-config", path).code == 2


def test_a_deepspeed_config_names_the_strategy(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    zero = {"stage": 2, "reduce_bucket_size": 1e6, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}}
    path.write_text(json.dumps({"zero_optimization": zero}))
    (row,) = rows(llama, "--ds-config", path)
    assert (row["strategy"], row["offload-optimizer"], row["optimizer"]) == ("zero2", "cpu", 0)
    (plain,) = rows(llama, "--strategy", "zero2", "--ds-config", path, "--offload-optimizer", "none")
    assert plain["buffers"] == 4_000_000


def test_a_number_of_memory_is_gigabytes(llama: Path) -> None:
    for text in ("24", "24GB", " 24.0 "):
        done = ckpt("estimate", llama, "--gpu-memory", text, "--json")
        assert json.loads(done.out)["gpu_memory"] == 24 * 10**9


def test_offloaded_rows_fit_80_columns_and_fill_disks(llama: Path) -> None:
    words = ["--gpus", "8", "--offload-optimizer", "nvme", "--offload-param", "nvme"]
    (row,) = rows(llama, *words)
    part = 8_030_261_248 // 8
    # float32 masters, two states and gradients; parameters beyond 1e9 elements stay in the host
    assert row["nvme"] == pytest.approx(16 * part + 2 * (part - 10**9), rel=1e-3)
    assert row["host"] == pytest.approx(2 * part + 4 * 4 * 10**9 + 2 * 10**9 + 2 * 5 * 10**8, rel=1e-3)
    lines = ckpt("estimate", llama, *words).out.splitlines()
    assert max(map(len, lines[1:])) <= 80
    assert lines[3].split()[-2:] == ["nvme", "fits"]


# -- option effects ----------------------------------------------------------------------------------------
def test_offload_of_parameters_alone_leaves_the_optimizer() -> None:
    model = in_memory(LLAMA)
    plain, moved = (estimate(model, ZERO3, Setup(4, offload_params=device)) for device in ("", "cpu"))
    assert (moved.parameters, moved.host) == (0, plain.parameters)
    assert replace(moved, parameters=plain.parameters, host=0) == plain


def test_16_bit_masters_and_states_are_half() -> None:
    model = in_memory(LLAMA)
    for strategy in (ZERO2, ZERO3):
        full = estimate(model, strategy, Setup(4))
        half = estimate(model, strategy, Setup(4, master_dtype="bf16", state_dtype="bf16"))
        assert (2 * half.masters, 2 * half.optimizer, 2 * half.step) == (full.masters, full.optimizer, full.step)
        assert half.parameters == full.parameters


def test_a_fused_loss_makes_no_logits() -> None:
    model, tokens, vocabulary = in_memory(LLAMA), 4096, 128256
    plain, fused = (estimate(model, DDP, Setup(fused_loss=fused)).activations for fused in (False, True))
    assert plain and fused
    chunk, head = 128 * vocabulary, vocabulary * HIDDEN  # 4096 tokens in 32 chunks: same size as the hidden states
    assert plain.kept - fused.kept == tokens * vocabulary * 14 - 2 * (tokens * HIDDEN + chunk + head)
    frozen = estimate(model, DDP, Setup(fused_loss=True, lora_rank=8)).activations
    assert frozen and fused.kept - frozen.kept == 2 * head


def test_offloaded_inputs_of_layers_are_in_the_host() -> None:
    model = in_memory(LLAMA)
    plain, moved = (estimate(model, DDP, Setup(activation_offload=off)).activations for off in (False, True))
    assert plain and moved
    assert moved.host == 30 * 4096 * HIDDEN * 2
    assert plain.checkpointed - moved.checkpointed == moved.host
    assert plain.kept == moved.kept


def test_fsdp_that_does_not_reshard_holds_the_whole_model() -> None:
    model = in_memory(LLAMA)
    found = estimate(model, FSDP2, Setup(8, reshard=False))
    assert found.gathered == 2 * 8_030_261_248


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "lion_8bit", "momentum_8bit"])
def test_8_bit_states_are_as_large_as_those_of_bitsandbytes(optimizer: str) -> None:
    optim = pytest.importorskip("bitsandbytes").optim
    import torch

    kinds = {"adamw_8bit": optim.AdamW8bit, "lion_8bit": optim.Lion8bit, "momentum_8bit": optim.SGD8bit}
    for shape in ((64, 64), (63, 65), (300, 70), (100,)):
        parameter = torch.nn.Parameter(torch.randn(shape))
        parameter.grad = torch.randn(shape)
        made = kinds[optimizer]([parameter], lr=1e-3, **({"momentum": 0.9} if "momentum" in optimizer else {}))
        made.step()
        state = made.state[parameter]
        names = [name for name in state if name.startswith(("state", "absmax"))]  # tables are shared by all
        real = sum(state[name].numel() * state[name].element_size() for name in names)
        assert Setup(optimizer=optimizer).state_bytes(parameter.numel(), 4) == real, shape


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ({"tensor_parallel": {"autotp_size": 8}}, "tensor_parallel"),
        ({"sequence_parallel_size": 4}, "sequence_parallel_size 4"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "data_types"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine"),
        ({"amp": {"enabled": True}}, "amp"),
        ({"nobody_has_heard_of_it": 3}, "nobody_has_heard_of_it 3"),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}},
            "zero_optimization.zero_hpz_partition_size",
        ),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 8}}, "mics_shard_size 8"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights True"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "cpu_offload True"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "offload_optimizer.ratio 0.5"),
        ({"tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 1, "amp": {"enabled": False}}, None),
        ({"hybrid_engine": {"enabled": False, "max_out_tokens": 512}, "train_batch_size": "auto"}, None),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1, "mics_shard_size": -1}}, None),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 1.0}}}, None),
        ({"nobody_has_heard_of_it": None, "zero_optimization": {"nobody_has_heard_of_it": False}}, None),
    ],
    ids=str,
)
def test_a_setting_of_deepspeed_that_is_not_modelled_is_refused(
    content: dict[str, Any], name: str | None, tmp_path: Path
) -> None:
    content = {"zero_optimization": {"stage": 3}, "steps_per_print": 2000, **content}
    if name is None:
        understand(content, tmp_path / "ds_config.json", HIDDEN)
        return
    with pytest.raises(UsageError, match="does not model") as refused:
        understand(content, tmp_path / "ds_config.json", HIDDEN)
    assert name in str(refused.value)


def test_every_setting_of_zero_is_read_harmless_or_refused() -> None:
    """A new release's settings must be sorted."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    refused = {"cpu_offload", "cpu_offload_param", "save_muon_momentum_buffer_in_memory", "zenflow"}
    refused |= {"zero_hpz_partition_size", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"}
    refused |= {"zero_quantized_weights"}
    names = {name.removeprefix("stage3_") for name in DeepSpeedZeroConfig.model_fields}
    for name in names:
        content = {"zero_optimization": {"stage": 3, name: 77}}
        try:
            deepspeed_settings.check(content, Path("ds_config.json"))
        except UsageError:
            assert name in refused, name
        else:
            assert name not in refused, name
