"""Keywords of functions for editors and mypy, by the groups of options in `groups.py`.

`tests/api/test_keywords.py` writes this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal

from typing_extensions import TypedDict

from ckpt.plan.checkpoint import Checkpoint


class PlanningKeywords(TypedDict, total=False):
    tag: str | None
    config: str | PathLike[str] | None
    replica: int | None
    accept_settings: Sequence[str] | None
    complete_from: str | PathLike[str] | Checkpoint | None
    dtype: Literal["keep", "fp32", "bf16", "fp16"]
    dequantize: bool
    quantize: Literal["fp8-block", "fp8-dynamic", "int8", "mxfp4", "nvfp4a16", "f32", "f16", "bf16", "q8_0"] | None
    like: str | PathLike[str] | Checkpoint | None
    optimizer_dtype: Literal["keep", "fp32"]
    max_shard_size: str | int
    world_size: int | None
    max_memory: str | int
    workers: int


class CheckKeywords(TypedDict, total=False):
    check: bool


class WriteOptionsKeywords(TypedDict, total=False):
    manifest: bool
    overwrite: bool
    restart: bool
    verify: bool


class WatchingKeywords(TypedDict, total=False):
    progress: Callable[[int], None] | None
    phase: Callable[[str, int], None] | None
    say: Callable[[str], None] | None
    planned: Callable[[Any], None] | None


class ProcessesKeywords(TypedDict, total=False):
    group: Any


class SidesKeywords(TypedDict, total=False):
    from_a: str
    from_b: str
    tag_a: str | None
    tag_b: str | None
    config: str | PathLike[str] | None
    accept_settings: Sequence[str] | None


class MeasuringKeywords(TypedDict, total=False):
    progress: Callable[[int], None] | None
    expected: Callable[[int], None] | None


class StatedKeywords(TypedDict, total=False):
    strategy: str | Sequence[str] | None
    run_config: str | PathLike[str] | None
    ds_config: str | PathLike[str] | None


class TrainingKeywords(TypedDict, total=False):
    dtype: Literal["bf16", "fp16", "fp32"] | None
    pure: bool
    batch_size: int | None
    seq_len: int | None
    fused_cross_entropy: bool
    eager_attention: bool
    activation_offload: bool
    recompute_modules: str | Sequence[str] | None


class GpusKeywords(TypedDict, total=False):
    gpus: int | None
    gpu_memory: str | int
    cp: int | None
    tp: int | None
    pp: int | None
    ep: int | None
    no_sequence_parallel: bool


class StateOptionsKeywords(TypedDict, total=False):
    optimizer: Literal["adam", "adamw", "adamw_8bit", "lion", "lion_8bit", "momentum", "momentum_8bit", "sgd"] | None
    master_dtype: Literal["fp32", "bf16", "fp16", "fp8"] | None
    state_dtype: Literal["fp32", "bf16", "fp16", "fp8"] | None
    offload_optimizer: Literal["none", "cpu", "nvme"] | None
    offload_param: Literal["none", "cpu", "nvme"] | None


class LoraKeywords(TypedDict, total=False):
    lora_r: int | None
    lora_target_modules: str | Sequence[str] | None
    qlora: bool


class MergeSourceKeywords(TypedDict, total=False):
    base: str | PathLike[str] | None
    config: str | PathLike[str] | None
    tag: str | None
    accept_base: bool
    expert_layout: Literal["peft", "unsloth"] | None
    peft_version: str | None
    accept_settings: Sequence[str] | None
    ignore_files: Sequence[str] | None


class CombiningKeywords(TypedDict, total=False):
    adapter_weights: Sequence[float] | None
    combination: str | None
    density: float | None
    seed: int | None


class MergedKeywords(TypedDict, total=False):
    dtype: Literal["keep", "fp32", "bf16", "fp16"]
    dequantize: bool
    max_shard_size: str | int
    names: Literal["hub", "own"]
    as_peft: bool


class ThreadsKeywords(TypedDict, total=False):
    workers: int


class SelectionKeywords(TypedDict, total=False):
    format: str
    tag: str | None
    config: str | PathLike[str] | None
    accept_settings: Sequence[str] | None


class PrecisionKeywords(TypedDict, total=False):
    dtype: Literal["keep", "fp32", "bf16", "fp16"]
    dequantize: bool
    quantize: Literal["fp8-block", "fp8-dynamic", "int8", "mxfp4", "nvfp4a16", "f32", "f16", "bf16", "q8_0"] | None
    like: str | PathLike[str] | Checkpoint | None


class ShardingKeywords(TypedDict, total=False):
    max_shard_size: str | int
    world_size: int | None


class ComparisonKeywords(TypedDict, total=False):
    only: Literal["weights", "optimizer", "all"]
    cast: bool
    exact: bool


class ReadFormatKeywords(TypedDict, total=False):
    adapter_slot: str | None


class FormatKeywords(TypedDict, total=False):
    tp: int | None
    pp: int | None
    ep: int | None
    vpp: int | None
    etp: int | None
    decoder_first_pipeline_num_layers: int | None
    decoder_last_pipeline_num_layers: int | None
    account_for_embedding_in_pipeline_split: bool | None
    account_for_loss_in_pipeline_split: bool | None
    pipeline_model_parallel_layout: str | None
    transformer_impl: Literal["local", "transformer_engine"] | None
    make_vocab_size_divisible_by: int | None
    ckpt_format: Literal["torch_dist", "torch_dcp", "fsdp_dtensor", "nemo"] | None
    names: Literal["hub", "own", "torchtitan"] | None
    flat_optimizer: bool | None
    strict: bool | None
    mesh_device: str | None
    step_folder: bool | None
    ep_size: int | None
    fsdp_version: int | None
    server: Literal["vllm", "sglang"] | None


class ConvertKeywords(
    PlanningKeywords,
    CheckKeywords,
    WriteOptionsKeywords,
    WatchingKeywords,
    ProcessesKeywords,
    ReadFormatKeywords,
    FormatKeywords,
    total=False,
):
    pass


class DiffKeywords(SidesKeywords, MeasuringKeywords, total=False):
    pass


class EstimateKeywords(StatedKeywords, TrainingKeywords, GpusKeywords, StateOptionsKeywords, LoraKeywords, total=False):
    pass


class MergeLoraKeywords(
    MergeSourceKeywords,
    CombiningKeywords,
    MergedKeywords,
    ThreadsKeywords,
    WriteOptionsKeywords,
    WatchingKeywords,
    ReadFormatKeywords,
    total=False,
):
    pass


class MountKeywords(
    SelectionKeywords,
    PrecisionKeywords,
    ShardingKeywords,
    ReadFormatKeywords,
    FormatKeywords,
    total=False,
):
    pass


class PlanKeywords(PlanningKeywords, ReadFormatKeywords, FormatKeywords, total=False):
    pass


class VerifyKeywords(ComparisonKeywords, SidesKeywords, MeasuringKeywords, total=False):
    pass
