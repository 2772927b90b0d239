"""Public models: sizes from their config.json, and how many parameters they have."""

from __future__ import annotations

from typing import Any

#: Parameters, and the config.
PUBLIC: dict[str, tuple[int, dict[str, Any]]] = {
    "Llama-3-8B": (
        8_030_261_248,
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen3-8B": (
        8_190_735_360,
        {
            "model_type": "qwen3",
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        {
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
    ),
    "gpt-oss-20b": (
        20_914_757_184,
        {
            "model_type": "gpt_oss",
            "attention_bias": True,
            "head_dim": 64,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "vocab_size": 201088,
            "tie_word_embeddings": False,
        },
    ),
    "DeepSeek-V3": (
        671_026_404_352,  # without the layer of multi-token prediction, and without the routers' bias, a buffer
        {
            "model_type": "deepseek_v3",
            "first_k_dense_replace": 3,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "kv_lora_rank": 512,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_attention_heads": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 129280,
            "tie_word_embeddings": False,
        },
    ),
    "LLaMA-7B": (
        6_738_415_616,
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32000,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen3-235B-A22B": (
        235_093_634_560,
        {
            "model_type": "qwen3_moe",
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "mlp_only_layers": [],
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 94,
            "num_key_value_heads": 4,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
    ),
}

#: Sizes from the model card llm-jp/llm-jp-13b-v1.0-mdsfmt.
LLM_JP_13B = {
    "model_type": "gpt2",
    "n_embd": 5120,
    "n_head": 40,
    "n_layer": 40,
    "n_positions": 2048,
    "vocab_size": 50570,
}
#: From llm-jp/Megatron-DeepSpeed scripts/abci/175B/49node/, with the tokenizer of the 13B.
LLM_JP_175B = {
    "model_type": "gpt_neox",
    "hidden_size": 12288,
    "intermediate_size": 49152,
    "num_attention_heads": 96,
    "num_hidden_layers": 96,
    "rotary_pct": 0.25,
    "vocab_size": 50570,
    "tie_word_embeddings": True,
    "use_parallel_residual": False,
}
