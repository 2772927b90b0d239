"""Search for an adapter and its base, with a check that they match."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ckpt import api
from ckpt.adapters import names, peft_rules
from ckpt.adapters import services as adapter_services
from ckpt.adapters.config import LORA, AdapterConfig, Columns, settings_of
from ckpt.adapters.names import parse_name
from ckpt.base.errors import CorruptError, NotFoundError, UsageError
from ckpt.base.text import HUB_ID, Brief, pluralize
from ckpt.base.words import Message, Note, joined
from ckpt.move.casts import too_large
from ckpt.move.files import OpenFiles, translate_os_errors
from ckpt.move.reading import read_exactly
from ckpt.move.source import is_standin
from ckpt.plan.checkpoint import MASTER, MODEL_ROLES, OWN, WEIGHT, Checkpoint, Key, SourceFile, TrainingState
from ckpt.plan.dtypes import DType
from ckpt.plan.namespace import in_words
from ckpt.plan.precision import Choice, choices
from ckpt.plan.tensors import Shape, Tensor
from ckpt.runs.from_hub import cached_snapshot, is_repository, owner_hint, unknown_hint
from ckpt.runs.opening import open_accepted
from ckpt.runs.selection import Want
from ckpt.state.naming import to_namespace
from ckpt.state.same_model import difference
from ckpt.stores import placeholder_files
from ckpt.stores.placeholder_files import local
from ckpt.views.lazy import LazyTensor, becomes_infinite

if TYPE_CHECKING:
    import torch

PEFT = "peft"
ExpertLayout = Literal["peft", "unsloth"]
_COLUMNS: Mapping[ExpertLayout, Columns] = {"peft": "rank_major", "unsloth": "grouped_by_expert"}
_SNAPSHOT = re.compile(r"models--(?P<id>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})(?:/|$)")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_QUANTIZED = re.compile(r"(?i)[-_](unsloth[-_])?(bnb[-_])?(4bit|8bit|int4|int8|nf4|mxfp4|fp8|gptq|awq)([-_].*)?$")
_FLOATING = re.compile(r"(?i)[-_](bf16|fp16|fp32)$")


@dataclass(frozen=True)
class Factor:
    """A tensor in the checkpoint `of`, usually an adapter.

    `choice` is the stored tensor. `is_held` marks tensors computed by PEFT, already in the merge's dtype.
    """

    fqn: str
    shape: Shape
    load: Callable[[], torch.Tensor]
    of: Checkpoint
    is_held: bool = False
    choice: Choice | None = None

    @classmethod
    def stored(cls, fqn: str, choice: Choice, of: Checkpoint, files: AdapterFiles | None = None) -> Factor:
        read = load if files is None else files.load
        return cls(fqn, choice.tensor.shape, lambda: read(choice, of), of, choice=choice)

    @property
    def file(self) -> str | None:
        fragments = self.choice.tensor.fragments() if self.choice else ()
        return next((one.extent.path for one in fragments), None)

    @property
    def is_range(self) -> bool:
        """True for one byte range of a local file."""
        fragments = [*islice(self.choice.tensor.fragments(), 2)] if self.choice else []
        extents = [one.extent for one in fragments if one.extent.is_contiguous]
        return len(fragments) == 1 and any(not (e.path in self.of.computed or is_standin(e.path)) for e in extents)

    def rows(self, number: int) -> Iterator[torch.Tensor]:
        """Yield a range's rows, `number` at a time, in memory that the next rows overwrite."""
        import torch

        assert self.choice is not None
        (extent,) = (one.extent for one in self.choice.tensor.fragments())
        memory = torch.empty((min(number, self.shape[0]), self.shape[1]), dtype=getattr(torch, extent.dtype.name))
        place, end = extent.offset, extent.end
        with OpenFiles() as sources:
            while place < end:
                rows = memory[: (end - place) // (self.shape[1] * extent.dtype.itemsize)]
                data = rows.reshape(-1).view(torch.uint8).numpy().data
                read_exactly(sources, extent.path, place, data)
                place += len(data)
                yield _cast_tensor(rows, self.choice.dtype, self.of, self.fqn) if self.choice.is_cast else rows

    def rounded(self, dtype: DType) -> Factor:
        def load() -> torch.Tensor:
            return _cast_tensor(self.load(), dtype, self.of, self.fqn)

        return self if self.choice and self.choice.dtype == dtype else replace(self, load=load, choice=None)


def load(choice: Choice, of: Checkpoint, sources: OpenFiles | None = None) -> torch.Tensor:
    tensor = LazyTensor(choice.tensor, of.computed, sources)[...]
    return _cast_tensor(tensor, choice.dtype, of, choice.tensor.fqn) if choice.is_cast else tensor


def _cast_tensor(tensor: torch.Tensor, dtype: DType, of: Checkpoint, fqn: str) -> torch.Tensor:
    """Raise LossError if a finite number becomes infinite."""
    import torch

    found = tensor.to(getattr(torch, dtype.name))
    if becomes_infinite(tensor, found):
        largest = tensor[tensor.isfinite()].abs().max().item()
        raise too_large(dtype, path=of.path, fqn=fqn, found=f"{largest:.4g}")
    return found


class AdapterFiles:
    def __init__(self) -> None:
        self._sources, self._lock = OpenFiles(), threading.RLock()
        weakref.finalize(self, self._sources.close)

    def load(self, choice: Choice, of: Checkpoint) -> torch.Tensor:
        with self._lock:
            return load(choice, of, self._sources)


@dataclass(frozen=True)
class Adapter:
    """Tensors have PEFT's file names. `others` holds a combined adapter's other checkpoints."""

    path: str
    folder: Path
    config: AdapterConfig
    checkpoint: Checkpoint
    factors: Mapping[str, Factor]
    notes: tuple[str, ...] = ()
    others: tuple[Checkpoint, ...] = ()

    @property
    def source(self) -> str:
        return self.checkpoint.path if Path(self.path).exists() else self.path


# -- adapters ------------------------------------------------------------------------------------------------


def open_adapter(
    where: str,
    *,
    config: str | None = None,
    tag: str | None = None,
    expert_layout: ExpertLayout | None = None,
    options: Mapping[str, Any] | None = None,
    base: str | None = None,
    base_config: str | None = None,
    peft_version: str | None = None,
    accept_settings: Sequence[str] | None = None,
) -> Adapter:
    """Return the adapter at `where`: a PEFT folder, run (newest adapter), sharded checkpoint, URL or cached Hub id.

    If the adapter has no config, `base` or `base_config` maps its names to PEFT's.
    """
    path = local(where)
    if is_repository(where):
        path = cached_snapshot(where, None)
    with translate_os_errors(path):
        if not path.exists():
            expected = "a folder, or a Hub id in the local cache"
            raise NotFoundError("adapter not found", path=where, expected=expected, hint=unknown_hint(where))
        checkpoint = _with_config_of(_open(path, config, tag, options or {}), base, base_config)
        checkpoint = to_namespace(replace(checkpoint, accepted=frozenset(accept_settings or ())), OWN)
    place = local(config) if config else None
    layers = {parse_name(fqn).module for fqn, _ in checkpoint.tensors if parse_name(fqn).kind == names.A}
    raw, found = settings_of(checkpoint, place if place is not None and place.is_dir() else None, layers)
    raw, notes = _with_release(raw, peft_version)
    spelled = {"entry_option": "accept_settings", "release_option": "peft_version"}
    settings = adapter_services.settings.checked_settings(checkpoint, raw, found, accept_settings or (), **spelled)
    settings = replace(settings, given_layout=expert_layout and _COLUMNS[expert_layout])
    chosen = names.tensors(checkpoint, settings.raw) if settings.kind == LORA else choices(checkpoint, None)
    folder = Path(checkpoint.path) if Path(checkpoint.path).is_dir() else Path(checkpoint.path).parent
    if not checkpoint.is_adapter:
        folder = found.parent  # a sharded checkpoint's config has the run's files next to it
    with translate_os_errors(found):
        files = (*checkpoint.files, *([SourceFile.stat(str(found))] if found.is_file() else []))
    given = replace(checkpoint.given, places=(*checkpoint.given.places, str(path)))
    checkpoint = replace(checkpoint, files=files, given=given)
    opened = AdapterFiles()
    factors = {fqn: Factor.stored(fqn, choice, checkpoint, opened) for fqn, choice in chosen.items()}
    return Adapter(where, folder, settings, checkpoint, factors, (*checkpoint.notes, *notes))


def _with_release(raw: Mapping[str, Any], given: str | None) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    if given is None:
        return raw, ()
    if peft_rules.release_of({"peft_version": given}) is None:
        raise UsageError(
            Message("{peft_version} needs a PEFT release"), expected="0.13, 0.18.1 or another one", found=given
        )
    if re.fullmatch(r"\d+\.\d+\.\d+", str(raw.get("peft_version"))):  # a development version may match either release
        recorded = f"the adapter records PEFT {raw['peft_version']}"
        return raw, (Note("{}: {peft_version} is not used for it", recorded, peft_version=given),)
    return {**raw, "peft_version": given if given.count(".") > 1 else f"{given}.0"}, ()


def _with_config_of(checkpoint: Checkpoint, base: str | None, config: str | None) -> Checkpoint:
    """Add the base's config if the adapter's names need one."""
    if checkpoint.config is not None or checkpoint.namespace == OWN or not checkpoint.is_adapter:
        return checkpoint
    if base is None:
        raise NotFoundError(
            f"the base's config.json is needed to turn {in_words(checkpoint.namespace)} into PEFT's",
            path=checkpoint.path,
            expected="the adapter's base model",
            hint=Message("{base} takes the model's folder, or a Hub id"),
        )
    place = local(base)
    return replace(checkpoint, config=_model(place if place.exists() else cached_snapshot(base, None), config).config)


def _model(path: Path, config: str | None) -> Checkpoint:
    model = api.open(path)
    if model.config is None and config is not None:
        with suppress(NotFoundError):  # the folder may have an adapter's config only
            return api.open(path, config=config)
    return model


def _open(path: Path, config: str | None, tag: str | None, options: Mapping[str, Any]) -> Checkpoint:
    empty: list[tuple[str, str, int, int]] = []

    def holds(checkpoint: Checkpoint) -> bool:
        if checkpoint.format == PEFT and (found := _empty_tensors(checkpoint)):
            empty.append((checkpoint.path, found[0], len(found), len(checkpoint.tensors)))
            return False
        return checkpoint.is_adapter or names.is_adapter(fqn for fqn, _ in checkpoint.tensors)

    want = Want("adapter", holds, prefers=PEFT)
    try:
        checkpoint = open_accepted(path, want, tag=tag, config=config, options=options)
    except CorruptError:
        if not empty:
            raise
        checkpoint = None  # the sharded checkpoint next to the empty adapter is damaged
    if checkpoint is None and tag is None and not empty:
        # The missing config is reported later. PEFT prefers safetensors.
        alone = sorted(path.glob("adapter_model.*"), key=lambda file: file.suffix != ".safetensors")
        path = alone[0] if alone else path
        checkpoint = open_accepted(path, want, tag=tag, config=config, options=options) if alone else None
    if checkpoint is None and empty:
        place, fqn, count, of = empty[0]
        raise CorruptError(
            "the adapter was saved without its partitions: its tensors are empty",
            path=place,
            fqn=fqn,
            found=f"{count} of {pluralize(of, 'tensor')} of shape [0]",
            hint="give the sharded checkpoint instead: it still has them",
        )
    if checkpoint is None:
        checkpoint = api.open(path, tag=tag, config=config, **options)
        names.check_is_no_others(checkpoint)
        raise NotFoundError("no LoRA adapter found", path=path, found=f"a checkpoint in {checkpoint.format} format")
    names.check_is_no_others(checkpoint)
    notes = [
        f"the adapter file in {place} is empty because of ZeRO-3; using its partitions instead" for place, *_ in empty
    ]
    return replace(checkpoint, notes=(*notes, *checkpoint.notes))


def _empty_tensors(checkpoint: Checkpoint) -> list[str]:
    return [fqn for (fqn, _), tensor in checkpoint.tensors.items() if tensor.numel == 0]


# -- bases ---------------------------------------------------------------------------------------------------


def own_base(adapter: Adapter) -> Checkpoint | None:
    """Return the base in the adapter's own checkpoint, if complete."""
    checkpoint = adapter.checkpoint
    if checkpoint.is_adapter:
        return None
    tensors: dict[Key, Tensor] = {}
    for (fqn, role), tensor in checkpoint.tensors.items():
        name = parse_name(fqn)
        if name.kind == names.BASE and role in MODEL_ROLES:
            tensors[name.module, role] = tensor.renamed(name.module)
    adapted = {name.module for name in map(parse_name, adapter.factors) if name.kind != names.BASE}
    present = {fqn.rpartition(".")[0] for fqn, _ in tensors}
    if not all(module.partition(".base_layer")[0] in present for module in adapted):
        return None
    ties = {parse_name(alias).module: parse_name(owner).module for alias, owner in checkpoint.ties.items()}
    kept = {alias: owner for alias, owner in ties.items() if (owner, WEIGHT) in tensors or (owner, MASTER) in tensors}
    notes = (Brief("using the base model in the checkpoint itself"),)
    return replace(checkpoint, tensors=tensors, ties=kept, notes=notes, state=TrainingState())


def open_base(adapter: Adapter, where: str | None, *, accept: bool = False, config: str | None = None) -> Checkpoint:
    """Return the base at `where`, from the adapter's checkpoint or its record.

    Raise UsageError if `where` is known to differ from the recorded model, unless `accept`.
    """
    if where is None and (own := own_base(adapter)) is not None:
        return own
    recorded = adapter.config.base
    given = where or recorded
    if given is None:
        raise UsageError(
            "the adapter records no base model",
            path=adapter.config.path,
            hint=Message("give it with {base}"),
        )
    path = local(given) if where else Path(given)
    if not path.exists():
        if not is_repository(given):
            raise NotFoundError(
                "base model not found",
                path=given,
                found=None if where else f"base_model_name_or_path of {adapter.config.path}",
                hint=joined("; or, ", filter(None, (Message("give the base's folder with {base}"), owner_hint(given)))),
            )
        try:
            path = cached_snapshot(given, adapter.config.revision if given == recorded else None)
        except NotFoundError as error:
            if where is None and _is_quantized(given):
                error.hint = Message(
                    "it is a quantized copy: give the full-precision {}, or what that was made from, with {base}; or "
                    "fetch it, hf download {}, and add {dequantize=True}",
                    _QUANTIZED.sub("", given),
                    given,
                )
            else:
                error.hint = Message("{}; or give the folder of a copy with {base}", error.hint)
            raise
    note = None if accept else _check_identity(adapter.config, path, given)
    base = _model(path, config)
    if not accept:
        _check_architecture(adapter.checkpoint, base)
    return replace(base, notes=(*base.notes, note)) if note else base


def check_one_base(adapters: Sequence[Adapter]) -> None:
    named = [(one.config.base, one.config.path) for one in adapters if one.config.base]
    for base, path in named[1:]:
        first, where = named[0]
        if _model_name(base) != _model_name(first):
            raise UsageError(
                "these adapters were trained on different bases",
                path=path,
                expected=f"{first}, as {where} has it",
                found=base,
                hint=Message("{accept_base=True} merges anyway"),
            )


def _check_architecture(adapter: Checkpoint, base: Checkpoint) -> None:
    """Raise UsageError if the config next to the adapter describes another model: shapes could still fit."""
    if (differing := difference(adapter.config, base.config)) is not None:
        key, trained, given = differing
        raise _other_base(base.path, f"{key} {trained}, from the config next to the adapter", f"{key} {given}")


def _other_base(path: str | Path, expected: str, found: str) -> UsageError:
    what, hint = "the adapter was trained on another base", Message("{accept_base=True} merges anyway")
    return UsageError(what, path=path, expected=expected, found=found, hint=hint)


def _check_identity(config: AdapterConfig, path: Path, given: str) -> str | None:
    """Return a note if `path` may not be the recorded model. Raise UsageError if it certainly is not."""
    if config.base is None:
        return f"the adapter names no base; assuming it was trained on {given}"
    is_same = given == config.base or (Path(config.base).exists() and Path(config.base).resolve() == path.resolve())
    found = _hub_id(path) or (given if is_repository(given) else "")
    wanted = config.base + (f" at revision {config.revision}" if config.revision else "")
    refusal = _other_base(path, wanted, found or str(path))
    if not is_same and found and HUB_ID.fullmatch(config.base) and _model_name(found) != _model_name(config.base):
        raise refusal
    commit = _SNAPSHOT.search(str(path.resolve()))
    if commit and config.revision and _COMMIT.fullmatch(config.revision) and commit["commit"] != config.revision:
        raise refusal
    if is_same or found == config.base:
        return None
    if found and _is_quantized(config.base) and not _is_quantized(found):
        trained = f"the adapter was trained on the quantized {config.base}"
        is_exact = "merges into the exact values from training"
        return Note(
            "{}; assuming {} is the same model in full precision; {base} {dequantize=True} {}",
            trained,
            found,
            is_exact,
            base=config.base,
        )
    if found:
        return f"the adapter was trained on {config.base}; assuming {found} is the same model in another precision"
    return f"the adapter was trained on {config.base}; assuming {given} is the same model"


def _model_name(repo_id: str) -> str:
    return _FLOATING.sub("", _QUANTIZED.sub("", repo_id.rpartition("/")[2])).lower()


def _is_quantized(repo_id: str) -> bool:
    return _QUANTIZED.search(repo_id.rpartition("/")[2]) is not None


def _hub_id(path: Path) -> str | None:
    url = placeholder_files.url_of(path)
    if url is not None and url.startswith("hf://"):
        return "/".join(url.split("/")[2:4]).partition("@")[0]
    match = _SNAPSHOT.search(f"{path.resolve()}/")
    return match["id"].replace("--", "/") if match else None
