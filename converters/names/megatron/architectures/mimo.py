"""MiMo: Qwen2's names, and multi-token prediction layers that take the hidden state before the embedding.

Megatron takes the embedding first, so the two halves of the joining matrix are swapped.
"""

from __future__ import annotations

from dataclasses import replace

from converters.names.families.tables import FAMILIES
from converters.names.megatron.architectures import qwen2

PREDICTION = """
    mtp.layers.{n}.enorm.weight                     token_layernorm.weight                  same
    mtp.layers.{n}.hnorm.weight                     hidden_layernorm.weight                 same
    mtp.layers.{n}.eh_proj.weight                   input_proj.weight                       exchanged
    mtp.layers.{n}.final_layernorm.weight           final_layernorm.weight                  same
"""

TABLE = replace(qwen2.TABLE, family=FAMILIES["mimo"], prediction=PREDICTION)
