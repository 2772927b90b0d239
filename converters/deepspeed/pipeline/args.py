"""Arguments of Megatron-DeepSpeed, forked from Megatron-LM in 2021, and Megatron-LM's current names for them.

From deepspeedai/Megatron-DeepSpeed, megatron/arguments.py and checkpointing.py (`check_checkpoint_args`), and
EleutherAI/gpt-neox, megatron/checkpointing.py, which compares every recorded argument with its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt.containers.torchfile.values import Record

_NORMS = {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}
#: Layout arguments in both frameworks.
_TP, _PP = ("tensor_model_parallel_size", "model_parallel_size"), ("pipeline_model_parallel_size", "pipe_parallel_size")


def attributes(args: Any) -> Mapping[str, Any]:
    """Return the recorded arguments. Megatron-DeepSpeed saves a Namespace, GPT-NeoX a dict."""
    if isinstance(args, Record):
        return args.attributes
    return args if isinstance(args, Mapping) else {}


def current(args: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(args)
    groups, heads = args.get("num_key_value_heads"), args.get("num_attention_heads")
    if isinstance(groups, int):
        found.setdefault("num_query_groups", groups)
        found.setdefault("group_query_attention", groups != heads)
    if "rope_theta" in args:
        found.setdefault("rotary_base", args["rope_theta"])
    if "layernorm_epsilon" in args:
        found.setdefault("norm_epsilon", args["layernorm_epsilon"])
    norm = str(args.get("normalization", "")).lower()
    found |= next(({"normalization": new} for new, old in _NORMS.items() if norm == old), {})
    return found


def recorded(args: Any, sizes: Mapping[str, Any]) -> Any:
    known = attributes(args)
    changed = {name: size for name, size in sizes.items() if name in known}
    changed |= {new: sizes[old] for old, new in (_TP, _PP) if new in known}
    if isinstance(args, Record):
        return Record(args.module, args.name, state={**known, **changed})
    return {**known, **changed}


def of_neox(args: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that GPT-NeoX records (`save_ds_checkpoint`), except the tokenizer's type."""
    names = ("hidden_size", "num_attention_heads", "max_position_embeddings", "make_vocab_size_divisible_by")
    found = {name: args[name] for name in names if name in args}
    found |= {name: sizes[name] for name in ("num_layers", "padded_vocab_size")}
    return found | {"model_parallel_size": sizes[_TP[0]]}


def namespace(args: Mapping[str, Any], sizes: Mapping[str, Any]) -> Record:
    found = {**args, **sizes}
    if "num_attention_heads" in args:
        groups = args.get("num_query_groups") if args.get("group_query_attention") else None
        found["num_key_value_heads"] = groups or args["num_attention_heads"]
    if "norm_epsilon" in args:
        found["layernorm_epsilon"] = args["norm_epsilon"]
    if args.get("normalization") in _NORMS:
        found["normalization"] = _NORMS[args["normalization"]]
    return Record("argparse", "Namespace", state=found)
