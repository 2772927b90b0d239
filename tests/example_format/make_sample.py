"""Makes `ckpt_mlx/sample` with mlx_lm itself (0.32.2, mlx 0.32.4): a tiny mixture of experts, and its state.

pip install mlx-lm mlx[cpu] && python make_sample.py
"""

from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.models import qwen3_moe

SAMPLE = Path(__file__).parent / "ckpt_mlx" / "sample"
CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 8,
    "intermediate_size": 12,
    "moe_intermediate_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 11,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


class Bytes(int):
    """A limit in bytes, not gigabytes, to split a small model into several files."""

    def __lshift__(self, bits: int) -> int:
        return int(self)


mx.random.seed(0)
model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(CONFIG))
model.set_dtype(mx.bfloat16)
utils.make_shards = partial(utils.make_shards, max_file_size_gb=Bytes(1500))
utils.save_model(SAMPLE, model)
utils.save_config(dict(CONFIG), SAMPLE / "config.json")
np.savez(
    SAMPLE / "truth.npz", **{name: np.array(value.view(mx.uint16)) for name, value in tree_flatten(model.parameters())}
)
