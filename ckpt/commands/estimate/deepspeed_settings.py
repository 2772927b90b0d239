"""Settings in a DeepSpeed config that the estimate does not model.

Names from deepspeed 0.19.8 (runtime/config.py, runtime/constants.py, runtime/zero/config.py,
runtime/zero/offload_config.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt.base.errors import UsageError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READ = _names("bf16 bfloat16 fp16 optimizer train_micro_batch_size_per_gpu zero_optimization")
#: Without effect on memory, or for models other than transformers'.
_HARMLESS = _names(
    """
    activation_checkpointing aio autotuning checkpoint comet comms_logger communication_data_type compile csv_monitor
    curriculum_learning data_efficiency dataloader_drop_last datastates_ckpt disable_allgather disable_python_gc
    dump_state eigenvalue elasticity flops_profiler fp32_allreduce gradient_accumulation_steps gradient_allreduce_op
    gradient_clipping gradient_predivide_factor graph_harvesting load_universal_checkpoint log_level
    managed_gradient_accumulation memory_breakdown monitor_config nebula pipeline prescale_gradients
    progressive_layer_drop scheduler seed seq_parallel_communication_data_type sparse_gradients steps_per_print
    tensorboard timers train_batch_size use_data_before_expert_parallelism use_data_before_expert_parallel_parallelism
    use_node_local_storage wall_clock_breakdown wandb zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    """
)
#: Without the prefix `stage3_`.
_ZERO = _names(
    """
    max_live_parameters offload_optimizer offload_param overlap_comm param_persistence_threshold reduce_bucket_size
    stage sub_group_size
    allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients
    cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks gather_16bit_weights_on_model_save
    gather_fp16_weights_on_model_save ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights
    log_trace_cache_warnings max_reuse_distance memory_efficient_linear model_persistence_threshold
    module_granularity_threshold override_module_apply parameter_alignment pipeline_loading_checkpoint
    prefetch_bucket_size reduce_scatter round_robin_gradients use_all_reduce_for_fetch_params
    use_multi_rank_bucket_allreduce
    """
)
_OFFLOAD = _names(
    """
    buffer_count buffer_size device max_in_cpu
    cpuadam_cores_perc fast_init nvme_path pin_memory pipeline pipeline_read pipeline_write
    """
)
#: Group sizes and the part to offload are off at 1.
_OFF: tuple[Any, ...] = (None, False, -1, 0, 1, "", "auto", "none")


def check(content: Mapping[str, Any], path: Path) -> None:
    """Raise UsageError if a setting may change the memory, and the estimate does not model it."""
    found = list(_unknown(content))
    if found:
        raise UsageError(
            "the DeepSpeed config has settings that the estimate does not model",
            path=path,
            found=", ".join(f"{name} {value!r}" for name, value in found),
            hint="remove them from a copy of the config to estimate a run without them",
        )


def _unknown(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from _of_section(content, _READ | _HARMLESS)
    zero = content.get("zero_optimization")
    if isinstance(zero, Mapping):
        within = "zero_optimization."
        short = {name.removeprefix("stage3_"): value for name, value in zero.items()}
        yield from _of_section(short, _ZERO, within)
        for name in ("offload_optimizer", "offload_param"):
            offload = zero.get(name)
            if isinstance(offload, Mapping) and offload.get("device", "none") != "none":
                yield from _of_section(offload, _OFFLOAD, f"{within}{name}.")


def _of_section(values: Mapping[str, Any], known: frozenset[str], within: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if name not in known and not _is_off(value):
            yield within + name, value


def _is_off(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("enabled") is False or all(map(_is_off, value.values()))
    return value == [] or (value is not True and not isinstance(value, list) and value in _OFF)
