"""Writer for NeMo 2: weights in megatron-core's form for NeMo, beside a copied `context`.

    weights/    `torch_dist`, with `module.` before the model's keys; `common.pt` is Lightning's
    context/    `io.json`, the source of NeMo's Python objects; `model.yaml`, the same for people; the tokenizer

`context` holds NeMo's classes with all arguments. It is copied from a NeMo checkpoint, for example made by
`llm.import_ckpt`, and checked against the model. NeMo only resumes an optimizer together with its trainer's loops, so
none is written.

Format facts: nemo_toolkit 2.5.0, nemo/lightning/ckpt_utils.py, io/pl.py, io/mixin.py,
pytorch/strategies/megatron_strategy.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt.base.errors import LossError, UsageError
from ckpt.base.words import Message
from ckpt.containers.dcp.write import Writing
from ckpt.containers.torchfile.write import torch_file
from ckpt.move.files import confined, translate_os_errors
from ckpt.plan.checkpoint import MASTER, MODEL_ROLES, Checkpoint, Layout, Target, TargetFile
from ckpt.plan.precision import describe
from ckpt.runs.omitted_content import run_files_left_out, training_left_out
from ckpt.runs.trainer_files import content_of
from ckpt.runs.yaml_files import read_run_config
from converters.megatron.chunks import MegatronModel, describe_model, refuse_encoder
from converters.megatron.dist import write
from converters.megatron.dist.folder import BACKENDS, COMMON, CONTEXT, MODEL, MODULE, WEIGHTS

IO = "io.json"
#: Megatron-LM's arguments by megatron-core's field name, also used by NeMo.
_NAMES = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_query_groups",
    "kv_channels": "kv_channels",
    "num_moe_experts": "num_experts",
    "moe_ffn_hidden_size": "moe_ffn_hidden_size",
    "moe_router_topk": "moe_router_topk",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "normalization": "normalization",
    "layernorm_epsilon": "norm_epsilon",
    "qk_layernorm": "qk_layernorm",
    "gated_linear_unit": "swiglu",
    "add_bias_linear": "add_bias_linear",
    "rotary_base": "rotary_base",
}
_TIED, _UNTIED = "share_embeddings_and_output_weights", "untie_embeddings_and_output_weights"


def lay_out(checkpoint: Checkpoint, layout: Layout) -> Target:
    """Raise UsageError without a context, LossError for another model's context."""
    folder = _context(checkpoint)
    model = describe_model(checkpoint, layout)
    refuse_encoder(model, "NeMo 2")
    _refuse_others(model, folder)
    writing = Writing(model.args["world_size"], f"{WEIGHTS}/", is_nested=False)
    keys = write.add_model(model, writing, MODULE).keys
    step = checkpoint.state.step or 0
    lightning = {"epoch": 0, "global_step": step, "state_dict": {}, "content_metadata": write.content_metadata(keys)}
    files = (
        *writing.files(),
        torch_file(f"{WEIGHTS}/{COMMON}", lightning),
        TargetFile.of_bytes(f"{WEIGHTS}/{BACKENDS}", json.dumps(write.KIND).encode()),
        *_copied(folder),
    )
    notes = [f"NeMo 2, for its RestoreConfig, with the context from {folder.parent}"]
    notes += describe(model.chosen, checkpoint, layout.dtype)
    untold = replace(checkpoint, state=replace(checkpoint.state, args=None))  # the context has them
    without = [*training_left_out(untold), *run_files_left_out(checkpoint)]
    states = [key for key in checkpoint.tensors if key[1] not in (*MODEL_ROLES, MASTER)]
    left_out = dict.fromkeys(states, without.pop(0)) if states else {}
    return Target(files, left_out, tuple(without), tuple(notes))


def _context(checkpoint: Checkpoint) -> Path:
    for place in map(Path, checkpoint.folders):
        for folder in (place, place / CONTEXT):
            if (folder / IO).is_file() and (folder / MODEL).is_file():
                return folder
    raise UsageError(
        "NeMo 2 builds a model from its own Python classes and their arguments, but they are missing here",
        path=checkpoint.path,
        expected=f"{CONTEXT}/{IO} and {CONTEXT}/{MODEL}",
        found="no folder with both",
        hint=Message(
            "{config} takes the {} folder from a NeMo checkpoint (llm.import_ckpt makes one from the base model), "
            "with config.json beside it",
            CONTEXT,
        ),
    )


def _refuse_others(model: MegatronModel, folder: Path) -> None:
    config = read_run_config(confined(folder, MODEL)).get("config")
    stated = config if isinstance(config, Mapping) else {}
    known: dict[str, Any] = {name: model.args.get(ours) for name, ours in _NAMES.items()}
    known[_TIED] = not model.args.get(_UNTIED)
    for name, ours in known.items():
        theirs = stated.get(name)
        if ours is not None and theirs is not None and ours != theirs:
            raise LossError(
                "the NeMo context belongs to another model",
                path=folder / MODEL,
                expected=f"{name} {ours}",
                found=f"{name} {theirs}",
            )


def _copied(folder: Path) -> Iterator[TargetFile]:
    """Skip weights, which may be in the tokenizer's folder."""
    with translate_os_errors(folder):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix not in (".safetensors", ".bin"):
                name = path.relative_to(folder).as_posix()
                yield TargetFile.of_bytes(f"{CONTEXT}/{name}", content_of(folder, name))
