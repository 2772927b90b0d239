"""LLM-jp v4 in Megatron-LM's `torch_dist` with `dp_reshardable`, in sparse files.

    291b    70 layers at PP 6, VPP 2 with the embedding and the loss counted, EP 8 and DP 48: 288 ranks
    332b    80 layers at TP 2, PP 4, VPP 5, EP 8; the real number of ranks is not public, here DP 32: 256

Both are qwen3_moe with 128 experts and Transformer Engine's names. Items, keys, buckets and ranks' shares follow
megatron-core 0.19.2 (transformer/, distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py
`sharded_param_state_dp_reshardable`). The elements are holes in the files: over 4 TB in less than 2 GB.

    python -m benchmarks.megatron_dist_source FOLDER 291b
"""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from math import lcm, prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

HIDDEN, HEADS, HEAD, EXPERTS, INNER, VOCAB = 5120, 80, 128, 128, 2048, 196_608
EP, STEP = 8, 1000
_BF16, _FP32 = torch.bfloat16, torch.float32
_DTYPES = "dtype_(torch.bfloat16, torch.float32)"
_STATES = ("param", "exp_avg", "exp_avg_sq")

Shape = tuple[int, ...]
_EXPERT: dict[str, Shape] = {"linear_fc1.weight": (2 * INNER, HIDDEN), "linear_fc2.weight": (HIDDEN, INNER)}


@dataclass(frozen=True)
class Run:
    """If `counts` is set, the embedding and the loss count as layers."""

    layers: int
    groups: int
    tp: int
    pp: int
    vpp: int
    dp: int
    counts: bool
    batch: int

    @property
    def of_stage(self) -> int:
        return self.tp * self.dp

    @property
    def attention(self) -> dict[str, tuple[Shape, int | None]]:
        """Non-expert tensors of a layer, with the dim sharded by tensor parallelism."""
        return {
            "self_attention.linear_proj.weight": ((HIDDEN, HEADS * HEAD), 1),
            "self_attention.linear_qkv.layer_norm_weight": ((HIDDEN,), None),
            "self_attention.linear_qkv.weight": (((HEADS + 2 * self.groups) * HEAD, HIDDEN), 0),
            "self_attention.q_layernorm.weight": ((HEAD,), None),
            "self_attention.k_layernorm.weight": ((HEAD,), None),
            "pre_mlp_layernorm.weight": ((HIDDEN,), None),
            "mlp.router.weight": ((EXPERTS, HIDDEN), None),
        }

    def layers_of(self, pp: int, vp: int) -> range:
        counted = int(self.counts)
        size, chunk = (self.layers + 2 * counted) // (self.pp * self.vpp), vp * self.pp + pp
        return range(max(0, chunk * size - counted), min(self.layers, (chunk + 1) * size - counted))


RUNS = {"291b": Run(70, 8, 1, 6, 2, 48, True, 2880), "332b": Run(80, 4, 2, 4, 5, 32, False, 2048)}
#: Modules with an extra state per layer, empty without FP8.
_STATEFUL = ("core_attention", "linear_proj", "linear_qkv", "q_layernorm", "k_layernorm")


def config(run: Run) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": run.layers,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": run.groups,
        "head_dim": HEAD,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": INNER,
        "intermediate_size": 16384,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rope_theta": 500000,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def arguments(run: Run) -> Namespace:
    return Namespace(
        num_layers=run.layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        group_query_attention=True,
        num_query_groups=run.groups,
        kv_channels=HEAD,
        ffn_hidden_size=16384,
        moe_ffn_hidden_size=INNER,
        num_experts=EXPERTS,
        moe_layer_freq=1,
        moe_router_topk=8,
        moe_grouped_gemm=True,
        qk_layernorm=True,
        add_bias_linear=False,
        swiglu=True,
        normalization="RMSNorm",
        untie_embeddings_and_output_weights=True,
        padded_vocab_size=VOCAB,
        transformer_impl="transformer_engine",
        tensor_model_parallel_size=run.tp,
        sequence_parallel=run.tp > 1,
        pipeline_model_parallel_size=run.pp,
        virtual_pipeline_model_parallel_size=run.vpp,
        num_virtual_stages_per_pipeline_rank=run.vpp if run.counts else None,
        num_layers_per_virtual_pipeline_stage=None if run.counts else run.layers // (run.pp * run.vpp),
        account_for_embedding_in_pipeline_split=run.counts,
        account_for_loss_in_pipeline_split=run.counts,
        expert_model_parallel_size=EP,
        expert_tensor_parallel_size=1,
        context_parallel_size=1,
        world_size=run.pp * run.of_stage,
        data_parallel_size=run.dp,
        bf16=True,
        fp16=False,
        optimizer="adam",
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        ddp_bucket_size=None,
        ckpt_format="torch_dist",
        consumed_train_samples=STEP * run.batch,
        iteration=STEP,
    )


def dense_numels(run: Run, pp: int, vp: int) -> Iterator[int]:
    """Yield sizes on one tensor-parallel rank, in module order."""
    if (pp, vp) == (0, 0):
        yield VOCAB // run.tp * HIDDEN
    for _ in run.layers_of(pp, vp):
        yield from (prod(shape) // (1 if dim is None else run.tp) for shape, dim in run.attention.values())
    if (pp, vp) == (run.pp - 1, run.vpp - 1):
        yield HIDDEN
        yield VOCAB // run.tp * HIDDEN


def expert_numels(run: Run, pp: int, vp: int) -> Iterator[int]:
    """Yield sizes on one expert-parallel rank: per layer all fc1, then all fc2."""
    for _ in run.layers_of(pp, vp):
        for shape in _EXPERT.values():
            yield from [prod(shape)] * (EXPERTS // EP)


@cache
def _item(shape: Shape, dtype: torch.dtype) -> tuple[bytes, int, bytes]:
    """Return `torch.save`'s bytes before a tensor's elements, the elements' size, and the bytes after them."""
    size = prod(shape) * dtype.itemsize
    with tempfile.TemporaryDirectory() as scratch, torch.serialization.skip_data():
        path = Path(scratch, "archive")  # torch's name for a stream
        torch.save(torch.empty(shape, dtype=dtype), path)
        with path.open("rb") as file:
            head = file.read(4096)
            name = head.index(b"archive/data/0")
            extra = int.from_bytes(head[name - 2 : name], "little")  # aligns the elements to 64 bytes
            start = name + len(b"archive/data/0") + extra
            file.seek(start + size)
            return head[:start], size, file.read()


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save([value], stream)
    return stream.getvalue()


class _Folder:
    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder = folder
        self.ends = [0] * ranks
        self.files = [os.open(folder / f"__{rank}_0.distcp", os.O_CREAT | os.O_WRONLY) for rank in range(ranks)]
        self.stored: dict[dcp.MetadataIndex, _StorageInfo] = {}
        self.known: dict[str, Any] = {}

    def _put(self, rank: int, index: dcp.MetadataIndex, head: bytes, size: int, tail: bytes) -> None:
        at = self.ends[rank]
        # Equal files would be taken for copies.
        os.pwrite(self.files[rank], head + os.urandom(min(size, 8)), at)
        os.pwrite(self.files[rank], tail, at + len(head) + size)
        length = len(head) + size + len(tail)
        self.stored[index] = _StorageInfo(f"__{rank}_0.distcp", at, length)
        self.ends[rank] = at + length

    def value(self, rank: int, key: str, content: bytes) -> None:
        self._put(rank, dcp.MetadataIndex(key), content, 0, b"")
        self.known[key] = dcp.BytesStorageMetadata()

    def part(self, rank: int, key: str, whole: Shape, dtype: torch.dtype, offsets: Shape, sizes: Shape) -> None:
        if key not in self.known:
            properties = dcp.TensorProperties(dtype=dtype)
            self.known[key] = dcp.TensorStorageMetadata(properties, torch.Size(whole), [])
        chunks = self.known[key].chunks
        index = dcp.MetadataIndex(key, torch.Size(offsets), len(chunks))
        chunks.append(dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        self._put(rank, index, *_item(sizes, dtype))

    def finish(self) -> int:
        for file in self.files:
            os.close(file)
        metadata = dcp.Metadata(self.known, {}, self.stored, dcp.StorageMeta("checkpoints"))
        with (self.folder / ".metadata").open("wb") as file:
            pickle.dump(metadata, file)
        (self.folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
        return len(self.stored)


def write(place: Path, run: Run) -> None:
    folder = place / f"iter_{STEP:07d}"
    folder.mkdir(parents=True)
    (place / "latest_checkpointed_iteration.txt").write_text(str(STEP))
    (place / "config.json").write_text(json.dumps(config(run)))
    written = _Folder(folder, run.pp * run.of_stage)
    _model(written, run)
    for pp in range(run.pp):
        first = pp * run.of_stage
        for vp in range(run.vpp):
            for tp in range(run.tp):
                name = f"chained_0.optimizer.distributed.dp_group_idx_{pp * run.tp + tp}"
                ranks = [first + dp * run.tp + tp for dp in range(run.dp)]
                limit = max(40_000_000, 1_000_000 * run.dp) if (pp, vp) == (0, 0) else None
                _buffer(written, name, vp, list(dense_numels(run, pp, vp)), ranks, limit)
            for ep in range(EP):
                name = f"chained_1.optimizer.distributed.dp_group_idx_{pp * EP + ep}"
                ranks = [first + number for number in range(run.of_stage) if number % EP == ep]
                limit = max(40_000_000, 1_000_000 * run.dp) if (pp, vp) == (0, 0) else None
                _buffer(written, name, vp, list(expert_numels(run, pp, vp)), ranks, limit)
    _rest(written, run)
    print(f"{written.finish()} items, {sum(written.ends) / 1e12:.2f} TB")


def _model(written: _Folder, run: Run) -> None:
    empty = _saved(io.BytesIO())
    last = run.pp - 1
    chunks = [(pp, vp) for vp in range(run.vpp) for pp in range(run.pp)]
    stage = [next(pp for pp, vp in chunks if layer in run.layers_of(pp, vp)) for layer in range(run.layers)]
    turn = 0

    def rank(pp: int) -> int:
        nonlocal turn
        turn += 1
        return pp * run.of_stage + turn % run.of_stage

    def put(pp: int, key: str, shape: Shape, dim: int | None, *layer: int) -> None:
        cut = 1 if dim is None else run.tp
        part = tuple(size // (cut if number == dim else 1) for number, size in enumerate(shape))
        for tp in range(cut):
            at = tuple(tp * size if number == dim else 0 for number, size in enumerate(part))
            whole = (run.layers, *shape) if layer else shape
            written.part(rank(pp), key, whole, _BF16, (*layer, *at), (*(1 for _ in layer), *part))

    put(0, "embedding.word_embeddings.weight", (VOCAB, HIDDEN), 0)
    for layer, pp in enumerate(stage):
        for name, (shape, dim) in run.attention.items():
            put(pp, f"decoder.layers.{name}", shape, dim, layer)
        for module in _STATEFUL:
            key = f"decoder.layers.self_attention.{module}._extra_state/shard_{layer}_{run.layers}"
            written.value(rank(pp), key, empty)
        written.value(rank(pp), f"decoder.layers.pre_mlp_layernorm._extra_state/shard_{layer}_{run.layers}", empty)
        for expert in range(EXPERTS):
            home = pp * run.of_stage + (expert * EP // EXPERTS) + EP * (turn % (run.of_stage // EP))
            for name, shape in _EXPERT.items():
                key = f"decoder.layers.mlp.experts.experts.{name}"
                halves = 2 if name.startswith("linear_fc1") else 1  # gate and up rows
                part = (shape[0] // halves, shape[1])
                for half in range(halves):
                    at = (layer, expert, half * part[0], 0)
                    written.part(home, key, (run.layers, EXPERTS, *shape), _BF16, at, (1, 1, *part))
                place = f"{layer}.{expert}_{run.layers}.{EXPERTS}"
                written.value(home, f"{key.removesuffix('.weight')}._extra_state/shard_{place}", empty)
    put(last, "decoder.final_layernorm.weight", (HIDDEN,), None)
    written.value(rank(last), "decoder.final_layernorm._extra_state/shard_0_1", empty)
    put(last, "output_layer.weight", (VOCAB, HIDDEN), 0)
    written.value(rank(last), "output_layer._extra_state/shard_0_1", empty)


def _buffer(written: _Folder, name: str, vp: int, numels: list[int], ranks: list[int], limit: int | None) -> None:
    """Write buckets in reverse parameter order, split over data-parallel ranks."""
    buckets: list[list[tuple[int, int]]] = [[]]
    at = 0
    for numel in reversed(numels):
        at += -at % 64
        buckets[-1].append((at, at + numel))
        at += numel
        if limit is not None and at >= limit:
            buckets.append([])
            at = 0
    for number, places in enumerate(bucket for bucket in buckets if bucket):
        unpadded = places[-1][1]
        local = (unpadded + -unpadded % lcm(len(ranks), 128)) // len(ranks)
        key = f"{name}.gbuf_idx_{vp}.{_DTYPES}.bucket_idx_{number}"
        for position, rank in enumerate(ranks):
            low, high = position * local, min((position + 1) * local, unpadded)
            for start, stop in _cut(places, low, high):
                for state in _STATES:
                    written.part(rank, f"{key}.{state}", (unpadded,), _FP32, (start,), (stop - start,))


def _cut(places: list[tuple[int, int]], low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield the parts between elements `low` and `high`: parameters and gaps."""
    edges = sorted({low, high, *(edge for place in places for edge in place if low < edge < high)})
    yield from pairwise(edges)


def _rest(written: _Folder, run: Run) -> None:
    """Write param groups, random states, and the common state."""
    for number, of_stage in enumerate((run.tp, EP)):
        for group in range(run.pp * of_stage):
            name = f"chained_{number}.optimizer.distributed.dp_group_idx_{group}"
            options = {
                "is_expert_parallel": bool(number),
                "lr_mult": 1.0,
                "is_decoupled_lr": False,
                "max_lr": 4e-4,
                "min_lr": 4e-5,
                "lr": 4e-4,
                "betas": (0.9, 0.95),
                "eps": 1e-8,
                "weight_decay": 0.1,
                "step": STEP,
            }
            decays = (1.0,) if number else (0.0, 1.0)
            content = {"param_groups": [{**options, "wd_mult": decay} for decay in decays]}
            rank = group // of_stage * run.of_stage + group % of_stage
            written.value(rank, f"{name}.optimizer/shard_0_1", _saved(content))
    for pp, tp in product(range(run.pp), range(run.tp)):
        state = {"torch_rng_state": torch.get_rng_state(), "rng_tracker_states": {}}
        written.value(pp * run.of_stage + tp, f"rng_state/shard_{pp}.{tp}_{run.pp}.{run.tp}", _saved([state]))
    common = {
        "args": arguments(run),
        "checkpoint_version": 3.0,
        "iteration": STEP,
        "optimizer": {number: {"param_state_sharding_type": "dp_reshardable"} for number in range(2)},
        "opt_param_scheduler": {"max_lr": 4e-4, "num_steps": STEP * run.batch},
        "content_metadata": {
            "distrib_optim_sharding_type": "dp_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        },
    }
    written.value(0, "common_state/shard_0_1", _saved(common))


if __name__ == "__main__":
    write(Path(sys.argv[1]), RUNS[sys.argv[2]])
