"""EXAONE 3 and 3.5: Llama with other names."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import llama
from converters.names.megatron.args import gated

TOP = llama.TOP.replace("model.embed_tokens", "transformer.wte").replace("model.norm", "transformer.ln_f")
LAYER = llama.ATTENTION.replace("self_attn.", "attn.attention.").replace(".o_proj", ".out_proj")
MLP = llama.MLP.replace("[gate|up]_proj", "c_fc_[0|1]").replace("down_proj", "c_proj")
LAYER, MLP = LAYER.replace("input_layernorm", "ln_1"), MLP.replace("post_attention_layernorm", "ln_2")
ARGS = partial(gated, slides=False)

TABLE = replace(llama.TABLE, family=FAMILIES["exaone"], args=ARGS, top=TOP, layer=LAYER, dense=MLP)
