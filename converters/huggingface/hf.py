"""Hugging Face model folders: `model.safetensors`, or shards with `model.safetensors.index.json`.

Format facts: safetensors 0.8.0. File names, index and sharding follow transformers 5.23 (`modeling_utils.py`,
`save_pretrained`) and huggingface_hub (`serialization/_base.py`). Each file equals the output of
`safetensors.torch.save_file`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from ckpt.adapters.names import check_is_no_others, is_others
from ckpt.base.errors import NotFoundError, UnknownArchitectureError, UsageError
from ckpt.base.text import Brief
from ckpt.base.words import Message, Note
from ckpt.containers.sources import Sources
from ckpt.containers.weights import (
    INDEX,
    MAX_INDEX,
    SINGLE,
    Index,
    check_shard_set,
    index_is_missing,
    is_shard_set,
    missing_index,
    model_weights,
    parse_index,
    read_weights,
    weight_files,
)
from ckpt.move.files import confined
from ckpt.move.json_files import read_json
from ckpt.move.listing import names_in
from ckpt.plan.checkpoint import BUFFER, HUB, OWN, PART, Checkpoint, Format, Layout, ReadRequest, Target, TargetFile
from ckpt.plan.load_check import LoadCheck
from ckpt.plan.namespace import OF_THE_MODEL
from ckpt.plan.precision import CAST_SOURCES, Choice, choices, describe
from ckpt.runs.finding import Steps, find_step
from ckpt.runs.model_files import read_config, run_files_left_out, training_left_out
from ckpt.runs.sentence_modules import by_module, module_weights, modules_in
from ckpt.runs.steps import is_ranks_folder
from ckpt.runs.trainer_files import model_files
from converters.names.hub.diffusers_models import TRANSFORMERS_STEM, class_name, file_stem
from converters.names.options import OWN as OWN_NAMES
from converters.names.options import NameOptions, ProofOptions
from converters.names.transformers.ties import kept_names, tied_names, trained_apart, untied_config
from converters.quantized.misnamed import with_plain_names
from converters.quantized.parts import quantized_weights

_ADAPTER = re.compile(r"adapter_model.*\.safetensors")

_MAY_COMPUTE_IN_LESS = Brief(
    Message(
        "wrote float32, like the run's weights; the compute dtype is not recorded, so use {dtype=bf16} or fp16 for "
        "16-bit weights"
    )
)

_CONFIG = Message("{config=ORG/NAME} takes the trained model's config")
NO_CONFIG = LoadCheck(
    False,
    why="config.json is missing",
    hint=Message("Run again with {config=ORG/NAME} {overwrite=True} to write it, too"),
)


class HuggingFace(Format):
    name = "hf"
    title = "Hugging Face safetensors"
    aliases = ("huggingface", "safetensors")
    carries_optimizer = False
    carries_quantized = True
    quantizes = ("fp8-block", "fp8-dynamic", "int8", "mxfp4", "nvfp4a16")
    takes = ("max_shard_size",)
    namespace = HUB

    def find(self, path: Path, tag: str | None) -> Path | None:
        """Find a folder with weights (`tag` names one inside it), an index, or a single safetensors file."""
        if path.is_file():
            named = path.name.endswith((".safetensors", ".safetensors.index.json")) and not _ADAPTER.match(path.name)
            return path if named else None
        return find_step(path, tag, Steps(lambda folder: bool(_weights(folder))))

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        """Give all tensors the role `weight`, because files don't mark buffers."""
        folder = path.parent if path.is_file() else path
        folders = tuple(p for p in (request.config, folder) if p is not None)
        config = read_config(folders)
        index, names, notes = _weight_files(path, folder)
        sources = Sources()
        tensors = read_weights(folder, names, index.weight_map if index else None, sources)
        tensors, renamed = with_plain_names(tensors)
        notes += renamed
        if index is not None:
            notes += index.size_notes(tensors.values())
        is_adapter = is_others({fqn for fqn, _ in tensors})
        notes += ["an adapter with another program's names, not a model"] if is_adapter else []
        modules = module_weights(folders, sources)
        tensors |= modules
        is_hub = config is not None and "model_type" in config
        checkpoint = Checkpoint(
            path=str(path),
            format=self.name,
            tensors=tensors,
            files=sources.files,
            framework="transformers" if is_hub else None,
            namespace=HUB if is_hub else OWN,
            ties=tied_names(config, {fqn for fqn, _ in tensors}) if config else {},
            config=config,
            folders=tuple(str(p) for p in folders),
            notes=tuple(notes),
            is_adapter=is_adapter,
        )
        if config is None:
            return checkpoint
        from converters.names.hub.expected_tensors import table_notes

        return replace(checkpoint, notes=(*checkpoint.notes, *table_notes(checkpoint, modules)))

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        checkpoint, untied = _as_trained(checkpoint)
        names = kept_names(checkpoint) if checkpoint.config else {}
        run = checkpoint.computes_in if layout.dtype is None else None
        dtype = run.dtype if run else layout.dtype
        chosen = {names.get(fqn, fqn): choice for fqn, choice in choices(checkpoint, dtype).items()}
        ordered = {name: chosen[name] for name in sorted(chosen, key=natural_key)}
        parameters = sum(choice.tensor.numel for choice in chosen.values() if choice.tensor.role != BUFFER)
        model, *parts = by_module(ordered, modules_in(checkpoint.folders))
        stem = file_stem(checkpoint.config)
        totals = {"total_parameters": parameters} if stem == TRANSFORMERS_STEM else {}
        files = model_weights(model[1], layout.max_shard_size, stem, **totals)
        for place, part in parts:
            files += weight_files(part, f"{place}/model", {})[0]
        plain = [choice for choice in chosen.values() if checkpoint.uncast.get(choice.tensor.fqn) != PART]
        config = checkpoint.config if untied else None
        beside, notes = model_files(checkpoint, dtype, plain, plain=_is_plain(chosen), config=config)
        wrapped = _adapter_notes(chosen, checkpoint, layout)
        of_model = {name: chosen[name] for name in chosen if name in model[1]} if parts else chosen
        told, loads = _proof(checkpoint, of_model, layout, beside, dict(parts))
        notes = (
            describe(chosen, checkpoint, layout.dtype, run.record if run else None)
            + ([_MAY_COMPUTE_IN_LESS] if run and run.dtype is None else [])
            + _tie_notes(checkpoint, names)
            + untied
            + wrapped
            + told
            + _promises(checkpoint, chosen)
            + notes
        )
        dropped = (*training_left_out(checkpoint), *run_files_left_out(checkpoint))
        return Target(files=(*files, *beside), dropped=dropped, notes=tuple(notes), loads=loads)


HF = HuggingFace()


# -- reading -------------------------------------------------------------------------------------------------


def _weights(folder: Path) -> list[str] | str | None:
    """Return the single file, the index, or names without an index."""
    for name in (SINGLE, INDEX):
        if (folder / name).is_file() or (folder / name).is_symlink():
            return name
    names = [name for name in names_in(folder) if name.endswith((".safetensors", ".safetensors.index.json"))]
    indexes = [name for name in names if name.endswith(".index.json")]
    if len(indexes) == 1:
        return indexes[0]
    if (folder / "adapter_config.json").exists():
        return None  # a PEFT adapter
    names = [name for name in names if name not in indexes and not _ADAPTER.match(name)]
    if is_ranks_folder(folder):
        return None
    if len(names) == 1 and not names[0].startswith("shard-"):
        return names
    return names if is_shard_set(names) else None


def _weight_files(path: Path, folder: Path) -> tuple[Index | None, list[str], list[str]]:
    found = path.name if path.is_file() else _weights(folder)
    if found is None:
        raise NotFoundError("found no safetensors model weights", path=path)
    if isinstance(found, list):
        check_shard_set(found, folder)
        return None, found, [index_is_missing(found[0])] if missing_index(folder / found[0]) else []
    if not found.endswith(".json"):
        both = not path.is_file() and (folder / INDEX).exists()
        notes = [f"{SINGLE} and {INDEX} are both in the folder; reading {SINGLE}, like transformers"]
        return None, [found], notes if both else []
    index = parse_index(read_json(confined(folder, found), unique=True, max_bytes=MAX_INDEX), folder / found)
    return index, sorted(set(index.weight_map.values())), []


# -- writing -------------------------------------------------------------------------------------------------


def natural_key(name: str) -> tuple[tuple[int, str, int], ...]:
    """Return a sort key with `layers.2` before `layers.10`, like transformers (`dot_natural_key`)."""
    return tuple(map(_natural_part, name.split(".")))


@cache  # few distinct parts
def _natural_part(part: str) -> tuple[int, str, int]:
    text = part.rstrip("0123456789")
    digits = part[len(text) :]
    number = int(digits) if 0 < len(digits) < 1000 else -1
    return (1, text, number) if text else (0, "", number)


def _is_plain(chosen: Mapping[str, Choice]) -> bool:
    return all(choice.dtype in CAST_SOURCES for choice in chosen.values() if choice.tensor.role != BUFFER)


def _as_trained(checkpoint: Checkpoint) -> tuple[Checkpoint, list[str]]:
    """Untie weights in the config if the run trained both, and return notes."""
    if checkpoint.config is None or not (apart := trained_apart(checkpoint)):
        return checkpoint, []
    names = "; ".join(f"{alias} and {owner}" for alias, owner in apart.values())
    config = untied_config(checkpoint.config, apart)
    if config is None:
        told = f"the run trained these weights apart, and the config ties them: {names}: a program may load only one"
        return checkpoint, [told]
    told = f"config.json: set tie_word_embeddings to false: the run trained these weights apart: {names}"
    return replace(checkpoint, config=config), [told]


def _tie_notes(checkpoint: Checkpoint, names: Mapping[str, str]) -> list[str]:
    if not checkpoint.ties:
        return []
    groups: dict[str, list[str]] = {}
    for alias, owner in checkpoint.ties.items():
        kept = names.get(owner, owner)
        groups.setdefault(kept, []).append(owner if alias == kept else alias)
    return [Brief(f"tied: written once as {kept}, not again as {', '.join(sorted(g))}") for kept, g in groups.items()]


def _proof(
    checkpoint: Checkpoint,
    chosen: Mapping[str, Choice],
    layout: Layout,
    beside: Iterable[TargetFile],
    parts: Mapping[str, Mapping[str, Choice]],
) -> tuple[list[str], LoadCheck]:
    """Return notes, and whether `from_pretrained` can load the folder.

    Raise LossError or UsageError if the config's architecture has other names.
    """
    if (config := checkpoint.config) is None:
        return _not_compared(checkpoint, layout, NO_CONFIG)
    from converters.names.hub import loading
    from converters.names.hub.proof import names_architecture, not_compared, proof_notes, prove, ways_to_compare

    weights = quantized_weights(checkpoint)
    shapes = weights.in_place({name: choice.tensor.shape for name, choice in chosen.items()})
    if checkpoint.namespace not in OF_THE_MODEL or not names_architecture(config):
        return _not_compared(checkpoint, layout, loading.unproved(config, shapes))
    if layout.read(NameOptions).names == OWN_NAMES:
        told: str = Note("{names=own}: the names are not compared with the config's architecture")
        return [told], LoadCheck(None, why=weights.unproved) if weights.unproved else loading.unproved(config, shapes)
    try:
        saved = prove(config, shapes, checkpoint.path)
    except UnknownArchitectureError:
        loads = loading.unproved(config, shapes, weights.unproved or "the names were not compared with its class")
        return _not_compared(checkpoint, layout, loads, not_compared(config), ways_to_compare(config))
    if saved is None:
        told = "config.json names no class (`architectures`), so the names are not compared with a class"
        return _not_compared(checkpoint, layout, loading.unproved(config, shapes), told)
    files = {file.name: file.literals[0][1] for file in beside}
    inner = {place: {name: one.tensor.shape for name, one in own.items()} for place, own in parts.items()}
    loads = loading.proved(saved.cls)
    if class_name(config) is None:
        loads = loading.with_files(loading.accepted(loads, config), files, inner)
    unknown = weights.unproved or (None if weights.unread else weights.untried)
    if why := unknown or weights.unread:
        loads = LoadCheck(None if unknown else False, loads.call, why)
    loads = replace(loads, packages=weights.packages)
    return [*proof_notes(saved, shapes, loads=not why)], loads


def _not_compared(
    checkpoint: Checkpoint, layout: Layout, loads: LoadCheck, why: str = "", hint: str = ""
) -> tuple[list[str], LoadCheck]:
    if layout.read(ProofOptions).strict and layout.read(NameOptions).names != OWN_NAMES:
        raise UsageError(
            Message("{strict=True}: the names can't be compared with the model's architecture"),
            path=checkpoint.path,
            found=why or loads.why,
            hint=Message("{}; leave {strict=True} out to write the names uncompared", hint or _CONFIG),
        )
    return ["; ".join(filter(None, [why, hint]))] if why else [], loads


def _promises(checkpoint: Checkpoint, chosen: Mapping[str, Choice]) -> list[str]:
    if checkpoint.config is None:
        return []
    from converters.names.hub.expected_tensors import missing_parts

    shapes = quantized_weights(checkpoint).in_place({name: choice.tensor.shape for name, choice in chosen.items()})
    cure = Message("use {complete_from=BASE} to take it from the base model, or remove its entry from config.json")
    return [f"{one}: {cure}" for one in missing_parts(checkpoint.config, shapes)]


def _adapter_notes(chosen: Collection[str], checkpoint: Checkpoint, layout: Layout) -> list[str]:
    """Note a PEFT-wrapped model: from_pretrained finds neither a model nor an adapter in it.

    Raise UsageError for an adapter, unless the names are the user's own.
    """
    if is_others(chosen) and layout.read(NameOptions).names != OWN_NAMES:
        check_is_no_others(checkpoint)
    if not any(fqn.startswith("base_model.model.") for fqn in chosen):
        return []
    if layout.read(NameOptions).names != OWN_NAMES:
        where = shlex.quote(next(iter(checkpoint.given.places), checkpoint.path))
        if checkpoint.is_adapter:
            what, hint = "this is an adapter, not a model", f"`ckpt merge-lora {where} --base MODEL` makes one"
        else:
            what = "from_pretrained can't load this: it is a model with PEFT adapters under its training names"
            hint = f"`ckpt merge-lora {where}` merges the adapter into its base, "
            hint += Message("`ckpt convert auto peft {}` extracts it; {names=own} writes the names unchanged", where)
        raise UsageError(what, path=checkpoint.path, hint=hint)
    return [
        "from_pretrained will find neither a model nor an adapter: the tensors keep their training names "
        "(base_model.model...)"
    ]
