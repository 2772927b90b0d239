"""Keys in DeepSpeed's files.

From deepspeed 0.19.8: runtime/engine.py (`_common_checkpoint_state`), runtime/zero/stage_1_and_2.py,
runtime/zero/stage3.py and runtime/bf16_optimizer.py (`state_dict`), checkpoint/ds_to_universal.py
(`_save_optimizer_state`).
"""

from __future__ import annotations

import re

# fmt: off
MODEL_STATE = ("lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_samples")
OPTIMIZER_STATE = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
UNIVERSAL_INFO = "universal_checkpoint_info"
AUTOEP = "ds_autoep_layers"
#: DeepSpeed's own. All others are the user's client state.
MODEL_FILE = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", *MODEL_STATE, "sparse_tensor_module_names", "global_steps", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "num_experts", "ds_config", "ds_version", AUTOEP, UNIVERSAL_INFO,
})
#: Tensors and the schema, also in a universal checkpoint. All others are training state.
OPTIMIZER_FILE = frozenset({
    "base_optimizer_state", "base_optimizer_state_step", "optimizer_state_dict", "single_partition_of_fp32_groups",
    "fp32_flat_groups", "zero_stage", "group_paddings", "param_alignment_paddings", "partition_count", "ds_version",
    "param_slice_mappings", "param_groups", "ds_zero_partition_groups", UNIVERSAL_INFO,
})
# fmt: on
#: Differ per slice: random states of Megatron-DeepSpeed and GPT-NeoX.
OF_SLICES = (
    "rng_state",
    "random_rng_state",
    "np_rng_state",
    "torch_rng_state",
    "cuda_rng_state",
    "rng_tracker_states",
)
#: Key for facts to write a Megatron-DeepSpeed pipeline again.
PIPELINE = "pipeline"
#: Expert parameter in MoE layers: prefix, number, rest.
EXPERT = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..+)")
#: Experts under AutoEP.
AUTOEP_EXPERTS = re.compile(r".*\.experts\.w[123]")
