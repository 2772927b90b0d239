"""Llama 2, 3 and 3.1: the names that most decoders have followed."""

from __future__ import annotations

from functools import partial

from converters.names.megatron.args import gated
from converters.names.megatron.rows import DENSE, Row, gated_mlp, joined, qkv, same
from converters.names.megatron.sizes import Config, Sizes, attention_sizes
from converters.names.megatron.table import Table

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"

_M, _H = "decoder.layers.{n}", "model.layers.{n}"
_QKV = "qkv bias"

FINAL_NORM = (Row("decoder.final_layernorm.weight", "model.norm.weight", "h", same),)

ATTENTION = (
    Row(f"{_M}.self_attention.linear_qkv.layer_norm_weight", f"{_H}.input_layernorm.weight", "h", same),
    Row(f"{_M}.self_attention.linear_qkv.weight", tuple(f"{_H}.self_attn.{x}_proj.weight" for x in "qkv"), "a h", qkv),
    Row(f"{_M}.self_attention.linear_qkv.bias", tuple(f"{_H}.self_attn.{x}_proj.bias" for x in "qkv"), "a", qkv, _QKV),
    Row(f"{_M}.self_attention.linear_proj.weight", f"{_H}.self_attn.o_proj.weight", "h a", same),
    Row(f"{_M}.self_attention.linear_proj.bias", f"{_H}.self_attn.o_proj.bias", "h", same, only="biases"),
    Row(f"{_M}.self_attention.q_layernorm.weight", f"{_H}.self_attn.q_norm.weight", "d", same, only="qk norm"),
    Row(f"{_M}.self_attention.k_layernorm.weight", f"{_H}.self_attn.k_norm.weight", "d", same, only="qk norm"),
)

MLP = (
    Row(f"{_M}.mlp.linear_fc1.layer_norm_weight", f"{_H}.post_attention_layernorm.weight", "h", same, only=DENSE),
    *gated_mlp(f"{_M}.mlp", f"{_H}.mlp", "f", DENSE),
)

MLP_BIASES = (
    Row(f"{_M}.mlp.linear_fc1.bias", (f"{_H}.mlp.gate_proj.bias", f"{_H}.mlp.up_proj.bias"), "f", joined, "biases"),
    Row(f"{_M}.mlp.linear_fc2.bias", f"{_H}.mlp.down_proj.bias", "h", same, only="biases"),
)

#: Older files of Llama and its kin hold the frequencies of rotary positions.
DERIVED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def sizes(config: Config) -> Sizes:
    # Megatron has biases in all linear layers or in none, besides those of queries, keys and values alone.
    attention, mlp = config.flag("attention_bias"), config.flag("mlp_bias")
    return attention_sizes(config, holds=[_QKV] * attention + ["biases"] * (attention and mlp))


_ARGS = partial(gated, sizes=sizes, slides=False)
TABLE = Table(EMBEDDING, OUTPUT, FINAL_NORM + ATTENTION + MLP + MLP_BIASES, sizes, _ARGS, derived=DERIVED)
