"""Tiny models with awkward shapes.

Few sizes divide by 2, 3 or 4, so every kind of sharding has to pad. All weights are random, so a misplaced slice is
always noticed.
"""

import re
from typing import Any

import torch
from torch import nn

from train.config import Config, UserError
from train.data import BOS, EOS, PAD, VOCABULARY

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
# Attention width (30) differs from the hidden size (35), so a transposed projection shows.
_LAYER = {"hidden_size": 35, "intermediate_size": 53, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 6}
_COMMON = _TOKENS | _LAYER | _HEADS | {"max_position_embeddings": 128, "tie_word_embeddings": False}
_EXPERTS = {"intermediate_size": 21, "num_local_experts": 5, "num_experts_per_tok": 2}
_SIZES: dict[str, dict[str, Any]] = {
    "llama": dict(_COMMON),
    # Divisible by 2 tensor-parallel ranks. Rows per rank stay odd, so further sharding still pads.
    "llama_even": _COMMON
    | {"hidden_size": 36, "intermediate_size": 54, "num_attention_heads": 4, "num_key_value_heads": 2},
    "mistral": _COMMON | {"sliding_window": None},
    "qwen2": _COMMON | {"tie_word_embeddings": True},
    "qwen3": dict(_COMMON),
    "qwen3_moe": _COMMON
    | {"moe_intermediate_size": 11, "num_experts": 5, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
    "mixtral": _COMMON | _EXPERTS,
    "gpt2": _TOKENS
    | {"n_embd": 33, "n_layer": 2, "n_head": 3, "n_inner": 51, "n_positions": 131}
    | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "gpt_neox": _COMMON
    | {
        "hidden_size": 40,
        # A quarter of each head is rotated. Megatron has no parallel residual.
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "use_parallel_residual": False,
    },
    # For the architecture's default RoPE scaling.
    "gpt_oss": _COMMON | _EXPERTS | {"max_position_embeddings": 131072, "sliding_window": 8},
    "deepseek_v3": _COMMON
    | {"num_key_value_heads": 5, "head_dim": 4, "q_lora_rank": 15, "kv_lora_rank": 11}
    | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 7}
    | {"moe_intermediate_size": 11, "n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 2}
    | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    "qwen3_next": _COMMON
    | {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
    | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    | {"linear_key_head_dim": 5, "linear_value_head_dim": 7, "linear_num_key_heads": 2, "linear_num_value_heads": 6}
    | {"moe_intermediate_size": 11, "shared_expert_intermediate_size": 13, "num_experts": 5, "num_experts_per_tok": 2}
    | {"mlp_only_layers": [0], "num_nextn_predict_layers": 0},
}

# For Megatron's tensor, pipeline and expert parallelism.
_WIDE = {"hidden_size": 40, "intermediate_size": 60, "num_hidden_layers": 4}
_WIDE |= {"num_attention_heads": 8, "num_key_value_heads": 4}
_WIDE_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 12, "num_experts": 8, "norm_topk_prob": True},
    "mixtral": {"intermediate_size": 28, "num_local_experts": 8},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 12,
        "num_experts": 8,
    },
    "gpt2": {"n_embd": 48, "n_layer": 4, "n_head": 8, "n_inner": 60},
    "gpt_neox": {"hidden_size": 64},
    "gpt_oss": {"intermediate_size": 20, "num_local_experts": 8},
    "deepseek_v3": {"num_key_value_heads": 8, "q_lora_rank": 20, "kv_lora_rank": 12}
    | {"moe_intermediate_size": 12, "n_routed_experts": 8},
}


def sizes_of(model: str) -> dict[str, Any]:
    architecture = model.removesuffix("_wide")
    if architecture == model:
        return _SIZES[model]
    common = {} if architecture == "gpt2" else _WIDE
    return _SIZES[architecture] | common | _WIDE_SIZES.get(architecture, {})


def build_model(config: Config) -> nn.Module:
    """Build the model in fp32 on the CPU, equal on every rank."""
    torch.manual_seed(config.seed)
    # ZeRO-3 fails to gather an empty parameter.
    model: nn.Module = Toy(empty=config.strategy != "zero3") if config.model == "toy" else _transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    if config.lora:
        model = _add_lora(model, config.lora)
    if config.freeze is not None:
        _freeze(model, config.freeze)
    return model


def sparse_blocks(model: nn.Module) -> list[type[nn.Module]]:
    """Return block classes with experts. Ranks may choose different experts in them."""
    return list({type(module) for module in model.modules() if "experts" in dict(module.named_children())})


def _transformer(config: Config) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = config.model.removesuffix("_even").removesuffix("_wide")
    if 0 < config.vocab < VOCABULARY:
        raise UserError(f"--vocab {config.vocab}: the tokenizer has {VOCABULARY} tokens")
    requested = {
        "n_layer" if architecture == "gpt2" else "num_hidden_layers": config.layers,
        "vocab_size": config.vocab,
    }
    requested = {name: size for name, size in requested.items() if size}
    sizes = AutoConfig.for_model(architecture, **sizes_of(config.model) | requested)
    for name in ("attention_dropout", "hidden_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"):
        if config.dropout and hasattr(sizes, name):
            setattr(sizes, name, config.dropout)
    # Every architecture has the eager implementations, and they take odd sizes (grouped_mm does not).
    model = AutoModelForCausalLM.from_config(
        sizes, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    # save_pretrained would not record these for random weights.
    model.config.architectures = [type(model).__name__]
    model.config.dtype = DTYPES[config.dtype]
    return model


def _add_lora(model: nn.Module, rank: int) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped = get_peft_model(model, lora)
    with torch.no_grad():  # B starts at zero, so A would have no gradient in the first step
        for name, parameter in wrapped.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.02)
    return wrapped


def _freeze(model: nn.Module, pattern: str) -> None:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UserError(f"--freeze {pattern}: {error}") from None
    names = [name for name, _ in model.named_parameters() if expression.search(name)]
    if not names:
        raise UserError(f"--freeze {pattern}: matches no model parameter")
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"--freeze {pattern}: leaves nothing to train")


class Toy(nn.Module):
    """Plain module with every shape and dtype that breaks naive code."""

    seen: torch.Tensor
    mask: torch.Tensor
    mean: torch.Tensor
    shift: torch.Tensor

    def __init__(self, empty: bool, width: int = 7) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embed.weight, std=0.2)
        self.conv = nn.Conv2d(1, 3, kernel_size=(3, 5), padding=(1, 2))  # 4-d weight, 3-element bias
        self.down = nn.Linear(width, 5)
        self.frozen = nn.Linear(5, width)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.0))  # 0-dim
        self.gain = nn.Parameter(torch.ones(1))  # one element
        self.pair = nn.Parameter(torch.ones(2))  # fewer elements than ranks
        self.empty = nn.Parameter(torch.ones(0, 4)) if empty else None
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.register_buffer("seen", torch.tensor(0))  # int64, counts this rank's tokens
        self.register_buffer("mask", torch.arange(width) % 3 != 1)  # bool
        self.register_buffer("mean", torch.linspace(-1, 1, width))  # fp32, not exact in 16 bits
        self.register_buffer("shift", torch.linspace(-2, 2, width, dtype=torch.bfloat16))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)  # not saved

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen += input_ids.numel()
        x = self.embed(input_ids)
        x = x + self.frozen(torch.tanh(self.down(x)))
        x = x + (self.conv(x.unsqueeze(1)).mean(1) + self.mean.to(x.dtype)) * self.mask
        x = x * self.scale + self.gain * self.shift.to(x.dtype) + x.roll(1, -1) * self.pair[0] + self.pair[1]
        logits = self.head(x)
        if self.empty is not None:
            logits = logits + self.empty.sum()
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return {"logits": logits, "loss": loss}
