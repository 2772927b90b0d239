"""The tensors that a run's arguments tell of, and whether a checkpoint has them in these shapes.

Told are those that every GPTModel with these arguments has; tensors beside them (sinks, more norms, layers of
multi-token prediction) are neither asked for nor refused.  Models with layers of other kinds tell of nothing.

Facts: megatron-core 0.16.1 (models/gpt/gpt_layer_specs.py, transformer/attention.py, mlp.py, moe/experts.py,
moe/shared_experts.py), Megatron-LM of August 2026 (training/arguments.py, `core_transformer_config_from_args`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.plan.tensors import Shape
from converters.names.megatron.model.spelling import EMBEDDING, OUTPUT

#: Sizes without which nothing is told.
_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels")
#: Arguments of models whose layers are of other kinds, or not all of one.
_OTHERWISE = (
    "attention_output_gate",
    "experimental_attention_variant",
    "heterogeneous_layers_config_encoded_json",
    "heterogeneous_layers_config_path",
    "hybrid_attention_ratio",
    "hybrid_layer_pattern",
    "hybrid_mlp_ratio",
    "hybrid_override_pattern",
    "linear_attention_freq",
    "moe_latent_size",
    "multi_latent_attention",
    "spec",
)


def check_args(args: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> None:
    """CorruptError where tensors of `shapes`, by name, contradict the run's arguments, or one of them is missing."""
    check_told(told(args), shapes, "the record of the run's arguments", path)


def check_told(expected: Mapping[str, Shape], shapes: Mapping[str, Shape], who: str, path: Path | None = None) -> None:
    """CorruptError where a tensor of `expected` is missing, or has another shape; `who` is what tells of them."""
    for name, shape in expected.items():
        if shapes.get(name, shape) != shape:
            raise CorruptError(
                f"a tensor has not the shape that {who} tells",
                path=path,
                fqn=name,
                expected=list(shape),
                found=list(shapes[name]),
                hint=f"does {who} belong to this checkpoint?",
            )
    if missing := [name for name in expected if name not in shapes]:
        raise CorruptError(
            f"the checkpoint lacks tensors of the model that {who} tells of",
            path=path,
            fqn=", ".join(missing[:3]) + (", ..." if len(missing) > 3 else ""),
            expected=f"{len(expected)} tensors",
            found=f"{len(expected) - len(missing)} of them",
            hint=f"does {who} belong to this checkpoint?",
        )


def told(args: Mapping[str, Any]) -> dict[str, Shape]:
    """The tensors of the whole model, by name; none where the arguments do not tell of a model of equal layers."""
    if any(type(args.get(name)) is not int for name in _SIZES) or any(args.get(name) for name in _OTHERWISE):
        return {}
    hidden, found = args["hidden_size"], dict[str, Shape]()
    if type(rows := args.get("padded_vocab_size")) is int:
        outputs = [OUTPUT] if args.get("untie_embeddings_and_output_weights") else []
        found |= dict.fromkeys((EMBEDDING, *outputs), (rows, hidden))
    if args.get("position_embedding_type") == "learned_absolute" and args.get("max_position_embeddings"):
        found["embedding.position_embeddings.weight"] = (args["max_position_embeddings"], hidden)
    layers = _sparse(args)
    kinds = {sparse: dict(_layer(args, sparse=sparse)) for sparse in set(layers)}
    for number, sparse in enumerate(layers):
        found |= {f"decoder.layers.{number}.{name}": shape for name, shape in kinds[sparse].items()}
    return found | dict(_norm(args, "decoder.final_layernorm.", hidden))


def _sparse(args: Mapping[str, Any]) -> list[bool]:
    """Whether each layer has experts."""
    often, layers = args.get("moe_layer_freq", 1), range(args["num_layers"])
    if not args.get("num_experts"):
        return [False for _ in layers]
    return [bool(often[number] if isinstance(often, list) else number % often == 0) for number in layers]


def _layer(args: Mapping[str, Any], *, sparse: bool) -> Iterator[tuple[str, Shape]]:
    """The tensors of a layer, without what begins their names."""
    hidden, heads, size = (args[name] for name in ("hidden_size", "num_attention_heads", "kv_channels"))
    groups = args["num_query_groups"] if args.get("group_query_attention") else heads
    biases = bool(args.get("add_bias_linear"))
    yield from _norm(args, "self_attention.linear_qkv.layer_norm_", hidden)
    rows = (heads + 2 * groups) * size
    yield from _linear("self_attention.linear_qkv.", (rows, hidden), biases=biases or bool(args.get("add_qkv_bias")))
    yield from _linear("self_attention.linear_proj.", (hidden, heads * size), biases=biases)
    if args.get("qk_layernorm"):
        yield from _norm(args, "self_attention.q_layernorm.", size)
        yield from _norm(args, "self_attention.k_layernorm.", size)
    if not sparse:
        yield from _norm(args, "mlp.linear_fc1.layer_norm_", hidden)
        yield from _mlp(args, "mlp.", args["ffn_hidden_size"], biases=biases)
        return
    yield from _norm(args, "pre_mlp_layernorm.", hidden)
    yield "mlp.router.weight", (args["num_experts"], hidden)
    for expert in range(args["num_experts"]):
        width = args.get("moe_ffn_hidden_size") or args["ffn_hidden_size"]
        yield from _mlp(args, f"mlp.experts.local_experts.{expert}.", width, biases=biases)
    if shared := args.get("moe_shared_expert_intermediate_size"):
        yield from _mlp(args, "mlp.shared_experts.", shared, biases=False)
        if args.get("moe_shared_expert_gate"):
            yield "mlp.shared_experts.gate_weight", (1, hidden)


def _norm(args: Mapping[str, Any], prefix: str, size: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}weight", (size,)
    if args.get("normalization") == "LayerNorm":
        yield f"{prefix}bias", (size,)


def _mlp(args: Mapping[str, Any], prefix: str, width: int, *, biases: bool) -> Iterator[tuple[str, Shape]]:
    rows = 2 * width if args.get("swiglu") or args.get("quick_geglu") else width
    yield from _linear(f"{prefix}linear_fc1.", (rows, args["hidden_size"]), biases=biases)
    yield from _linear(f"{prefix}linear_fc2.", (args["hidden_size"], width), biases=biases)


def _linear(prefix: str, shape: Shape, *, biases: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}weight", shape
    if biases:
        yield f"{prefix}bias", shape[:1]
