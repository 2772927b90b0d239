"""Spans that put ZeRO-3's masters together by DeepSpeed's rule, for `benchmarks.copying`.

    python -m benchmarks.zero_spans STEP_FOLDER FOLDER

writes `FOLDER/spans.json`, and a safetensors header for its first span.
"""

from __future__ import annotations

import json
import struct
import sys
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

NAME = "model.safetensors"


def write(step: Path, folder: Path) -> None:
    ranks = len(list(step.glob("*_optim_states.pt")))
    files = [step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(ranks)]
    (group,) = torch.load(step / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)["param_shapes"]
    starts = [_start(file) for file in files]
    entries: dict[str, Any] = {}
    parts: list[tuple[str, int, int]] = []
    end = at = 0
    for name, shape in group.items():
        size, slot = 4 * prod(shape), 4 * -(-prod(shape) // ranks)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": (end, end + size)}
        lengths = [min(slot, size - rank * slot) for rank in range(ranks)]
        parts += [(str(file), start + at, n) for file, start, n in zip(files, starts, lengths, strict=True) if n > 0]
        end, at = end + size, at + slot
    text = json.dumps(entries).encode()
    folder.mkdir(exist_ok=True)
    (folder / "header").write_bytes(struct.pack("<Q", len(text)) + text)
    spans, at = [], 0
    for source, start, length in ((str(folder / "header"), 0, 8 + len(text)), *parts):
        spans.append((source, start, NAME, at, length))
        at += length
    (folder / "spans.json").write_text(json.dumps(spans))


def _start(file: Path) -> int:
    """Return the offset of a rank's masters in its file."""
    with FakeTensorMode():
        (masters,) = torch.load(file, weights_only=False)["optimizer_state_dict"]["fp32_flat_groups"]
    assert masters.storage_offset() == 0
    return int(masters.untyped_storage()._checkpoint_offset)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
