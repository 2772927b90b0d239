"""Table for `ckpt estimate`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, lcm
from pathlib import Path
from typing import Any, Protocol

from ckpt.adapters.names import BASE, is_adapter, parse_name
from ckpt.base.entries import lazy_module
from ckpt.base.errors import NotFoundError, UsageError
from ckpt.base.text import pluralize, show_size
from ckpt.base.words import Note
from ckpt.commands.estimate.memory import Memory, estimate, megatron, multiple
from ckpt.commands.estimate.setup import (
    DDP,
    FSDP1,
    FSDP2,
    FSDP2_OFFLOAD,
    MEGATRON,
    NVME,
    OFFLOADED,
    STRATEGIES,
    ZERO1,
    ZERO2,
    ZERO2_OFFLOAD,
    ZERO3,
    ZERO3_OFFLOAD,
    ZERO3_OFFLOAD_ALL,
    Setup,
)
from ckpt.move.files import translate_os_errors
from ckpt.move.json_files import read_object
from ckpt.plan.checkpoint import MASTER, WEIGHT, Checkpoint
from ckpt.runs import from_hub
from ckpt.runs.model_files import CONFIG, read_config
from ckpt.runs.opening import open_checkpoint
from ckpt.state.parameters import EMBEDDING, LINEAR, OTHER, Model, Parameter, Stage, num_elements


class ParametersProtocol(Protocol):
    def in_memory(self, config: Mapping[str, Any]) -> Model: ...
    def megatron_stages(self, config: Mapping[str, Any], *, tp: int, pp: int, ep: int) -> tuple[Stage, ...]: ...


PARAMETERS: ParametersProtocol = lazy_module("converters.names.parameters")

#: The CUDA context, NCCL and fragmentation need the rest.
USABLE = 0.9
#: Tensor parallelism across nodes is slow, and experts are rarely spread over more ranks.
_MAX_TP, _MAX_EP = 8, 64
_MAX_GPUS = 4096
#: GPUs per node.
_NODE = 8

_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Subject:
    path: str
    model: Model
    config: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EstimateRow:
    """`options` holds parallel sizes and LoRA, by option name. `stages` counts each pipeline stage's layers."""

    strategy: str
    memory: Memory
    dp: int
    options: Mapping[str, int | bool | str] = field(default_factory=dict)
    stages: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        words = [self.strategy]
        words += [f"{name} {value}" if value is not True else name for name, value in self.options.items() if value]
        return " ".join(words)


@dataclass(frozen=True)
class Sizing:
    subject: Subject
    setup: Setup
    gpu_memory: int
    rows: tuple[EstimateRow, ...]
    suggestions: tuple[str, ...]


def find(where: str) -> Subject:
    """Return the model at `where`: a config.json or its folder, a Hub id, or a checkpoint in any format.

    A config comes before a checkpoint's tensors: they may be quantized or an adapter's. Raise NotFoundError if both are
    missing, UsageError for an unknown architecture.
    """
    path = Path(where)
    with translate_os_errors(path):
        if path.is_file() and path.suffix == ".json":
            return _config_subject(where, read_object(path, "the model's config"))
        if path.exists():
            config = read_config([path]) if path.is_dir() else None
            if config is not None and config.get("model_type"):
                return _config_subject(where, config)
            return _checkpoint_subject(where, open_checkpoint(path))
    if from_hub.is_repository(where):
        fetched = from_hub.fetched(where, [CONFIG]) / CONFIG
        return _config_subject(where, read_object(fetched, "the model's config"))
    raise NotFoundError(
        "no such model",
        path=where,
        expected="a folder, a config.json, a checkpoint, or a Hub id like org/name",
        hint=from_hub.unknown_hint(where),
    )


def _config_subject(where: str, config: Mapping[str, Any]) -> Subject:
    model = PARAMETERS.in_memory(config)
    notes = []
    if not model.blocks:
        notes.append(f"activations of {model.name} are unknown, and not counted")
    if config.get("num_nextn_predict_layers"):
        notes.append("layers for multi-token prediction are not counted: transformers doesn't build them")
    return Subject(where, model, config, tuple(notes))


def _checkpoint_subject(where: str, checkpoint: Checkpoint) -> Subject:
    """Use the config if the number of elements agrees, else the checkpoint's tensors."""
    found: dict[str, Parameter] = {}
    notes = list(checkpoint.notes)
    if is_adapter(fqn for fqn, _ in checkpoint.tensors):
        notes.append("a LoRA run: only the model without its adapter is counted")
    for (stored_fqn, role), tensor in checkpoint.tensors.items():
        name = parse_name(stored_fqn)
        fqn = name.module
        if role in (WEIGHT, MASTER) and name.kind == BASE and fqn not in found:
            layer = _LAYER.search(fqn)
            kind = EMBEDDING if "embed" in fqn else LINEAR if len(tensor.shape) == 2 else OTHER
            number = int(layer[1]) if layer else None
            found[fqn] = Parameter(fqn, tensor.shape, kind, number, adapter=int(kind == LINEAR))
    if not found:
        raise NotFoundError("the checkpoint has no model parameters", path=checkpoint.path, found=checkpoint.format)
    stored = num_elements(found.values())
    config = checkpoint.config
    if config and config.get("model_type"):
        subject = _config_subject(where, config)
        if num_elements(subject.model.parameters) == stored:
            return replace(subject, notes=(*notes, *subject.notes))
        elements = pluralize(stored, "element", ",")
        note = f"the checkpoint holds {elements}, but its config implies another number; the checkpoint's count"
    else:
        note = "there is no config.json: activations are unknown, and not counted"
    model = Model(checkpoint.format, tuple(found.values()), (), 0, 0)
    return Subject(where, model, None, (*notes, note))


def size(
    subject: Subject,
    setup: Setup,
    gpu_memory: int,
    strategies: Sequence[str] = (),
    *,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
) -> Sizing:
    """Estimate strategies. Without `tp`, `pp` or `ep`, try several sizes for Megatron."""
    rows = []
    for strategy in strategies or _default(subject, setup):
        if strategy == MEGATRON:
            tried = [] if tp or pp or ep else list(_megatron_rows(subject, setup))
            rows += tried or [megatron_row(subject, setup, tp or 1, pp or 1, ep or 1)]
        else:
            rows.append(_row(subject, strategy, setup))
    if not (strategies or setup.lora_rank or setup.offload_optimizer or setup.offload_params):
        lora = replace(setup, lora_rank=16)
        rows += [_row(subject, strategy, lora) for strategy in (DDP, ZERO3)]
        rows.append(_row(subject, DDP, replace(lora, quantized=True)))
    suggestions = tuple(suggest(subject, setup, gpu_memory, rows))
    return Sizing(subject, setup, gpu_memory, tuple(rows), suggestions)


def _default(subject: Subject, setup: Setup) -> list[str]:
    if setup.offload_optimizer or setup.offload_params:  # for engines that support it
        fsdp = [] if setup.offload_optimizer or setup.offload_params == NVME else [FSDP1, FSDP2]
        zero = [] if setup.offload_params or setup.offload_optimizer == NVME else [ZERO1, ZERO2]
        return [*zero, ZERO3, *fsdp]
    has_megatron = _has_megatron(subject) and not setup.lora_rank
    return [strategy for strategy in STRATEGIES if strategy != MEGATRON or has_megatron]


def _has_megatron(subject: Subject) -> bool:
    return subject.config is not None and bool(subject.model.blocks)


def _row(subject: Subject, strategy: str, setup: Setup) -> EstimateRow:
    cp = setup.context_parallel
    if setup.gpus % cp:
        raise UsageError(
            "the parallel sizes don't divide the GPUs", expected=f"GPUs divisible by cp {cp}", found=setup.gpus
        )
    is_named = strategy in OFFLOADED
    options: dict[str, int | bool | str] = {
        "lora": setup.lora_rank,
        "qlora": setup.quantized,
        "cp": cp if cp > 1 else 0,
        "offload-optimizer": "" if is_named else setup.offload_optimizer,
        "offload-param": "" if is_named else setup.offload_params,
    }
    return EstimateRow(strategy, estimate(subject.model, strategy, setup), setup.gpus // cp, options)


def megatron_row(subject: Subject, setup: Setup, tp: int, pp: int, ep: int = 1) -> EstimateRow:
    if not _has_megatron(subject):
        raise UsageError("unknown Megatron layout for this model", found=subject.model.name)
    assert subject.config is not None
    cp = setup.context_parallel
    if setup.gpus % (tp * pp * cp):
        axes = f"tp {tp} x pp {pp}" + (f" x cp {cp}" if cp > 1 else "")
        raise UsageError(
            "the parallel sizes don't divide the GPUs", expected=f"GPUs divisible by {axes}", found=setup.gpus
        )
    stages = PARAMETERS.megatron_stages(subject.config, tp=tp, pp=pp, ep=ep)
    memory = megatron(stages, subject.model.blocks, subject.model.vocabulary, setup, tp, ep)
    options = {"tp": tp, "pp": pp, "cp": cp if cp > 1 else 0, "ep": ep if ep > 1 else 0}
    return EstimateRow(
        MEGATRON, memory, setup.gpus // (tp * pp * cp), options, tuple(len(stage.layers) for stage in stages)
    )


def _megatron_rows(subject: Subject, setup: Setup) -> Iterator[EstimateRow]:
    """Prefer tensor parallelism. Experts are spread widely: data parallelism stays the same."""
    num_experts = max((block.num_experts for block in subject.model.blocks), default=0)
    most = _MAX_TP * (len(subject.model.blocks) + 2)
    for ranks in (n for n in range(1, min(setup.gpus, most) + 1) if setup.gpus % n == 0):
        for tp in (t for t in range(min(ranks, _MAX_TP), 0, -1) if ranks % t == 0):
            ep = gcd(setup.gpus * tp // ranks, num_experts, _MAX_EP) if num_experts else 1
            try:
                yield megatron_row(subject, setup, tp, ranks // tp, ep)
            except UsageError:
                continue
            break


#: Less sharding and less traffic is faster.
_PREFERRED = (DDP, ZERO1, ZERO2, FSDP2, ZERO3)
_OFFLOADED = (ZERO2_OFFLOAD, ZERO3_OFFLOAD, FSDP2_OFFLOAD, ZERO3_OFFLOAD_ALL)


def fits(row: EstimateRow, gpu_memory: int, *, checkpointing: bool) -> bool:
    return row.memory.total(checkpointing=checkpointing) <= USABLE * gpu_memory


def suggest(subject: Subject, setup: Setup, gpu_memory: int, rows: Sequence[EstimateRow]) -> Iterator[str]:
    """Suggest the simplest strategies that fit, or more GPUs.

    Activation checkpointing comes second, then offloading or LoRA, then Megatron.
    """
    mine = [row for row in rows if bool(row.options.get("lora")) == bool(setup.lora_rank)]
    data_parallel = _first([row for s in _PREFERRED for row in mine if row.strategy == s], gpu_memory)
    model_parallel = _first([row for row in mine if row.strategy == MEGATRON], gpu_memory)
    offloaded = _first([row for s in _OFFLOADED for row in mine if row.strategy == s], gpu_memory)
    lora = _first([row for row in rows if row not in mine], gpu_memory)
    trains_less = f"with fewer trained parameters: {lora}" if lora else None
    instead = "; or ".join(filter(None, (offloaded, trains_less)))
    if data_parallel or instead:
        yield data_parallel or instead
    if model_parallel:
        yield f"with Megatron: {model_parallel}"
    if not (data_parallel or model_parallel):
        more = _more_gpus(subject, setup, gpu_memory, [row.strategy for row in mine])
        nothing = "nothing else" if instead else "nothing"
        yield more or Note(
            "{} fits on up to {} such GPUs: {}", nothing, _MAX_GPUS, _help(subject, setup, gpu_memory, mine)
        )


def _help(subject: Subject, setup: Setup, gpu_memory: int, rows: Sequence[EstimateRow]) -> str:
    """Return advice if nothing fits on any number of GPUs: fewer tokens if everything else fits."""
    many = replace(setup, gpus=multiple(_MAX_GPUS, setup.context_parallel))
    tried = {row.strategy for row in rows}
    most_sharded = [_row(subject, strategy, many) for strategy in tried - {MEGATRON}]
    most_sharded += _megatron_rows(subject, many) if MEGATRON in tried else ()
    memories = [replace(row.memory, activations=None) for row in (*rows, *most_sharded)]
    without = min(memory.total(checkpointing=True) for memory in memories)
    if without <= USABLE * gpu_memory:
        return Note("a shorter {seq_len} or a smaller {batch_size} helps")
    alone = f"without any activations it is {show_size(without)} of {show_size(gpu_memory)} on each GPU"
    if not setup.offload_params and not tried.issuperset(_PREFERRED):
        every = [_row(subject, strategy, setup) for strategy in _PREFERRED]
        if other := _first(every, gpu_memory) or _more_gpus(subject, setup, gpu_memory, _PREFERRED):
            return f"{alone}; sharding these states helps: {other}"
    return Note("{}; LoRA ({lora_r}), {optimizer=adamw_8bit} or larger GPUs take less of it", alone)


def _first(rows: Sequence[EstimateRow], gpu_memory: int) -> str | None:
    """Describe the first row that fits, if possible without activation checkpointing.

    Megatron's rows may use checkpointing: it costs less than more sharding.
    """
    for checkpointing in (False, True):
        for row in rows:
            if fits(row, gpu_memory, checkpointing=checkpointing or row.strategy == MEGATRON):
                return _words(row, gpu_memory, not fits(row, gpu_memory, checkpointing=False))
    return None


def _words(row: EstimateRow, gpu_memory: int, checkpointing: bool) -> str:
    total = show_size(row.memory.total(checkpointing=checkpointing))
    how = " with activation checkpointing" if checkpointing and row.memory.activations else ""
    host = f", and {show_size(row.memory.host)} of host memory for each" if row.memory.host else ""
    return f"{row.title}{how}, data parallel {row.dp}: {total} of {show_size(gpu_memory)} on each GPU{host}"


def _more_gpus(subject: Subject, setup: Setup, gpu_memory: int, strategies: Sequence[str]) -> str | None:
    """Find the fewest GPUs, in whole nodes beyond one."""
    searched = [s for s in (FSDP2, ZERO3) if s in strategies] or [s for s in _PREFERRED if s in strategies]

    def fitting(gpus: int) -> str | None:
        more = replace(setup, gpus=gpus)
        model_parallel = list(_megatron_rows(subject, more)) if MEGATRON in strategies else []
        data_parallel = [_row(subject, strategy, more) for strategy in searched]
        return _first(data_parallel, gpu_memory) or _first(model_parallel, gpu_memory)

    unit = lcm(setup.context_parallel, _NODE if setup.gpus >= _NODE else 1)
    least, most = setup.gpus, multiple(setup.gpus + 1, unit)
    while not (found := fitting(most)):
        least, most = most, multiple(2 * most, unit)
        if most > _MAX_GPUS:
            return None
    while most - least > unit:  # `least` is too few, `most` is enough
        middle = multiple((least + most) // 2, unit)
        if middle in (least, most):
            break
        if better := fitting(middle):
            most, found = middle, better
        else:
            least = middle
    return f"on {pluralize(most, 'GPU')}: {found}"
