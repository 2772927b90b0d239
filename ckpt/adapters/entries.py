"""Entries in `adapter_config.json` and their effect on a merge.

The tables list all methods' entries in peft 0.21.2. An unlisted entry may change the adapter's results.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ckpt.adapters.config import KINDS
from ckpt.base.errors import LossError
from ckpt.base.words import Keyword, Message

#: Records, training, initialization and layer names (the tensors have them too).
HARMLESS = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"),
        *("task_type", "exclude_modules", "layers_pattern", "layers_to_transform", "target_modules"),
        *("lora_dropout", "boft_dropout", "deft_dropout", "frod_dropout", "gralora_dropout", "hira_dropout"),
        *("miss_dropout", "module_dropout", "psoft_dropout", "pvera_dropout", "randlora_dropout", "rank_dropout"),
        *("rank_dropout_scale", "tinylora_dropout", "unilora_dropout", "vblora_dropout", "vera_dropout"),
        *("init_weights", "init_ia3_weights", "init_scale", "init_v_bound", "init_theta_d_bound"),
        *("init_vector_bank_bound", "init_logits_std", "d_initial"),
        *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "megatron_core", "qalora_group_size"),
        *("runtime_config", "runtime_offload_base_weight", "progressbar"),
        *("beta1", "beta2", "deltaT", "orth_reg_weight", "target_r", "tfinal", "tinit", "total_step"),
        *("asa_importance_beta", "asa_schedule_exponent", "asa_target_subspaces", "asa_uncertainty_beta"),
        *("final_warmup", "init_warmup", "mask_interval", "use_asa"),
        # transformers 4, early PEFT, Unsloth
        *("enable_lora", "merge_weights", "lora_B_layout", "unsloth_fused_expert_lora"),
    )
)
READ = frozenset(
    (
        *("alpha_pattern", "bias", "ensure_weight_tying", "fan_in_fan_out", "init_lora_weights", "kasa_config"),
        *("lora_alpha", "lora_bias", "modules_to_save", "monteclora_config", "r", "rank_pattern", "target_parameters"),
        *("trainable_token_indices", "use_bdlora", "use_dora", "use_rslora", "velora_config"),
    )
)
REFUSED = frozenset(("alora_invocation_tokens", "arrow_config", "layer_replication", "megatron_config", "use_qalora"))
#: Other methods' entries, used by PEFT itself when it merges.
OF_PEFT = frozenset(
    (
        *("ab_svd_init", "act_fn", "alpha", "alpha_pattern", "apply_GS", "bias", "block_share", "block_size"),
        *("block_size_pattern", "boft_block_num", "boft_block_size", "boft_n_butterfly_factor", "cayley_neumann_eps"),
        *("coft", "config_A_B", "config_C", "config_D_E", "decompose_both", "decompose_factor"),
        *("decomposition_method", "delora_lambda", "depth", "effective_rank", "eps", "fan_in_fan_out"),
        *("feedforward_modules", "generator_seed", "gralora_k", "group_size", "hybrid_r", "init_r", "lambda_pattern"),
        *("lora_alpha", "mask_type", "mini_r", "modules_to_save", "n_frequency", "n_frequency_pattern"),
        *("num_cayley_neumann_terms", "num_subspaces", "num_vectors", "oft_block_size", "para", "proj_seed"),
        *("projection_prng_key", "projection_seed", "proportional_parameters", "psoft_alpha", "psoft_mag_a"),
        *(
            "psoft_mag_b",
            "psoft_orth",
            "psoft_svd",
            "psoft_svd_lowrank_niter",
            "r",
            "randlora_alpha",
            "random_loc_seed",
        ),
        *("random_seed", "rank_pattern", "regularization_alpha", "sample_at_inference", "save_indices"),
        *("save_only_topk_weights", "save_precomputed_indices", "save_projection", "scaling", "select_top", "sparse"),
        *("sparse_rate", "sparsity", "subspace_rank", "svd_threshold", "target_svd_config", "theta_d_length"),
        *("token_indices", "topk", "u", "use_cayley_neumann", "use_dynamic_rank", "use_effective_conv2d", "use_idwt"),
        *("variant", "vector_length", "very_sparse", "wavelet_family", "weight_tying"),
    )
)

_INIT = "init_lora_weights"
#: LoRA's inits by name (`tuners/lora/layer.py`), except `pissa_niter_N`.
_INITS = ("corda", "eva", "gaussian", "loftq", "lora_ga", "mica", "olora", "orthogonal", "pissa")

_OFF: tuple[object, ...] = (None, False, "", [], {})


def is_known(kind: str, entry: str) -> bool:
    """Return True if the table has `entry` for the method `kind`, or has no entries for this method at all."""
    if kind not in KINDS:  # checked by `ckpt.commands.merge_lora.layer.check_installed`
        return True
    of_lora, of_others = READ | REFUSED, OF_PEFT
    wanted = of_lora if kind == "LORA" else of_lora | of_others if kind == "ADALORA" else of_others
    return entry in HARMLESS or entry in wanted


def relevant(raw: Mapping[str, Any]) -> list[str]:
    return [key for key, value in raw.items() if key in OF_PEFT | READ and value not in _OFF]


def turned_on(raw: Mapping[str, Any]) -> list[str]:
    return [key for key, value in raw.items() if value not in _OFF]


def unknown(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries with an unknown effect on a merge, and an unknown init.

    In PEFT, null, false or an empty value turns a feature off.
    """
    kind = str(raw.get("peft_type"))
    found = {key: value for key, value in raw.items() if not is_known(kind, key) and value not in _OFF}
    init = raw.get(_INIT)
    is_known_init = isinstance(init, str) and (init.lower() in _INITS or init.startswith("pissa_niter_"))
    if kind == "LORA" and init and init is not True and not is_known_init:
        found[_INIT] = init
    return found


def check(raw: Mapping[str, Any], path: object, accepted: Collection[str] = (), *, option: str = "") -> None:
    """Raise LossError if `raw` has an unknown entry that is not `accepted`."""
    found = {key: value for key, value in unknown(raw).items() if key not in accepted}
    if not found:
        return
    version = raw.get("peft_version")
    raise LossError(
        "the adapter config has unknown entries, and they may change its results",
        path=str(path),
        expected="entries and inits from peft 0.21.2 or older",
        found=", ".join(f"{key}: {value!r}" for key, value in found.items())
        + (f"; peft_version {version}" if version else ""),
        hint=(
            Message("{} merges and ignores them", Keyword(option, [*found]))
            if option
            else "remove entries that change nothing from a copy of adapter_config.json"
        )
        + "; or merge with the adapter's PEFT release: merge_and_unload",
    )
