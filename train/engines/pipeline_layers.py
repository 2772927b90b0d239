"""Decoder like Megatron-DeepSpeed's: layers for DeepSpeed's PipelineModule, sharded over tensor-parallel ranks.

Module names, layer order and shards follow Megatron-DeepSpeed's GPTModelPipe (docs/pipelines.md names the commits).
Each weight's generator is seeded with the tensor's name, so every layout has the same weights.
"""

import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.module_inject.layers import ColumnParallel, GatherFromTensorParallelRegion, RowParallel
from torch import nn
from torch.nn import functional

from train.config import Config, UserError
from train.data import VOCABULARY
from train.models import sizes_of
from train.truth.pieces import Place

ARCHITECTURES = ("llama", "mistral", "qwen2", "gpt_neox")


@dataclass(frozen=True)
class Sizes:
    """`group` is the tensor-parallel process group."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    epsilon: float
    rotary_dim: int
    tied: bool
    bias: bool
    qkv_bias: bool
    layer_norm: bool
    gated: bool
    seed: int
    tp: int
    rank: int
    group: Any


def sizes(config: Config, model: Any, rank: int, group: Any) -> Sizes:
    """Raise UserError if the layout does not fit."""
    architecture = config.model.removesuffix("_wide").removesuffix("_even")
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"--strategy megatron-deepspeed: --model {config.model} is not one of {', '.join(ARCHITECTURES)}"
        )
    hub, tp, heads = model.config, config.tp, model.config.num_attention_heads
    neox = architecture == "gpt_neox"  # its config may hold other architectures' sizes
    kv_heads = heads if neox else hub.num_key_value_heads
    head_dim = (not neox and getattr(hub, "head_dim", None)) or hub.hidden_size // heads
    for name, size in (("attention heads", heads), ("key/value heads", kv_heads)):
        if size % tp:
            raise UserError(f"--tp {tp}: --model {config.model} has {size} {name}; try {architecture}_wide")
    if hub.intermediate_size % tp:
        raise UserError(f"--tp {tp} does not divide the MLP's {hub.intermediate_size} rows")
    if hub.num_hidden_layers < config.pp:
        raise UserError(f"--pp {config.pp}: {hub.num_hidden_layers} layers leave a stage without any")
    multiple = config.vocab_multiple * tp
    return Sizes(
        hidden=hub.hidden_size,
        ffn=hub.intermediate_size,
        layers=hub.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=head_dim // (4 if neox else 1),
        bias=neox,
        qkv_bias=neox or architecture == "qwen2",
        layer_norm=neox,
        gated=not neox,
        seed=config.seed,
        tp=tp,
        rank=rank,
        group=group,
        vocabulary=-(-VOCABULARY // multiple) * multiple,
        epsilon=hub.layer_norm_eps if neox else hub.rms_norm_eps,
        tied=bool(sizes_of(config.model).get("tie_word_embeddings")),
    )


def _parameter(name: str, shape: tuple[int, ...], how: str, of: Sizes) -> nn.Parameter:
    """Return this rank's shard of a random tensor, with its Place as an attribute."""
    generator = torch.Generator().manual_seed(of.seed + zlib.crc32(name.encode()))
    full = 0.05 * torch.randn(shape, generator=generator)
    if "norm" in name and name.endswith("weight"):
        full += 1
    dim, stride = {"whole": (None, 1), "rows": (0, 1), "halves": (0, 2), "columns": (1, 1)}[how]
    part = tuple(size // of.tp if number == dim else size for number, size in enumerate(shape))
    place = Place(name, part, dim, stride, *((of.rank, of.tp) if dim is not None else ()))
    parameter = nn.Parameter(place.cut(full).contiguous().clone())
    # DeepSpeed reads this to count each tensor once in the gradient norm.
    parameter.tensor_model_parallel = dim is not None  # type: ignore[attr-defined]
    parameter.place = place  # type: ignore[attr-defined]
    return parameter


class Linear(nn.Module):
    """Matrix sharded by rows or columns. The bias is sharded like the rows."""

    def __init__(self, name: str, rows: int, columns: int, how: str, bias: bool, of: Sizes) -> None:
        super().__init__()
        self.how, self.of = how, of
        self.weight = _parameter(f"{name}.weight", (rows, columns), how, of)
        self.bias = _parameter(f"{name}.bias", (rows,), "whole" if how == "columns" else how, of) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's outputs from the whole input (`rows`), or all outputs from its own inputs (`columns`)."""
        if self.how == "columns":
            x = RowParallel.apply(self.of.group, functional.linear(x, self.weight), False)
            return x if self.bias is None else x + self.bias
        return functional.linear(ColumnParallel.apply(self.of.group, x), self.weight, self.bias)


class Norm(nn.Module):
    def __init__(self, name: str, of: Sizes) -> None:
        super().__init__()
        self.epsilon = of.epsilon
        self.weight = _parameter(f"{name}weight", (of.hidden,), "whole", of)
        self.bias = _parameter(f"{name}bias", (of.hidden,), "whole", of) if of.layer_norm else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            return functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.epsilon)
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)).to(x.dtype)


class Embedding(nn.Module):
    def __init__(self, of: Sizes) -> None:
        super().__init__()
        self.of = of
        self.word_embeddings = nn.Module()
        shape = (of.vocabulary, of.hidden)
        self.word_embeddings.weight = _parameter("embedding.word_embeddings.weight", shape, "rows", of)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        weight = self.word_embeddings.weight
        local = input_ids - self.of.rank * weight.shape[0]
        here = (local >= 0) & (local < weight.shape[0])
        found = functional.embedding(local.where(here, 0), weight) * here.unsqueeze(-1)
        return RowParallel.apply(self.of.group, found, False)


def output_of(embedding: Embedding, x: torch.Tensor) -> torch.Tensor:
    weight = embedding.word_embeddings.weight
    return _gathered(functional.linear(ColumnParallel.apply(embedding.of.group, x), weight), embedding.of)


def _gathered(logits: torch.Tensor, of: Sizes) -> torch.Tensor:
    """Gather the vocabulary's logits. Each rank keeps its own part's gradient."""
    return GatherFromTensorParallelRegion.apply(of.group, logits, (logits.shape[-1],) * of.tp)


class Output(nn.Module):
    def __init__(self, of: Sizes) -> None:
        super().__init__()
        self.of = of
        self.lm_head = Linear("output_layer", of.vocabulary, of.hidden, "rows", False, of)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _gathered(self.lm_head(x), self.of)


class Attention(nn.Module):
    """Causal attention. The rows of query_key_value are interleaved by query group."""

    def __init__(self, prefix: str, of: Sizes) -> None:
        super().__init__()
        self.of = of
        width = of.heads * of.head_dim
        rows = width + 2 * of.kv_heads * of.head_dim
        self.query_key_value = Linear(f"{prefix}linear_qkv", rows, of.hidden, "rows", of.qkv_bias, of)
        self.dense = Linear(f"{prefix}linear_proj", of.hidden, width, "columns", of.bias, of)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        of = self.of
        batch, length, _ = x.shape
        groups, queries = of.kv_heads // of.tp, of.heads // of.kv_heads
        mixed = self.query_key_value(x).view(batch, length, groups, queries + 2, of.head_dim)
        q, k, v = mixed.split([queries, 1, 1], 3)
        q = _rotated(q.reshape(batch, length, -1, of.head_dim).transpose(1, 2), of.rotary_dim)
        k = _rotated(k.reshape(batch, length, -1, of.head_dim).transpose(1, 2), of.rotary_dim)
        v = v.reshape(batch, length, -1, of.head_dim).transpose(1, 2)
        k, v = k.repeat_interleave(queries, 1), v.repeat_interleave(queries, 1)
        scores = q @ k.transpose(2, 3) / of.head_dim**0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(mask, float("-inf")).float().softmax(-1).to(x.dtype)
        return self.dense((weights @ v).transpose(1, 2).reshape(batch, length, -1))


def _rotated(x: torch.Tensor, dim: int) -> torch.Tensor:
    inverse = 1.0 / 10000.0 ** (torch.arange(0, dim, 2, device=x.device).float() / dim)
    angles = torch.outer(torch.arange(x.shape[2], device=x.device).float(), inverse).repeat(1, 2)
    turned, kept = x[..., :dim], x[..., dim:]
    first, second = turned.chunk(2, -1)
    turned = turned * angles.cos().to(x.dtype) + torch.cat((-second, first), -1) * angles.sin().to(x.dtype)
    return torch.cat((turned, kept), -1)


class MLP(nn.Module):
    def __init__(self, prefix: str, of: Sizes) -> None:
        super().__init__()
        self.gated = of.gated
        rows, how = (2 * of.ffn, "halves") if of.gated else (of.ffn, "rows")
        self.dense_h_to_4h = Linear(f"{prefix}linear_fc1", rows, of.hidden, how, of.bias, of)
        self.dense_4h_to_h = Linear(f"{prefix}linear_fc2", of.hidden, of.ffn, "columns", of.bias, of)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dense_h_to_4h(x)
        if self.gated:
            gate, up = x.chunk(2, -1)
            return self.dense_4h_to_h(functional.silu(gate) * up)
        return self.dense_4h_to_h(functional.gelu(x))


class ParallelTransformerLayerPipe(nn.Module):
    """Transformer layer. `type:transformer` matches its name to assign layers to stages."""

    def __init__(self, number: int, of: Sizes) -> None:
        super().__init__()
        prefix = f"decoder.layers.{number}."
        self.input_layernorm = Norm(f"{prefix}self_attention.linear_qkv.layer_norm_", of)
        self.self_attention = Attention(f"{prefix}self_attention.", of)
        self.post_attention_layernorm = Norm(f"{prefix}mlp.linear_fc1.layer_norm_", of)
        self.mlp = MLP(f"{prefix}mlp.", of)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


def layers(of: Sizes, lib: Any) -> list[Any]:
    """Return the pipeline's layers. `lib` is deepspeed.pipe."""
    shared = partial(lib.TiedLayerSpec, "embed", Embedding, of, tied_weight_attr="word_embeddings.weight")
    return [
        lambda x: x,  # Megatron-DeepSpeed starts with a function, without a file
        shared() if of.tied else lib.LayerSpec(Embedding, of),
        *(lib.LayerSpec(ParallelTransformerLayerPipe, number, of) for number in range(of.layers)),
        lib.LayerSpec(Norm, "decoder.final_layernorm.", of),
        shared(forward_fn=output_of) if of.tied else lib.LayerSpec(Output, of),
        lambda x: x.float(),
    ]


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
