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
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ckpt.base.errors import LossError, UsageError
from ckpt.base.words import Message
from ckpt.containers.dcp.write import Writing
from ckpt.containers.torchfile.write import torch_file
from ckpt.move.files import confined, translate_os_errors
from ckpt.plan.checkpoint import MASTER, MODEL_ROLES, Checkpoint, Layout, Target, TargetFile
from ckpt.plan.precision import describe
from ckpt.runs.model_files import run_files_left_out, training_left_out
from ckpt.runs.trainer_files import content_of
from ckpt.runs.yaml_files import read_run_config
from converters.megatron.chunks import MegatronModel, describe_model, refuse_encoder
from converters.megatron.dist import write
from converters.megatron.dist.bridge import model_settings, with_sizes
from converters.megatron.dist.folder import BACKENDS, COMMON, CONTEXT, MODEL, MODULE, WEIGHTS
from converters.names.megatron.config_against_args import differences
from converters.names.megatron.settings import check_aliases, check_settings
from converters.names.megatron.shapes_from_args import expected_shapes

IO = "io.json"
#: Settings that NeMo's classes record only if they have them.
_DEFAULTS = {"use_rope_scaling": False, "squared_relu": False, "quick_geglu": False, "glu_linear_offset": 0.0}
_TIED = "share_embeddings_and_output_weights"
#: Tensors that a setting adds to a layer.
_OPTIONAL = re.compile(r"decoder\.layers\..*(?:\.linear_\w+\.bias|\.[qk]_layernorm\.\w+)")


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
    """Raise LossError if the context and the model have different settings or tensors."""
    path, accepted = folder / MODEL, model.checkpoint.accepted
    stated = read_run_config(confined(folder, MODEL)).get("config")
    stated = stated if isinstance(stated, Mapping) else {}
    settings = {**_DEFAULTS, **with_sizes(model_settings(stated)), _TIED: stated.get(_TIED)}
    context = {name: value for name, value in settings.items() if name not in accepted}
    args = {name: value for name, value in model.args.items() if name not in accepted}
    shapes = {fqn: choice.tensor.shape for fqn, choice in model.chosen.items()}
    described = expected_shapes(context, shapes)
    for name, theirs, ours in differences(context, args):
        raise _another(path, f"{name} {ours}", f"{name} {theirs}")
    for name, ours, theirs in differences(args, context):
        raise _another(path, f"{name} {ours}", f"{name} {theirs}")
    for fqn in shapes:
        if described and fqn not in described and _OPTIONAL.fullmatch(fqn):
            raise _another(path, f"a model with {fqn}", "a model without it")
    if other := next((fqn for fqn, shape in described.items() if shapes.get(fqn) != shape), None):
        raise _another(path, f"{other} {list(shapes.get(other, ()))}", f"{other} {list(described[other])}")
    check_aliases(context, str(path))
    check_settings(context, args, str(path))
    check_settings(args, context, str(path))


def _another(path: Path, expected: str, found: str) -> LossError:
    return LossError("the NeMo context belongs to another model", path=path, expected=expected, found=found)


def _copied(folder: Path) -> Iterator[TargetFile]:
    """Skip weights, which may be in the tokenizer's folder."""
    with translate_os_errors(folder):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix not in (".safetensors", ".bin"):
                name = path.relative_to(folder).as_posix()
                yield TargetFile.of_bytes(f"{CONTEXT}/{name}", content_of(folder, name))
