"""Adapters in the layouts of vLLM and sglang.

vLLM 0.32 (`lora/lora_model.py`, `peft_helper.py`, `model_manager.py`) and sglang 0.5.23 (`srt/lora/lora.py`,
`lora_config.py`, `mem_pool.py`, `lora_manager.py`):

- Adapters for stacked experts (PEFT's `target_parameters`) are refused by vLLM for models whose experts it keeps
  separate, and dropped by sglang. Both accept `experts.N.gate_proj`, `up_proj` and `down_proj`. For some models vLLM
  accepts both stacked parameters in PEFT's packing.
- vLLM packs all three layers of all experts (`lora_weights.py`, `pack_moe`), and fails if one has no adapter.
- vLLM reads rsLoRA and rank and alpha patterns. sglang has one rank and one scaling, alpha / r, for all layers.
- sglang stacks q, k and v: without q or v it fails or skips k. It stacks gate and up, and skips up alone. In latent
  attention it stacks q_a and kv_a: q_a alone gets zeros of its own shape, and kv_a alone has no place.

A target tensor is a box of a source tensor, so the trained bits stay the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isclose
from typing import Any

from ckpt.adapters import names
from ckpt.adapters.config import AdapterConfig
from ckpt.adapters.names import PREFIX, parse_name
from ckpt.base.errors import CorruptError, LossError, UsageError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.containers.safetensors import Planned, build_header
from ckpt.plan.checkpoint import Slot, TargetFile
from ckpt.plan.precision import Choice
from ckpt.plan.tensors import Box, Extent, Shape, stepped, whole
from converters.huggingface.peft_options import SGLANG, VLLM

#: Gate and up are stacked in memory, but separate in files and servers.
APART = ("qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v3", "glm4_moe")
#: Experts stacked in PEFT's form under vLLM (`is_3d_moe_weight`).
STACKED = ("gpt_oss", "qwen3_5_moe", "qwen3_vl_moe")
#: Maximum ranks accepted by vLLM at start (`MaxLoRARanks`).
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_PARAMETERS = ("gate_up_proj", "down_proj")
#: Single expert's layer, and both namings of its three layers. The first is the gate.
_SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")
_TRIPLES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w2", "w3"))
#: Without effect after training starts. Servers refuse other inits.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal")
#: Unsloth's packing, removed from the output.
_RECORDS = ("lora_B_layout", "unsloth_fused_expert_lora")


@dataclass(frozen=True)
class ServedTensor:
    """Tensor to write: pairs of its box and the source's box. The rest is zeros."""

    name: str
    source: str
    shape: Shape
    boxes: tuple[tuple[Box, Box], ...]


@dataclass(frozen=True)
class ServerLayout:
    """Adapter in a server's layout. `left_out` has a reason for each tensor."""

    tensors: tuple[ServedTensor, ...]
    config: Mapping[str, Any]
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Layer:
    """Layer in the server's form, with boxes in the source tensors `a` and `b`."""

    module: str
    key: str
    a: str
    b: str
    a_box: Box
    b_box: Box

    @property
    def rank(self) -> int:
        return self.a_box.sizes[0]


def served(chosen: Mapping[str, Choice], config: AdapterConfig, server: str, model_type: str | None) -> ServerLayout:
    """Lay out the `chosen` tensors for `server`.

    Raise UsageError for an unsupported kind or for experts of an unknown model, LossError for a part that the server
    would skip.
    """
    _check_kind(chosen, config, server)
    modules: dict[str, dict[str, str]] = {}
    left_out: dict[str, str] = {}
    for name in chosen:
        parsed = parse_name(name)
        if parsed.kind == names.BASE and ".base_layer." in name:
            left_out[name] = "the base's own embedding (the server has it)"
        elif parsed.kind in (names.A, names.B):
            modules.setdefault(parsed.module, {})[parsed.kind] = name
        else:
            raise UsageError(
                f"{server} does not load this adapter part",
                path=config.path,
                fqn=name,
                hint="use `ckpt merge-lora` to merge it into the base for any server",
            )
    layers: list[_Layer] = []
    stacked: dict[str, list[str]] = {}
    for module, parts in modules.items():
        if module.partition(".base_layer")[0].endswith(".experts"):
            stacked.setdefault(module.partition(".base_layer")[0], []).append(module)
        else:
            a, b = (chosen[parts[kind]].tensor.shape for kind in (names.A, names.B))
            layers.append(_Layer(module, module, parts[names.A], parts[names.B], whole(a), whole(b)))
    tensors: list[ServedTensor] = []
    for experts, wrappers in stacked.items():
        both = _parameters(chosen, config, experts, [modules[m] for m in sorted(wrappers, key=len, reverse=True)])
        if model_type in APART:
            layers += _taken_apart(experts, both)
        elif model_type in STACKED and server == VLLM:
            tensors += _repacked(chosen, experts, both, config)
        else:
            raise UsageError(
                f"ckpt does not know {server}'s expert layout for this model",
                path=config.path,
                fqn=experts,
                expected=f"a model_type of {', '.join((*APART, *(STACKED if server == VLLM else ())))}",
                found=f"model_type {model_type}" if model_type else "no base config",
                hint=Message("give the base's config.json with {config}")
                if model_type is None
                else "use `ckpt merge-lora` to merge it",
            )
    if server == SGLANG:
        _check_siblings(layers, config)
    else:
        _check_experts(layers, config, model_type)
    rank, raw, notes = (_sglang_adapter if server == SGLANG else _vllm_adapter)(layers, tensors, config)
    tensors += [one for layer in layers for one in _factors(layer, rank)]
    return ServerLayout(tuple(tensors), raw, left_out, notes)


def weights_file(name: str, tensors: tuple[ServedTensor, ...], chosen: Mapping[str, Choice]) -> TargetFile:
    dtypes = {one.name: chosen[one.source].dtype for one in tensors}
    by_name = {one.name: one for one in tensors}
    header, placed = build_header([Planned(one.name, dtypes[one.name], one.shape) for one in tensors], {"format": "pt"})
    slots: list[Slot] = []
    zeros: list[tuple[int, int]] = []
    for planned, offset in placed:
        one, extent = by_name[planned.name], Extent.contiguous(name, offset, planned.dtype, planned.shape)
        for target, source in one.boxes:
            slots.append(Slot(chosen[one.source].key, source, extent.narrow(target)))
        zeros += _gaps(one, extent)
    size = len(header) + sum(planned.nbytes for planned, _ in placed)
    return TargetFile(name, size, ((0, header),), tuple(slots), tuple(zeros))


def _gaps(one: ServedTensor, extent: Extent) -> Iterator[tuple[int, int]]:
    """Yield ranges outside all boxes: lora_A's last rows, lora_B's row ends."""
    (rows, columns), item = one.shape, extent.dtype.itemsize
    filled = one.boxes[0][0].sizes if len(one.boxes) == 1 else one.shape
    if filled[0] < rows:
        yield extent.offset + filled[0] * columns * item, (rows - filled[0]) * columns * item
    if filled[1] < columns:
        for row in range(rows):
            yield extent.offset + (row * columns + filled[1]) * item, (columns - filled[1]) * item


def _check_kind(chosen: Mapping[str, Choice], config: AdapterConfig, server: str) -> None:
    raw, init = config.raw, config.raw.get("init_lora_weights")
    for what, is_there in (
        ("DoRA", config.use_dora),
        ("modules_to_save", bool(config.saved)),
        ("trained biases", config.bias != "none" or bool(raw.get("lora_bias"))),
        ("trained tokens", bool(config.token_indices)),
        ("a kind only PEFT can merge", config.is_of_peft),
        (f"the init {init!r}", isinstance(init, str) and init.lower() not in _PLAIN_INITS),
    ):
        if is_there:
            raise UsageError(
                f"{server} does not serve an adapter with {what}",
                path=config.path,
                hint="use `ckpt merge-lora` to merge it into the base for any server",
            )
    for name, choice in chosen.items():
        if parse_name(name).kind in (names.A, names.B) and len(choice.tensor.shape) != 2:
            raise UsageError(f"{server} serves only linear layers' adapters", path=config.path, fqn=name)


@dataclass(frozen=True)
class _Stacked:
    fqn: str
    a: str
    b: str
    num_experts: int
    rank: int
    num_in: int
    num_out: int
    by_expert: bool

    def rows(self, expert: int) -> Box:
        return Box((expert * self.rank, 0), (self.rank, self.num_in))

    def columns(self, expert: int, start: int, stop: int) -> Box:
        """Return the box for rows `start` to `stop` in an expert's lora_B."""
        if self.by_expert:
            return Box((start, expert * self.rank), (stop - start, self.rank))
        return stepped((start, expert), (stop - start, self.rank), (1, self.num_experts))


def _parameters(
    chosen: Mapping[str, Choice], config: AdapterConfig, experts: str, wrappers: list[dict[str, str]]
) -> list[_Stacked]:
    """Return the stacked adapters. `wrappers` has the innermost first."""
    targeted = [one for one in _PARAMETERS if config.targets_parameter(f"{experts}.{one}")]
    if len(targeted) != len(wrappers):
        raise CorruptError(
            "the adapter's config and weights target different expert parameters",
            path=config.path,
            fqn=experts,
            expected=f"adapters of {' and '.join(targeted) or 'none'}",
            found=f"{len(wrappers)}",
        )
    found = []
    for name, parts in zip(targeted, wrappers, strict=True):
        (rows, num_in), (num_out, columns) = (chosen[parts[kind]].tensor.shape for kind in (names.A, names.B))
        fqn = f"{experts}.{name}"
        rank, layout = config.rank_of(fqn), config.expert_layout(fqn)
        if rows != columns or rows % rank:
            raise _odd_factors(
                config, fqn, f"{pluralize(rank, 'rank')} for each expert in both factors", f"{rows} and {columns}"
            )
        if layout is None and rank > 1 and rows > rank:
            raise UsageError(
                "Unsloth's packing for this expert adapter is not recorded",
                path=config.path,
                fqn=fqn,
                hint='write "lora_B_layout": "grouped_by_expert" into its adapter_config.json if a version before '
                '2026.9.6 trained it, and "rank_major" if a later one did',
            )
        by_expert = layout == "grouped_by_expert"
        found.append(_Stacked(fqn, parts[names.A], parts[names.B], rows // rank, rank, num_in, num_out, by_expert))
    if len(found) == 1 and found[0].num_in == found[0].num_out and (config.peft_release or ()) < (0, 19, 1):
        raise _odd_factors(
            config,
            found[0].fqn,
            "square ones by PEFT 0.19.1 or later",
            f"peft_version {config.raw.get('peft_version')}",
        )
    if len(found) == 2:
        up, down = found
        if (up.num_in, up.num_out, up.num_experts) != (down.num_out, 2 * down.num_in, down.num_experts):
            raise _odd_factors(
                config,
                experts,
                "factors with matching inputs and outputs",
                f"gate_up_proj {up.num_in} to {up.num_out}, down_proj {down.num_in} to {down.num_out}",
            )
    return found


def _odd_factors(config: AdapterConfig, fqn: str, expected: str, found: str) -> LossError:
    hint = "PEFT before 2026-04 stored some of these with A and B exchanged"
    what = "these experts' factors do not match PEFT's layout"
    return LossError(what, path=config.path, fqn=fqn, expected=expected, found=found, hint=hint)


def _taken_apart(experts: str, both: list[_Stacked]) -> Iterator[_Layer]:
    """Share lora_A between gate and up. Each has half of lora_B's rows."""
    for one in both:
        half = one.num_out // 2
        parts = {"gate_proj": (0, half), "up_proj": (half, one.num_out)}
        if one.fqn.endswith("down_proj"):
            parts = {"down_proj": (0, one.num_out)}
        for expert in range(one.num_experts):
            for leaf, (start, stop) in parts.items():
                module = f"{experts}.{expert}.{leaf}"
                yield _Layer(module, one.fqn, one.a, one.b, one.rows(expert), one.columns(expert, start, stop))


def _repacked(
    chosen: Mapping[str, Choice], experts: str, both: list[_Stacked], config: AdapterConfig
) -> Iterator[ServedTensor]:
    if len(both) != 2:
        raise LossError(
            "vLLM needs LoRA on both stacked parameters of a layer, or on neither",
            path=config.path,
            fqn=experts,
            expected=" and ".join(_PARAMETERS),
            found=both[0].fqn,
        )
    for one, module in zip(both, (f"{experts}.base_layer", experts), strict=True):
        a, b = chosen[one.a].tensor.shape, chosen[one.b].tensor.shape
        yield ServedTensor(f"{PREFIX}{module}.lora_A.weight", one.a, a, ((whole(a), whole(a)),))
        boxes = [(whole(b), whole(b))]
        if one.by_expert:
            boxes = [
                (
                    Box((0, rank * one.num_experts), (b[0], one.num_experts)),
                    stepped((0, rank), (b[0], one.num_experts), (1, one.rank)),
                )
                for rank in range(one.rank)
            ]
        yield ServedTensor(f"{PREFIX}{module}.lora_B.weight", one.b, b, tuple(boxes))


def _factors(layer: _Layer, rank: int | None) -> Iterator[ServedTensor]:
    (own, num_in), (num_out, _) = layer.a_box.sizes, layer.b_box.sizes
    rank = rank or own
    a, b = whole((own, num_in)), whole((num_out, own))
    yield ServedTensor(f"{PREFIX}{layer.module}.lora_A.weight", layer.a, (rank, num_in), ((a, layer.a_box),))
    yield ServedTensor(f"{PREFIX}{layer.module}.lora_B.weight", layer.b, (num_out, rank), ((b, layer.b_box),))


def _check_experts(layers: list[_Layer], config: AdapterConfig, model_type: str | None) -> None:
    """Raise LossError if an expert's layer lacks an adapter."""
    found: dict[str, set[tuple[int, str]]] = {}
    for layer in layers:
        if match := _SINGLE.fullmatch(layer.module):
            found.setdefault(match[1], set()).add((int(match[2]), match[3]))
    leaves = {leaf for of_layer in found.values() for _, leaf in of_layer}
    for triple in _TRIPLES:
        if triple[0] in leaves or (model_type in APART and leaves.intersection(triple)):
            leaves |= set(triple)
    num = 1 + max((expert for of_layer in found.values() for expert, _ in of_layer), default=-1)
    for experts, of_layer in found.items():
        missing = sorted({(expert, leaf) for expert in range(num) for leaf in leaves} - of_layer)
        if missing:
            expert, leaf = missing[0]
            raise LossError(
                "vLLM needs LoRA on every expert of a layer, or on none",
                path=config.path,
                fqn=f"{experts}.{expert}.{leaf}",
                expected=f"adapters of {', '.join(sorted(leaves))} in {pluralize(num, 'expert')}",
                found="no adapter on this expert",
                hint="use `ckpt merge-lora` to merge it into the base for any server",
            )


def _check_siblings(layers: list[_Layer], config: AdapterConfig) -> None:
    """Raise LossError if sglang would fail or skip a layer."""
    known = {layer.module for layer in layers}
    for layer in layers:
        parent, _, leaf = layer.module.rpartition(".")
        needs = {
            "q_proj": ("v_proj",),
            "k_proj": ("q_proj", "v_proj"),
            "v_proj": ("q_proj",),
            "up_proj": ("gate_proj",),
            "q_a_proj": ("kv_a_proj_with_mqa",),
            "kv_a_proj_with_mqa": ("q_a_proj",),
        }
        for other in needs.get(leaf, ()):
            if f"{parent}.{other}" not in known:
                raise LossError(
                    f"sglang needs LoRA on {other}, too, to load it on {leaf}",
                    path=config.path,
                    fqn=layer.module,
                    hint="use `ckpt merge-lora` to merge it into the base for any server",
                )


_Written = tuple[int | None, dict[str, Any], tuple[str, ...]]


def _vllm_adapter(layers: list[_Layer], stacked: list[ServedTensor], config: AdapterConfig) -> _Written:
    """Return None (no padding), config, and vLLM's options as a note."""
    ranks = {re.escape(one.module): one.rank for one in layers if one.rank != config.rank}
    alphas = {re.escape(one.module): a for one in layers if (a := config.alpha_of(one.key)) != config.alpha}
    if stacked:
        ranks, alphas = dict(config.rank_pattern), dict(config.alpha_pattern)
    largest = max([config.rank, *ranks.values()])
    if largest > _VLLM_RANKS[-1]:
        raise UsageError(
            "the adapter's rank is above vLLM's limit",
            path=config.path,
            expected=f"at most {_VLLM_RANKS[-1]}",
            found=largest,
        )
    start = next(one for one in _VLLM_RANKS if one >= largest)
    raw = {**_plain(layers, stacked, config), "rank_pattern": ranks, "alpha_pattern": alphas}
    return None, raw, (f"for vLLM: --enable-lora --max-lora-rank {start}, or more",)


def _sglang_adapter(layers: list[_Layer], _: list[ServedTensor], config: AdapterConfig) -> _Written:
    """Return rank, config, and sglang's options as a note."""
    scalings = {layer.module: config.scaling(layer.key) for layer in layers}
    scaling = next(iter(scalings.values()))
    for module, other in scalings.items():
        if other != scaling:
            raise UsageError(
                "sglang uses one scaling for all layers, and these layers have another",
                path=config.path,
                fqn=module,
                expected=scaling,
                found=other,
                hint="use `ckpt merge-lora` to merge it into the base for any server",
            )
    rank = max(layer.rank for layer in layers)
    alpha = scaling * rank
    if not isclose(alpha / rank, scaling, rel_tol=1e-15):
        raise UsageError("sglang cannot compute this scaling as alpha / r", path=config.path, found=scaling)
    raw = {**_plain(layers, [], config), "r": rank, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha}
    raw |= {"use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
    return rank, raw, (f"for sglang: --enable-lora --max-lora-rank {rank}, or more",)


def _plain(layers: list[_Layer], stacked: list[ServedTensor], config: AdapterConfig) -> dict[str, Any]:
    leaves = {layer.module.rpartition(".")[2] for layer in layers} | ({"experts"} if stacked else set())
    raw = {key: value for key, value in config.raw.items() if key not in _RECORDS}
    mapping = raw.get("auto_mapping")
    if isinstance(mapping, Mapping):
        raw["auto_mapping"] = {key: value for key, value in mapping.items() if key not in _RECORDS}
    raw |= {"target_modules": sorted(leaves), "exclude_modules": None}
    return raw if stacked else {**raw, "target_parameters": None}
