"""MLX model folders of mlx-lm 0.32.2: safetensors with `format: mlx` and stacked experts, not quantized."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.base.words import Message
from ckpt.containers.sources import Sources
from ckpt.containers.weights import parse_index, read_weights, weight_files
from ckpt.errors import LossError, UsageError
from ckpt.move.json_files import read_json
from ckpt.plan import services
from ckpt.plan.checkpoint import HUB, WEIGHT, Checkpoint, Format, Layout, ReadRequest, Target, TargetFile
from ckpt.plan.namespace import Namespace
from ckpt.plan.options import option
from ckpt.plan.precision import choices, describe
from ckpt.plan.relation import Link, Relation, translate
from ckpt.plan.tensors import Box, Shape, whole
from ckpt.runs.finding import Steps, find_step
from ckpt.runs.model_files import read_config, training_left_out
from ckpt.runs.trainer_files import model_files

if TYPE_CHECKING:
    from ckpt.testing import Declaration, Tensors

NAME, INDEX = "mlx", "model.safetensors.index.json"
#: Model types `sanitize` leaves unchanged, and model types with stacked experts.
PLAIN, WITH_EXPERTS = ("llama", "mistral", "qwen2", "qwen3"), ("qwen2_moe", "qwen3_moe")
EXPERT = re.compile(r"(.*\.mlp\.)experts\.(\d+)(\.(?:gate|up|down)_proj\.weight)")
STACKED = re.compile(r"(.*\.mlp\.)switch_mlp(\.(?:gate|up|down)_proj\.weight)")
#: A model folder holds no pickle. This is a fine-tuning run's record in a torch file.
PICKLE_NAMES: Mapping[tuple[str, str], tuple[str, ...]] = {("mlx_lm.tuner.trainer", "TrainingArgs"): ()}


@dataclass(frozen=True)
class MlxOptions:
    mlx_stem: str = option("Begin names of weight files with this; mlx_lm loads `model*`.", default="model")


# -- names ----------------------------------------------------------------------------------------------------------
def stacking(checkpoint: Checkpoint) -> Relation:
    """Map the Hub's names to MLX's, for a checkpoint with either: each expert is a slice of a stacked tensor."""
    model_type = (checkpoint.config or {}).get("model_type")
    if model_type not in (*PLAIN, *WITH_EXPERTS):
        known = ", ".join((*PLAIN, *WITH_EXPERTS))
        raise UsageError("MLX's names are not known for this model", expected=f"one of {known}", found=str(model_type))
    hub: dict[str, Shape] = {}
    stacks: dict[str, Shape] = {}
    for fqn, shape in {fqn: tensor.shape for (fqn, _), tensor in checkpoint.tensors.items()}.items():
        stack = STACKED.fullmatch(fqn)
        names = [STACKED.sub(rf"\1experts.{n}\2", fqn) for n in range(shape[0])] if stack else [fqn]
        hub |= dict.fromkeys(names, shape[1:] if stack else shape)
    links = []
    for fqn, shape in hub.items():
        if not (one := EXPERT.fullmatch(fqn)):
            links.append(Link.rename(fqn, fqn, shape))
            stacks[fqn] = shape
            continue
        name, number = f"{one[1]}switch_mlp{one[3]}", int(one[2])
        links.append(Link(fqn, whole(shape), name, Box((number, 0, 0), (1, *shape)), (1, 2)))
        stacks[name] = (max(number + 1, stacks.get(name, (0,))[0]), *shape)
    return Relation(tuple(links), hub, stacks)


NAMESPACE = Namespace(
    lambda checkpoint: translate(checkpoint, stacking(checkpoint).inverse(), HUB),
    lambda checkpoint, _: translate(checkpoint, stacking(checkpoint), NAME),
)


# -- the format -----------------------------------------------------------------------------------------------------
class Mlx(Format):
    name, title = NAME, "MLX safetensors"
    namespace = NAME
    carries_optimizer = False
    takes = ("max_shard_size",)

    def find(self, path: Path, tag: str | None) -> Path | None:
        return find_step(path, tag, Steps(is_model))

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        folders = tuple(p for p in (request.config, path) if p is not None)
        config, places = read_config(folders), parse_index(read_json(path / INDEX), path / INDEX).weight_map
        if config is not None and "quantization" in config:
            raise LossError("MLX's quantized weights are not read", path=path, found=str(config["quantization"]))
        sources = Sources()
        tensors = read_weights(path, sorted(set(places.values())), places, sources)
        more = {"framework": NAME, "namespace": NAME, "config": config, "folders": tuple(map(str, folders))}
        return Checkpoint(path=str(path), format=NAME, tensors=tensors, files=sources.files, **more)

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        stem = layout.read(MlxOptions).mlx_stem
        if not re.fullmatch(r"model[\w.-]*", stem):
            raise UsageError(
                "mlx_lm would not load these files", found=Message("{mlx_stem}", mlx_stem=stem), expected="model..."
            )
        kept = services.ties.kept_names(checkpoint)
        chosen = {kept.get(fqn, fqn): choice for fqn, choice in choices(checkpoint, layout.dtype).items()}
        if quantized := services.quantization.quantized_weights(checkpoint).parts:
            raise LossError(
                "MLX quantizes in its own way",
                fqn=min(quantized),
                hint=Message("{dequantize=True} makes plain weights"),
            )
        files, places = weight_files(chosen, stem, {"format": NAME}, layout.max_shard_size)
        total = {"total_size": sum(slot.extent.nbytes for file in files for slot in file.slots)}
        index = json.dumps({"metadata": total, "weight_map": dict(sorted(places.items()))}, indent=4).encode()
        beside, notes = model_files(checkpoint, layout.dtype)
        notes = [*describe(chosen, checkpoint, layout.dtype), *notes]
        dropped = tuple(training_left_out(checkpoint))
        return Target((*files, TargetFile.of_bytes(INDEX, index), *beside), dropped=dropped, notes=tuple(notes))


MLX = Mlx()


def is_model(folder: Path) -> bool:
    return (folder / INDEX).is_file() and any(map(is_mlx, folder.glob("*.safetensors")))


def is_mlx(file: Path) -> bool:
    """Return True if the header's metadata say so. They come first because MLX sorts its keys."""
    with open(file, "rb") as head:
        return b'"format":"mlx"' in head.read(4096)


def declaration() -> Declaration:
    """Declare the sample, made by `make_sample.py` with mlx_lm. Its truth is MLX's state in memory."""
    import shutil

    import numpy as np

    from ckpt.testing import Declaration

    def make(folder: Path) -> tuple[Path, Tensors]:
        shutil.copytree(Path(__file__).parent / "sample", folder / NAME, ignore=shutil.ignore_patterns("truth.npz"))
        with np.load(Path(__file__).parent / "sample" / "truth.npz") as truth:
            return folder / NAME, {(n, WEIGHT): ("bfloat16", v.shape, v.tobytes()) for n, v in truth.items()}

    return Declaration(NAME, make, ("model*.safetensors",), is_unchecked_data=True, reads_head=("*.safetensors",))
