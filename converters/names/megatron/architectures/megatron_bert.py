"""MegatronBERT, a BERT with norms before attention and MLP: megatron-core's BertModel with its binary head.

megatron/core/models/bert/bert_model.py, bert_lm_head.py and pooler.py. Its `encoder` layers are like a decoder's with
another name (`model.spelling`), and attend to all tokens.
"""

from __future__ import annotations

from typing import Any

from ckpt.base.errors import LossError
from converters.names.families.config import architectures
from converters.names.families.rows import Sizes
from converters.names.families.tables import FAMILIES
from converters.names.megatron.args import common
from converters.names.megatron.table import Table

TOP = """
    embedding.word_embeddings.weight                        bert.embeddings.word_embeddings.weight              padded
    embedding.position_embeddings.weight                    bert.embeddings.position_embeddings.weight          same
    embedding.tokentype_embeddings.weight                   bert.embeddings.token_type_embeddings.weight        same
    decoder.final_layernorm.[weight|bias]                   bert.encoder.ln.[weight|bias]                       same
    lm_head.dense.[weight|bias]                             cls.predictions.transform.dense.[weight|bias]       same
    lm_head.layer_norm.[weight|bias]                        cls.predictions.transform.LayerNorm.[weight|bias]   same
    output_layer.weight                                     cls.predictions.decoder.weight                      padded
    output_layer.bias                                       cls.predictions.bias                                padded
    output_layer.bias                                       cls.predictions.decoder.bias                        copy
    binary_head.[weight|bias]                               cls.seq_relationship.[weight|bias]                  same
    pooler.dense.[weight|bias]                              bert.pooler.dense.[weight|bias]                     same
"""
LAYER = """
    self_attention.linear_qkv.layer_norm_[weight|bias]      attention.ln.[weight|bias]                          same
    self_attention.linear_qkv.[weight|bias]                 attention.self.[query|key|value].[weight|bias]      qkv
    self_attention.linear_proj.[weight|bias]                attention.output.dense.[weight|bias]                same
    mlp.linear_fc1.layer_norm_[weight|bias]                 ln.[weight|bias]                                    same
    mlp.linear_fc1.[weight|bias]                            intermediate.dense.[weight|bias]                    same
    mlp.linear_fc2.[weight|bias]                            output.dense.[weight|bias]                          same
"""

_CLASS = "MegatronBertForPreTraining"


def args(sizes: Sizes) -> dict[str, Any]:
    config = sizes.config
    for name, expected in (("hidden_act", "gelu"), ("type_vocab_size", 2)):
        if config.get(name) not in (None, expected):
            raise LossError(
                "Megatron's BertModel does not support this setting",
                expected=f"{name} {expected}",
                found=f"{name} {config.get(name)}",
            )
    if config.flag("is_decoder"):
        raise LossError("Megatron's BertModel attends to all tokens", expected="is_decoder false", found="true")
    if not sizes.tied:
        raise LossError("this class has an unused extra bias if the embeddings are untied")
    if named := [name for name in architectures(config.values) if name != _CLASS]:
        raise LossError(
            "Megatron-LM's BertModel has heads for masked tokens and sentence pairs, and this class lacks one or both",
            expected=_CLASS,
            found=named[0],
        )
    return common(sizes) | {
        "bert_binary_head": True,
        "max_position_embeddings": sizes.dims["p"],
        "position_embedding_type": "learned_absolute",
        "use_rotary_position_embeddings": False,
        "normalization": "LayerNorm",
        "norm_epsilon": config.number("layer_norm_eps", 1e-12),
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "swiglu": False,
        "attention_dropout": config.number("attention_probs_dropout_prob", 0.1),
        "hidden_dropout": config.number("hidden_dropout_prob", 0.1),
    }


TABLE = Table(FAMILIES["megatron-bert"], args, TOP, LAYER)
