"""What a model is made of, as its memory depends on it: parameters with their shapes, and the sizes of its layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from ckpt.plan.tensors import Shape

#: Kinds of parameters: matrices of linear layers, all experts of a layer in one, and what chooses among these.
EMBEDDING, HEAD, LINEAR, EXPERT, ROUTER, OTHER = "embedding", "head", "linear", "expert", "router", "other"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter, or `count` of them that are alike.

    `layer` is the number of the layer that it belongs to, None outside all.  `adapter` says how many times the rank of
    a LoRA adapter it gets where all linear layers have one.
    """

    name: str
    shape: Shape
    kind: str
    layer: int | None = None
    count: int = 1
    adapter: int = 0

    @property
    def numel(self) -> int:
        """Elements of all `count` of them."""
        return self.count * prod(self.shape)


def num_elements(parameters: Iterable[Parameter]) -> int:
    """Elements of all of them together."""
    return sum(parameter.numel for parameter in parameters)


@dataclass(frozen=True, slots=True)
class Block:
    """The sizes of a layer that its activations depend on; all are elements per token.

    `queries`, `keys`, `values` are those of all heads, `attended` what attention gives to its output layer, which
    transformers' fused attention saves `again` so many times; its eager attention saves each score `scores` times in
    the model's dtype, and in float32 where `scores_fp32`.  `latent`
    the low-rank queries, keys and values of latent attention.  `qk_norms` is the number of heads whose queries or keys
    are normalised.  `ffn` is the width of a dense MLP or of shared experts, `ffn_saved` the number of tensors of that
    width that the backward pass needs; the same of one expert.  Each token goes through `top` experts.
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
    """A model in the form in which transformers holds it; `blocks` is empty where its layers are not known."""

    name: str
    parameters: tuple[Parameter, ...]
    blocks: tuple[Block, ...]
    hidden: int
    vocabulary: int


def flops_per_token(model: Model, length: int, *, frozen: bool = False) -> int | None:
    """Floating-point operations of the forward and the backward pass for each token; None where layers are not known.

    6 N + 12 s q, as of PaLM (Chowdhery et al. 2022, appendix B): N are the parameters that a token is multiplied with,
    the embedding's only where it is the output layer too, and of the experts those that it is sent to; s is the
    `length` of a sequence, q the width of all layers' queries together.  Of a `frozen` model, trained by an adapter,
    no gradients of parameters are made: 4 N.
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
    """What one tensor-parallel rank of a pipeline stage of megatron-core's holds, and of which layers."""

    parameters: tuple[Parameter, ...]
    layers: range
    is_last: bool
