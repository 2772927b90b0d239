"""Adapters trained by Megatron-Bridge, related to PEFT's.

    decoder.layers.{n}.self_attention.linear_qkv.adapter.linear_in.weight     q_proj, k_proj and v_proj.lora_A
    decoder.layers.{n}.self_attention.linear_qkv.adapter.linear_out.weight    their lora_B, by query group
    ....linear_qkv.adapter.adapter_[q|k|v].linear_[in|out].weight             one of them (canonical LoRA)
    ....linear_fc1.adapter.adapter_[gate|up].linear_[in|out].weight           gate_proj or up_proj
    ....linear_proj.adapter.weight_magnitude                                  DoRA's magnitudes, one for each output
    ....mlp.experts.local_experts.{e}.linear_fc1.adapter....                  an expert's
    ....mlp.experts.linear_fc1.adapter....                                    one shared by all experts

If one Megatron module is several on the Hub, PEFT repeats the first factor for each. The second factor's rows are
divided like the weight's, by the architecture's table.

Format facts: megatron-bridge 0.3.1, peft/ (utils.py, canonical_lora.py, dora_layers.py, adapter_wrapper.py);
Megatron-Bridge, August 2026, peft/utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.adapters import names as peft
from ckpt.adapters.config import AdapterConfig, parse_config, settings_of
from ckpt.base.errors import CorruptError, LossError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.plan.checkpoint import MEGATRON, OWN, Checkpoint, Layout
from ckpt.plan.relation import Link, Relation, translate
from ckpt.plan.tensors import Box, Shape
from converters.names.adapter_settings import adapter_settings
from converters.names.families.composites import Composite
from converters.names.families.rows import Sizes
from converters.names.megatron.config_against_args import refuse_another_models
from converters.names.megatron.facts import SWIFT, AdapterRun, MegatronFacts
from converters.names.megatron.model.spelling import is_outside_language_model
from converters.names.megatron.options import MegatronOptions
from converters.names.megatron.relation import table_of_checkpoint

IN, OUT, MAGNITUDE = "linear_in.weight", "linear_out.weight", "weight_magnitude"
_NAME = re.compile(
    r"(?P<module>.+)\.adapter\.(?:adapter_(?P<part>q|k|v|gate|up)\.)?(?P<kind>linear_(?:in|out)\.weight|weight_magnitude)"
)
_PARTS = {"linear_qkv": ("q", "k", "v"), "linear_fc1": ("gate", "up")}
_SHARED = re.compile(r"(?P<before>.*\.mlp\.experts\.)(?P<linear>linear_fc[12])")
_PEFTS = {IN: peft.A, OUT: peft.B, MAGNITUDE: peft.MAGNITUDE}
_MEGATRONS = {peft.A: IN, peft.B: OUT}


@dataclass(frozen=True, slots=True)
class ModuleName:
    module: str
    part: str | None = None

    def of(self, kind: str) -> str:
        return f"{self.module}.adapter.{f'adapter_{self.part}.' if self.part else ''}{kind}"

    @property
    def leaf(self) -> str:
        return self.module.rpartition(".")[2]

    @property
    def is_expert(self) -> bool:
        return ".mlp.experts." in self.module

    @property
    def is_shared(self) -> bool:
        return _SHARED.fullmatch(self.module) is not None

    def of_expert(self, expert: int) -> ModuleName:
        match = _SHARED.fullmatch(self.module)
        assert match is not None
        return ModuleName(f"{match['before']}local_experts.{expert}.{match['linear']}", self.part)


def parse_name(fqn: str) -> tuple[ModuleName, str] | None:
    match = _NAME.fullmatch(fqn)
    return (ModuleName(match["module"], match["part"]), match["kind"]) if match else None


@dataclass(frozen=True, slots=True)
class HubModule:
    """Hub module with all or some rows of a Megatron module.

    `rows` are (first row here, first row in Megatron, number). `shape` is [out, in].
    """

    name: str
    shape: Shape
    rows: tuple[tuple[int, int, int], ...]
    is_transposed: bool

    @property
    def is_whole(self) -> bool:
        """True if its rows are consecutive in Megatron, too."""
        return len(self.rows) == 1


@dataclass(frozen=True)
class Modules:
    """Megatron's modules with a matrix, and their Hub modules."""

    path: str
    sizes: Sizes
    shapes: Mapping[str, Shape]
    hubs: Mapping[str, tuple[HubModule, ...]]
    #: Modules stored on the Hub in one tensor for all experts.
    stacked: frozenset[str]
    #: True for the text model inside a model with images.
    sees: bool

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Modules:
        """Return the config's modules, under PEFT's names."""
        table, sizes = table_of_checkpoint(checkpoint)
        if table.beside:
            raise LossError(
                "Megatron adapters for models with several layer kinds are not supported",
                path=checkpoint.path,
                found=f"model_type {sizes.config.get('model_type')!r}",
                hint="merge the adapter where it was trained",
            )
        family = table.family if isinstance(table.family, Composite) else None
        relation = table.relation(sizes, sizes.dims["v"], {})
        links: dict[str, dict[str, list[Link]]] = {}
        stacked = set()
        for link in relation.links:
            if len(relation.b_shapes[link.b]) != 2:
                continue
            if len(relation.a_shapes[link.a]) != 2:
                stacked.add(link.b.removesuffix(".weight"))
            else:
                links.setdefault(link.b.removesuffix(".weight"), {}).setdefault(link.a, []).append(link)
        hubs = {
            module: tuple(
                _hub_module(_in_memory(family, name), relation.a_shapes[name], parts) for name, parts in found.items()
            )
            for module, found in links.items()
        }
        shapes = {module: relation.b_shapes[f"{module}.weight"] for module in hubs}
        return cls(checkpoint.path, sizes, shapes, hubs, frozenset(stacked), family is not None)

    def parts(self, name: ModuleName, run: AdapterRun) -> tuple[HubModule, ...]:
        """Raise LossError if the model has none."""
        if name.module in self.stacked:
            raise LossError(
                "PEFT's files can't hold an adapter for a single expert: the Hub has one tensor for all experts",
                path=self.path,
                fqn=name.module,
            )
        hubs = None if is_outside_language_model(name.module) else self.hubs.get(name.module)
        if hubs is None:
            raise self._misfit(run, name.module, "a linear layer in the config's model", "no such layer")
        if name.part is None:
            return hubs
        number = _PARTS.get(name.leaf, ()).index(name.part) if name.part in _PARTS.get(name.leaf, ()) else len(hubs)
        if len(hubs) != len(_PARTS.get(name.leaf, ())) or number >= len(hubs):
            raise self._misfit(run, name.of(IN), "a layer part with its own Hub tensor", "none")
        return (hubs[number],)

    def check_shape(self, run: AdapterRun, fqn: str, shape: Shape, expected: Shape) -> None:
        """Raise LossError for another model, CorruptError for another rank."""
        if shape == expected:
            return
        differ = [number for number, (one, other) in enumerate(zip(shape, expected, strict=False)) if one != other]
        if len(shape) == len(expected) == 2 and differ == [1 if fqn.endswith(OUT) else 0]:
            raise CorruptError(
                "a factor's rank doesn't match the run's config",
                path=run.path,
                fqn=fqn,
                expected=f"rank {expected[differ[0]]}",
                found=f"rank {shape[differ[0]]}",
            )
        raise self._misfit(run, fqn, f"shape {list(expected)}", f"shape {list(shape)}")

    def _misfit(self, run: AdapterRun, fqn: str, expected: str, found: str) -> LossError:
        return LossError(
            "the adapter doesn't fit the model in the config",
            path=self.path,
            fqn=fqn,
            expected=expected,
            found=found,
            hint=f"the run's config says: it was trained on {run.base}"
            if run.base
            else Message("give the base model it was trained on: {base} in merge-lora, {config} in convert"),
        )


def _in_memory(family: Composite | None, name: str) -> str:
    if family is None or not name.startswith(family.model):
        return name
    return f"model.language_model.{name.removeprefix(family.model)}"


def _hub_module(name: str, shape: Shape, links: Sequence[Link]) -> HubModule:
    out = links[0].dims.index(0)
    rows = sorted((link.a_box.offsets[out], link.b_box.offsets[0], link.a_box.sizes[out]) for link in links)
    joined: list[tuple[int, int, int]] = []
    for first, place, number in rows:
        if joined and sum(joined[-1][::2]) == first and joined[-1][1] + joined[-1][2] == place:
            joined[-1] = (*joined[-1][:2], joined[-1][2] + number)
        else:
            joined.append((first, place, number))
    return HubModule(name.removesuffix(".weight"), (shape[out], shape[1 - out]), tuple(joined), out == 1)


# -- Megatron's to PEFT's ------------------------------------------------------------------------------------


def to_peft(checkpoint: Checkpoint) -> Checkpoint:
    """Convert names, tensors and config to PEFT's.

    Raise LossError for another model's adapter, or one that defines no single model, CorruptError if a factor is
    missing or has another rank.
    """
    run = checkpoint.facts_of(MegatronFacts).adapter
    assert run is not None
    modules = Modules.of(checkpoint)
    if run.num_layers not in (None, modules.sizes.num_layers):
        raise LossError(
            "the adapter doesn't fit the model in the config",
            path=checkpoint.path,
            expected=f"{pluralize(run.num_layers, 'layer')}, from {run.path}",
            found=f"{pluralize(modules.sizes.num_layers, 'layer')}",
        )
    compared = refuse_another_models(checkpoint, table_of_checkpoint(checkpoint)[0], modules.sizes)
    shapes = checkpoint.shapes
    made = _Pefts(modules, run, shapes)
    for name, factors in _by_module(checkpoint, run, modules.sizes.num_experts):
        made.add(name, factors)
    copies = {copy: owner for copy, owner in made.copies.items() if copy != owner}
    relation = Relation(tuple(made.links), shapes, made.shapes, b_copies=copies)
    named = translate(replace(checkpoint, ties={}), relation, OWN)
    notes = [*checkpoint.notes, *compared]
    if run.etp > 1 and any(name.is_expert for name in made.names):
        notes.append(
            f"expert adapters were trained with expert tensor parallel size {run.etp}, and Megatron-Bridge "
            "computes them differently there (Megatron-Bridge#5634): this is the stored adapter, unchanged"
        )
    return replace(named, adapter_config=made.config(), facts=None, notes=tuple(notes))


def _by_module(
    checkpoint: Checkpoint, run: AdapterRun, num_experts: int
) -> Iterator[tuple[ModuleName, Mapping[str, str]]]:
    """Repeat a shared adapter for each expert."""
    found: dict[ModuleName, dict[str, str]] = {}
    for fqn, _ in checkpoint.tensors:
        parsed = parse_name(fqn)
        if parsed is None:
            raise LossError("this tensor does not belong to a Megatron-Bridge adapter", path=checkpoint.path, fqn=fqn)
        found.setdefault(parsed[0], {})[parsed[1]] = fqn
    for name, factors in list(found.items()):
        if not name.is_shared:
            continue
        del found[name]
        if run.ep > 1 and len(factors) > 1:
            raise LossError(
                "each rank's experts shared an adapter, but the run saved only the first rank's adapter",
                path=checkpoint.path,
                fqn=name.of(OUT),
                expected="an adapter for each expert, or for all experts on one rank",
                found=f"one adapter, expert parallel size {run.ep}",
                hint="save with Megatron-Bridge later than 0.3: it saves an adapter for each expert",
            )
        for expert in range(num_experts):
            one = found.setdefault(name.of_expert(expert), {})
            found[name.of_expert(expert)] = {**factors, **one}
    for name, factors in found.items():
        expected = {IN, OUT, *([MAGNITUDE] if run.has_magnitudes else [])}
        if factors.keys() != expected:
            raise CorruptError(
                "the adapter lacks a LoRA factor for a layer",
                path=checkpoint.path,
                fqn=name.module,
                expected=" and ".join(sorted(expected)),
                found=", ".join(sorted(factors)),
            )
        if run.has_magnitudes and run.tp > 1 and (name.leaf in ("linear_proj", "linear_fc2") or name.is_expert):
            raise LossError(
                "DoRA on a layer with split inputs uses separate norms on each tensor parallel rank, but the "
                "run saved only one rank's norms: no merged model can match it",
                path=checkpoint.path,
                fqn=name.of(MAGNITUDE),
                expected="tensor parallel size 1, or layers with split outputs",
                found=f"tensor parallel size {run.tp}",
            )
        yield name, factors


@dataclass
class _Pefts:
    modules: Modules
    run: AdapterRun
    shapes_before: Mapping[str, Shape]
    links: list[Link] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    names: list[ModuleName] = field(default_factory=list)
    ranks: dict[str, int] = field(default_factory=dict)
    transposed: set[bool] = field(default_factory=set)
    _owners: dict[tuple[str, tuple[tuple[int, int, int], ...]], str] = field(default_factory=dict)

    def add(self, name: ModuleName, factors: Mapping[str, str]) -> None:
        hubs, dim = self.modules.parts(name, self.run), self.run.dim_of(is_expert=name.is_expert)
        rows = sum(hub.shape[0] for hub in hubs)
        expected = {IN: (dim, hubs[0].shape[1]), OUT: (rows, dim), MAGNITUDE: (rows,)}
        for kind, fqn in factors.items():
            self.modules.check_shape(self.run, fqn, self.shapes_before[fqn], expected[kind])
        is_by_rank = self.run.kind == SWIFT and name.leaf == "linear_fc1" and len(hubs) > 1 and not name.is_expert
        for hub in hubs:
            placed = hub.rows if name.part is None else ((0, 0, hub.shape[0]),)
            if is_by_rank:
                placed = _rows_of_ranks(placed, rows, self.run.tp)
            for kind, fqn in factors.items():
                if kind == IN:
                    self._place(fqn, hub.name, kind, ((0, 0, dim),), expected[IN])
                else:
                    self._place(fqn, hub.name, kind, placed, (hub.shape[0], *expected[kind][1:]))
            self.ranks[hub.name] = dim
            self.transposed.add(hub.is_transposed)
        self.names.append(name)

    def _place(self, fqn: str, hub: str, kind: str, rows: tuple[tuple[int, int, int], ...], shape: Shape) -> None:
        new = peft.AdapterName(_PEFTS[kind], hub).in_file
        self.shapes[new] = shape
        owner = self.copies[new] = self._owners.setdefault((fqn, rows), new)
        if owner != new:
            return
        dims, tail = tuple(range(len(shape))), shape[1:]
        zeros = (0,) * len(tail)
        self.links += [
            Link(fqn, Box((place, *zeros), (number, *tail)), new, Box((first, *zeros), (number, *tail)), dims)
            for first, place, number in rows
        ]

    def config(self) -> dict[str, Any]:
        run = self.run
        patterns = {hub: rank for hub, rank in self.ranks.items() if rank != run.dim}
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": run.base,
            "inference_mode": True,
            "r": run.dim,
            "lora_alpha": run.alpha,
            "lora_dropout": run.dropout,
            "bias": "none",
            "fan_in_fan_out": self.transposed == {True},
            "use_rslora": False,
            "use_dora": run.has_magnitudes,
            "target_modules": self._targets(),
            "rank_pattern": patterns,
            "alpha_pattern": {},
            "modules_to_save": None,
            "init_lora_weights": True,
        }

    def _targets(self) -> list[str]:
        """Use last name parts if all such modules are adapted, else full names."""
        leaves = {hub.rpartition(".")[2] for hub in self.ranks}
        others = {one.name for hubs in self.modules.hubs.values() for one in hubs} - self.ranks.keys()
        return sorted(self.ranks if any(hub.rpartition(".")[2] in leaves for hub in others) else leaves)


def _rows_of_ranks(placed: Sequence[tuple[int, int, int]], rows: int, size: int) -> tuple[tuple[int, int, int], ...]:
    """Return gate's or up's rows if each rank's are together."""
    half, part = rows // 2, rows // 2 // size
    return tuple(
        (first + rank * part, 2 * rank * part + (part if place >= half else 0), part)
        for first, place, _ in placed
        for rank in range(size)
    )


# -- PEFT's to Megatron's ------------------------------------------------------------------------------------


def from_peft(checkpoint: Checkpoint, layout: Layout) -> Checkpoint:
    """Convert an adapter to Megatron-Bridge's canonical LoRA: two factors per module.

    Raise LossError for DoRA, biases, modules trained as a whole, differing ranks, or parts of modules.
    """
    recorded = parse_config(*settings_of(checkpoint))
    config = recorded if recorded.is_of_peft else adapter_settings(checkpoint)
    modules = Modules.of(checkpoint)
    if modules.sees:
        raise LossError(
            "adapters for models with images can't be written for Megatron-Bridge",
            path=checkpoint.path,
            found=f"model_type {(checkpoint.config or {}).get('model_type')!r}",
        )
    places = {hub.name: place for place, hub in _places(modules)}
    shapes = checkpoint.shapes
    links: list[Link] = []
    scalings: dict[tuple[int, float], str] = {}
    for fqn in shapes:
        name = peft.parse_name(fqn)
        if name.kind not in _MEGATRONS or config.is_of_peft:
            raise _no_place(checkpoint, fqn, "only lora_A and lora_B for linear layers", name.kind)
        if name.module not in places:
            raise _no_place(
                checkpoint,
                fqn,
                "a linear layer in Megatron's model, whole or split into q, k, v, gate or up",
                name.module,
            )
        scalings.setdefault((config.rank_of(name.module), config.scaling(name.module)), fqn)
        place, hub = places[name.module]
        rank = config.rank_of(name.module)
        expected = (rank, hub.shape[1]) if name.kind == peft.A else (hub.shape[0], rank)
        run = AdapterRun(config.path, "canonical_lora", rank, config.alpha, base=config.base)
        modules.check_shape(run, place.of(_MEGATRONS[name.kind]), shapes[fqn], expected)
        links.append(Link.rename(fqn, place.of(_MEGATRONS[name.kind]), shapes[fqn]))
    if len(scalings) > 1:
        first, other = list(scalings.values())[:2]
        raise _no_place(checkpoint, other, f"the same rank and scaling for all layers, like {first}", "another one")
    ((rank, scaling),) = scalings
    alpha = scaling * rank
    options = layout.read(MegatronOptions)
    run = AdapterRun(
        path=config.path,
        kind="canonical_lora",
        dim=rank,
        alpha=int(alpha) if alpha == int(alpha) else alpha,
        dropout=_dropout(config),
        num_layers=modules.sizes.num_layers,
        base=config.base,
        tp=options.tp or 1,
        ep=options.ep or 1,
        etp=options.etp or options.tp or 1,
    )
    relation = Relation(tuple(links), shapes, {link.b: shapes[link.a] for link in links})
    return replace(translate(checkpoint, relation, MEGATRON), facts=MegatronFacts(adapter=run), is_adapter=True)


def _places(modules: Modules) -> Iterator[tuple[tuple[ModuleName, HubModule], HubModule]]:
    for module, hubs in modules.hubs.items():
        if not module.startswith("decoder.layers."):
            continue  # Megatron pads the vocabulary's rows
        parts = _PARTS.get(module.rpartition(".")[2], ())
        if len(hubs) == len(parts):
            for part, hub in zip(parts, hubs, strict=True):
                yield (ModuleName(module, part), hub), hub
        elif len(hubs) == 1 and hubs[0].is_whole and not parts:
            yield (ModuleName(module), hubs[0]), hubs[0]


def _dropout(config: AdapterConfig) -> float:
    found = config.raw.get("lora_dropout")
    return float(found) if isinstance(found, int | float) else 0.0


def _no_place(checkpoint: Checkpoint, fqn: str, expected: str, found: str) -> LossError:
    return LossError(
        "Megatron-Bridge's canonical LoRA has no place for this",
        path=checkpoint.path,
        fqn=fqn,
        expected=expected,
        found=found,
    )
