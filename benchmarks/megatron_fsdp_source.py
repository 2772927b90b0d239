"""Megatron-FSDP checkpoint with DeepSeek-V3's names and tiny sizes: about a million items, almost no bytes.

For every parameter Megatron-FSDP stores the tensor, two states, a step and eighteen param group options, each as an
item (see `fixtures/megatron-fsdp`; its training state is used here). Ranks take turns with the items, and each tensor
with several rows is cut between two ranks.

    python -m benchmarks.megatron_fsdp_source FOLDER [NUM_LAYERS]
"""

from __future__ import annotations

import io
import pickle
import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import cache
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

NUM_LAYERS, NUM_EXPERTS, NUM_RANKS = 61, 256, 64
_DENSE = 3  # first layers, without experts
_HIDDEN, _INNER, _VOCAB, _HEADS, _RANK = 16, 4, 64, 4, 8
_OPTIONS = {
    "is_expert_parallel": False,
    "default_config": True,
    "wd_mult": 1.0,
    "lr_mult": 1.0,
    "is_decoupled_lr": False,
    "max_lr": 1e-3,
    "min_lr": 1e-4,
    "lr": 7e-4,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}

Shape = tuple[int, ...]


def shapes(num_layers: int) -> Iterator[tuple[str, Shape]]:
    yield "embedding.word_embeddings.weight", (_VOCAB, _HIDDEN)
    for i in range(num_layers):
        layer = f"decoder.layers.{i}"
        attention = f"{layer}.self_attention"
        yield f"{layer}.input_layernorm.weight", (_HIDDEN,)
        yield f"{attention}.linear_q_down_proj.weight", (_RANK, _HIDDEN)
        yield f"{attention}.linear_q_up_proj.layer_norm_weight", (_RANK,)
        yield f"{attention}.linear_q_up_proj.weight", (_HEADS * 6, _RANK)
        yield f"{attention}.linear_kv_down_proj.weight", (_RANK + 2, _HIDDEN)
        yield f"{attention}.linear_kv_up_proj.layer_norm_weight", (_RANK,)
        yield f"{attention}.linear_kv_up_proj.weight", (_HEADS * 8, _RANK)
        yield f"{attention}.linear_proj.weight", (_HIDDEN, _HEADS * 4)
        yield f"{layer}.pre_mlp_layernorm.weight", (_HIDDEN,)
        if i < _DENSE:
            yield from _mlp(f"{layer}.mlp", 4 * _INNER)
            continue
        yield f"{layer}.mlp.router.weight", (NUM_EXPERTS, _HIDDEN)
        for expert in range(NUM_EXPERTS):
            yield from _mlp(f"{layer}.mlp.experts.local_experts.{expert}", _INNER)
        yield from _mlp(f"{layer}.mlp.shared_experts", _INNER)
    yield "decoder.final_layernorm.weight", (_HIDDEN,)
    yield "output_layer.weight", (_VOCAB, _HIDDEN)


def _mlp(name: str, inner: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.linear_fc1.weight_w", (inner, _HIDDEN)
    yield f"{name}.linear_fc1.weight_v", (inner, _HIDDEN)
    yield f"{name}.linear_fc2.weight", (_HIDDEN, inner)


@cache
def _saved_tensor(shape: Shape) -> bytes:
    return _saved(torch.rand(shape))


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def write(folder: Path, num_layers: int = NUM_LAYERS) -> None:
    folder.mkdir(parents=True)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text(folder.name.removeprefix("iter_").lstrip("0"))
    files = [(folder / f"__{rank}_0.distcp").open("wb") for rank in range(NUM_RANKS)]
    results: list[dict[dcp.MetadataIndex, _StorageInfo]] = [{} for _ in files]
    described: list[dict[str, Any]] = [{} for _ in files]  # by the rank with the first part
    paths: dict[str, tuple[str | int, ...]] = {}
    ranks = cycle(range(NUM_RANKS))

    def put(key: str, content: bytes, **where: Any) -> int:
        rank = next(ranks)
        info = _StorageInfo(f"__{rank}_0.distcp", files[rank].tell(), len(content))
        # Ranks report separate objects, so each name is a separate string, too.
        results[rank][dcp.MetadataIndex("".join([*key]), **where)] = info
        files[rank].write(content)
        return rank

    def tensor(path: tuple[str | int, ...], shape: Shape) -> None:
        key = paths_of(path)
        cuts = (0, shape[0] // 2, shape[0]) if len(shape) > 1 else (0, *shape[:1])
        parts = [
            (torch.Size((low, *(0 for _ in shape[1:]))), torch.Size((high - low, *shape[1:])))
            for low, high in pairwise(cuts)
        ] or [(torch.Size(()), torch.Size(()))]
        chunks = [dcp.ChunkStorageMetadata(*part) for part in parts]
        properties = dcp.TensorProperties(dtype=torch.float32)
        puts = [
            put(key, _saved_tensor(sizes), offset=torch.Size([*offsets]), index=number)
            for number, (offsets, sizes) in enumerate(parts)
        ]
        described[puts[0]][key] = dcp.TensorStorageMetadata(properties, torch.Size(shape), chunks)

    def value(path: tuple[str | int, ...], content: bytes) -> None:
        key = paths_of(path)
        described[put(key, content)][key] = dcp.BytesStorageMetadata()

    def paths_of(path: tuple[str | int, ...]) -> str:
        key = ".".join(map(str, path))
        paths["".join([*key])] = path
        return key

    args = {
        "num_layers": num_layers,
        "hidden_size": _HIDDEN,
        "num_experts": NUM_EXPERTS,
        "swiglu": True,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 8,
        "world_size": NUM_RANKS,
        "bf16": True,
        "fp16": False,
        "ckpt_format": "fsdp_dtensor",
        "use_megatron_fsdp": True,
    }
    common = {"args": Namespace(**args), "checkpoint_version": 3.0, "iteration": 2}
    for name, content in common.items():
        value((name,), _saved(content))
    options = {name: _saved(content) for name, content in _OPTIONS.items()}
    parameters = {f"module.module.module.{name}": shape for name, shape in shapes(num_layers)}
    for name, shape in parameters.items():
        tensor(("model", name.removeprefix("module.module.")), shape)
    for name, shape in parameters.items():
        for state in ("exp_avg", "exp_avg_sq"):
            tensor(("optimizer", "state", name, state), shape)
        tensor(("optimizer", "state", name, "step"), ())
    for name in parameters:
        for option, content in options.items():
            value(("optimizer", "param_to_group_meta", name, option), content)
    for file in files:
        file.close()
    stored = {index: info for one in results for index, info in one.items()}
    known = {key: what for one in described for key, what in one.items()}
    metadata = dcp.Metadata(known, paths, stored, dcp.StorageMeta(folder))
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)
    print(f"{len(stored)} items")


if __name__ == "__main__":
    write(Path(sys.argv[1]), *map(int, sys.argv[2:]))
