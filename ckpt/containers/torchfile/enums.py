"""Members of enums in pickles. Python 3.11.0 to 3.11.3 pickles them by name, as `getattr(cls, name)`.

The members come from torch 2.13, DeepSpeed 0.19, megatron-core 0.16, transformers 5.23, accelerate 1.15 and some older
versions.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from ckpt.plan import dtypes

#: `NAME=value` gives a member's value, NAME its lower-case name as the value, `NAME=` its unchanged name.
_ENUMS: Mapping[str, Mapping[str, str]] = {
    "uuid": {"SafeUUID": "safe=0 unsafe=-1 unknown=None"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING": "TORCH_CONTIGUOUS_FORMAT=0 TORCH_CHANNELS_LAST=1 TORCH_PRESERVE_FORMAT=2",
    },
    "torch.distributed.checkpoint.filesystem": {"SerializationFormat": "TORCH_SAVE SAFETENSORS"},
    "torch.distributed.checkpoint.planner": {"WriteItemType": "TENSOR=1 SHARD=2 BYTE_IO=3"},
    "torch.distributed._shard.sharded_tensor.metadata": {
        "MEM_FORMAT_ENCODING": "TORCH_CONTIGUOUS_FORMAT=0 TORCH_CHANNELS_LAST=1 TORCH_PRESERVE_FORMAT=2",
    },
    "deepspeed.runtime.fp16.loss_scaler": {"LossScaleProfile": "FUSED UNFUSED"},
    "deepspeed.runtime.zero.offload_config": {
        "OffloadDeviceEnum": "none cpu nvme",
        "OffloadStateTypeEnum": "optim_states hp_params lp_params lp_grads contiguous_grad_buffer",
    },
    "deepspeed.runtime.config": {
        "DtypeEnum": "fp16=torch.float16 fp32=torch.float32 int8=torch.int8 bf16=torch.bfloat16",
    },
    "megatron.core.enums": {
        "ModelType": "encoder_or_decoder=1 encoder_and_decoder=2",
        "Fp8Recipe": "delayed tensorwise mxfp8 blockwise custom",
        "Fp4Recipe": "nvfp4 custom",
    },
    "megatron.core.transformer.enums": {
        "AttnBackend": "flash=1 fused=2 unfused=3 local=4 auto=5",
        "AttnMaskType": "padding=1 causal=2 no_mask=3 padding_causal=4 arbitrary=5 causal_bottom_right=6",
        "AttnType": "self_attn=1 cross_attn=2",
        "LayerType": "embedding=1 loss=2 encoder=3 decoder=4 mtp=5",
        "ModelType": "encoder_or_decoder=1 encoder_and_decoder=2",
        "CudaGraphScope": (
            "full_iteration=1 attn=2 mlp=3 moe=4 moe_router=5 moe_preprocess=6 mamba=7 full_iteration_inference=8"
        ),
        "CudaGraphModule": "attn=1 mlp=2 moe=3 moe_router=4 moe_preprocess=5 mamba=6",
        "InferenceCudaGraphScope": "none=1 layer=2 block=3",
    },
    "megatron.core.rerun_state_machine": {
        "RerunDiagnostic": "CORRECT_RESULT TRANSIENT_ERROR PERSISTENT_ERROR",
        "RerunMode": "DISABLED VALIDATE_RESULTS REPORT_DETERMINISM_STATS",
        "RerunState": (
            "NOT_RUNNING_YET=0 INITIAL_RUN=1 RERUNNING_IN_PLACE=2 WILL_RERUN_FROM_CHECKPOINT=3 "
            "RERUNNING_FROM_CHECKPOINT=4 RERUNNING_AGAIN_FROM_CHECKPOINT=5"
        ),
    },
    "transformers.trainer_utils": {
        "IntervalStrategy": "NO STEPS EPOCH",
        "SaveStrategy": "NO STEPS EPOCH BEST",
        "HubStrategy": "END EVERY_SAVE CHECKPOINT ALL_CHECKPOINTS",
        "SchedulerType": (
            "LINEAR COSINE COSINE_WITH_RESTARTS POLYNOMIAL CONSTANT CONSTANT_WITH_WARMUP INVERSE_SQRT "
            "REDUCE_ON_PLATEAU=reduce_lr_on_plateau COSINE_WITH_MIN_LR COSINE_WARMUP_WITH_MIN_LR WARMUP_STABLE_DECAY "
            "GREEDY"
        ),
        "FSDPOption": "FULL_SHARD SHARD_GRAD_OP NO_SHARD HYBRID_SHARD HYBRID_SHARD_ZERO2 OFFLOAD AUTO_WRAP",
        "HPSearchBackend": "OPTUNA RAY WANDB",
        "EvaluationStrategy": "NO STEPS EPOCH",
    },
    "transformers.training_args": {
        "OptimizerNames": (
            "ADAMW_TORCH ADAMW_TORCH_FUSED ADAMW_TORCH_XLA ADAMW_TORCH_NPU_FUSED ADAFACTOR ADAMW_ANYPRECISION "
            "ADAMW_TORCH_4BIT ADAMW_TORCH_8BIT ADEMAMIX SGD ADAGRAD ADAMW_BNB=adamw_bnb_8bit ADAMW_8BIT ADEMAMIX_8BIT "
            "LION_8BIT LION=lion_32bit PAGED_ADAMW=paged_adamw_32bit PAGED_ADAMW_8BIT "
            "PAGED_ADEMAMIX=paged_ademamix_32bit PAGED_ADEMAMIX_8BIT PAGED_LION=paged_lion_32bit PAGED_LION_8BIT "
            "RMSPROP RMSPROP_BNB RMSPROP_8BIT=rmsprop_bnb_8bit RMSPROP_32BIT=rmsprop_bnb_32bit GALORE_ADAMW "
            "GALORE_ADAMW_8BIT GALORE_ADAFACTOR GALORE_ADAMW_LAYERWISE GALORE_ADAMW_8BIT_LAYERWISE "
            "GALORE_ADAFACTOR_LAYERWISE LOMO ADALOMO GROKADAMW SCHEDULE_FREE_RADAM SCHEDULE_FREE_ADAMW "
            "SCHEDULE_FREE_SGD APOLLO_ADAMW APOLLO_ADAMW_LAYERWISE STABLE_ADAMW"
        ),
        "ParallelMode": "NOT_PARALLEL NOT_DISTRIBUTED DISTRIBUTED SAGEMAKER_MODEL_PARALLEL SAGEMAKER_DATA_PARALLEL TPU",
    },
    "accelerate.utils.dataclasses": {
        "DistributedType": (
            "NO= MULTI_CPU= MULTI_GPU= MULTI_NPU= MULTI_MLU= MULTI_SDAA= MULTI_MUSA= MULTI_XPU= DEEPSPEED= FSDP= XLA= "
            "MEGATRON_LM= MULTI_HPU= MULTI_NEURON="
        ),
        "PrecisionType": "NO FP8 FP16 BF16",
        "DynamoBackend": (
            "NO= EAGER= AOT_EAGER= INDUCTOR= AOT_TS_NVFUSER= NVPRIMS_NVFUSER= CUDAGRAPHS= OFI= FX2TRT= ONNXRT= "
            "TENSORRT= AOT_TORCHXLA_TRACE_ONCE= TORCHXLA_TRACE_ONCE= TVM= HPU_BACKEND= NEURON="
        ),
        "RNGType": "TORCH CUDA MLU SDAA MUSA NPU XLA XPU HPU NEURON GENERATOR",
    },
    "deepspeed.runtime.zero.config": {
        "ZeroStageEnum": "disabled=0 optimizer_states=1 gradients=2 weights=3 max_stage=3",
    },
    # before megatron-core, and Megatron-DeepSpeed; `alibi` is left out: its value differs between two forks
    "megatron.model.enums megatron.enums": {
        "LayerType": "encoder=1 decoder=2 retro_encoder=3 retro_decoder=4 retro_decoder_with_retriever=5",
        "AttnType": "self_attn=1 cross_attn=2",
        "AttnMaskType": "padding=1 causal=2 prefix=3 custom=4",
        "PositionEmbeddingType": "rotary=1 absolute=2 learned_absolute rope",
    },
    "megatron.enums": {"ModelType": "encoder_or_decoder=1 encoder_and_decoder=2"},
}


def _value(word: str) -> tuple[str, Any]:
    name, given, text = word.partition("=")
    if not text:
        return name, name if given else name.lower()
    if text.startswith("torch."):
        return name, dtypes.BY_NAME[text.removeprefix("torch.")]
    return name, None if text == "None" else int(text) if text.lstrip("-").isdigit() else text


ENUMS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    (module, name): dict(map(_value, members.split()))
    for modules, enums in _ENUMS.items()
    for module in modules.split()
    for name, members in enums.items()
}
#: Signal numbers. Python up to 3.11.3 pickles signals by name in the module `signal`.
SIGNALS: Mapping[str, int] = {one.name: one.value for one in signal.Signals}
