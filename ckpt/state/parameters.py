"""Model sizes for memory estimates: parameters with shapes, and layer sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from ckpt.plan.tensors import Shape

#: `EXPERT` is a layer's experts together.
EMBEDDING, HEAD, LINEAR, EXPERT, ROUTER, OTHER = "embedding", "head", "linear", "expert", "router", "other"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter, or `count` equal ones.

    `layer` is None outside all layers. `adapter` is the number of elements per LoRA rank.
    """

    name: str
    shape: Shape
    kind: str
    layer: int | None = None
    count: int = 1
    adapter: int = 0

    @property
    def numel(self) -> int:
        return self.count * prod(self.shape)


def num_elements(parameters: Iterable[Parameter]) -> int:
    return sum(parameter.numel for parameter in parameters)


@dataclass(frozen=True, slots=True)
class Block:
    """Layer sizes that determine its activations, in elements per token.

    `queries`, `keys` and `values` count all heads. `attended` is the input of attention's output layer; transformers'
    fused attention saves it `again` more times. Eager attention saves each score `scores` times in the model's dtype,
    and in float32 if `scores_fp32`. `latent` is the size of low-rank queries, keys and values in latent attention.
    `qk_norms` is the number of heads with normalised queries or keys. `ffn` is the width of a dense MLP or of shared
    experts, and `ffn_saved` the number of tensors with this width needed in the backward pass. `expert_ffn` and
    `expert_saved` are the same for one expert. Each token uses `top` experts.
    """

    hidden: int
    queries: int
    keys: int
    values: int
    attended: int
    heads: int
    latent: int
    qk_norms: int
    layer_norm: bool
    ffn: int
    ffn_saved: int
    gated: bool
    expert_ffn: int = 0
    expert_saved: int = 0
    num_experts: int = 0
    top: int = 0
    again: int = 0
    scores: int = 1
    scores_fp32: bool = True


@dataclass(frozen=True, slots=True)
class Model:
    """`blocks` is empty if the layers are unknown."""

    name: str
    parameters: tuple[Parameter, ...]
    blocks: tuple[Block, ...]
    hidden: int
    vocabulary: int


def flops_per_token(model: Model, length: int, *, frozen: bool = False) -> int | None:
    """Return the floating-point operations per token in forward and backward pass, or None if layers are unknown.

    The formula is 6 N + 12 s q from PaLM (Chowdhery et al. 2022, appendix B). N counts the parameters multiplied with a
    token: the embedding only if it is the output layer too, and only the experts in use. s is the sequence `length`, q
    the queries' width over all layers. A `frozen` model with an adapter needs no parameter gradients: 4 N.
    """
    if not model.blocks:
        return None
    used = model.hidden * model.vocabulary
    for parameter in model.parameters:
        if parameter.kind == EXPERT:
            block = model.blocks[parameter.layer or 0]
            used += parameter.numel * block.top // block.num_experts
        elif parameter.kind in (LINEAR, ROUTER):
            used += parameter.numel
    return (4 if frozen else 6) * used + 12 * length * sum(block.queries for block in model.blocks)


@dataclass(frozen=True, slots=True)
class Stage:
    """Parameters and layers of one tensor-parallel rank in a megatron-core pipeline stage."""

    parameters: tuple[Parameter, ...]
    layers: range
    is_last: bool
