"""BERT in transformers and megatron-core: two-part sentences with padding, and logits from both heads."""

from __future__ import annotations

from typing import Any

import torch

#: Unpadded tokens in the first sequence.
_LENGTH = 17
#: ckpt's names for the modules in a BertModel with local layers.
_NAMES = {
    "encoder.": "decoder.",
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}


def name_here(name: str) -> str:
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _given(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask for unpadded tokens, and each token's part in the sentence."""
    mask = torch.ones_like(inputs)
    mask[0, _LENGTH:] = 0
    return mask, (torch.arange(inputs.shape[1]) > inputs.shape[1] // 3).long().expand_as(inputs)


def of_transformers(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    mask, parts = _given(inputs)
    found = model(inputs, attention_mask=mask, token_type_ids=parts)
    return joined(found.prediction_logits, found.seq_relationship_logits, model.config.vocab_size)


def of_megatron(chunk: Any, inputs: torch.Tensor) -> Any:
    """Return a BertModel chunk's output; the last chunk returns both heads' logits."""
    mask, parts = _given(inputs)
    return chunk(inputs, mask, parts)


def joined(tokens: torch.Tensor, pairs: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Concatenate the logits for unpadded tokens and for sentence pairs."""
    tokens = tokens[..., :vocab_size]
    return torch.cat([tokens[0, :_LENGTH].flatten(), tokens[1:].flatten(), pairs.flatten()]).float()
