"""Bytes saved for the backward pass.

Counts follow Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models, section 4): every
tensor that autograd saves, once. Attention is fused, unless eager attention is requested.

* `transformers`: its modules (5.23). A norm keeps its float32 input, its normalised input and its output. A gated MLP
  keeps gate, its activation, up and their product. Counts equal `torch.autograd.graph.saved_tensors_hooks`.
* `megatron`: fused layers, as in the paper without dropout. Tensor parallelism divides tensors inside attention and MLP
  (section 4.2.1), sequence parallelism divides everything (4.2.2). Pipeline stages hold one micro batch for each later
  stage (4.2.3).

With checkpointing, every layer keeps only its input, and one layer at a time is recomputed (section 5).

A fused loss (Cut cross-entropy, Wijmans et al. 2024; Liger-Kernel ops/fused_linear_cross_entropy.py) holds the
gradients of its two operands, and logits for a few tokens at a time, by Liger's rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.commands.estimate.setup import Setup
from ckpt.state.parameters import Block

_FP32 = 4
#: An index, a float32 weight and its position, per token and expert.
_ROUTED = 38
#: One in use, one in transfer.
_IN_USE = 2


@dataclass(frozen=True, slots=True)
class Activations:
    """Peak bytes, with all activations kept and with every layer checkpointed.

    `host` counts inputs in host memory.
    """

    kept: int
    checkpointed: int
    host: int = 0


def per_token(block: Block, itemsize: int, keys: int = 0) -> int:
    """Return saved bytes per token and layer in transformers, with `itemsize` bytes per element.

    Eager attention saves scores for `keys` tokens, and keys and values for each query head.
    """
    norm = _norm(block, itemsize)
    if keys:
        repeated = block.queries // block.keys  # query heads per key head
        score = _FP32 * block.scores_fp32 + itemsize * block.scores
        attention = itemsize * (block.queries + repeated * (block.keys + block.values) + block.attended)
        attention += score * block.heads * keys
    else:
        attention = itemsize * (block.queries + block.keys + block.values + (1 + block.again) * block.attended)
        attention += _FP32 * block.heads
    heads = (_FP32 + itemsize) * (block.queries + block.keys) + _FP32 * block.qk_norms if block.qk_norms else 0
    latent = (_FP32 + 2 * itemsize) * block.latent
    mlp = itemsize * block.ffn_saved * block.ffn
    experts = 0
    if block.top:
        routed = itemsize * (2 * block.hidden + block.expert_saved * block.expert_ffn) + _ROUTED
        experts = block.top * routed + _FP32 * (block.num_experts + 1)
    return 2 * norm + attention + heads + latent + mlp + experts


def _norm(block: Block, itemsize: int) -> int:
    """Count the output too: it is the next layer's input."""
    if block.layer_norm:  # torch's own: input, output, mean and deviation
        return 2 * itemsize * block.hidden + 2 * itemsize
    return (_FP32 + 2 * itemsize) * block.hidden + _FP32


def _loss(hidden: int, vocabulary: int, setup: Setup) -> int:
    """Return the bytes for last norm, logits and loss, at the start of the backward pass.

    Logits have the model's dtype. The softmax and both gradients (loss, logits) are float32.
    """
    item = setup.itemsize
    norm = setup.tokens * (_FP32 + 2 * item) * hidden
    if not setup.fused_loss:
        return norm + setup.tokens * (item + 3 * _FP32) * vocabulary
    return norm + _fused_loss(hidden, vocabulary, setup)


def _fused_loss(hidden: int, vocabulary: int, setup: Setup, tp: int = 1) -> int:
    """Count gradients (last hidden states, output layer if trained) and one chunk's logits."""
    chunks = -(-vocabulary // hidden)
    chunk = min(setup.tokens, 1 << (-(-setup.tokens // chunks) - 1).bit_length())
    weight = 0 if setup.lora_rank else vocabulary * hidden
    return setup.itemsize * (setup.tokens * hidden + (chunk * vocabulary + weight) // tp)


def _activations(layers: Sequence[int], loss: int, again: int, inputs: int, setup: Setup) -> Activations:
    checkpointed, host = inputs * len(layers), 0
    if setup.activation_offload:
        host = max(0, checkpointed - _IN_USE * inputs)
    return Activations(sum(layers) + loss, checkpointed - host + max(loss, again), host)


def transformers(blocks: Sequence[Block], vocabulary: int, setup: Setup) -> Activations:
    item, tokens, hidden = setup.itemsize, setup.tokens, blocks[0].hidden
    keys = setup.length if setup.eager_attention else 0
    layers = [tokens * per_token(block, item, keys) for block in blocks]
    widest = max(max(block.ffn, block.top * block.expert_ffn) for block in blocks)
    # During recomputation, the logits and two MLP-wide gradients are still alive.
    logits = 0 if setup.fused_loss else vocabulary
    again = max(layers) + tokens * (item * (logits + 2 * widest) + _FP32 * hidden)
    return _activations(layers, _loss(hidden, vocabulary, setup), again, tokens * item * hidden, setup)


def megatron(
    blocks: Sequence[Block], in_flight: int, hidden: int, vocabulary: int, setup: Setup, tp: int, has_loss: bool
) -> Activations:
    """Return a pipeline stage's activations. `vocabulary` is padded. `has_loss` marks the last stage."""
    item, tokens = setup.itemsize, setup.tokens
    outside = tp if setup.sequence_parallel else 1  # divides norms and layer inputs
    loss = 0
    if has_loss:
        # Vocabulary-parallel loss: logits, their float32 copy, softmax and gradient (tensor_parallel/cross_entropy.py).
        logits = tokens * (item + 2 * _FP32) * vocabulary // tp
        fused = _fused_loss(hidden, vocabulary, setup, tp)
        loss = tokens * 2 * item * hidden // outside + (fused if setup.fused_loss else logits)
    layers = [tokens * _fused(block, setup, tp, outside, setup.recompute) for block in blocks]
    again = max((tokens * _fused(block, setup, tp, outside, ()) for block in blocks), default=0)
    inputs = in_flight * tokens * item * hidden // outside
    return _activations([in_flight * layer for layer in layers], loss, again, inputs, setup)


def _fused(block: Block, setup: Setup, tp: int, outside: int, recompute: Sequence[str]) -> int:
    """Return bytes per token: inputs to norms, linear layers, attention and activation."""
    norms = 2 if "layernorm" in recompute else 4
    inside = block.queries + block.keys + block.values + block.attended + 2 * block.latent
    if "mlp" not in recompute:
        inside += (3 if block.gated else 2) * block.ffn
    if "moe" not in recompute:
        inside += block.top * (2 * block.hidden + (2 if "moe_act" in recompute else 3) * block.expert_ffn)
    softmax = setup.itemsize * setup.length if setup.eager_attention else _FP32
    scores = 0 if "core_attn" in recompute else softmax * block.heads
    return -(-setup.itemsize * norms * block.hidden // outside) - (-(setup.itemsize * inside + scores) // tp)
