"""Table of `ckpt estimate` as text in 80 columns, and as plain values."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from ckpt.base.text import pluralize, show_size
from ckpt.base.words import on_command_line
from ckpt.commands.estimate.table import USABLE, EstimateRow, Sizing, fits
from ckpt.pictures.bars import Bar
from ckpt.state.parameters import LINEAR, flops_per_token, num_elements

_WIDTH = 80
_HEADS = ("param", "grads", "optim", "extra", "acts", "total", "acts*", "total*", "host", "nvme")
_PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "masters",
    "gathered",
    "buffers",
    "step",
)  # `Memory` fields in bytes
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))


def lines(sizing: Sizing) -> Iterator[str]:
    setup = sizing.setup
    title, facts = title_lines(sizing)
    yield title
    yield from facts
    yield ""
    yield from _table_lines(sizing)
    yield ""
    yield from _wrap(
        "* with activation checkpointing. extra: what is gathered from other GPUs, and buffers. A total is the peak, "
        "in the backward pass or in the step."
    )
    yield from _wrap(f"fits: at most {USABLE:.0%} of the GPU's memory. host: CPU memory of each GPU's process.")
    if flops := _flops(sizing):
        yield from _wrap(
            f"FLOPs: {_scaled(flops)} for each token ({4 if setup.lora_rank else 6} N + 12 s q), "
            f"{_scaled(flops * setup.tokens)} for a micro batch; 2 N + 4 s q more with activation checkpointing."
        )
    yield ""
    notes = list(_sizing_notes(sizing))
    for note in notes:
        yield from _wrap(note)
    if notes:
        yield ""
    for suggestion in sizing.suggestions:
        yield from _wrap(f"suggestion: {on_command_line(suggestion)}")


def title_lines(sizing: Sizing) -> tuple[str, list[str]]:
    model, setup = sizing.subject.model, sizing.setup
    precision = "mixed precision" if setup.mixed and setup.dtype != "fp32" else "pure"
    facts = (
        f"{pluralize(setup.gpus, 'GPU')} of {show_size(sizing.gpu_memory)}, {setup.dtype} ({precision}), "
        f"{setup.optimizer}, micro batch {setup.batch} x {pluralize(setup.length, 'token')}{_choices(sizing)}"
    )
    return f"{sizing.subject.path}: {model.name}, {pluralize(num_elements(model.parameters), 'parameter', ',')}", _wrap(
        facts
    )


def bars(sizing: Sizing) -> list[Bar]:
    return [
        Bar(
            row.title,
            row.memory.at_peak(checkpointing=False),
            row.memory.at_peak(checkpointing=True) if row.memory.activations else None,
        )
        for row in sizing.rows
    ]


def _flops(sizing: Sizing) -> int | None:
    setup = sizing.setup
    return flops_per_token(sizing.subject.model, setup.length, frozen=bool(setup.lora_rank))


def _scaled(count: int) -> str:
    """Return `48.7 G`: a count with an SI prefix."""
    power = min((len(str(count)) - 1) // 3, 5)
    return f"{count / 1000**power:.3g} {' kMGTP'[power].strip()}"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _choices(sizing: Sizing) -> str:
    setup = sizing.setup
    chosen = [
        ("fused cross-entropy", setup.fused_loss),
        ("eager attention", setup.eager_attention),
        ("checkpointed inputs in the host's memory", setup.activation_offload),
        (f"masters in {setup.master_dtype}", setup.master_dtype != "fp32"),
        (f"states in {setup.state_dtype}", setup.state_dtype != "fp32"),
        ("no sequence parallelism", not setup.sequence_parallel),
        (f"recomputed: {', '.join(setup.recompute)}", bool(setup.recompute)),
        ("not resharded after the forward pass", not setup.reshard),
    ]
    return "".join(f", {text}" for text, is_chosen in chosen if is_chosen)


def _table_lines(sizing: Sizing) -> Iterator[str]:
    from rich.console import Console
    from rich.table import Table

    rows = [_counts(row) for row in sizing.rows]
    used = [n for n, head in enumerate(_HEADS) if head != "nvme" or any(row[n] for row in rows)]
    most = max(count or 0 for row in rows for count in row)
    size, unit = next((size, unit) for size, unit in _UNITS if most >= size or size == 1)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(f"{unit} on each GPU", overflow="fold")
    for n in used:
        table.add_column(_HEADS[n], justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for row, counts in zip(sizing.rows, rows, strict=True):
        table.add_row(row.title, *(_cell(counts[n], size) for n in used), _mark(row, sizing.gpu_memory))
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, markup=False, emoji=False, highlight=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    yield from (line.rstrip() for line in console.file.getvalue().splitlines())


def _counts(row: EstimateRow) -> list[int | None]:
    memory, made = row.memory, row.memory.activations
    return [
        memory.parameters,
        memory.gradients,
        memory.optimizer + memory.masters,
        memory.gathered + memory.buffers,
        made.kept if made else None,
        memory.total(checkpointing=False),
        made.checkpointed if made else None,
        memory.total(checkpointing=True),
        memory.host + (made.host if made else 0),
        memory.nvme,
    ]


def _cell(count: int | None, size: int) -> str:
    if not count:
        return "?" if count is None else "-"
    value = count / size
    if value < 0.005:
        return "<.01"
    return f"{value:.{2 if value < 9.995 else 1 if value < 999.95 else 0}f}"


def _mark(row: EstimateRow, gpu_memory: int) -> str:
    if fits(row, gpu_memory, checkpointing=False):
        return "yes"
    return "yes*" if row.memory.activations and fits(row, gpu_memory, checkpointing=True) else "no"


def _sizing_notes(sizing: Sizing) -> Iterator[str]:
    model, setup = sizing.subject.model, sizing.setup
    if any(row.options.get("qlora") for row in sizing.rows):
        rest = sum(parameter.numel for parameter in model.parameters if parameter.kind != LINEAR)
        yield (
            f"qlora: {pluralize(rest, 'parameter', ',')} are not quantized and stay in {setup.dtype}; "
            "PEFT's prepare_model_for_kbit_training makes them float32"
        )
    for row in sizing.rows:
        if len(set(row.stages)) > 1:
            yield f"{row.title}: stages of {_runs(row.stages)} layers, embedding and loss beside them"


def _runs(counts: Sequence[int]) -> str:
    """Return counts as `1, 2 x 47, 1`."""
    found = [(count, len(list(same))) for count, same in groupby(counts)]
    return ", ".join(f"{count} x {times}" if times > 1 else f"{count}" for count, times in found)


def to_json(sizing: Sizing) -> dict[str, Any]:
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
        "flops_per_token": _flops(sizing),
        "rows": [_row_json(row, sizing.gpu_memory) for row in sizing.rows],
        "suggestions": list(map(on_command_line, sizing.suggestions)),
        "notes": list(map(on_command_line, sizing.subject.notes)),
    }


def _row_json(row: EstimateRow, gpu_memory: int) -> dict[str, Any]:
    memory, made = row.memory, row.memory.activations
    return {
        "strategy": row.strategy,
        "data_parallel": row.dp,
        **{name: value for name, value in row.options.items() if value},
        **({"stages": list(row.stages)} if row.stages else {}),
        **{name: getattr(memory, name) for name in _PARTS},
        "activations": made.kept if made else None,
        "activations_checkpointed": made.checkpointed if made else None,
        "host": memory.host,
        "host_checkpointed": memory.host + (made.host if made else 0),
        "nvme": memory.nvme,
        "total": memory.total(checkpointing=False),
        "total_checkpointed": memory.total(checkpointing=True),
        "fits": fits(row, gpu_memory, checkpointing=False),
        "fits_checkpointed": fits(row, gpu_memory, checkpointing=True),
    }
