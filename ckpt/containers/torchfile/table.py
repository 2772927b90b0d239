"""Table of names that a pickle may use, by exact (module, name). See also `unknown_classes`.

Other packages register names through the entry-point group `ckpt.pickle_names`. An entry's value `module:object` maps
(module, name) to the names of the positional arguments in the pickle, mostly (). Their objects become inert `Record`s.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any

from ckpt.base.entries import entries, load
from ckpt.base.errors import UsageError
from ckpt.containers.torchfile.calls import FUNCTIONS, record
from ckpt.containers.torchfile.unknown_classes import class_of
from ckpt.containers.torchfile.values import Global, Record, StorageType, Unsupported
from ckpt.plan import dtypes

Name = tuple[str, str]

#: Classes whose objects become Records.
_RECORDS: tuple[Name, ...] = (
    # Python
    ("argparse", "Namespace"),
    ("types", "SimpleNamespace"),
    ("signal", "Signals"),
    ("_io", "BytesIO"),
    ("uuid", "UUID"),
    ("decimal", "Decimal"),
    ("fractions", "Fraction"),
    # numpy
    ("numpy", "dtype"),
    ("numpy.random._pickle", "__generator_ctor __bit_generator_ctor __randomstate_ctor"),
    ("numpy.random.bit_generator", "SeedSequence __pyx_unpickle_SeedSequence"),
    # torch
    ("torch", "device"),
    ("torch._C", "Generator"),
    ("torch.serialization", "_get_layout"),
    # torch.distributed.checkpoint (`.metadata`)
    ("torch.distributed.checkpoint.metadata", "Metadata MetadataIndex StorageMeta TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata BytesStorageMetadata"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo _StoragePrefix"),
    ("torch.distributed.checkpoint.planner", "SavePlan WriteItem TensorWriteData BytesIOWriteData"),
    # DTensor (FSDP2) and ShardedTensor (FSDP1)
    ("torch.distributed.tensor._dtensor_spec torch.distributed._tensor._dtensor_spec", "DTensorSpec"),
    ("torch.distributed._tensor.placement_types", "Shard Replicate Partial _Partial DTensorSpec"),
    ("torch.distributed.tensor.placement_types", "Shard Replicate Partial _StridedShard _MaskPartial"),
    ("torch.distributed.tensor._ops._embedding_ops", "_MaskPartial"),
    ("torch.distributed.device_mesh", "DeviceMesh _MeshLayout"),
    ("torch.distributed._mesh_layout", "_MeshLayout _FlatLayout"),
    ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor.ProcessGroupState"),
    ("torch.distributed._shard.sharded_tensor.shard", "Shard"),
    ("torch.distributed._shard.sharded_tensor.metadata", "ShardedTensorMetadata"),
    ("torch.distributed._shard.metadata", "ShardMetadata"),
    ("torch.distributed._shard.sharding_spec.api", "EnumerableShardingSpec"),
    ("torch.distributed._shard.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"),
    ("torch.distributed.remote_device", "_remote_device"),
    # DeepSpeed
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler DynamicLossScaler LossScalerBase"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
    # Megatron
    ("megatron.core.transformer.pipeline_parallel_layer_layout", "PipelineParallelLayerLayout"),
    ("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata MCoreSavePlan"),
    # transformers and accelerate
    ("transformers.training_args", "TrainingArguments"),
    ("transformers.training_args_seq2seq", "Seq2SeqTrainingArguments"),
    ("transformers.trainer_pt_utils", "AcceleratorConfig"),
    ("transformers.integrations.deepspeed", "HfDeepSpeedConfig HfTrainerDeepSpeedConfig"),
    ("trl.trainer.sft_config", "SFTConfig"),
    ("trl.trainer.dpo_config", "DPOConfig"),
    ("trl.trainer.grpo_config", "GRPOConfig"),
    ("axolotl.core.training_args", "AxolotlTrainingArguments"),
    ("accelerate.state", "PartialState AcceleratorState"),
    ("accelerate.utils.dataclasses", "DeepSpeedPlugin FullyShardedDataParallelPlugin"),
)

_PROPERTIES = "dtype layout requires_grad memory_format pin_memory"

#: Part names for namedtuples and tuple states.
_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("torch.distributed.tensor._dtensor_spec", "TensorMeta", "shape stride dtype"),
    ("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry", "tensor_dim mesh_dims"),
    ("torch.distributed._tensor.placement_types", "TensorMeta", "shape stride dtype"),
    ("torch.distributed._tensor._dtensor_spec", "TensorMeta", "shape stride dtype"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties", _PROPERTIES),
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties", _PROPERTIES),
)

#: Classes used only by name: a default factory, a tensor's type, an argument.
_NAMES: tuple[Name, ...] = (
    ("builtins", "int float str bool list dict tuple object type"),
    ("__builtin__", "int long float str unicode bool list dict tuple object type"),
    ("numpy", "ndarray"),
    ("numpy.random._pcg64", "PCG64 PCG64DXSM"),
    ("numpy.random._philox", "Philox"),
    ("numpy.random._sfc64", "SFC64"),
    ("numpy.random._mt19937", "MT19937"),
    ("numpy.dtypes", "BoolDType Int32DType Int64DType UInt8DType UInt32DType UInt64DType"),
    ("numpy.dtypes", "Float32DType Float64DType"),
    ("torch", "Tensor"),
    ("torch", "contiguous_format preserve_format channels_last channels_last_3d"),
    ("torch.nn.parameter", "Parameter Buffer"),
    ("torch.distributed.tensor torch.distributed.tensor._api torch.distributed._tensor.api", "DTensor"),
    ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"),
    # FSDP2's wrapper for a tensor that is still being gathered
    ("torch.distributed._functional_collectives", "AsyncCollectiveTensor"),
    # Module names up to 0.8 and since.
    ("torchao.prototype.low_bit_optim.subclass_8bit torchao.optim.subclass_8bit", "OptimState8bit"),
    ("torchao.prototype.low_bit_optim.subclass_4bit torchao.optim.subclass_4bit", "OptimState4bit"),
    ("torchao.prototype.low_bit_optim.subclass_fp8 torchao.optim.subclass_fp8", "OptimStateFp8"),
)

#: `UntypedStorage` serves dtypes without a class, and counts bytes.
STORAGES: Mapping[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "uint8",
}

_UNSUPPORTED: tuple[tuple[str, str, str], ...] = (
    ("torch._utils", "_rebuild_qtensor", "a quantized tensor"),
    ("torch", "QInt8Storage QUInt8Storage QInt32Storage", "a quantized tensor"),
    ("torch", "QUInt4x2Storage QUInt2x4Storage", "a quantized tensor"),
    ("torch", "qint8 quint8 qint32 quint4x2 quint2x4", "a quantized tensor"),
    ("torch", "per_tensor_affine per_tensor_symmetric per_channel_affine", "a quantized tensor"),
    ("torch", "per_channel_symmetric per_channel_affine_float_qparams", "a quantized tensor"),
    ("torch._utils", "_rebuild_sparse_tensor", "a sparse tensor"),
    ("torch._utils", "_rebuild_sparse_csr_tensor", "a sparse tensor"),
    ("torch._utils", "_rebuild_nested_tensor", "a nested tensor"),
    ("torch._utils", "_rebuild_device_tensor_from_numpy _rebuild_xla_tensor", "a tensor within a numpy array"),
    ("torch.storage", "_load_from_bytes", "a torch file within the pickle"),
    ("torch", "uint1 uint2 uint3 uint4 uint5 uint6 uint7", "a dtype of less than a byte"),
    ("torch", "int1 int2 int3 int4 int5 int6 int7", "a dtype of less than a byte"),
)

#: Members of enums, from torch 2.13, DeepSpeed 0.19, megatron-core 0.16, transformers 5.23, accelerate 1.15 and some
#: older versions. Python 3.11.0 to 3.11.3 pickles them by name, as `getattr(cls, name)`.
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


#: Signal numbers. Python up to 3.11.3 pickles signals by name in the module `signal`.
SIGNALS: Mapping[str, int] = {one.name: one.value for one in signal.Signals}


def _make_table() -> dict[Name, Any]:
    table: dict[Name, Any] = {("torch", dtype.name): dtype for dtype in dtypes.ALL}
    table |= {(module, name): Global(module, name, record) for module, name in _each(_RECORDS)}
    for module, name, fields in _each(_FIELDS):
        table[module, name] = Global(module, name, record, tuple(fields.split()))
    enums = ((modules, *one) for modules, members in _ENUMS.items() for one in members.items())
    table |= {(module, name): Global(module, name, record, members=text) for module, name, text in _each(enums)}
    table |= {("signal", name): Record("signal", "Signals", (number,)) for name, number in SIGNALS.items()}
    table |= {(module, name): Global(module, name) for module, name in _each(_NAMES)}
    table |= {(module, name): Global(module, name, build) for module, name, build in _each(FUNCTIONS)}
    table |= {(module, "Ellipsis"): ... for module in ("builtins", "__builtin__")}
    # torch.cuda's classes, from before torch 1.5, store elements in the same way.
    kinds = {name: StorageType(dtypes.BY_NAME[dtype]) for name, dtype in STORAGES.items()}
    table |= {(module, name): kinds[name] for module in ("torch", "torch.cuda", "torch.storage") for name in kinds}
    table |= {(module, name): Unsupported(what) for module, name, what in _each(_UNSUPPORTED)}
    return table


def _each(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    for modules, names, *more in rows:
        for module, name in product(modules.split(), names.split()):
            yield module, name, *more


GLOBALS: Mapping[Name, Any] = _make_table()


@cache
def allowed() -> Mapping[Name, Any]:
    """Return the names that a pickle may use: the table, and names registered by installed packages.

    Raise UsageError if a package redefines a name. Call it before any pickle is read, so that no pickle causes an
    import.
    """
    table = _Allowed(GLOBALS)
    for where in entries("ckpt.pickle_names").values():
        for (module, name), fields in load(where).items():
            if (module, name) in table:
                raise UsageError(
                    f"{where} registers the pickle name {module}.{name}, but this name is taken",
                    hint="update the registering package, or uninstall it",
                )
            table[module, name] = Global(module, name, record, tuple(fields))
    return table


class _Allowed(dict[Name, Any]):
    def __missing__(self, key: Name) -> Global:
        if (found := class_of(*key)) is None:
            raise KeyError(key)
        return found


class AnyName(dict[Name, Any]):
    """`allowed()`, with an inert record in place of each refusal."""

    def __init__(self) -> None:
        known = {key: entry for key, entry in allowed().items() if type(entry) is not Unsupported}
        super().__init__(known)
        del self["builtins", "getattr"]  # it may name a member of an unknown enum

    def __missing__(self, key: Name) -> Global:
        return Global(*key, record)
