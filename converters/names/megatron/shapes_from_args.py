"""Tensors implied by a run's arguments, compared with a checkpoint's tensors.

Further tensors (sinks, more norms, multi-token prediction layers) are neither required nor refused. Nothing is implied
for models with other kinds of layers, judging by the arguments or the tensors' names: derived trainers have layers
without any argument.

Facts: megatron-core 0.16.1 (models/gpt/gpt_layer_specs.py, transformer/attention.py, mlp.py, moe/experts.py,
moe/shared_experts.py), Megatron-LM, August 2026 (training/arguments.py, `core_transformer_config_from_args`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.base.text import pluralize
from ckpt.plan.tensors import Shape
from converters.names.megatron.model.spelling import EMBEDDING, OUTPUT
from converters.names.megatron.model.splits import GATED_ARGS

#: Required sizes.
_SIZES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels")
#: Optional sizes.
_MAY_LACK = (
    *("num_experts", "num_query_groups", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("padded_vocab_size", "max_position_embeddings"),
)
#: Other or mixed kinds of layers, or sizes elsewhere: examples/multimodal, `--yaml-cfg`, ModelOpt, MindSpeed-LLM, and
#: Megatron-Bridge's own layers.
_OTHERWISE = (
    "attention_output_gate",
    "experimental_attention_variant",
    "first_k_dense_replace",
    "heterogeneous_layers_config_encoded_json",
    "heterogeneous_layers_config_path",
    "hybrid_attention_ratio",
    "hybrid_layer_pattern",
    "hybrid_mlp_ratio",
    "hybrid_override_pattern",
    "language_model_type",
    "linear_attention_freq",
    "modelopt_enabled",
    "moe_latent_size",
    "multi_latent_attention",
    "noop_layers",
    "retro_add_retriever",
    "spec",
    "transformer_layer_spec",
    "yaml_cfg",
)
#: Other layers' tensors, or quantized ones.
_OTHERS = re.compile(
    r"decoder\.layers\.\d+\.(?:mixer|cross_attention|"
    r"self_attention\.(?!linear_qkv\.|linear_proj\.|[qk]_layernorm\.|core_attention\.))|.*_quantizer\."
)
#: May have other rows: a reward model's or classifier's head, and norms over all heads.
_ROWS = re.compile(rf"{re.escape(OUTPUT)}|.*\.self_attention\.[qk]_layernorm\..*")


def check_args(args: Mapping[str, Any], shapes: Mapping[str, Shape], path: Path) -> None:
    check_expected_shapes(expected_shapes(args, shapes), shapes, "the run's argument record", path)


def check_expected_shapes(
    expected: Mapping[str, Shape], shapes: Mapping[str, Shape], who: str, path: Path | None = None
) -> None:
    """Raise CorruptError if a tensor is missing or has another shape. `who` names the source."""
    for name, shape in expected.items():
        if shapes.get(name, shape) != shape:
            raise CorruptError(
                f"a tensor's shape doesn't match {who}",
                path=path,
                fqn=name,
                expected=list(shape),
                found=list(shapes[name]),
                hint=f"does {who} belong to this checkpoint?",
            )
    if missing := [name for name in expected if name not in shapes]:
        raise CorruptError(
            f"the checkpoint lacks tensors required by {who}",
            path=path,
            fqn=", ".join(missing[:3]) + (", ..." if len(missing) > 3 else ""),
            expected=f"{pluralize(len(expected), 'tensor')}",
            found=f"{len(expected) - len(missing)} of them",
            hint=f"does {who} belong to this checkpoint?",
        )


def expected_shapes(args: Mapping[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return {} for other kinds of layers."""
    expected = model_shapes(args)
    if not expected or any(map(_OTHERS.match, shapes)):
        return {}
    for name in filter(_ROWS.fullmatch, expected.keys() & shapes.keys()):
        expected[name] = (*shapes[name][:1], *expected[name][1:])
    return expected


def model_shapes(args: Mapping[str, Any]) -> dict[str, Shape]:
    """Return {} unless the arguments describe equal layers."""
    layers = _sparse(args) if _are_plain(args) else []
    if not layers:
        return {}
    hidden, found = args["hidden_size"], dict[str, Shape]()
    if rows := args.get("padded_vocab_size"):
        found[EMBEDDING] = (rows, hidden)
        if args.get("untie_embeddings_and_output_weights") and args.get("task_type") in (None, "causal_lm"):
            found[OUTPUT] = (rows, hidden)
    if positions := _positions(args):
        found["embedding.position_embeddings.weight"] = (positions, hidden)
    kinds = {sparse: dict(_layer(args, sparse=sparse)) for sparse in set(layers)}
    for number, sparse in enumerate(layers):
        found |= {f"decoder.layers.{number}.{name}": shape for name, shape in kinds[sparse].items()}
    return found | dict(_norm(args, "decoder.final_layernorm.", hidden))


def _are_plain(args: Mapping[str, Any]) -> bool:
    optional = [args.get(name) for name in _MAY_LACK]
    return (
        all(type(args.get(name)) is int for name in _SIZES)
        and all(size is None or type(size) is int for size in optional)
        and not any(args.get(name) for name in _OTHERWISE)
        and args.get("normalization") in (None, "LayerNorm", "RMSNorm")
        and not (args.get("group_query_attention") and args.get("num_query_groups") is None)
    )


def _positions(args: Mapping[str, Any]) -> int | None:
    """Return the number of learned positions. Older versions have a separate option for rotary positions."""
    if args.get("position_embedding_type") != "learned_absolute" or args.get("use_rotary_position_embeddings"):
        return None
    return args.get("max_position_embeddings") if args.get("add_position_embedding", True) else None


def _sparse(args: Mapping[str, Any]) -> list[bool]:
    """Return [] if the layers with experts are not given in Megatron-LM's form."""
    often, count = args.get("moe_layer_freq", 1), args["num_layers"]
    if not args.get("num_experts"):
        return [False] * count
    if type(often) is int and often > 0:
        return [number % often == 0 for number in range(count)]
    is_pattern = isinstance(often, list) and len(often) == count and all(one in (0, 1) for one in often)
    return [bool(one) for one in often] if is_pattern else []


def _layer(args: Mapping[str, Any], *, sparse: bool) -> Iterator[tuple[str, Shape]]:
    hidden, heads, size = (args[name] for name in ("hidden_size", "num_attention_heads", "kv_channels"))
    groups = args["num_query_groups"] if args.get("group_query_attention") else heads
    biases = bool(args.get("add_bias_linear"))
    yield from _norm(args, "self_attention.linear_qkv.layer_norm_", hidden)
    rows = (heads + 2 * groups) * size
    yield from _linear("self_attention.linear_qkv.", (rows, hidden), biases=biases or bool(args.get("add_qkv_bias")))
    yield from _linear("self_attention.linear_proj.", (hidden, heads * size), biases=biases)
    if args.get("qk_layernorm") and not args.get("qk_l2_norm"):  # L2 norms have no weights
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
    rows = 2 * width if any(args.get(name) for name in GATED_ARGS) else width
    yield from _linear(f"{prefix}linear_fc1.", (rows, args["hidden_size"]), biases=biases)
    yield from _linear(f"{prefix}linear_fc2.", (args["hidden_size"], width), biases=biases)


def _linear(prefix: str, shape: Shape, *, biases: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}weight", shape
    if biases:
        yield f"{prefix}bias", shape[:1]
