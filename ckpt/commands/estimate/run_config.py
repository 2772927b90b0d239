"""Memory settings in DeepSpeed's JSON, or in the YAML of Axolotl, Accelerate or FSDP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, NotFoundError, UsageError
from ckpt.base.words import Message
from ckpt.commands.estimate import deepspeed_settings
from ckpt.commands.estimate.setup import CPU, DDP, FSDP1, FSDP2, MEGATRON, NVME, OPTIMIZER_STATES, ZeroOptions
from ckpt.runs.yaml_files import read_run_config

#: DeepSpeed's zero_optimization fields, with transformers' value for "auto" (integrations/deepspeed.py). Stage 3's
#: prefix is optional (zero/config.py, `populate_by_name`).
_ZERO: dict[str, tuple[str, Callable[[int], int] | None]] = {
    "reduce_bucket_size": ("reduce_bucket_size", lambda hidden: hidden * hidden),
    "max_live_parameters": ("stage3_max_live_parameters", None),
    "param_persistence_threshold": ("stage3_param_persistence_threshold", lambda hidden: 10 * hidden),
    "sub_group_size": ("sub_group_size", None),
}
#: In search order.
_OPTIMIZERS = (("adam", "adamw"), ("lion", "lion"), ("sgd", "sgd"))


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Settings: `setup` holds fields of `Setup`, `axes` sizes of Megatron's axes."""

    model: str | None = None
    strategy: str | None = None
    setup: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=dict)

    def under(self, other: RunConfig) -> RunConfig:
        return RunConfig(
            other.model or self.model,
            other.strategy or self.strategy,
            {**self.setup, **other.setup},
            {**self.axes, **other.axes},
        )


def model_of(content: Mapping[str, Any], path: Path) -> str:
    if not isinstance(content.get("base_model"), str):
        raise CorruptError(
            "the config has no model",
            path=path,
            expected="base_model",
            hint=Message("give the model, and this file with {run_config}"),
        )
    return str(content["base_model"])


def understand(content: Mapping[str, Any], path: Path, hidden: int) -> RunConfig:
    """Return a config's settings, or raise UsageError for an unsupported one."""
    if "base_model" in content:
        return _axolotl(content, path, hidden)
    if "distributed_type" in content:
        return _accelerate(content, path, hidden)
    if isinstance(content.get("zero_optimization"), dict):
        return _deepspeed(content, path, hidden)
    if any(name.startswith("fsdp_") or name in ("reshard_after_forward", "offload_params") for name in content):
        return _fsdp(content, path)
    raise CorruptError(
        "this is not a run config",
        path=path,
        expected="Axolotl's base_model, Accelerate's distributed_type, DeepSpeed's zero_optimization, or fsdp_config",
    )


def _deepspeed(content: Mapping[str, Any], path: Path, hidden: int) -> RunConfig:
    deepspeed_settings.check(content, path)
    stated = content["zero_optimization"]
    sizes: dict[str, Any] = {}
    for name, (long_name, automatic) in _ZERO.items():
        value = stated.get(long_name, stated.get(name))
        if value == "auto" and automatic is not None and hidden:
            sizes[name] = automatic(hidden)
        elif _is_size(value):
            sizes[name] = int(value)
    zero = replace(ZeroOptions(), overlap_comm=stated.get("overlap_comm") is True, **sizes)
    setup: dict[str, Any] = {}
    for what, field_name in (("optimizer", "offload_optimizer"), ("param", "offload_params")):
        offload = stated.get(f"offload_{what}")
        if not isinstance(offload, dict) or offload.get("device", "none") == "none":
            continue
        if offload["device"] not in (CPU, NVME):
            what, found = "unknown offload device", repr(offload["device"])
            raise UsageError(what, path=path, expected="none, cpu, nvme", found=found)
        setup[field_name] = offload["device"]
        if what == "optimizer":
            zero = replace(zero, **_sizes(offload, buffer_count="optimizer_buffers"))
        else:
            names = {"buffer_count": "param_buffers", "buffer_size": "param_buffer_size", "max_in_cpu": "max_in_cpu"}
            zero = replace(zero, **_sizes(offload, **names))
    if zero != ZeroOptions():
        setup["zero"] = zero
    for dtype in ("fp16", "bf16"):
        section = content.get(dtype)
        masters, states = f"{dtype}_master_weights_and_grads", f"{dtype}_optimizer_states"
        if isinstance(section, dict):
            fields = (("enabled", "dtype"), (masters, "master_dtype"), (states, "state_dtype"))
            setup |= {ours: dtype for theirs, ours in fields if section.get(theirs) is True}
    optimizer = content.get("optimizer")
    if isinstance(optimizer, dict) and isinstance(optimizer.get("type"), str):
        momentum = (optimizer.get("params") or {}).get("momentum")
        setup["optimizer"] = _optimizer(optimizer["type"], path, momentum=bool(momentum))
    setup |= _sizes(content, train_micro_batch_size_per_gpu="batch")
    stage = stated.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise UsageError("unknown ZeRO stage", path=path, expected="0, 1, 2 or 3", found=repr(stage))
    # Stage 0 has DeepSpeed's own 16-bit optimizer: unsupported. A fragment without a stage only gives sizes.
    if "stage" in stated and not stage:
        raise UsageError(
            "estimate doesn't support DeepSpeed without ZeRO", path=path, expected="stage 1, 2 or 3", found=stage
        )
    return RunConfig(strategy=f"zero{stage}" if stage else None, setup=setup)


def _sizes(content: Mapping[str, Any], **names: str) -> dict[str, Any]:
    return {ours: int(content[theirs]) for theirs, ours in names.items() if _is_size(content.get(theirs))}


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _optimizer(name: str, path: Path, *, momentum: bool = False) -> str:
    lower = name.lower().replace("-", "_")
    found = next((ours for word, ours in _OPTIMIZERS if word in lower), None)
    if found == "sgd" and momentum:
        found = "momentum"
    if found and "8bit" in lower:
        found = f"{found}_8bit"
    if found not in OPTIMIZER_STATES or any(word in lower for word in ("4bit", "fp8", "mini", "apollo", "galore")):
        raise UsageError(
            "unknown optimizer",
            path=path,
            expected="one of " + ", ".join(OPTIMIZER_STATES),
            found=name,
            hint=Message("pass a known optimizer with equal states: {optimizer=NAME}"),
        )
    return found


def _fsdp(content: Mapping[str, Any], path: Path) -> RunConfig:
    """Read `fsdp_config`, or a config around it: transformers, Axolotl (no prefix) or Accelerate (prefix `fsdp_`)."""
    inner = content.get("fsdp_config")
    inner = dict(inner) if isinstance(inner, dict) else dict(content)
    stated = {name.removeprefix("fsdp_"): value for name, value in inner.items()}
    version = stated.get("version", content.get("fsdp_version", 1))
    reshard = stated.get("reshard_after_forward", stated.get("sharding_strategy", True))
    if reshard in ("NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", 3, 4, 5):
        raise UsageError("estimate supports FSDP only if it shards across all GPUs", path=path, found=str(reshard))
    setup: dict[str, Any] = {"reshard": reshard not in (False, "false", "SHARD_GRAD_OP", 2)}
    if stated.get("offload_params") in (True, "true"):
        setup["offload_params"] = CPU
    return RunConfig(strategy=FSDP2 if str(version) == "2" else FSDP1, setup=setup)


def _accelerate(content: Mapping[str, Any], path: Path, hidden: int) -> RunConfig:
    setup = _sizes(content, num_processes="gpus")
    precision = content.get("mixed_precision")
    if precision in ("bf16", "fp16", "no"):
        setup |= {"dtype": "fp32" if precision == "no" else precision}
    axes = content.get("parallelism_config")
    if isinstance(axes, dict):
        stated = {name.removeprefix("parallelism_config_"): value for name, value in axes.items()}
        _refuse_tensor_parallel(stated.get("tp_size"), path)
        setup |= _sizes(stated, cp_size="context_parallel")
    base = RunConfig(setup=setup)
    kind = str(content["distributed_type"]).upper()
    if kind == "FSDP":
        return base.under(_fsdp(content, path))
    if kind == "DEEPSPEED":
        stated = content.get("deepspeed_config") or {}
        if stated.get("deepspeed_config_file"):
            return base.under(_other(stated["deepspeed_config_file"], path, hidden))
        zero = {"stage": stated.get("zero_stage", 2)}
        for what in ("optimizer", "param"):
            zero[f"offload_{what}"] = {"device": stated.get(f"offload_{what}_device") or "none"}
        return base.under(_deepspeed({"zero_optimization": zero}, path, hidden))
    if kind == "MEGATRON_LM":
        stated = content.get("megatron_lm_config") or {}
        sizes = _sizes(stated, megatron_lm_tp_degree="tp", megatron_lm_pp_degree="pp")
        return base.under(RunConfig(strategy=MEGATRON, axes=sizes))
    if kind in ("MULTI_GPU", "NO"):
        return base.under(RunConfig(strategy=DDP))
    raise UsageError("estimate doesn't support this kind of run", path=path, found=f"distributed_type {kind}")


def _refuse_tensor_parallel(size: Any, path: Path) -> None:
    if _is_size(size) and size > 1:
        raise UsageError("estimate supports tensor parallelism only for Megatron", path=path, found=f"size {size}")


def _other(named: Any, path: Path, hidden: int) -> RunConfig:
    if isinstance(named, dict):
        return understand(named, path, hidden)
    for place in (Path(str(named)), path.parent / str(named)):
        if place.is_file():
            return understand(read_run_config(place), place, hidden)
    raise NotFoundError(
        "DeepSpeed config not found",
        path=path,
        found=str(named),
        hint="correct the path in the run config, or run the command from the training folder",
    )


def _axolotl(content: Mapping[str, Any], path: Path, hidden: int) -> RunConfig:
    _refuse_tensor_parallel(content.get("tensor_parallel_size"), path)
    if content.get("load_in_8bit") and content.get("adapter"):
        raise UsageError("estimate doesn't support 8-bit weights", path=path, found="load_in_8bit")
    setup: dict[str, Any] = _sizes(
        content,
        micro_batch_size="batch",
        sequence_len="length",
        sequence_parallel_degree="context_parallel",
        context_parallel_size="context_parallel",
    )
    half = next((dtype for dtype in ("bf16", "fp16") if content.get(dtype) not in (None, False, "false")), None)
    setup["dtype"] = half or "fp32"
    if isinstance(content.get("optimizer"), str):
        setup["optimizer"] = _optimizer(content["optimizer"], path)
    adapter = content.get("adapter")
    if adapter in ("lora", "qlora"):
        targets = content.get("lora_target_modules")
        if not (targets is None or isinstance(targets, list)):
            raise UsageError("lora_target_modules must be a list", path=path, found=repr(targets))
        named = tuple(str(name) for name in targets or ()) or None
        if not _is_size(content.get("lora_r")):
            raise UsageError("the adapter's rank is missing", path=path, expected="lora_r")
        setup |= {"lora_rank": int(content["lora_r"]), "lora_targets": named}
        setup["quantized"] = adapter == "qlora" or bool(content.get("load_in_4bit"))
    elif adapter:
        raise UsageError(
            "estimate doesn't support this adapter type", path=path, expected="lora, qlora", found=repr(adapter)
        )
    plugins = " ".join(str(name) for name in content.get("plugins") or ())
    cut = "CutCrossEntropyPlugin" in plugins and content.get("cut_cross_entropy") is not False
    setup["fused_loss"] = cut or bool(content.get("liger_fused_linear_cross_entropy"))
    setup["activation_offload"] = bool(content.get("activation_offloading"))
    setup["eager_attention"] = content.get("attn_implementation") == "eager" or bool(content.get("eager_attention"))
    base = RunConfig(str(content["base_model"]), setup=setup)
    if content.get("deepspeed"):
        return base.under(_other(content["deepspeed"], path, hidden))
    if content.get("fsdp") or content.get("fsdp_config"):
        # Accelerate keeps trained parameters in float32 under mixed precision (utils/fsdp_utils.py).
        return base.under(_fsdp(content, path)).under(RunConfig(setup={"mixed": content.get("bf16") != "full"}))
    # The model is loaded in 16 bits, so gradients and states are 16-bit too.
    return base.under(RunConfig(strategy=DDP, setup={"mixed": not half}))
