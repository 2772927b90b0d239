"""LoRA merge with PEFT's arithmetic, and nothing else: `python -m benchmarks.bare_lora BASE ADAPTER OUTPUT`.

It has no check, plan or digest, and merges only plain linear layers. torch is imported in one thread while the other
copies what has no adapter.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import cache, partial
from math import frexp, prod
from typing import Any

from benchmarks.copying import PART, Job, read, run, write

_LOCAL = threading.local()


def main(base: str, adapter: str, output: str) -> None:
    os.mkdir(output)
    with open(f"{adapter}/adapter_config.json") as file:
        config = json.load(file)
    scaling = config["lora_alpha"] / config["r"]
    assert abs(frexp(scaling)[0]) == 0.5, "scaling one factor must not round"
    factors = {name.removeprefix("base_model.model."): one for name, one in _tensors(adapter)}
    files: dict[int, int] = {}
    copies: list[Job] = []
    merges: list[Job] = []
    for name, (source, start, end, shape, path) in _tensors(base):
        if source not in files:
            files[source] = os.open(f"{output}/{os.path.basename(path)}", os.O_WRONLY | os.O_CREAT)
            copies.append(partial(_copy, source, files[source], 0, _data(source)))
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" not in factors:
            copies.append(partial(_copy, source, files[source], start, end))
            continue
        pair = (factors[f"{layer}.lora_{one}.weight"] for one in "AB")
        merges.append(partial(_merge, *pair, scaling, source, files[source], start, shape))
    run([lambda _: _torch(), *copies, *merges], list(files.values()), "meanwhile")


Tensor = tuple[int, int, int, list[int], str]


def _tensors(folder: str) -> Iterator[tuple[str, Tensor]]:
    """Yield names with file, start, end, shape and path."""
    for path in (f"{folder}/{name}" for name in os.listdir(folder) if name.endswith(".safetensors")):
        file = os.open(path, os.O_RDONLY)
        data = _data(file)
        header = json.loads(os.pread(file, data - 8, 8))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            yield name, (file, data + start, data + end, entry["shape"], path)


def _data(file: int) -> int:
    return 8 + int.from_bytes(os.pread(file, 8, 0), "little")


@cache
def _torch() -> Any:
    import torch

    torch.set_num_threads(1)
    return torch


def _copy(source: int, target: int, start: int, end: int, buffer: memoryview) -> None:
    for at in range(start, end, PART):
        part = buffer[: min(PART, end - at)]
        read(source, part, at)
        write(target, part, at)


def _merge(
    a: Tensor, b: Tensor, scaling: float, source: int, target: int, start: int, shape: list[int], buffer: memoryview
) -> None:
    torch = _torch()
    num_rows, num_columns = shape
    at_once = PART // (2 * num_columns)
    product = _scratch("product", shape)  # one call, as PEFT's: a product of some rows has other bits
    torch.mm(_loaded(b).mul_(scaling), _loaded(a), out=product)
    for first in range(0, num_rows, at_once):
        delta = product[first : first + at_once]
        part = buffer[: 2 * delta.numel()]
        read(source, part, start + 2 * first * num_columns)
        rows = torch.frombuffer(part, dtype=torch.bfloat16).view(delta.shape)
        rows.copy_(_scratch("wide", delta.shape).copy_(rows).add_(delta))
        write(target, part, start + 2 * first * num_columns)


def _scratch(name: str, shape: Sequence[int]) -> Any:
    """Return this thread's tensor again, because new memory costs more than the product."""
    size = prod(shape)
    if (found := _LOCAL.__dict__.get(name)) is None or found.numel() < size:
        _LOCAL.__dict__[name] = found = _torch().empty(size)
    return found[:size].view(shape)


def _loaded(tensor: Tensor) -> Any:
    file, start, end, shape, _ = tensor
    data = bytearray(end - start)
    read(file, memoryview(data), start)
    torch = _torch()
    return torch.frombuffer(data, dtype=torch.float32).view(shape)


if __name__ == "__main__":
    main(*sys.argv[1:])
