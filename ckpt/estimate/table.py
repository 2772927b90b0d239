"""`ckpt estimate`: from a model's config or checkpoint to a table by strategy, and what fits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from pathlib import Path
from typing import Any

from ckpt import api, registry
from ckpt.errors import CorruptError, NotFoundError, UsageError
from ckpt.estimate.memory import (
    DDP,
    FSDP2,
    FSDP2_OFFLOAD,
    MEGATRON,
    STRATEGIES,
    ZERO1,
    ZERO2,
    ZERO2_OFFLOAD,
    ZERO3,
    ZERO3_OFFLOAD,
    ZERO3_OFFLOAD_ALL,
    Memory,
    Setup,
    Zero,
    estimate,
    megatron,
)
from ckpt.estimate.parameters import EMBEDDING, LINEAR, OTHER, Model, Parameter, Stage, num_elements
from ckpt.move.files import translate_os_errors
from ckpt.plan.checkpoint import MASTER, WEIGHT, Checkpoint
from ckpt.run_folder.companions import read_config, read_json
from ckpt.sizes import show_size
from ckpt.state.adapter import BASE, is_adapter, parse_name
from ckpt.text import HUB_ID

#: The part of a GPU's memory that an estimate may fill: the CUDA context, NCCL and fragments want the rest.
USABLE = 0.9
#: Tensor parallelism beyond the GPUs of one node is slow; experts are rarely dealt to more ranks than this.
_MAX_TP, _MAX_EP = 8, 64
_MAX_GPUS = 4096

_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Subject:
    """What is estimated: the model, its config where there is one, and what there is to say of how it was found."""

    path: str
    model: Model
    config: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; `options` are sizes of parallel axes and LoRA, by the names of the command's options."""

    strategy: str
    memory: Memory
    dp: int
    options: Mapping[str, int | bool] = field(default_factory=dict)

    @property
    def title(self) -> str:
        words = [self.strategy]
        words += [f"{name} {value}" if value is not True else name for name, value in self.options.items() if value]
        return " ".join(words)


@dataclass(frozen=True)
class Sizing:
    """The table for one model on so many GPUs."""

    subject: Subject
    setup: Setup
    gpu_memory: int
    rows: tuple[Row, ...]
    suggestions: tuple[str, ...]


# -- the model -----------------------------------------------------------------------------------------------


def find(where: str) -> Subject:
    """The model at `where`: a config.json or its folder, a Hub id, or a checkpoint of any format.

    A config is preferred to a checkpoint's tensors, which may be quantized or an adapter's.  Raises NotFoundError
    where there is neither, UsageError for an architecture that is not known.
    """
    path = Path(where)
    with translate_os_errors(path):
        if path.is_file() and path.suffix == ".json":
            return _of_config(where, _read_config(path))
        if path.exists():
            config = read_config([path]) if path.is_dir() else None
            if config is not None and config.get("model_type"):
                return _of_config(where, config)
            return _of_checkpoint(where, api.open(path))
    if HUB_ID.fullmatch(where):
        return _of_config(where, _read_config(_from_hub(where)))
    raise NotFoundError(
        "no such model",
        path=where,
        expected="a folder, a config.json, a checkpoint, or a Hub id like org/name",
        hint="check the path; a model of the Hub is given as org/name",
    )


def _read_config(path: Path) -> Mapping[str, Any]:
    config = read_json(path)
    if not isinstance(config, dict):
        raise CorruptError("the model's config is not a JSON object", path=path, found=type(config).__name__)
    return config


def _from_hub(repo_id: str) -> Path:
    """The model's config.json, from the local cache or else from the Hub."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repo_id, "config.json"))
    except Exception as error:  # the library raises its own, requests' and OS errors
        raise NotFoundError(
            f"the config of {repo_id!r} could not be downloaded from the Hub",
            found=str(error).splitlines()[0] if str(error) else type(error).__name__,
            hint="give the folder of a local copy, or its config.json",
        ) from error


def _of_config(where: str, config: Mapping[str, Any]) -> Subject:
    model: Model = registry.service("parameters_in_memory")(config)
    notes = []
    if not model.blocks:
        notes.append(f"activations of {model.name} are not known, and not counted")
    if config.get("num_nextn_predict_layers"):
        notes.append("layers of multi-token prediction are not counted: transformers does not build them")
    return Subject(where, model, config, tuple(notes))


def _of_checkpoint(where: str, checkpoint: Checkpoint) -> Subject:
    """From the tensors that it holds; from its config, where that tells of the same number of elements."""
    found: dict[str, Parameter] = {}
    notes = list(checkpoint.notes)
    if is_adapter(fqn for fqn, _ in checkpoint.tensors):
        notes.append("a LoRA run: the model without its adapter is counted")
    for (stored_fqn, role), tensor in checkpoint.tensors.items():
        name = parse_name(stored_fqn)
        fqn = name.module
        if role in (WEIGHT, MASTER) and name.kind == BASE and fqn not in found:
            layer = _LAYER.search(fqn)
            kind = EMBEDDING if "embed" in fqn else LINEAR if len(tensor.shape) == 2 else OTHER
            number = int(layer[1]) if layer else None
            found[fqn] = Parameter(fqn, tensor.shape, kind, number, adapter=int(kind == LINEAR))
    if not found:
        raise NotFoundError(
            "the checkpoint holds no parameters of a model", path=checkpoint.path, found=checkpoint.format
        )
    stored = num_elements(found.values())
    config = checkpoint.config
    if config and config.get("model_type"):
        subject = _of_config(where, config)
        if num_elements(subject.model.parameters) == stored:
            return replace(subject, notes=(*notes, *subject.notes))
        note = (
            f"the checkpoint holds {stored:,} elements, and its config tells of another number; the checkpoint's count"
        )
    else:
        note = "there is no config.json: activations are not known, and not counted"
    model = Model(checkpoint.format, tuple(found.values()), (), 0, 0)
    return Subject(where, model, None, (*notes, note))


def read_zero(path: Path) -> Zero:
    """The sizes in a DeepSpeed config's `zero_optimization`; "auto" and what is not stated are as by default."""
    with translate_os_errors(path):
        config = read_json(path)
    stated = config.get("zero_optimization") if isinstance(config, dict) else None
    if not isinstance(stated, dict):
        raise CorruptError("this is no DeepSpeed config", path=path, expected="an object with zero_optimization")

    def size_of(name: str, default: int) -> int:
        value = stated.get(name)
        return int(value) if isinstance(value, int | float) and 0 <= value < 1 << 62 else default

    default = Zero()
    return Zero(
        size_of("reduce_bucket_size", default.reduce_bucket_size),
        stated.get("overlap_comm") is True,
        size_of("stage3_max_live_parameters", default.max_live_parameters),
        size_of("stage3_param_persistence_threshold", default.param_persistence_threshold),
        size_of("sub_group_size", default.sub_group_size),
    )


# -- the table -----------------------------------------------------------------------------------------------


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
    """Every strategy, or those that are named; `tp`, `pp` and `ep` are Megatron's, tried in turn otherwise."""
    rows = []
    for strategy in strategies or _default(subject, setup):
        if strategy == MEGATRON:
            tried = [] if tp or pp or ep else list(_megatron_rows(subject, setup))
            rows += tried or [megatron_row(subject, setup, tp or 1, pp or 1, ep or 1)]
        else:
            rows.append(_row(subject, strategy, setup))
    if not strategies and not setup.lora_rank:
        lora = replace(setup, lora_rank=16)
        rows += [_row(subject, strategy, lora) for strategy in (DDP, ZERO3)]
        rows.append(_row(subject, DDP, replace(lora, quantized=True)))
    suggestions = tuple(suggest(subject, setup, gpu_memory, rows))
    return Sizing(subject, setup, gpu_memory, tuple(rows), suggestions)


def _default(subject: Subject, setup: Setup) -> list[str]:
    has_megatron = _has_megatron(subject) and not setup.lora_rank
    return [strategy for strategy in STRATEGIES if strategy != MEGATRON or has_megatron]


def _has_megatron(subject: Subject) -> bool:
    return subject.config is not None and bool(subject.model.blocks)


def _row(subject: Subject, strategy: str, setup: Setup) -> Row:
    options = {"lora": setup.lora_rank, "qlora": setup.quantized}
    return Row(strategy, estimate(subject.model, strategy, setup), setup.gpus, options)


def megatron_row(subject: Subject, setup: Setup, tp: int, pp: int, ep: int = 1) -> Row:
    """Megatron with these sizes of axes; UsageError where something does not divide."""
    if not _has_megatron(subject):
        raise UsageError("Megatron's layout of this model is not known", found=subject.model.name)
    assert subject.config is not None
    if setup.gpus % (tp * pp):
        raise UsageError("the GPUs do not divide", expected=f"a multiple of tp {tp} x pp {pp}", found=setup.gpus)
    stages: tuple[Stage, ...] = registry.service("megatron_stages")(subject.config, tp=tp, pp=pp, ep=ep)
    memory = megatron(stages, subject.model.blocks, subject.model.vocabulary, setup, tp, ep)
    return Row(MEGATRON, memory, setup.gpus // (tp * pp), {"tp": tp, "pp": pp, "ep": ep if ep > 1 else 0})


def _megatron_rows(subject: Subject, setup: Setup) -> Iterator[Row]:
    """A row for each number of ranks that share a model, as many of them tensor parallel as can be.

    Experts are dealt to as many ranks as can be, which takes nothing from data parallelism.
    """
    num_experts = max((block.num_experts for block in subject.model.blocks), default=0)
    for ranks in (2**n for n in range(setup.gpus.bit_length())):
        if setup.gpus % ranks:
            continue
        for tp in (t for t in range(min(ranks, _MAX_TP), 0, -1) if ranks % t == 0):
            ep = gcd(setup.gpus * tp // ranks, num_experts, _MAX_EP) if num_experts else 1
            try:
                yield megatron_row(subject, setup, tp, ranks // tp, ep)
            except UsageError:
                continue
            break


# -- what fits -----------------------------------------------------------------------------------------------

#: In the order in which a user would take them: what shards and moves less is faster.
_PREFERRED = (DDP, ZERO1, ZERO2, FSDP2, ZERO3)
_OFFLOADED = (ZERO2_OFFLOAD, ZERO3_OFFLOAD, FSDP2_OFFLOAD, ZERO3_OFFLOAD_ALL)


def fits(row: Row, gpu_memory: int, *, checkpointing: bool) -> bool:
    return row.memory.total(checkpointing=checkpointing) <= USABLE * gpu_memory


def suggest(subject: Subject, setup: Setup, gpu_memory: int, rows: Sequence[Row]) -> Iterator[str]:
    """The largest data parallelism that fits, then tensor, then pipeline parallelism; more GPUs where nothing does."""
    mine = [row for row in rows if bool(row.options.get("lora")) == bool(setup.lora_rank)]
    data_parallel = _first([row for s in _PREFERRED for row in mine if row.strategy == s], gpu_memory)
    model_parallel = _first([row for row in mine if row.strategy == MEGATRON], gpu_memory)
    offloaded = _first([row for s in _OFFLOADED for row in mine if row.strategy == s], gpu_memory)
    if data_parallel:
        yield data_parallel
    if model_parallel:
        yield f"with Megatron: {model_parallel}"
    if not data_parallel and not model_parallel and offloaded:
        yield offloaded
    if not (data_parallel or model_parallel):
        more = _more_gpus(subject, setup, gpu_memory, [row.strategy for row in mine])
        yield (
            more or f"nothing fits on up to {_MAX_GPUS} such GPUs: a shorter --seq-len or a smaller --batch-size helps"
        )


def _first(rows: Sequence[Row], gpu_memory: int) -> str | None:
    """The first row that fits, without activation checkpointing if any does so."""
    for checkpointing in (False, True):
        for row in rows:
            if fits(row, gpu_memory, checkpointing=checkpointing):
                return _words(row, gpu_memory, checkpointing)
    return None


def _words(row: Row, gpu_memory: int, checkpointing: bool) -> str:
    total = show_size(row.memory.total(checkpointing=checkpointing))
    how = " with activation checkpointing" if checkpointing and row.memory.activations else ""
    host = f", and {show_size(row.memory.host)} of host memory for each" if row.memory.host else ""
    return f"{row.title}{how}, data parallel {row.dp}: {total} of {show_size(gpu_memory)} on each GPU{host}"


def _more_gpus(subject: Subject, setup: Setup, gpu_memory: int, strategies: Sequence[str]) -> str | None:
    """The fewest GPUs, by doubling, on which what shards most fits."""
    gpus = setup.gpus
    while gpus <= _MAX_GPUS // 2:
        gpus *= 2
        more = replace(setup, gpus=gpus)
        rows = [_row(subject, strategy, more) for strategy in (FSDP2, ZERO3) if strategy in strategies]
        if MEGATRON in strategies:
            rows += _megatron_rows(subject, more)
        if found := _first(rows, gpu_memory):
            return f"on {gpus} GPUs: {found}"
    return None


# -- as text and JSON ----------------------------------------------------------------------------------------

_HEADS = ("params", "grads", "optim", "master", "gathered", "buffers", "acts", "total", "acts*", "total*", "host")


def lines(sizing: Sizing) -> Iterator[str]:
    """The table as text."""
    model, setup = sizing.subject.model, sizing.setup
    yield f"{sizing.subject.path}: {model.name}, {num_elements(model.parameters):,} parameters"
    precision = "mixed precision" if setup.mixed and setup.dtype != "fp32" else "pure"
    gpus = "1 GPU" if setup.gpus == 1 else f"{setup.gpus} GPUs"
    yield (
        f"{gpus} of {show_size(sizing.gpu_memory)}, {setup.dtype} ({precision}), {setup.optimizer}, "
        f"micro batch {setup.batch} x {setup.length} tokens"
    )
    yield ""
    width = max(len(row.title) for row in sizing.rows)
    cells = [_cells(row.memory) for row in sizing.rows]
    widths = [max(len(head), *(len(row[n]) for row in cells)) for n, head in enumerate(_HEADS)]
    yield (
        f"{'each GPU holds':{max(width, 14)}}  "
        + "  ".join(h.rjust(w) for h, w in zip(_HEADS, widths, strict=True))
        + "  fits"
    )
    for row, texts in zip(sizing.rows, cells, strict=True):
        kept, again = (fits(row, sizing.gpu_memory, checkpointing=c) for c in (False, True))
        mark = "yes" if kept else "with *" if again and row.memory.activations else "no"
        shown = "  ".join(text.rjust(w) for text, w in zip(texts, widths, strict=True))
        yield f"{row.title:{max(width, 14)}}  {shown}  {mark}"
    yield ""
    yield "* with activation checkpointing. A total is the peak, in the backward pass or in the optimizer's step."
    yield f"fits: at most {USABLE:.0%} of the GPU's memory. host: CPU memory of each GPU's process."
    yield ""
    if any(row.options.get("qlora") for row in sizing.rows):
        rest = sum(parameter.numel for parameter in model.parameters if parameter.kind != LINEAR)
        yield (
            f"qlora: {rest:,} parameters are not quantized and stay in {setup.dtype}; "
            "PEFT's prepare_model_for_kbit_training makes them float32"
        )
        yield ""
    for suggestion in sizing.suggestions:
        yield f"suggestion: {suggestion}"


def _cells(memory: Memory) -> list[str]:
    kept, again = memory.activations, memory.activations
    counts: list[int | None] = [
        memory.parameters,
        memory.gradients,
        memory.optimizer,
        memory.masters,
        memory.gathered,
        memory.buffers,
        kept.kept if kept else None,
        memory.total(checkpointing=False),
        again.checkpointed if again else None,
        memory.total(checkpointing=True),
        memory.host,
    ]
    return ["?" if count is None else show_size(count) if count else "-" for count in counts]


def to_json(sizing: Sizing) -> dict[str, Any]:
    """The table as plain values; sizes are bytes."""
    setup = sizing.setup
    return {
        "model": sizing.subject.path,
        "model_type": sizing.subject.model.name,
        "parameters": num_elements(sizing.subject.model.parameters),
        "gpus": setup.gpus,
        "gpu_memory": sizing.gpu_memory,
        "dtype": setup.dtype,
        "mixed": setup.mixed,
        "optimizer": setup.optimizer,
        "batch_size": setup.batch,
        "seq_len": setup.length,
        "rows": [_row_json(row, sizing.gpu_memory) for row in sizing.rows],
        "suggestions": list(sizing.suggestions),
        "notes": list(sizing.subject.notes),
    }


def _row_json(row: Row, gpu_memory: int) -> dict[str, Any]:
    memory = row.memory
    return {
        "strategy": row.strategy,
        "data_parallel": row.dp,
        **{name: value for name, value in row.options.items() if value},
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "masters": memory.masters,
        "gathered": memory.gathered,
        "buffers": memory.buffers,
        "step": memory.step,
        "activations": memory.activations.kept if memory.activations else None,
        "activations_checkpointed": memory.activations.checkpointed if memory.activations else None,
        "host": memory.host,
        "total": memory.total(checkpointing=False),
        "total_checkpointed": memory.total(checkpointing=True),
        "fits": fits(row, gpu_memory, checkpointing=False),
        "fits_checkpointed": fits(row, gpu_memory, checkpointing=True),
    }
