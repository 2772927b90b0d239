"""ChatGLM 2 and 3, and GLM-4-9B as first released: names close to Megatron's, rotary positions in half of each head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt.base.errors import LossError
from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.args import common
from converters.names.megatron.table import Table

TOP = """
    embedding.word_embeddings.weight                transformer.embedding.word_embeddings.weight        padded
    output_layer.weight                             transformer.output_layer.weight                     padded
    decoder.final_layernorm.weight                  transformer.encoder.final_layernorm.weight          same
"""
LAYER = """
    self_attention.linear_qkv.layer_norm_weight     input_layernorm.weight                              same
    self_attention.linear_qkv.[weight|bias]         self_attention.query_key_value.[weight|bias]        one_qkv
    self_attention.linear_proj.weight               self_attention.dense.weight                         same
    mlp.linear_fc1.layer_norm_weight                post_attention_layernorm.weight                     same
    mlp.linear_fc1.weight                           mlp.dense_h_to_4h.weight                            same
    mlp.linear_fc2.weight                           mlp.dense_4h_to_h.weight                            same
"""
#: Config flags that Megatron requires to have this value.
_PLAIN = {"rmsnorm": True, "apply_residual_connection_post_layernorm": False, "post_layer_norm": True}


def args(sizes: Sizes) -> dict[str, Any]:
    config = sizes.config
    other = {name: config.flag(name, plain) for name, plain in _PLAIN.items() if config.flag(name, plain) != plain}
    if other:
        raise LossError("ckpt knows this architecture with RMS norms before attention and MLP", found=other)
    if "chatglm2" in str(config.get("_name_or_path")).lower() and config.number("rope_ratio", 1) != 1:
        raise LossError("ChatGLM2 divides positions by its rope_ratio, and ckpt knows ChatGLM3's", found="rope_ratio")
    return common(sizes) | {
        "add_qkv_bias": config.flag("add_qkv_bias"),
        "norm_epsilon": config.number("rms_norm_eps", 1e-5),
        "rotary_base": 10000 * config.number("rope_ratio", 1),
        "rotary_percent": 0.5,
        "rotary_interleaved": True,
        "hidden_dropout": config.number("hidden_dropout", 0.0),
    }


def notes(sizes: Sizes) -> Sequence[str]:
    if sizes.config.number("rope_ratio", 1) == 1:
        return ()
    return ("rope_ratio scales the rotary base (ChatGLM3, GLM-4); ChatGLM2 divides positions by it instead",)


TABLE = Table(FAMILIES["chatglm"], args, TOP, LAYER, notes=notes)
