"""Merge of LoRA adapters, tensor by tensor, under transformers' names.

The largest adapted tensor bounds the memory: its base and its fp32 delta.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import permutations
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.adapters import names, targets
from ckpt.adapters import shapes as adapter_shapes
from ckpt.adapters.config import BY_LAYER, BY_MODEL, KINDS, LORA, TRAINABLE_TOKENS, AdapterConfig
from ckpt.adapters.names import AdapterName, parse_name
from ckpt.base.errors import CkptError, CorruptError, LossError, StorageError, UsageError
from ckpt.base.text import Brief, pluralize
from ckpt.base.words import Message
from ckpt.commands.merge_lora import base_names, tied
from ckpt.commands.merge_lora.combine import loaded, require_peft
from ckpt.commands.merge_lora.effect import Merge, Noted, Update, raw_bytes
from ckpt.commands.merge_lora.empty_model import EmptyModel
from ckpt.commands.merge_lora.experts import ExpertPart, part_of
from ckpt.commands.merge_lora.find import Adapter, Factor, open_adapter
from ckpt.commands.merge_lora.head import as_trained
from ckpt.commands.merge_lora.layer import check_installed, merge_layer, updates
from ckpt.commands.merge_lora.loaded_model import LoadedModel
from ckpt.move.json_files import parse_json
from ckpt.move.workers import Resources
from ckpt.plan import registry, services
from ckpt.plan.checkpoint import HUB, WEIGHT, Checkpoint, Key, Layout, Target, TargetFile
from ckpt.plan.dtypes import DType
from ckpt.plan.namespace import config_parts
from ckpt.plan.planner import make_plan
from ckpt.plan.precision import CAST_SOURCES, choices
from ckpt.plan.tensors import Extent, Shape, Tensor, Whole
from ckpt.runs.file_table import FileKind, is_of
from ckpt.runs.model_files import CONFIG, TEMPLATES, companions, dump_config, training_left_out
from ckpt.runs.sentence_modules import MODULES, settings, weights_files
from ckpt.runs.steps import run_at
from ckpt.state.kept_dtypes import check_casts, check_parts, with_tensor_kinds, with_uncast_parts
from ckpt.state.naming import to_namespace

if TYPE_CHECKING:
    import torch

    from ckpt.plan.protocols import ModuleProtocol

_MERGED = "merged:"
_ROWS = "vocab_size"
_TIE = "tie_word_embeddings"
#: In PEFT's copies of a module, if the vocabulary was resized.
_COPY = re.compile(r"\.(modules_to_save|original_module)(?=\.)")
#: Tried if the run folder's adapter does not fit.
_MAX_STEPS = 8
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class _Merged:
    fqn: str
    source: Factor
    dtype: DType
    updates: tuple[Update, ...]
    noted: Noted

    def __call__(self) -> memoryview:
        with self._computing():
            return raw_bytes(self.noted.updated(self.fqn, self.dtype.name, self.source.load, self.updates)).data

    def parts(self) -> Iterator[memoryview]:
        """Yield the bytes in order. Merged row by row, they are still in the processor's cache."""
        import torch

        from ckpt.commands.merge_lora.arithmetic import rows_at_once

        by_rows = self.updates[0].by_rows if len(self.updates) == 1 and self.source.is_range else None
        if by_rows is None:
            yield self()
            return
        with self._computing():
            add = by_rows(getattr(torch, self.dtype.name))
            rows = self.source.rows(rows_at_once(self.source.shape[1]))
            for part in self.noted.updated_rows(self.fqn, self.dtype.name, rows, add, self.updates[0]):
                yield raw_bytes(part).data

    @contextmanager
    def _computing(self) -> Iterator[None]:
        import torch

        from ckpt.commands.merge_lora.arithmetic import one_thread

        try:
            with torch.no_grad(), one_thread():  # workers already compute tensors in parallel
                yield
        except (MemoryError, RuntimeError) as error:
            raise StorageError(
                f"torch can't compute this tensor: {error}",
                path=self.source.file or self.source.of.path,
                fqn=self.fqn,
                hint=Message("{workers=1} needs the least memory"),
            ) from error


def plan(
    adapters: Sequence[Adapter],
    base: Checkpoint,
    layout: Layout | None = None,
    resources: Resources | None = None,
    notes: Sequence[str] = (),
    *,
    as_peft: bool = False,
) -> Merge:
    """Plan the conversion of `base`, with `adapters` merged in order, to a Hugging Face folder.

    `base` may have any format. `as_peft` keeps tied weights tied, as PEFT does. Raise LossError if an adapter does not
    fit the base, UsageError if a merge is unsupported or torch is missing.
    """
    if find_spec("torch") is None:
        raise UsageError("merging needs torch", hint="pip install torch")
    if base.blocks and base.unreadable is None:
        fqn, stored = next(iter(base.blocks.items()))
        raise _quantized_base(base, fqn, stored.type, can_dequantize=True)
    layout = layout or Layout()
    try:
        return _plan(adapters, base, layout, resources or Resources(), notes, as_peft)
    except LossError as error:
        if (step := _step_that_fits(adapters, base, layout, as_peft)) is not None:
            error.hint = f"the adapter of {step.name} in this run fits: ckpt merge-lora {step}"
        raise


def _quantized_base(base: Checkpoint, fqn: str, found: str, *, can_dequantize: bool) -> UsageError:
    return UsageError(
        "can't merge an adapter into a quantized base weight",
        path=base.path,
        fqn=fqn,
        expected=" or ".join(sorted(d.name for d in CAST_SOURCES)),
        found=found,
        hint=Message("give the full-precision model with {base}")
        + (
            Message("; or use {dequantize=True} to merge into dequantized values")
            if can_dequantize
            else ": this quantization method can't be dequantized here"
        ),
    )


def _step_that_fits(adapters: Sequence[Adapter], base: Checkpoint, layout: Layout, as_peft: bool) -> Path | None:
    for step in run_at(adapters[0].folder).steps[:_MAX_STEPS] if len(adapters) == 1 else ():
        with suppress(CkptError):
            _plan([open_adapter(str(step.path))], base, layout, Resources(), (), as_peft)
            return step.path
    return None


def _plan(
    adapters: Sequence[Adapter],
    base: Checkpoint,
    layout: Layout,
    resources: Resources,
    notes: Sequence[str],
    as_peft: bool,
) -> Merge:
    model = tied.in_memory(base)
    entries: dict[str, Any] = {}
    for one in adapters:
        trained = as_trained(model, one)
        model, entries, notes = trained.base, {**entries, **trained.entries}, (*notes, *trained.notes)
    merge = _Merge(model, layout, Noted(len(adapters)), as_peft, entries)
    given, adapters = adapters, [base_names.in_memory(_stacked(one, merge), merge.base) for one in adapters]
    for one, before in zip(adapters, given, strict=True):
        merge.add(one)
        merge.check_vocabulary(one)
        notes = (*notes, *one.notes[len(before.notes) :])
    merge.check_ties()
    named = to_namespace(merge.checkpoint(_identity(adapters)), HUB)
    merged = with_uncast_parts(with_tensor_kinds(named, layout), layout)
    check_parts(merged)
    target = registry.get("hf").lay_out(merged, layout)
    check_casts(merged, target)
    if merge.untied or merge.resized or merge.entries:
        target = _with_config(target, merge.config)
    for one in adapters:
        target = _with_modules(_with_tokenizer(target, one), one)
    notes = (*notes, *merge.notes(), *target.notes)
    left_out = dict.fromkeys(line for one in given for line in training_left_out(one.checkpoint))
    target = replace(target, notes=notes, dropped=(*left_out, *target.dropped))
    sources = [checkpoint for one in given for checkpoint in (one.checkpoint, *one.others)]
    conversion = make_plan(_with_sources(merged, sources), target, carries_optimizer=False)
    return Merge(conversion, resources, "hf", base, merge.noted, tuple(sources))


def is_merged(tensor: Tensor) -> bool:
    return any(fragment.extent.path.startswith(_MERGED) for fragment in tensor.fragments())


def _with_sources(merged: Checkpoint, adapters: Sequence[Checkpoint]) -> Checkpoint:
    """Add the adapters' files, to protect them and detect changes."""
    files = {file.path: file for one in (merged, *adapters) for file in one.files}
    places = dict.fromkeys(place for one in (merged, *adapters) for place in (one.path, *one.given.places))
    return replace(merged, files=tuple(files.values()), given=replace(merged.given, places=tuple(places)))


def _identity(adapters: Sequence[Adapter]) -> str:
    """Digest everything besides the source files that decides a merge's bits, for its journal."""
    from xxhash import xxh3_128

    packages = ("torch", "peft", "transformers", "scikit-learn")
    hasher = xxh3_128(repr([_installed(name) for name in packages]).encode())
    for one in adapters:
        hasher.update(repr((one.config.given_layout, sorted(one.config.raw.items()))).encode())
        for fqn, factor in one.factors.items():
            hasher.update(repr((fqn, factor.shape)).encode())
            if factor.is_held:
                hasher.update(raw_bytes(factor.load()).data)
    return hasher.hexdigest()


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _stacked(adapter: Adapter, merge: _Merge) -> Adapter:
    """Stack an adapter for single experts if the base has only stacked ones."""
    modules = {parse_name(fqn).module for fqn in adapter.factors} if adapter.config.kind == LORA else set()
    if not any(_EXPERT.search(module) and f"{module}.weight" not in merge.shapes for module in modules):
        return adapter
    return loaded(adapter, merge.base)


@dataclass
class _Merge:
    base: Checkpoint
    layout: Layout
    noted: Noted
    as_peft: bool
    entries: Mapping[str, Any] = field(default_factory=dict)
    updates: dict[str, list[Update]] = field(default_factory=dict)
    replaced: dict[str, Factor] = field(default_factory=dict)
    untied: set[str] = field(default_factory=set)
    normed: set[str] = field(default_factory=set)
    resized: dict[str, int] = field(default_factory=dict)
    by_expert: list[str] = field(default_factory=list)
    overruled: list[str] = field(default_factory=list)
    token_rows: dict[str, list[tuple[list[int], Factor]]] = field(default_factory=dict)
    rows_again: list[tuple[int, str, str]] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    by_release: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chosen = choices(self.base, self.layout.dtype)
        self.shapes = {fqn: choice.tensor.shape for fqn, choice in self.chosen.items()}
        weights = services.quantization.quantized_weights(self.base)
        self.quantized = weights.parts
        self.packed = {owner.rpartition(".")[0]: min(parts.values()) for owner, parts in weights.owners.items()}

    @property
    def _vocabulary(self) -> object:
        return next((rows for part in config_parts(self.base.config) if (rows := part.get(_ROWS))), None)

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return `config` with the new ties and vocabulary size."""
        changed = {**config, **self.entries}
        if self.untied:
            changed = services.ties.untied_config(changed, self.untied) or {**changed, _TIE: False}
        if self.resized:
            rows = {_ROWS: next(iter(self.resized.values()))}
            text = changed.get("text_config")
            if isinstance(text, Mapping) and _ROWS in text:
                changed["text_config"] = {**text, **rows}
            if _ROWS in changed:
                changed |= rows
        return changed

    def add(self, adapter: Adapter) -> None:
        """Plan the merge, without PEFT's second copy of a resized embedding."""
        of = adapter.factors
        loaded = {fqn: factor for fqn, factor in of.items() if not (_COPY.search(fqn) and _COPY.sub("", fqn) in of)}
        adapter = replace(adapter, factors=loaded)
        if adapter.config.kind != LORA:
            self._add_by_layer(adapter)
            return
        modules: dict[str, dict[str, Factor]] = {}
        whole: dict[str, Factor] = {}
        for fqn, factor in adapter.factors.items():
            name = parse_name(fqn)
            if name.kind in (names.BASE, names.SAVED):
                whole[fqn] = factor
            else:
                kind = f"{name.kind}.{name.rest}" if name.kind == names.SAMPLER else name.kind
                modules.setdefault(name.module, {})[kind] = factor
        self._replace_all(adapter, whole, modules)
        self._place_experts(adapter, modules)
        self._check_targets(adapter, modules)
        self._check_saved(adapter)
        nested: dict[str, list[str]] = {}
        for module in modules:
            _check_complete(adapter, module, modules[module])
        rows = {module: parts[names.TOKENS] for module, parts in modules.items() if names.TOKENS in parts}
        for module, factor in rows.items():  # before a tied head's factors: its layer has these rows
            for owner in self._weights_of_rows(adapter, module, rows.keys()):
                self._place_tokens(adapter, module, owner, factor)
        targeted = {fqn.rpartition(".")[0] for fqn in self.shapes if adapter.config.targets_parameter(fqn)}
        for module in self._in_order(modules):
            parts = modules[module]
            if not self.as_peft and self._is_tied_duplicate(
                module, modules
            ):  # PEFT adds shared tensors once for each layer
                continue
            if names.EMBEDDING_A in parts:
                self._place_embedding(adapter, module, parts)
            elif names.A in parts:
                inner = _without_wrappers(module)
                if inner in targeted:
                    nested.setdefault(inner, []).append(module)
                else:
                    self._place_linear(adapter, module, parts)
        for inner, wrappers in nested.items():
            self._place_parameters(adapter, inner, [modules[m] for m in sorted(wrappers, key=len, reverse=True)])

    def _check_targets(self, adapter: Adapter, modules: Mapping[str, Mapping[str, Factor]]) -> None:
        weights = [*(fqn for fqn, shape in self.shapes.items() if len(shape) > 1), *self.base.ties]
        layers = {fqn.removesuffix(".weight") for fqn in weights if fqn.endswith(".weight")}
        adapted = {module for module, parts in modules.items() if names.A in parts or names.EMBEDDING_A in parts}
        adapted = {module for module in adapted if not adapter.config.targets_parameter(f"{module}.weight")}
        if adapter.config.raw.get("ensure_weight_tying"):  # one name means all tied weights
            ties = self.base.ties
            layers -= {fqn.removesuffix(".weight") for fqn in (*ties, *ties.values())}
        former = adapter.config.former
        layers, adapted = ({former.get(module, module) for module in of} for of in (layers, adapted))
        self.targets.extend(targets.notes(adapter.config, layers, adapted))

    def _check_saved(self, adapter: Adapter) -> None:
        """Raise CorruptError if the adapter lacks a fully trained module."""
        if not (adapter.config.saved and adapter.checkpoint.is_adapter) or _ties_copies(adapter.config):
            return
        parsed = [parse_name(fqn) for fqn in adapter.factors]
        brought = {f"{name.module}.{name.rest}" if name.kind == names.SAVED else name.module for name in parsed}
        modules = {fqn.rpartition(".")[0] for fqn in brought | self.untied}
        for name in adapter.config.saved:
            one = replace(adapter.config, saved=(name,))
            known = {fqn.rpartition(".")[0]: fqn for fqn in self.shapes if _is_saved_module(one, fqn)}
            missing = sorted(known.keys() - modules)
            if len(missing) < len(known) and self._modules:  # files may have more layers than the model
                missing = [module for module in missing if module in self._modules]
            if missing:
                raise CorruptError(
                    "the adapter lacks a fully trained module",
                    path=adapter.path,
                    fqn=known[missing[0]],
                    expected=f"its tensors, because modules_to_save has {name}",
                    found="no tensors",
                )

    def _add_by_layer(self, adapter: Adapter) -> None:
        require_peft("merging this kind of adapter")
        check_installed(adapter.config)
        layers: dict[str, dict[str, Factor]] = {}
        shared: dict[str, Factor] = {}
        whole: dict[str, Factor] = {}
        for fqn, factor in adapter.factors.items():
            name = parse_name(fqn)
            if self.base.ties.get(name.module, name.module) in self.chosen:
                whole[fqn] = factor
            elif not fqn.startswith(names.PREFIX) or adapter.config.kind not in KINDS:
                shared[fqn] = factor
            else:
                layers.setdefault(self._layer_of(adapter, fqn), {})[fqn] = factor
        parts = {m: {fqn.rpartition(".")[2]: one for fqn, one in state.items()} for m, state in layers.items()}
        self._replace_all(adapter, whole, parts)
        self._check_saved(adapter)
        if adapter.config.kind not in BY_LAYER:
            factors = {fqn: factor for state in (shared, *layers.values()) for fqn, factor in state.items()}
            kind = EmptyModel if adapter.config.kind in BY_MODEL else LoadedModel
            model = kind(adapter, self.base, self.chosen, factors, frozenset(layers), self._stored)
            if isinstance(model, LoadedModel):
                model.check_memory()
            self._divide(adapter, {layer: {} for layer in model.layers})
            placed = {module: self._place_alone(adapter, module) for module in model.layers}
            if isinstance(model, LoadedModel):
                self._merge_whole(adapter, model, placed)
                return
            for module, owner in placed.items():
                self._update(owner, model.update(module))
            return
        weights = (*self.shapes, *self.base.ties)
        known = {fqn.removesuffix(".weight") for fqn in weights if fqn.endswith(".weight")}
        self.targets.extend(targets.notes(adapter.config, known, layers.keys()))
        sizes = {module: prod(self.shapes[self._owner(f"{module}.weight")]) for module in layers}
        found = {fqn: factor.shape for fqn, factor in adapter.factors.items()}
        adapter_shapes.check_shares(adapter.config, found, sizes, adapter.path)
        for module, state in layers.items():
            if self._is_tied_duplicate(module, layers):
                continue
            self._place_alone(adapter, module)
            self._place_layer(adapter, module, state | shared)

    def _merge_whole(self, adapter: Adapter, model: LoadedModel, placed: Mapping[str, str]) -> None:
        model.untie(self.untied)
        model.merge_all(placed, {fqn: self._owner(fqn) for fqn in (*self.chosen, *self.base.ties)})
        self.noted.made_anew.extend(model.notes)
        for owner, update in model.updates(placed):
            if owner not in placed.values() and (self._shared(owner) or owner in self.updates):
                raise UsageError(
                    "PEFT's merge changes a shared or twice adapted parameter", path=adapter.path, fqn=owner
                )
            self._update(owner, update)

    def _layer_of(self, adapter: Adapter, fqn: str) -> str:
        module = fqn.removeprefix(names.PREFIX)
        while module := module.rpartition(".")[0]:
            if self.base.ties.get(f"{module}.weight", f"{module}.weight") in self.shapes:
                return module
        raise _misfit(adapter, fqn, "a tensor of a layer of the base", "no layer of this name")

    def _place_alone(self, adapter: Adapter, module: str) -> str:
        """Raise UsageError if a layer's weight is shared or adapted twice."""
        owner = self._weight(adapter, module)
        is_rows = adapter.config.kind == TRAINABLE_TOKENS and owner == f"{module}.weight"
        if self._shared(owner) and not is_rows:
            raise UsageError(
                "can't merge this adapter type into a weight shared by two layers",
                path=adapter.path,
                fqn=owner,
                hint=Message("leave out {as_peft=True} to merge it into its own layer only") if self.as_peft else None,
            )
        if owner in self.updates:
            raise UsageError("can't merge this adapter type into a weight adapted twice", path=adapter.path, fqn=owner)
        self.normed.add(owner)
        return owner

    def _place_layer(self, adapter: Adapter, module: str, state: Mapping[str, Factor]) -> None:
        stored = {fqn.rpartition(".")[2]: self._stored(fqn) for fqn in self._own_parameters(module)}
        for name, update in updates(adapter, module, self._layer(adapter, module, state), stored, state):
            self._update(f"{module}.{name}", update)

    def _layer(self, adapter: Adapter, module: str, state: Iterable[str]) -> str:
        """Return a layer's class, from the model or from unambiguous shapes and names."""
        known = self._modules.get(module)
        if known is not None and known.layer is not None:
            return known.layer
        weight, bias = self.shapes[f"{module}.weight"], self.shapes.get(f"{module}.bias")
        if len(weight) > 2:
            return f"Conv{len(weight) - 2}d"
        if any("_embedding_" in name or name.endswith("trainable_tokens_delta") for name in state):
            return "Embedding"
        if bias is not None and (bias[0] == weight[0]) != (bias[0] == weight[1]):
            return "Linear" if bias[0] == weight[0] else "Conv1D"
        is_linear = bias is not None or adapter.config.kind != "OFT"  # OFT adapts embeddings under the same names
        if is_linear:
            return "Conv1D" if adapter.config.raw.get("fan_in_fan_out") else "Linear"
        raise self._unknown_layer(adapter, module)

    def _replace_all(
        self, adapter: Adapter, whole: Mapping[str, Factor], modules: Mapping[str, Mapping[str, Factor]]
    ) -> None:
        """Replace parameters. The adapter's own copies decide which weights stay tied."""
        targets = {self._target(parse_name(fqn)) for fqn in whole}
        self._tie_copies(targets.union(f"{_without_wrappers(module)}.weight" for module in modules))
        for fqn in whole:
            if not _is_saved_base_weight(fqn):
                self._part_copy(adapter, self._target(parse_name(fqn)))
        beside = {fqn: factor for fqn, factor in whole.items() if _is_saved_base_weight(fqn)}
        for fqn, factor in beside.items():
            self._replace(adapter, fqn, self._target(parse_name(fqn)), factor)
        self._divide(adapter, modules)
        for fqn, factor in whole.items():
            if fqn not in beside:
                self._replace(adapter, fqn, self._target(parse_name(fqn)), factor)

    @staticmethod
    def _target(name: AdapterName) -> str:
        return f"{name.module}.{name.rest}" if name.kind == names.SAVED else name.module

    def _part_copy(self, adapter: Adapter, target: str) -> None:
        """Untie a module if the adapter has its own copy, unless PEFT ties the copies too."""
        owner = self.base.ties.get(target, target)
        is_copied = _is_saved_module(adapter.config, target) or _is_saved_module(adapter.config, owner)
        if is_copied and not _ties_copies(adapter.config):
            for alias in [target] if target != owner else self._shared(owner):
                self._untie(alias)

    def _divide(self, adapter: Adapter, modules: Mapping[str, Mapping[str, Factor]]) -> None:
        changes = {_without_wrappers(module): parts for module, parts in modules.items()}
        kept = services.ties.kept_names(self.base)
        for owner in dict.fromkeys(self.base.ties.values()):
            shared = [owner, *self._shared(owner)]
            members = [one.removesuffix(".weight") for one in sorted(shared, key=lambda one: one != kept.get(owner))]
            found = {module: changes[module] for module in members if module in changes}
            is_twice, is_divided = len(found) > 1 and not tied.are_rows(found), tied.is_divided(members, found)
            if is_twice and not (is_divided or self.as_peft):
                self.noted.shared.setdefault(adapter.path, []).extend(found)
            if len(members) > 1 and (is_divided or (is_twice and self.as_peft)):
                self.noted.divided.setdefault(adapter.path, []).extend(found)
                for alias in [] if self.as_peft else self._shared(owner):
                    self._untie(alias)
                if adapter.config.init_changes_base and not self.as_peft and not self._has_own_base(adapter, owner):
                    raise UsageError(
                        "the adapter's init changes a base weight shared with an unadapted layer",
                        path=adapter.config.path,
                        fqn=owner,
                        expected="the changed base weight in the adapter (save_embedding_layers=True)",
                        found=f"init_lora_weights: {adapter.config.raw.get('init_lora_weights')!r}",
                        hint=Message("{as_peft=True} writes the same weights as PEFT's merge_and_unload"),
                    )

    def _tie_copies(self, wanted: Set[str]) -> None:
        """Tie equal copies in the base if the config ties them and either is `wanted`."""
        declared = services.ties.declared_ties(self.base.config) if self.base.config else {}
        for alias, owner in declared.items():
            both = {alias, owner}
            if (
                owner is not None
                and both <= self.chosen.keys()
                and both.isdisjoint(self.untied)
                and (alias in wanted or owner in wanted)
                and tied.is_equal(self._stored(alias), self._stored(owner))
            ):
                tensors = {key: one for key, one in self.base.tensors.items() if key[0] != alias}
                self.base = replace(self.base, tensors=tensors, ties={**self.base.ties, alias: owner})
                del self.chosen[alias], self.shapes[alias]

    def _owner(self, fqn: str) -> str:
        return fqn if fqn in self.untied else self.base.ties.get(fqn, fqn)

    def _shared(self, owner: str) -> list[str]:
        return [alias for alias, of in self.base.ties.items() if of == owner and alias not in self.untied]

    def _untie(self, alias: str) -> None:
        """Give `alias` its own tensor, with all changes so far."""
        if alias in self.untied:
            return
        owner = self.base.ties[alias]
        self.untied.add(alias)
        states: tuple[dict[str, Any], ...] = (self.chosen, self.shapes, self.replaced, self.resized)
        for state in states:
            if owner in state:
                state[alias] = state[owner]
        lists: tuple[dict[str, list[Any]], ...] = (self.updates, self.token_rows)
        for changes in lists:
            if owner in changes:
                changes[alias] = list(changes[owner])
        if owner in self.normed:
            self.normed.add(alias)

    def _in_order(self, modules: Mapping[str, Mapping[str, Factor]]) -> list[str]:
        """Return PEFT's merge order: embeddings come before their tied output head."""
        found = sorted(modules, key=lambda module: names.EMBEDDING_A not in modules[module])
        if not self.as_peft or not self.noted.divided:
            return found
        described = services.modules.describe(self.base.config, self.shapes, None) or {}
        order = {module: number for number, module in enumerate(described)}
        return sorted(found, key=lambda module: order.get(module, len(order)))

    def _has_own_base(self, adapter: Adapter, owner: str) -> bool:
        return owner in self.replaced and self.replaced[owner].of is adapter.checkpoint

    def _is_tied_duplicate(self, module: str, modules: Iterable[str]) -> bool:
        """Return True if a tied module makes the same change."""
        owner = self._owner(f"{module}.weight")
        return owner != f"{module}.weight" and owner.removesuffix(".weight") in modules

    def check_ties(self) -> None:
        """Untie weights that the result's config can't tie, or raise LossError."""
        config = self.base.config
        if config is not None and self.untied:
            untied = services.ties.untied_config(config, self.untied)
            if untied is None and not self.as_peft:
                raise LossError(
                    f"the adapter changes only one tied weight, and {config.get('model_type')} can't untie it without "
                    "changing the model",
                    path=self.base.path,
                    fqn=next(iter(self.untied)),
                    expected="the same change to all tied weights",
                    found=f"only one changed: {', '.join([self.base.ties[min(self.untied)], *sorted(self.untied)])}",
                    hint=Message(
                        "{as_peft=True} changes every tied weight, like PEFT's merge_and_unload: the result is not "
                        "the trained model"
                    ),
                )
            declared = services.ties.declared_ties
            for alias in declared(config).keys() - declared(untied or {**config, _TIE: False}).keys():
                if alias in self.base.ties:
                    self._untie(alias)
        self.noted.untied |= self.untied

    def _replace(self, adapter: Adapter, fqn: str, target: str, factor: Factor) -> None:
        """Replace a fully trained or saved parameter."""
        owner = self._owner(target)
        if owner not in self.chosen:
            raise _misfit(
                replace(adapter, path=factor.file or adapter.path),
                fqn,
                "a parameter of the base",
                self._nearest(target),
            )
        if factor.shape != self.shapes[owner]:
            if factor.shape[1:] != self.shapes[owner][1:] or self.shapes[owner][:1] != (self._vocabulary,):
                raise _misfit(adapter, fqn, f"shape {list(self.shapes[owner])}", f"shape {list(factor.shape)}")
            self.shapes[owner], self.resized[owner] = factor.shape, factor.shape[0]
        if owner in self.replaced and self.replaced[owner].of is not adapter.checkpoint:
            raise UsageError("two adapters contain their own copy of this parameter", path=adapter.path, fqn=target)
        if owner in self.updates:  # an earlier adapter made them: an adapter's own updates follow its replacements
            if _is_saved_base_weight(fqn) and tied.is_equal(factor, self._stored(owner)):
                return
            raise UsageError(
                "an adapter contains its own copy of this parameter, and an earlier adapter changes it",
                path=adapter.path,
                fqn=target,
                hint="the change would be lost: give this adapter first if the other was trained on the copy",
            )
        if owner not in self.replaced or target != owner:  # PEFT loads a tied weight's alias last
            self.replaced[owner] = factor

    def check_vocabulary(self, adapter: Adapter) -> None:
        """Raise LossError if an adapter resizes only some embeddings.

        `resize_token_embeddings` fills new rows with random values, so unsaved rows are lost.
        """
        rows = next(iter(self.resized.values()), None)
        for fqn, shape in self.shapes.items() if rows is not None else ():
            if self.resized.get(fqn, rows) != rows or (fqn not in self.resized and shape[:1] == (self._vocabulary,)):
                raise _misfit(
                    adapter,
                    fqn,
                    f"{rows} rows in the adapter, which has so many in another embedding: the vocabulary was resized",
                    f"shape {list(shape)}",
                    "train with both embeddings in modules_to_save, or save with save_embedding_layers=True",
                )

    def _weights_of_rows(self, adapter: Adapter, module: str, modules: Collection[str]) -> list[str]:
        """Tie the input embedding's rows, as PEFT does if the config ties the weights, even different ones."""
        owner = self._weight(adapter, module)
        first = self.base.ties.get(f"{module}.weight", f"{module}.weight")
        if self._is_tied_duplicate(module, modules):
            return []
        if services.ties.kept_names(self.base).get(first) != f"{module}.weight":
            declared = services.ties.declared_ties(self.base.config) if self.base.config else {}
            apart = [alias for alias, of in declared.items() if of == owner and alias in self.chosen]
            others = [alias for alias in apart if alias.removesuffix(".weight") not in modules]
            return [owner, *(one for one in others if self.replaced.get(one) is self.replaced.get(owner))]
        tied_to = [alias for alias, of in self.base.ties.items() if of == first]
        others = [one for one in (first, *tied_to) if one.removesuffix(".weight") not in modules]
        found = dict.fromkeys(self._owner(one) for one in (f"{module}.weight", *others))
        return [one for one in found if self.replaced.get(one) is self.replaced.get(owner)]

    def _place_tokens(self, adapter: Adapter, module: str, owner: str, rows: Factor) -> None:
        index = _token_index(adapter.config, module)
        num, dim = self.shapes[owner]
        if rows.shape != (len(index), dim):
            raise _misfit(adapter, rows.fqn, f"{pluralize(len(index), 'row')} of {dim}", f"shape {list(rows.shape)}")
        if outside := [i for i in index if not 0 <= i < num]:
            raise _misfit(adapter, rows.fqn, f"tokens below {num}, as {owner} has rows", f"token {outside[0]}")
        # rounded once, from the stored dtype
        apply = _arithmetic("replace_rows", replace(rows, is_held=True), index=index)
        earlier = tuple(self.token_rows.setdefault(owner, []))
        again = {i for of_others, _ in earlier for i in of_others}.intersection(index)
        if again:
            self.rows_again.append((len(again), owner, adapter.path))
        self.token_rows[owner].append((index, rows))

        def is_nothing() -> bool:
            before = dict(zip(index, self._stored(owner).load()[index].double(), strict=True))
            for of_others, others in earlier:
                before |= zip(of_others, others.load().double(), strict=True)
            return all(bool((before[i] == row).all()) for i, row in zip(index, rows.load().double(), strict=True))

        self._update(owner, Update(adapter.path, module, apply, is_nothing))

    def _place_embedding(self, adapter: Adapter, module: str, parts: Mapping[str, Factor]) -> None:
        a, b, magnitude = parts[names.EMBEDDING_A], parts[names.EMBEDDING_B], parts.get(names.MAGNITUDE)
        owner = self._weight(adapter, module)
        _check_shape(adapter, a, (adapter.config.rank_of(module), self.shapes[owner][0]))
        _check_shape(adapter, b, (self.shapes[owner][1], adapter.config.rank_of(module)))
        scaling = adapter.config.scaling(module)
        apply = _arithmetic("merge_embedding", a, b, magnitude, scaling=scaling)
        self._update(owner, Update(adapter.path, module, apply, _is_zero(scaling, a, b)))

    def _place_linear(self, adapter: Adapter, module: str, parts: Mapping[str, Factor]) -> None:
        a, b, magnitude = parts[names.A], parts[names.B], parts.get(names.MAGNITUDE)
        has_base = adapter.config.init_changes_base and self._has_own_base(adapter, self._weight(adapter, module))
        if adapter.config.is_of_peft and not has_base:
            self._place_by_peft(adapter, module, parts)
            return
        owner = self._weight(adapter, module)
        attention = self._attention(module)
        shape, rank = self.shapes[owner], adapter.config.rank_of(attention or module)
        scaling = adapter.config.scaling(attention or module)
        is_conv = len(shape) > 2
        if attention and (magnitude is not None or names.BIAS in parts):
            raise UsageError("LoRA on nn.MultiheadAttention has neither DoRA nor a bias", path=adapter.path, fqn=module)
        transposed = not (is_conv or attention) and self._is_transposed(adapter, module, shape, a, b)
        if is_conv:
            if b.shape[:1] == shape[:1] and b.shape[1] < rank == a.shape[0] and rank % b.shape[1] == 0:
                raise UsageError("PEFT does not merge into a convolution with groups", path=adapter.path, fqn=module)
            _check_shape(adapter, a, (rank, *shape[1:]))
            _check_shape(adapter, b, (shape[0], rank, *(1,) * (len(shape) - 2)))
        else:
            num_out, num_in = reversed(shape) if transposed else shape
            _check_shape(adapter, a, (rank, num_in))
            _check_shape(adapter, b, (num_out, rank))
        if owner in self.updates and (magnitude is not None or owner in self.normed):
            raise UsageError(
                "can't merge DoRA, or an adapter merged by PEFT, into a weight adapted twice",
                path=adapter.path,
                fqn=owner,
            )
        if magnitude is not None:
            self.normed.add(owner)
        if attention:
            apply = _arithmetic("merge_attention", a, b, scaling=scaling, is_output=module != attention)
        elif is_conv:
            apply = _arithmetic("merge_conv", a, b, magnitude, scaling=scaling)
        else:
            apply = _arithmetic("merge_linear", a, b, magnitude, scaling=scaling, transposed=transposed)
        is_by_rows = not (attention or is_conv or transposed or magnitude)
        by_rows = partial(_adding_rows, a, b, scaling) if is_by_rows else None
        self._update(owner, Update(adapter.path, module, apply, _is_zero(scaling, a, b), by_rows))
        if names.BIAS in parts:
            self._place_bias(adapter, module, parts[names.BIAS], scaling)

    def _place_by_peft(self, adapter: Adapter, module: str, parts: Mapping[str, Factor]) -> None:
        require_peft("merging this kind of adapter")
        owner = self._weight(adapter, module)
        if len(self.shapes[owner]) > 2 or names.BIAS in parts or self._attention(module):
            raise UsageError(
                "this adapter type needs linear layers without a bias",
                path=adapter.path,
                fqn=module,
            )
        if owner in self.updates or owner in self.normed:
            raise UsageError("can't merge this adapter type into a weight adapted twice", path=adapter.path, fqn=owner)
        self.normed.add(owner)
        a, b = parts[names.A], parts[names.B]
        transposed = self._is_transposed(adapter, module, self.shapes[owner], a, b)

        def apply(weight: torch.Tensor) -> torch.Tensor:
            state = {factor.fqn: factor.load() for factor in parts.values()}
            lying = weight.T if transposed else weight
            merged = merge_layer(adapter.config, module, "Linear", {"weight": lying}, state)["weight"]
            return merged.T if transposed else merged

        self._update(owner, Update(adapter.path, module, apply, _is_zero(adapter.config.scaling(module), a, b)))

    def _place_bias(self, adapter: Adapter, module: str, factor: Factor, scaling: float) -> None:
        fqn = f"{module}.bias"
        if fqn not in self.shapes:
            raise _misfit(adapter, factor.fqn, f"a base layer with a bias, {fqn}", "none")
        _check_shape(adapter, factor, self.shapes[fqn])
        apply = _arithmetic("merge_bias", factor, scaling=scaling)
        self._update(fqn, Update(adapter.path, module, apply, _is_zero(scaling, factor)))

    def _place_experts(self, adapter: Adapter, modules: dict[str, dict[str, Factor]]) -> None:
        """Add updates for stacked experts, and remove their single-expert layers from `modules`."""
        found: dict[str, list[ExpertPart]] = {}
        for module in modules:
            if (part := part_of(module, self.shapes)) is not None:
                found.setdefault(part.parameter, []).append(part)
        for fqn, parts in found.items():
            known = self._module(adapter, fqn.rpartition(".")[0])
            num, *sizes = self.shapes[fqn]
            rows, columns = reversed(sizes) if known.is_transposed else sizes
            factors, scalings = [], []
            for part in parts:
                of_part = modules.pop(part.module)
                _check_complete(adapter, part.module, of_part)
                a, b = of_part[names.A], of_part[names.B]
                if of_part.keys() != {names.A, names.B} or adapter.config.is_of_peft:
                    what = "LoRA on single experts has neither DoRA nor a bias nor another merge than W + BA"
                    raise UsageError(what, path=adapter.path, fqn=part.module)
                if not part.fits(a, b, adapter.config.rank_of(part.module), (num, rows, columns)):
                    found_shapes = f"{list(a.shape)} x {list(b.shape)}"
                    raise _misfit(adapter, a.fqn, f"factors for {fqn} {list(self.shapes[fqn])}", found_shapes)
                factors += [a, b]
                scalings.append(adapter.config.scaling(part.module))
            places = [(part.expert, part.half) for part in parts]
            how = {"transposed": known.is_transposed, "interleaved": known.is_interleaved}
            apply = _arithmetic("merge_experts", *factors, parts=places, scalings=scalings, **how)
            is_zero = [_is_zero(s, *factors[2 * n : 2 * n + 2]) for n, s in enumerate(scalings)]
            self._update(fqn, Update(adapter.path, fqn, apply, partial(_are_true, is_zero)))

    def _place_parameters(self, adapter: Adapter, module: str, wrappers: Sequence[Mapping[str, Factor]]) -> None:
        """Add updates for `target_parameters`. `wrappers` are nested, innermost first."""
        targeted = [fqn for fqn in self._own_parameters(module) if adapter.config.targets_parameter(fqn)]
        if len(targeted) != len(wrappers):
            raise _misfit(
                adapter,
                wrappers[0][names.A].fqn,
                f"{pluralize(len(targeted), 'adapted parameter')}",
                f"{pluralize(len(wrappers), 'adapter')}",
            )
        fits = partial(self._fits, adapter)
        fitting = [order for order in permutations(targeted) if all(map(fits, order, wrappers))]
        if not fitting:
            raise _misfit(
                adapter,
                wrappers[0][names.A].fqn,
                " and ".join(f"a factor for {fqn} {list(self.shapes[fqn])}" for fqn in targeted),
                " and ".join(f"{list(w[names.A].shape)} x {list(w[names.B].shape)}" for w in wrappers),
                "PEFT before 2026-04 stored some of these with the roles of A and B exchanged",
            )
        order = fitting[0] if len(fitting) == 1 else self._registered(adapter, module, targeted)
        for fqn, parts in zip(order, wrappers, strict=True):
            self._place_parameter(adapter, module, fqn, parts)

    def _fits(self, adapter: Adapter, fqn: str, parts: Mapping[str, Factor]) -> bool:
        (num, num_in), (num_out, num_b) = parts[names.A].shape, parts[names.B].shape
        shape = self.shapes[fqn]
        num_experts = shape[0] if len(shape) == 3 else 1
        fitting = [(num_out, num_in), *([(num_in, num_out)] if len(shape) == 3 else [])]
        return num == num_b == num_experts * adapter.config.rank_of(fqn) and shape[-2:] in fitting

    def _place_parameter(self, adapter: Adapter, module: str, fqn: str, parts: Mapping[str, Factor]) -> None:
        a, b, shape, scaling = parts[names.A], parts[names.B], self.shapes[fqn], adapter.config.scaling(fqn)
        input_last = shape[-2:] == (b.shape[0], a.shape[1])
        if len(shape) == 3 and shape[-1] == shape[-2]:
            input_last = self._has_input_last(adapter, module, fqn)
        if not input_last and shape[0] == 1:
            raise UsageError("PEFT can't merge into a single expert in this orientation", path=adapter.path, fqn=fqn)
        if any(kind not in (names.A, names.B) for kind in parts):
            raise UsageError("a targeted parameter has neither DoRA nor a bias", path=adapter.path, fqn=fqn)
        by_expert = self._is_packed_by_expert(adapter, fqn, shape)
        apply = _arithmetic("merge_parameter", a, b, scaling=scaling, input_last=input_last, by_expert=by_expert)
        update = Update(adapter.path, fqn, apply, _is_zero(scaling, a, b))
        self._update(self._owner(fqn), update)

    def _has_input_last(self, adapter: Adapter, module: str, fqn: str) -> bool:
        """Return True for square experts stored as [out, in]: PEFT changed this twice."""
        is_transposed = self._module(adapter, module).is_transposed
        trained = adapter.config.has_input_last(is_transposed)
        if trained is None:
            raise UsageError(
                "unknown factor layout: it differs between PEFT 0.18, 0.19.0 and later, and these experts are square",
                path=adapter.config.path,
                fqn=fqn,
                expected="peft_version, the release used for training",
                found=repr(adapter.config.raw.get("peft_version")),
                hint=Message("{peft_version=0.18.1}, 0.19.0, or 0.19.1 for later releases"),
            )
        if trained == is_transposed:
            self.by_release.append(fqn)
        return trained

    def _is_packed_by_expert(self, adapter: Adapter, fqn: str, shape: Shape) -> bool:
        """Return True if `lora_B` groups columns by expert, False if by rank."""
        if len(shape) < 3 or shape[0] == 1 or adapter.config.rank_of(fqn) == 1:
            return False
        layout = adapter.config.expert_layout(fqn)
        if layout is None:
            raise UsageError(
                "unknown layout for Unsloth's experts: before 2026.9.6 Unsloth used its own, and later PEFT's; "
                "the wrong layout mixes columns between experts",
                path=adapter.config.path,
                fqn=fqn,
                expected="lora_B_layout: grouped_by_expert or rank_major",
                found="Unsloth's mark in auto_mapping or README.md, and no lora_B_layout or different ones",
                hint=Message(
                    "{expert_layout=unsloth} if a version before 2026.9.6 trained it; {expert_layout=peft} if a later "
                    "version did, or if UNSLOTH_MOE_LORA_MERGED=1 was set"
                ),
            )
        if layout == "grouped_by_expert":
            self.by_expert.append(fqn)
        if adapter.config.overrules(fqn):
            self.overruled.append(fqn)
        return layout == "grouped_by_expert"

    def _weight(self, adapter: Adapter, module: str) -> str:
        fqn = f"{module}.weight"
        owner = self._owner(fqn)
        inner = _without_wrappers(module)
        packed = self.packed.get(inner)
        if owner not in self.shapes and packed is not None:
            raise self._quantized(packed)
        if attention := self._attention(module):
            name = "in_proj_weight" if attention == inner else "out_proj.weight"
            owner = self._owner(f"{attention}.{name}")
        if owner not in self.shapes:
            raise _misfit(adapter, module, f"a layer of the base with {fqn}", self._nearest(fqn))
        if owner in self.quantized or self.chosen[owner].dtype not in CAST_SOURCES:
            raise self._quantized(owner)
        if len(self.shapes[owner]) < 2:
            raise _misfit(adapter, module, "a matrix", f"shape {list(self.shapes[owner])}")
        return owner

    def _nearest(self, fqn: str) -> str:
        end = fqn.split(".")[-2:]
        near = get_close_matches(fqn, [name for name in self.shapes if name.split(".")[-2:] == end], 1)
        return "none of this name" + (f"; {near[0]} is the nearest" if near else "")

    def _attention(self, module: str) -> str | None:
        attention = _without_wrappers(module.removesuffix(".out_proj"))
        return attention if f"{attention}.in_proj_weight" in self.shapes else None

    def _stored(self, fqn: str) -> Factor:
        """Return a parameter before any update, in the chosen dtype."""
        found, choice = self.replaced.get(fqn), self.chosen[fqn]
        return found.rounded(choice.dtype) if found else Factor.stored(fqn, choice, self.base)

    def _own_parameters(self, module: str) -> list[str]:
        return [fqn for fqn in self.shapes if fqn.rpartition(".")[0] == module]

    def _is_transposed(self, adapter: Adapter, module: str, shape: Shape, a: Factor, b: Factor) -> bool:
        """Return True if the weight is [in, out], as in transformers' Conv1D. Decide by the class, like PEFT."""
        wanted = (b.shape[0], a.shape[-1])
        if wanted[0] != wanted[1] or shape != wanted:
            return shape == wanted[::-1] and shape != wanted
        conv1d = services.modules.has_conv1d(self.base.config)
        if conv1d is None:
            return adapter.config.fan_in_fan_out  # custom model: use PEFT's record
        return conv1d and self._module(adapter, module).is_conv1d

    def _module(self, adapter: Adapter, module: str) -> ModuleProtocol:
        found = self._modules.get(module)
        if found is None:
            raise self._unknown_layer(adapter, module)
        return found

    def _unknown_layer(self, adapter: Adapter, module: str) -> UsageError:
        return UsageError(
            "unknown adapter layout in this layer: neither its shapes nor its class tell it",
            path=adapter.path,
            fqn=module,
            hint="check if transformers is installed and the base has its config.json",
        )

    @cached_property
    def _modules(self) -> Mapping[str, ModuleProtocol]:
        names = {fqn.rpartition(".")[0] for fqn in self.shapes}
        return services.modules.describe(self.base.config, self.shapes, names) or {}

    def _registered(self, adapter: Adapter, module: str, fqns: Iterable[str]) -> list[str]:
        order = self._module(adapter, module).parameters
        return sorted(fqns, key=lambda fqn: order.index(fqn.rpartition(".")[2]))

    def _update(self, fqn: str, update: Update) -> None:
        if self.chosen[fqn].dtype not in CAST_SOURCES:
            raise self._quantized(fqn)
        self.updates.setdefault(fqn, []).append(update)

    def _quantized(self, fqn: str) -> UsageError:
        method = services.quantization.quantized_weights(self.base).title
        return _quantized_base(
            self.base,
            fqn,
            f"{self.chosen[fqn].dtype}, {method}",
            can_dequantize=services.dequantizing.can_dequantize(self.base),
        )

    def checkpoint(self, identity: str) -> Checkpoint:
        changed = {*self.updates, *self.replaced}
        tensors: dict[Key, Tensor] = {key: t for key, t in self.base.tensors.items() if key[0] not in changed}
        for alias in self.untied - changed:
            tensor = self.chosen[alias].tensor
            tensors[alias, tensor.role] = tensor.renamed(alias)
        computed, compute = dict(self.base.computed), dict[str, Callable[[], memoryview]]()
        for fqn in changed:
            choice = self.chosen[fqn]
            path = f"{_MERGED}{identity}:{fqn}"
            one = _Merged(fqn, self._stored(fqn), choice.dtype, tuple(self.updates.get(fqn, ())), self.noted)
            computed[path], compute[fqn] = one, one
            extent = Extent.contiguous(path, 0, choice.dtype, self.shapes[fqn])
            tensors[fqn, WEIGHT] = Tensor(fqn, WEIGHT, choice.dtype, self.shapes[fqn], Whole(extent))
        self.noted.compute = {fqn: compute[fqn] for fqn in self.updates}
        ties = {alias: owner for alias, owner in self.base.ties.items() if alias not in self.untied}
        config = None if self.base.config is None else self.config(self.base.config)
        return replace(self.base, tensors=tensors, computed=computed, ties=ties, config=config)

    def notes(self) -> Iterator[str]:
        yield Brief(f"merged into {pluralize(len(self.updates), 'tensor')}")
        if whole := self.replaced.keys() - self.updates.keys():
            yield f"{pluralize(len(whole), 'tensor')} copied whole from the adapter"
        if self.by_expert:
            yield f"{pluralize(len(self.by_expert), 'adapter')} for stacked experts read in Unsloth's layout"
        if self.overruled:
            adapters = pluralize(len(self.overruled), "adapter")
            yield f"{adapters} for stacked experts read in another layout than recorded"
        yield from self.targets
        if self.by_release:
            experts = pluralize(len(self.by_release), "adapter")
            yield f"{experts} for square experts merged in the training release's layout: PEFT 0.19.1 changed it"
        yield from self.noted.made_anew
        for num, fqn, path in self.rows_again:
            yield f"{pluralize(num, 'trained row')} of {fqn} from {path} replace an earlier adapter's"
        if self.untied:
            yield f"no longer tied: {', '.join(sorted(self.untied))}"
        yield from tied.notes(self.noted.divided, self.noted.shared, as_peft=self.as_peft)
        if self.resized:
            rows = next(iter(self.resized.values()))
            yield f"the vocabulary has {pluralize(rows, 'row')}, as in training; the base has {self._vocabulary}"


def _are_true(every: Iterable[Callable[[], bool]]) -> bool:
    return all(one() for one in every)


def _is_zero(scaling: float, *factors: Factor) -> Callable[[], bool]:
    return lambda: not scaling or any(not factor.load().any() for factor in factors)


def _arithmetic(name: str, *factors: Factor | None, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def update(weight: torch.Tensor) -> torch.Tensor:
        from ckpt.commands.merge_lora import arithmetic  # imports torch

        merged: torch.Tensor = getattr(arithmetic, name)(
            weight, *(one and _loaded_factor(one, weight.dtype) for one in factors), **options
        )
        return merged

    return update


def _adding_rows(a: Factor, b: Factor, scaling: float, dtype: torch.dtype) -> Callable[[torch.Tensor, int], None]:
    from ckpt.commands.merge_lora.arithmetic import add_rows

    return add_rows(_loaded_factor(a, dtype), _loaded_factor(b, dtype), scaling=scaling)


def _loaded_factor(factor: Factor, weight: torch.dtype) -> torch.Tensor:
    from ckpt.commands.merge_lora.arithmetic import adapter_dtype

    tensor = factor.load()
    return tensor if factor.is_held else tensor.to(adapter_dtype(weight))


def _is_saved_base_weight(fqn: str) -> bool:
    """Return True for an embedding saved with the adapter."""
    return ".base_layer." in fqn


def _without_wrappers(module: str) -> str:
    while module.endswith(".base_layer"):
        module = module.removesuffix(".base_layer")
    return module


def _check_complete(adapter: Adapter, module: str, parts: Collection[str]) -> None:
    config = adapter.config
    others = bool(config.target_parameters)
    names.check_factors(module, parts, config.optional_tensors, adapter.path, has_other_layers=others)


def _check_shape(adapter: Adapter, factor: Factor, expected: Shape) -> None:
    if factor.shape != expected:
        raise _misfit(adapter, factor.fqn, f"shape {list(expected)}", f"shape {list(factor.shape)}")


def _misfit(adapter: Adapter, fqn: str, expected: str, found: str, hint: str | None = None) -> LossError:
    trained = f"its config says it was trained on {adapter.config.base!r}" if adapter.config.base else None
    return LossError(
        "the adapter does not fit this base",
        path=adapter.path,
        fqn=fqn,
        expected=expected,
        found=found,
        hint=hint or trained or Message("give the model from training with {base}"),
    )


def _is_saved_module(config: AdapterConfig, fqn: str) -> bool:
    """Match `modules_to_save` by path ending, like PEFT."""
    module, _, parameter = fqn.rpartition(".")
    path = [*config.former.get(module, module).split("."), parameter]
    modules = [".".join(path[:count]) for count in range(1, len(path))]
    return any(module.endswith(name) for module in modules for name in config.saved)


def _ties_copies(config: AdapterConfig) -> bool:
    """Return True if tied modules share the copy (peft `_check_tied_modules`)."""
    names = {name.rpartition(".")[2] for name in config.saved}
    return bool(config.raw.get("ensure_weight_tying")) and not names.isdisjoint(("embed_tokens", "lm_head"))


def _token_index(config: AdapterConfig, module: str) -> list[int]:
    given = config.token_indices
    if isinstance(given, list):
        return given
    for name, index in (given or {}).items():
        if module == name or module.endswith(f".{name}"):
            return index
    raise CorruptError(
        "the adapter's config doesn't list the trained tokens", path=config.path, fqn=module, found=repr(given)
    )


def _with_config(target: Target, changed: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Target:
    def written(file: TargetFile) -> TargetFile:
        if file.name != CONFIG:
            return file
        return TargetFile.of_bytes(CONFIG, dump_config(changed(parse_json(file.literals[0][1], Path(file.name)))))

    return replace(target, files=tuple(map(written, target.files)))


def _is_tokenizer(name: str) -> bool:
    return name.startswith(TEMPLATES) or is_of(name, FileKind.TOKENIZER)


def _with_tokenizer(target: Target, adapter: Adapter) -> Target:
    """Use the adapter's tokenizer if there is one."""
    found = {name: content for name, content in companions([adapter.folder]).items() if _is_tokenizer(name)}
    if "tokenizer_config.json" not in found:
        return target
    files = [file for file in target.files if not _is_tokenizer(file.name)]
    files += [TargetFile.of_bytes(name, content) for name, content in found.items()]
    return replace(target, files=tuple(files), notes=(*target.notes, Brief("the tokenizer comes from the adapter")))


def _with_modules(target: Target, adapter: Adapter) -> Target:
    """Add sentence-transformers' settings if only the adapter's folder has them, for modules without weights."""
    names = set(settings(adapter.folder))
    if MODULES not in names or weights_files(adapter.folder) or any(file.name == MODULES for file in target.files):
        return target
    own = {file.name for file in target.files}
    found = {name: content for name, content in companions([adapter.folder]).items() if name in names - own}
    files = (TargetFile.of_bytes(name, content) for name, content in found.items())
    note = Brief("sentence-transformers' settings and modules come from the adapter")
    return replace(target, files=(*target.files, *files), notes=(*target.notes, note))
