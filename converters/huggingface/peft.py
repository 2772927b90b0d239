"""PEFT adapter folders: `adapter_config.json` with `adapter_model.safetensors` or `adapter_model.bin`.

Format facts: peft 0.21.2 (`peft_model.py`, `save_pretrained`; `utils/save_and_load.py`, `get_peft_model_state_dict`;
`utils/constants.py`).

The output equals `get_peft_model_state_dict` on the gathered model. The config is the run's own, byte for byte, or an
equivalent one in a trainer's form (`Checkpoint.adapter_config`), never made up: alpha and the flags are stored nowhere
else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ckpt.adapters import names as adapter
from ckpt.adapters.config import is_of_mlx, settings_of
from ckpt.adapters.names import ADAPTER_CONFIG
from ckpt.base.errors import CorruptError, LossError, NotFoundError, UsageError
from ckpt.base.text import pluralize, show_size
from ckpt.base.words import Message
from ckpt.containers.safetensors import read_header
from ckpt.containers.sources import Sources
from ckpt.containers.torchfile import read as torchfile
from ckpt.containers.torchfile.values import StoredTensor, is_state_dict
from ckpt.containers.weights import weight_files
from ckpt.move.files import confined
from ckpt.move.json_files import read_object
from ckpt.move.source import open_stream, read_file
from ckpt.plan.checkpoint import (
    MODEL_ROLES,
    OWN,
    WEIGHT,
    Checkpoint,
    Format,
    Layout,
    ReadRequest,
    Target,
    TargetFile,
)
from ckpt.plan.dtypes import DType
from ckpt.plan.precision import describe
from ckpt.plan.tensors import Extent, Shape, Tensor, Whole
from ckpt.runs.file_table import GENERATION
from ckpt.runs.finding import Steps, find_step
from ckpt.runs.model_files import CONFIG, companions, dump_config, training_left_out
from ckpt.runs.model_files import read_config as read_model_config
from ckpt.state.naming import clean_names
from converters.huggingface.peft_options import ServerOptions
from converters.names.adapter_settings import checked_settings

SAFETENSORS = "adapter_model.safetensors"
TORCH = "adapter_model.bin"
#: mlx-lm's file. lora_a [in, r] and lora_b [r, out] are PEFT's, transposed.
MLX = "adapters.safetensors"
_MLX_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[ab])")
#: Trained in full next to an adapter by LLaVA's and Qwen2-VL scripts. Names are PEFT's in training.
TRAINED_IN_FULL = ("non_lora_trainables.bin", "non_lora_state_dict.bin")
METADATA = {"format": "pt"}
#: Axolotl 0.19 writes wrapped names under FSDP2 with `activation_checkpointing`.
_WRAPPED = (
    "{}: {} names contain wrapper prefixes, for example {}. PEFT ignores these tensors: use `ckpt convert peft peft` "
    "to write an adapter it can load"
)


class Peft(Format):
    name = "peft"
    title = "PEFT adapter"
    aliases = ("adapter", "lora")
    carries_optimizer = False
    carries_quantized = True
    namespace = None

    def find(self, path: Path, tag: str | None) -> Path | None:
        """Find an adapter's folder, or its weights file."""
        if path.is_file():
            return path if path.name in (SAFETENSORS, TORCH, MLX) else None
        return find_step(path, tag, Steps(lambda folder: _weights(folder) is not None))

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        folder = path.parent if path.is_file() else path
        name = path.name if path.is_file() else _weights(folder)
        if name is None:
            raise NotFoundError("found no adapter weights", path=path, expected=SAFETENSORS)
        file = confined(folder, name)
        sources = Sources()
        sources.add(file)
        extents, wrapped = _stored(file)
        _check_pairs(extents, file)
        beside = [confined(folder, one) for one in TRAINED_IN_FULL if (folder / one).is_file()]
        for one in beside:
            sources.add(one)
            extents |= _trained_in_full(one, extents)
        return Checkpoint(
            path=str(path),
            format=self.name,
            tensors={(fqn, WEIGHT): Tensor(fqn, WEIGHT, e.dtype, e.shape, Whole(e)) for fqn, e in extents.items()},
            files=sources.files,
            framework="peft",
            is_adapter=True,
            namespace=OWN,
            folders=tuple(str(p) for p in (request.config, folder) if p is not None),
            notes=(
                *([_WRAPPED.format(name, len(wrapped), wrapped[0])] if wrapped else ()),
                *(f"{one.name} belongs to the adapter: fully trained parameters" for one in beside),
            ),
        )

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        adapter.check_is_there(checkpoint)
        parsed = map(adapter.parse_name, (fqn for fqn, _ in checkpoint.tensors))
        raw, config = settings_of(checkpoint, layers={name.module for name in parsed if name.kind == adapter.A})
        chosen = adapter.tensors(checkpoint, raw, layout.dtype)
        why: dict[str, str] = {}
        notes = describe(chosen, checkpoint, layout.dtype)
        if (server := layout.read(ServerOptions).server) is not None:
            from converters.huggingface.server_adapters import served, weights_file

            settings = checked_settings(checkpoint, raw, config)
            made = served(chosen, settings, server, _model_type(checkpoint, raw))
            weights = [weights_file(SAFETENSORS, made.tensors, chosen)]
            content, why = dump_config(made.config), dict(made.left_out)
            notes = [*notes, *made.notes]
        else:
            weights, _ = weight_files(chosen, SAFETENSORS.removesuffix(".safetensors"), METADATA)
            is_pefts = config.name == ADAPTER_CONFIG and not is_of_mlx(read_object(config, "the adapter's config"))
            content = read_file(config) if is_pefts else dump_config(raw)
        beside = [
            TargetFile.of_bytes(name, content)
            for name, content in companions(map(Path, checkpoint.folders)).items()
            if name not in (CONFIG, GENERATION)
        ]
        written = {choice.key for name, choice in chosen.items() if name not in why}
        reasons = {chosen[name].key: reason for name, reason in why.items()}
        left = [
            key for key in checkpoint.tensors if key not in written and key not in reasons and key[1] in MODEL_ROLES
        ]
        count, size = len({fqn for fqn, _ in left}), show_size(sum(checkpoint.tensors[key].nbytes for key in left))
        frozen = f"the base model's {pluralize(count, 'parameter')} and buffers ({size}): not trained"
        return Target(
            files=(*weights, TargetFile.of_bytes(ADAPTER_CONFIG, content), *beside),
            left_out={**dict.fromkeys(left, frozen), **reasons},
            dropped=tuple(training_left_out(checkpoint)),
            notes=tuple(notes),
            is_rearranged=server is not None,
        )


PEFT = Peft()


def prove_names(folder: Path) -> None:
    """Raise LossError for wrappers' names: PEFT does not load them."""
    name = _weights(folder) if PEFT.find(folder, None) else None
    _, wrapped = _stored(confined(folder, name)) if name else ({}, [])
    if wrapped:
        raise LossError(
            "PEFT would not load this adapter",
            path=folder,
            fqn=wrapped[0],
            found=f"{pluralize(len(wrapped), 'name')} with wrapper prefixes",
            hint=Message(
                "`ckpt convert peft peft {}` writes an adapter PEFT can load; {names=own} keeps these names", folder
            ),
        )


def _model_type(checkpoint: Checkpoint, raw: Mapping[str, Any]) -> str | None:
    found = checkpoint.config or read_model_config(map(Path, checkpoint.folders))
    base = raw.get("base_model_name_or_path")
    if found is None and isinstance(base, str) and (Path(base) / CONFIG).is_file():
        found = read_model_config([Path(base)])
    return str(found["model_type"]) if found and found.get("model_type") else None


def _weights(folder: Path) -> str | None:
    """Return the weights file, in PEFT's search order."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return None
    return next((name for name in (SAFETENSORS, TORCH, MLX) if (folder / name).is_file()), None)


def _stored(file: Path) -> tuple[dict[str, Extent], list[str]]:
    stored = _torch(file) if file.name == TORCH else _safetensors(file)
    if file.name == MLX:
        stored = dict(_as_peft_names(fqn, extent, file) for fqn, extent in stored.items())
    names = clean_names(stored, str(file))
    return {names[fqn]: extent for fqn, extent in stored.items()}, [fqn for fqn in stored if names[fqn] != fqn]


def _trained_in_full(file: Path, known: Mapping[str, Extent]) -> dict[str, Extent]:
    """Return tensors missing from `known`, under PEFT's file names.

    Raise CorruptError if a tensor is in both files with other values.
    """
    parsed = ((fqn, adapter.parse_name(fqn), extent) for fqn, extent in _torch(file).items())
    found = {fqn if name.kind == adapter.BASE else name.in_file: extent for fqn, name, extent in parsed}
    for fqn in found.keys() & known.keys():
        if _content(found[fqn]) != _content(known[fqn]):
            raise CorruptError(
                "the adapter's file and the file next to it disagree about this tensor", path=file, fqn=fqn
            )
    return {fqn: extent for fqn, extent in found.items() if fqn not in known}


def _content(extent: Extent) -> tuple[DType, Shape, bytes]:
    with open_stream(Path(extent.path)) as stream:
        stream.seek(extent.offset)
        return extent.dtype, extent.shape, stream.read(extent.nbytes)


def _safetensors(path: Path) -> dict[str, Extent]:
    entries = read_header(path).entries
    return {e.name: Extent.contiguous(str(path), e.start, e.dtype, e.shape) for e in entries}


def _as_peft_names(fqn: str, extent: Extent, path: Path) -> tuple[str, Extent]:
    """Return PEFT's name, and the extent as a transposed view."""
    match = _MLX_NAME.fullmatch(fqn)
    if match is None or len(extent.shape) != 2:
        raise UsageError(
            "ckpt reads only linear layers' factors from mlx-lm adapters",
            path=path,
            fqn=fqn,
            expected="lora_a [in, rank] and lora_b [rank, out]",
            found=f"shape {list(extent.shape)}",
            hint="use mlx_lm.fuse on a machine with MLX",
        )
    name = f"{adapter.PREFIX}{match['module']}.lora_{match['factor'].upper()}.weight"
    return name, extent._replace(shape=extent.shape[::-1], strides=extent.strides[::-1])


def _torch(path: Path) -> dict[str, Extent]:
    root = torchfile.read(path).root
    if not is_state_dict(root):
        raise CorruptError("the adapter's file has no state dict", path=path, found=type(root).__name__)
    for name, value in root.items():
        if not isinstance(value, StoredTensor):
            raise CorruptError("the adapter's file has an entry that is not a tensor", path=path, fqn=name)
    return {name: value.extent for name, value in root.items()}


def _check_pairs(fqns: Iterable[str], path: Path) -> None:
    """Raise CorruptError if one factor is missing: no checksum protects names in a safetensors header."""
    kinds: dict[str, set[str]] = {}
    for name in map(adapter.parse_name, fqns):
        kinds.setdefault(name.module, set()).add(name.kind)
    for module, found in kinds.items():
        for pair in ((adapter.A, adapter.B), (adapter.EMBEDDING_A, adapter.EMBEDDING_B)):
            if len(found.intersection(pair)) == 1:
                raise CorruptError(
                    "the adapter lacks a LoRA factor for a layer",
                    path=path,
                    fqn=module,
                    expected=" and ".join(pair),
                    found=", ".join(sorted(found)),
                )
