"""transformers' architectures that megatron-core can't compute, and the features missing for each.

From megatron-core 0.16.1 (transformer/transformer_config.py, transformer_layer.py, attention.py, mlp.py and
moe/moe_utils.py, models/common/embeddings) and the classes in transformers 5.23. Peers train some of these with their
own model classes, which can't load Megatron-LM's checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping

_LACKS = {
    "attention and MLP beside each other, which read one norm": "codegen cohere cohere2 cohere2_moe falcon gptj phi",
    "norms behind attention and MLP": """
        afmoe axk1 bert exaone4 flex_olmo gemma2 gemma3_text glm4 kolibri1 olmo2 olmo3 roberta
    """,
    "norms of queries and keys over all heads together": "minimax_m2 olmoe",
    "norms of queries and keys behind the rotary positions": "hunyuan_v1_dense hunyuan_v1_moe nanochat",
    "norms without weights": "olmo",
    "gated norms": "axk2",
    "norms inside attention and MLP": "bitnet",
    "a norm behind the embedding": "modernbert-decoder",
    "embeddings that are multiplied by a number": "biogpt gemma vaultgemma xglm",
    "multipliers of embeddings, residuals or logits": """
        granite granite_swa granitemoe granitemoe_swa granitemoeshared hyperclovax minicpm3
    """,
    "residuals that are scaled by their depth": "beam",
    "queries that are scaled by their position": "llama4_text ministral3",
    "rotary positions that differ between layers": "mellum",
    "biases that are linear in the distance (ALiBi)": "bloom mpt",
    "the activation xIELU": "apertus",
    "the activation ReLU": "opt",
    "biases of the output of attention alone": "gpt_neo",
    "an encoder with biases of attention by relative position": "mt5 t5 umt5",
    "a clamp of queries, keys and values": "dbrx",
    "a mask of attention that depends on the values": "doge",
    "differences of two attentions": "diffllama",
    "gates of attention by softplus": "laguna",
    "values of attention that are scaled": "mimo_v2_flash",
    "attention whose heads are experts": "jetmoe",
    "a bias for the choice of experts beside a softmax": "ernie4_5_moe",
    "experts that are chosen by SparseMixer": "phimoe",
    "experts that compute nothing": "longcat_flash",
    "convolutions in place of attention": "lfm2 lfm2_moe",
    "lightning attention": "minimax",
    "attention and Mamba side by side in one layer": "falcon_h1",
    "Mamba of the first kind, without heads": "falcon_mamba jamba mamba",
    "delta attention with a decay for each channel": "kimi_linear",
    "gated linear recurrences": "recurrent_gemma",
    "a layer specification with sparse attention (DSA)": "deepseek_v32 glm_moe_dsa",
    "hyper-connections": "deepseek_v4 hy_v4",
}

#: Missing features in megatron-core, by `model_type`.
MISSING: Mapping[str, str] = {model_type: what for what, types in _LACKS.items() for model_type in types.split()}
