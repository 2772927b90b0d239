"""Checkpoints of random bits, each tensor seeded by its name in the whole model.

    python -m benchmarks.cards.source shapes CONFIG.json       the shapes of its tensors on the Hub, as JSON
    python -m benchmarks.cards.source hf FOLDER START RANKS     weights in bf16
    python -m benchmarks.cards.source zero3 FOLDER START RANKS  masters in fp32 and Adam's states, in ZeRO-3's files
    python -m benchmarks.cards.source peft FOLDER START RANKS   weights in bf16, and an adapter in fp32 next to FOLDER
    python -m benchmarks.cards.source lora FOLDER START RANKS   the same, and the result of PEFT's `merge_and_unload`

FOLDER holds the config. Its layers begin at layer START of the whole model. The output is JSON: a list of kind, name,
role, dtype, shape and the xxh3-128 of the elements, in hex.

Any bit pattern occurs. Each tensor with 8 elements or more begins with 0.0, -0.0, both infinities, two NaNs (one
signalling), the smallest subnormal and the largest finite number. But an adapter, and the weights that it changes, have
no infinities and NaNs. Names and shapes on the Hub, and their pieces of tensors in memory, come from transformers.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128

from benchmarks.cards.lora import ADAPTER, MERGED, Lora, read
from benchmarks.cards.windows import Shape, Window
from benchmarks.models import STEP

SEED = 45
STATES = ("exp_avg", "exp_avg_sq")
_BF16 = (0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFF81, 0x0001, 0x7F7F)
_FP32 = (0x0000_0000, 0x8000_0000, 0x7F80_0000, 0xFF80_0000, 0x7FC0_0000, 0xFF81_2345, 0x0000_0001, 0x7F7F_FFFF)
#: Megatron stores one less, so only some numbers survive: those of bf16 from 0.5 to 2 do.
_GATED_NORM = re.compile(r"linear_attn\.norm\.weight$")
_SHARD = 2_000_000_000  # bytes per file

#: Kind, name, role, dtype, shape, and the digest of the elements.
Made = tuple[str, str, str, str, Shape, str]


def bits(name: str, role: str, count: int, dtype: Any) -> NDArray:
    """Return `count` patterns of `dtype`, an unsigned integer, the same in every run."""
    generator = np.random.Generator(np.random.SFC64(xxh3_64_intdigest(f"{SEED}\0{name}\0{role}".encode())))
    itemsize = np.dtype(dtype).itemsize
    words = generator.integers(0, 1 << 64, size=-(-count * itemsize // 8), dtype=np.uint64)
    values = words.view(dtype)[:count]
    if role in ("weight", "master") and _GATED_NORM.search(name):
        low = values.dtype.type(8 * itemsize - 16)
        values[:] = (values >> low & 0xFF | 0x3F00) << low
    elif count >= len(_BF16):
        values[: len(_BF16)] = _BF16 if itemsize == 2 else _FP32
    return values


def numbers(values: NDArray, lowest: int, count: int) -> NDArray:
    """Give each bf16 or fp32 one of `count` exponents, from `lowest`. The bits of sign and fraction stay."""
    at, one = values.dtype.type(8 * values.itemsize - 9), values.dtype.type
    exponent = (values >> at & one(0xFF)) % one(count) + one(lowest)
    return values & ~(one(0xFF) << at) | exponent << at


def rounded(values: NDArray) -> NDArray:
    """Round fp32 to bf16, to nearest even. A NaN keeps its upper bits, and is quiet if its payload would be 0."""
    wide = values.astype(np.uint64)
    nearest = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
    upper = wide >> 16
    nan = np.where(upper & 0x7F, upper, upper | 0x40)
    return np.where((wide & 0x7FFF_FFFF) > 0x7F80_0000, nan, nearest).astype(np.uint16)


def empty_model(config: Mapping[str, Any]) -> Any:
    import torch
    import transformers

    (name,) = config["architectures"]
    cls = getattr(transformers, name)
    with torch.device("meta"):
        return cls(cls.config_class.from_dict(dict(config)))


def shapes(model: Any) -> dict[str, Shape]:
    """Return the saved tensors' names and shapes in memory."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    unsaved = set(model._keys_to_ignore_on_save or ())
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in unsaved}
    return {name: tuple(tensor.shape) for name, tensor in remove_tied_weights_from_state_dict(state, model).items()}


def buffers(model: Any) -> dict[str, Shape]:
    """Return the saved buffers. The Hub has them in fp32."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: shape for name, shape in shapes(model).items() if name not in parameters}


def as_saved(model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors as `save_pretrained` names and cuts them."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, dict(tensors)))


def stored_shapes(model: Any) -> dict[str, Shape]:
    import torch

    with torch.device("meta"):
        empty = {name: torch.empty(shape) for name, shape in shapes(model).items()}
    return {name: tuple(tensor.shape) for name, tensor in as_saved(model, empty).items()}


def weight(name: str, shape: Shape, data: NDArray) -> Made:
    """Return a weight as `ckpt hash --dtype bf16` counts it."""
    narrow = data if data.itemsize == 2 else rounded(data)
    return "weights", name, "weight", "bfloat16", shape, xxh3_128(narrow.data).hexdigest()


def write_hf(folder: Path, model: Any, window: Window, lora: Lora | None = None) -> Iterator[Made]:
    """Write safetensors files with an index. An adapter's targets have all exponents below 2."""
    groups: list[dict[str, Shape]] = [{}]
    size, wide = 0, buffers(model)
    for name, shape in stored_shapes(model).items():
        size += 2 * prod(shape)
        if groups[-1] and size > _SHARD:
            groups.append({})
            size = 2 * prod(shape)
        groups[-1][name] = shape
    weight_map = {}
    for number, group in enumerate(groups, 1):
        file, header = f"model-{number:05d}-of-{len(groups):05d}.safetensors", {}
        for name, shape in group.items():
            header[name] = ("F32" if name in wide else "BF16", shape)
        with (folder / file).open("wb") as written:
            written.write(safetensors_header(header))
            for name, shape in group.items():
                data = bits(window.name(name), "weight", prod(shape), np.uint32 if name in wide else np.uint16)
                if lora is not None and lora.is_target(name):
                    data = numbers(data, 0, 128)
                written.write(data.data)
                yield weight(name, shape, data)
        weight_map |= dict.fromkeys(group, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def safetensors_header(tensors: Mapping[str, tuple[str, Shape]]) -> bytes:
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = {"F32": 4, "BF16": 2}[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + size)}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_adapter(folder: Path, model: Any, window: Window, lora: Lora) -> Iterator[Made]:
    """Write factors from 1/256 to 1: each counts in the sums of a product."""
    factors = lora.factors(stored_shapes(model))
    with (folder / "adapter_model.safetensors").open("wb") as written:
        written.write(safetensors_header({name: ("F32", shape) for name, shape in factors.items()}))
        for name, shape in factors.items():
            data = numbers(bits(window.name(name), "weight", prod(shape), np.uint32), 119, 8)
            written.write(data.data)
            yield "weights", name, "weight", "float32", shape, xxh3_128(data.data).hexdigest()


def merged_by_peft(folder: Path, base: Mapping[str, str], lora: Lora) -> Iterator[Made]:
    """Let PEFT merge. Raise RuntimeError if it changes other tensors than the targets, by their digests in `base`."""
    import torch
    from safetensors import safe_open

    from benchmarks.lora_peer import merge

    output = folder.with_name(MERGED)
    merge(folder, folder.with_name(ADAPTER), output)
    for path in sorted(output.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                tensor = file.get_tensor(name)
                made = weight(name, tuple(tensor.shape), tensor.view(torch.uint16).numpy().reshape(-1))
                if (made[-1] != base[name]) != lora.is_target(name):
                    raise RuntimeError(f"PEFT's merge: {name} is changed, but no target, or a target, but not changed")
                yield made


def write_zero3(folder: Path, model: Any, window: Window, ranks: int) -> Iterator[Made]:
    """Write a step folder: every parameter has one equal slot per rank, padded with zeros."""
    import torch

    from benchmarks.zero_source import save_rank

    held = {name: bits(window.name(name), "weight", prod(shape), np.uint32) for name, shape in buffers(model).items()}
    params = {name: shape for name, shape in shapes(model).items() if name not in held}
    for name, data in held.items():
        yield weight(name, shapes(model)[name], data)
    kept = {name: torch.from_numpy(data.view(np.float32)).reshape(shapes(model)[name]) for name, data in held.items()}
    slots = {name: -(-prod(shape) // ranks) for name, shape in params.items()}
    roles, scratch = ("master", *STATES), folder / "scratch"
    flat = np.memmap(scratch, np.uint32, "w+", shape=(len(roles), ranks, sum(slots.values())))
    at = 0
    for _, layer in groupby(params, window.layer):  # at most one layer in memory
        names = list(layer)
        for role, rows in zip(roles, flat, strict=True):
            whole, end = {}, at
            for name in names:
                data, slot = bits(window.name(name), role, prod(params[name]), np.uint32), slots[name]
                padded = np.zeros(ranks * slot, np.uint32)
                padded[: data.size] = data
                rows[:, end : end + slot] = padded.reshape(ranks, slot)
                whole[name] = torch.from_numpy(data.view(np.float32)).reshape(params[name])
                end += slot
            for name, tensor in as_saved(model, whole).items():
                data, shape = tensor.contiguous().numpy().view(np.uint32).reshape(-1), tuple(tensor.shape)
                kind = "masters" if role == "master" else "optimizer"
                yield kind, name, role, "float32", shape, xxh3_128(data.data).hexdigest()
                if role == "master":
                    yield "optimizer", name, "step", "number", (), xxh3_128(float(STEP).hex().encode()).hexdigest()
                    yield weight(name, shape, data)
        at = end
    for rank in range(ranks):
        master, *moments = (torch.from_numpy(rows[rank].view(np.float32)) for rows in flat)
        save_rank(folder, params, rank, ranks, master, moments, bf16=True, buffers=kept)
    scratch.unlink()


def main(kind: str, path: Path, start: int = 0, ranks: int = 0) -> Any:
    model = empty_model(json.loads((path if kind == "shapes" else path / "config.json").read_text()))
    if kind == "shapes":
        return stored_shapes(model)
    window = Window(start, 0)
    if kind == "hf":
        return list(write_hf(path, model, window))
    if kind == "zero3":
        return list(write_zero3(path, model, window, ranks))
    folder = path.with_name(ADAPTER)
    lora = read(json.loads((folder / "adapter_config.json").read_text()))
    base = {name: digest for _, name, *_, digest in write_hf(path, model, window, lora)}
    factors = list(write_adapter(folder, model, window, lora))
    return factors if kind == "peft" else list(merged_by_peft(path, base, lora))


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))))
