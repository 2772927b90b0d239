"""Bytes that the backward pass needs of the forward pass, per layer and in all.

Counted as Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models, section 4) do it:
every tensor that autograd saves, once; attention is fused (flash or memory-efficient), so no tensor has sequence
length squared elements.  Two implementations are told apart:

* `transformers`: its modules as they are (5.23).  A norm keeps its input in float32, the normalised input and its
  output; a gated MLP keeps gate, its activation, up and their product.  Counts follow from the modules' source and
  equal what `torch.autograd.graph.saved_tensors_hooks` sees.
* `megatron`: fused layers, as the paper counts them, without its dropout.  Sequence parallelism divides everything by
  the tensor parallel size (section 4.2.2), pipeline stages hold one micro batch for each stage behind them (4.2.3).

With checkpointing, every layer keeps its input only, and one layer at a time is computed again (section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.estimate.parameters import Block

_FP32 = 4
#: An index, a float32 weight and its position: what routing keeps for each expert of a token, in bytes.
_ROUTED = 38


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes at the peak, with every activation kept and with checkpointing of every layer."""

    kept: int
    checkpointed: int


def per_token(block: Block, itemsize: int) -> int:
    """Bytes that transformers' modules save for one token in one layer, computing in elements of `itemsize` bytes."""
    norm = _norm(block, itemsize)
    attention = itemsize * (block.queries + block.keys + block.values + block.attended) + _FP32 * block.heads
    heads = (_FP32 + itemsize) * (block.queries + block.keys) + _FP32 * block.qk_norms if block.qk_norms else 0
    latent = (_FP32 + 2 * itemsize) * block.latent
    mlp = itemsize * block.ffn_saved * block.ffn
    experts = 0
    if block.top:
        routed = itemsize * (2 * block.hidden + block.expert_saved * block.expert_ffn) + _ROUTED
        experts = block.top * routed + _FP32 * (block.num_experts + 1)
    return 2 * norm + attention + heads + latent + mlp + experts


def _norm(block: Block, itemsize: int) -> int:
    """A norm and its output, which is the next layer's input."""
    if block.layer_norm:  # torch's own: input, output, mean and deviation
        return 2 * itemsize * block.hidden + 2 * itemsize
    return (_FP32 + 2 * itemsize) * block.hidden + _FP32


def loss_per_token(hidden: int, vocabulary: int, itemsize: int) -> int:
    """Last norm, logits and the loss, at the start of the backward pass: logits in the model's dtype, and in float32
    their softmax, the gradient of the loss and that of the logits.
    """
    return (_FP32 + 2 * itemsize) * hidden + (itemsize + 3 * _FP32) * vocabulary


def transformers(blocks: Sequence[Block], vocabulary: int, tokens: int, itemsize: int) -> Activations:
    """Of a micro batch of `tokens` tokens, all on one GPU."""
    layers = [per_token(block, itemsize) for block in blocks]
    hidden = blocks[0].hidden
    loss = loss_per_token(hidden, vocabulary, itemsize)
    inputs = itemsize * hidden * len(blocks)
    widest = max(max(block.ffn, block.top * block.expert_ffn) for block in blocks)
    # While a layer is computed again the model's logits are still there, and two gradients as wide as its MLP.
    again = max(layers) + itemsize * (vocabulary + 2 * widest) + _FP32 * hidden
    return Activations(tokens * (sum(layers) + loss), tokens * (inputs + max(loss, again)))


def megatron(
    blocks: Sequence[Block], in_flight: int, vocabulary: int, tokens: int, itemsize: int, tp: int, *, has_loss: bool
) -> Activations:
    """Of a pipeline stage with the layers `blocks`, which holds `in_flight` micro batches of `tokens` tokens.

    `vocabulary` is padded; `has_loss`: it is the last stage.
    """
    layers = [_fused(block, itemsize) for block in blocks]
    hidden = blocks[0].hidden
    # The vocabulary-parallel loss: logits, their float32 copy, softmax and gradient (tensor_parallel/cross_entropy.py).
    loss = 2 * itemsize * hidden + (itemsize + 2 * _FP32) * vocabulary if has_loss else 0
    inputs = itemsize * hidden * len(blocks)
    kept = tokens * (in_flight * sum(layers) + loss)
    return Activations(-(-kept // tp), -(-tokens * (in_flight * inputs + max(loss, max(layers))) // tp))


def _fused(block: Block, itemsize: int) -> int:
    """A layer of fused modules: inputs of norms, of linear layers, of attention and of the activation function."""
    attention = block.queries + block.keys + block.values + block.attended + 2 * block.latent
    mlp = (3 if block.gated else 2) * block.ffn
    experts = block.top * (2 * block.hidden + 3 * block.expert_ffn)
    return itemsize * (4 * block.hidden + attention + mlp + experts) + _FP32 * block.heads
