"""A ZeRO-3 checkpoint of realistic size, written as DeepSpeed writes it, without training a model of that size.

The structure is that of `DeepSpeedZeroOptimizer_Stage3.state_dict` and `DeepSpeedEngine.save_checkpoint` (deepspeed
0.19); the objects in it are DeepSpeed's own, so its `zero_to_fp32.py` reads it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from math import prod
from pathlib import Path

NUM_RANKS = 8
STEP = 100
TAG = f"global_step{STEP}"


def shapes(num_layers: int, hidden: int, ffn: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Parameters of a llama with grouped-query attention, untied."""
    found = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(num_layers):
        layer = f"model.layers.{i}"
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (hidden // 4, hidden),
            "self_attn.v_proj": (hidden // 4, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():
            found[f"{layer}.{name}.weight"] = shape
    found["model.norm.weight"] = (hidden,)
    found["lm_head.weight"] = (vocab, hidden)
    return found


def config(num_layers: int, hidden: int, ffn: int, vocab: int) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def write(folder: Path, num_layers: int, hidden: int = 1024, ffn: int = 3584, vocab: int = 32000) -> int:
    """Write the checkpoint unless it is there; returns the number of parameters."""
    params = shapes(num_layers, hidden, ffn, vocab)
    total = sum(prod(shape) for shape in params.values())
    if (folder / "latest").exists():
        return total

    import torch
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    step_folder = folder / TAG
    step_folder.mkdir(parents=True, exist_ok=True)
    length = sum(-(-prod(shape) // NUM_RANKS) for shape in params.values())
    generator = torch.Generator().manual_seed(0)
    for rank in range(NUM_RANKS):
        master = torch.randn(length, generator=generator) * 0.02
        state = {"step": torch.tensor(float(STEP)), "exp_avg": master * 0.01, "exp_avg_sq": master * master}
        group = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}
        optimizer = {
            "zero_stage": ZeroStageEnum.weights,
            "loss_scaler": LossScaler(1.0),
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": NUM_RANKS,
            "optimizer_state_dict": {"state": {0: state}, "param_groups": [group]},
            "fp32_flat_groups": [master],
        }
        outer = {"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": "0.19.8"}
        torch.save(outer, step_folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        model = {
            "module": OrderedDict((name, torch.empty(0)) for name in params),
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in params.items())],
            "frozen_param_shapes": OrderedDict(),
            "frozen_param_fragments": OrderedDict(),
            "shared_params": {},
            "lr_scheduler": None,
            "global_steps": STEP,
            "global_samples": 0,
            "skipped_steps": 0,
            "dp_world_size": NUM_RANKS,
            "mp_world_size": 1,
            "ds_config": {},
            "ds_version": "0.19.8",
        }
        torch.save(model, step_folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    (folder / "config.json").write_text(json.dumps(config(num_layers, hidden, ffn, vocab)))
    (folder / "latest").write_text(TAG)
    return total
