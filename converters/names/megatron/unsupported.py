"""transformers' architectures that megatron-core can't compute, and the features missing for each.

From megatron-core 0.16.1 (transformer/transformer_config.py, transformer_layer.py, attention.py, mlp.py and
moe/moe_utils.py, models/common/embeddings) and the classes in transformers 5.23. Peers train some of these with their
own model classes, which can't load Megatron-LM's checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping

_LACKS = {
    "parallel attention and MLP with one norm": "codegen cohere cohere2 cohere2_moe falcon gptj phi",
    "norms after attention and MLP": """
        afmoe axk1 bert exaone4 flex_olmo gemma2 gemma3_text glm4 kolibri1 olmo2 olmo3 roberta
    """,
    "query and key norms across all heads": "minimax_m2 olmoe",
    "query and key norms after rotary positions": "hunyuan_v1_dense hunyuan_v1_moe nanochat",
    "norms without weights": "olmo",
    "gated norms": "axk2",
    "norms inside attention and MLP": "bitnet",
    "a norm after the embedding": "modernbert-decoder",
    "scaled embeddings": "biogpt gemma vaultgemma xglm",
    "multipliers for embeddings, residuals or logits": """
        granite granite_swa granitemoe granitemoe_swa granitemoeshared hyperclovax minicpm3
    """,
    "residuals scaled by depth": "beam",
    "queries scaled by position": "llama4_text ministral3",
    "rotary positions by layer": "mellum",
    "biases linear in the distance (ALiBi)": "bloom mpt",
    "the activation xIELU": "apertus",
    "the activation ReLU": "opt",
    "biases only on the attention output": "gpt_neo",
    "an encoder with relative position biases": "mt5 t5 umt5",
    "clamped queries, keys and values": "dbrx",
    "an attention mask computed from the values": "doge",
    "differential attention": "diffllama",
    "softplus attention gates": "laguna",
    "scaled attention values": "mimo_v2_flash",
    "heads routed like experts": "jetmoe",
    "an expert choice bias with a softmax": "ernie4_5_moe",
    "experts chosen by SparseMixer": "phimoe",
    "experts without computation": "longcat_flash",
    "convolutions instead of attention": "lfm2 lfm2_moe",
    "lightning attention": "minimax",
    "attention and Mamba side by side in one layer": "falcon_h1",
    "Mamba-1, without heads": "falcon_mamba jamba mamba",
    "delta attention with a decay for each channel": "kimi_linear",
    "gated linear recurrences": "recurrent_gemma",
    "a layer specification with sparse attention (DSA)": "deepseek_v32 glm_moe_dsa",
    "hyper-connections": "deepseek_v4 hy_v4",
}

#: Missing features in megatron-core, by `model_type`.
MISSING: Mapping[str, str] = {model_type: what for what, types in _LACKS.items() for model_type in types.split()}
