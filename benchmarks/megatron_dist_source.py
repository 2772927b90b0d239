"""LLM-jp v4's 291B-A27B as Megatron-LM saves it: `torch_dist`, `dp_reshardable`, 288 ranks, in sparse files.

qwen3_moe of 70 layers and 128 experts at PP 6, VPP 2 with the embedding and the loss counted, EP 8 and DP 48, with
Transformer Engine's names.  Items, keys, buckets and ranks' shares are those of megatron-core 0.19.2 (transformer/,
distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py `sharded_param_state_dp_reshardable`); headers of
items are `torch.save`'s, the metadata are torch's own objects.  The elements are holes in the files: 4 TB that take
less than 2 GB.

    python -m benchmarks.megatron_dist_source FOLDER
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
from functools import cache
from itertools import pairwise
from math import lcm, prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

LAYERS, HIDDEN, HEADS, GROUPS, HEAD, EXPERTS, INNER, VOCAB = 70, 5120, 80, 8, 128, 128, 2048, 196_608
PP, VPP, EP, DP = 6, 2, 8, 48
STEP = 1000
_BF16, _FP32 = torch.bfloat16, torch.float32
_DTYPES = "dtype_(torch.bfloat16, torch.float32)"
_STATES = ("param", "exp_avg", "exp_avg_sq")

Shape = tuple[int, ...]
_ATTENTION: dict[str, Shape] = {
    "self_attention.linear_proj.weight": (HIDDEN, HEADS * HEAD),
    "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
    "self_attention.linear_qkv.weight": ((HEADS + 2 * GROUPS) * HEAD, HIDDEN),
    "self_attention.q_layernorm.weight": (HEAD,),
    "self_attention.k_layernorm.weight": (HEAD,),
    "pre_mlp_layernorm.weight": (HIDDEN,),
    "mlp.router.weight": (EXPERTS, HIDDEN),
}
_EXPERT: dict[str, Shape] = {"linear_fc1.weight": (2 * INNER, HIDDEN), "linear_fc2.weight": (HIDDEN, INNER)}
#: Modules of a layer that have an extra state, without content, as FP8 is not used.
_STATEFUL = ("core_attention", "linear_proj", "linear_qkv", "q_layernorm", "k_layernorm")


def config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
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


def arguments() -> Namespace:
    return Namespace(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        group_query_attention=True,
        num_query_groups=GROUPS,
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
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=PP,
        virtual_pipeline_model_parallel_size=VPP,
        num_virtual_stages_per_pipeline_rank=VPP,
        num_layers_per_virtual_pipeline_stage=None,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
        expert_model_parallel_size=EP,
        expert_tensor_parallel_size=1,
        context_parallel_size=1,
        world_size=PP * DP,
        data_parallel_size=DP,
        bf16=True,
        fp16=False,
        optimizer="adam",
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        ddp_bucket_size=None,
        ckpt_format="torch_dist",
        consumed_train_samples=STEP * 2880,
        iteration=STEP,
    )


def layers_of(pp: int, vp: int) -> range:
    """The layers of a chunk; the embedding counts as one, and the loss."""
    size, chunk = (LAYERS + 2) // (PP * VPP), vp * PP + pp
    return range(max(0, chunk * size - 1), min(LAYERS, (chunk + 1) * size - 1))


def dense_numels(pp: int, vp: int) -> Iterator[int]:
    """Elements of a chunk's dense parameters, in the order of its modules."""
    if (pp, vp) == (0, 0):
        yield VOCAB * HIDDEN
    for _ in layers_of(pp, vp):
        yield from map(prod, _ATTENTION.values())
    if (pp, vp) == (PP - 1, VPP - 1):
        yield HIDDEN
        yield VOCAB * HIDDEN


def expert_numels(pp: int, vp: int) -> Iterator[int]:
    """Elements of a chunk's experts on one expert parallel rank: of a layer first all fc1, then all fc2."""
    for _ in layers_of(pp, vp):
        for shape in _EXPERT.values():
            yield from [prod(shape)] * (EXPERTS // EP)


@cache
def _item(shape: Shape, dtype: torch.dtype) -> tuple[bytes, int, bytes]:
    """What `torch.save` writes of a tensor before its elements, how many bytes these are, and what it writes behind."""
    size = prod(shape) * dtype.itemsize
    with tempfile.TemporaryDirectory() as scratch, torch.serialization.skip_data():
        path = Path(scratch, "archive")  # as torch calls what it writes to a stream
        torch.save(torch.empty(shape, dtype=dtype), path)
        with path.open("rb") as file:
            head = file.read(4096)
            name = head.index(b"archive/data/0")
            extra = int.from_bytes(head[name - 2 : name], "little")  # padding, so that the elements begin at 64 bytes
            start = name + len(b"archive/data/0") + extra
            file.seek(start + size)
            return head[:start], size, file.read()


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save([value], stream)
    return stream.getvalue()


class _Folder:
    """The files of all ranks, being filled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ends = [0] * (PP * DP)
        self.files = [os.open(folder / f"__{rank}_0.distcp", os.O_CREAT | os.O_WRONLY) for rank in range(PP * DP)]
        self.stored: dict[dcp.MetadataIndex, _StorageInfo] = {}
        self.known: dict[str, Any] = {}

    def _put(self, rank: int, index: dcp.MetadataIndex, head: bytes, size: int, tail: bytes) -> None:
        at = self.ends[rank]
        # Files of the same bytes would be taken for copies, and compared.
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


def write(run: Path) -> None:
    folder = run / f"iter_{STEP:07d}"
    folder.mkdir(parents=True)
    (run / "latest_checkpointed_iteration.txt").write_text(str(STEP))
    (run / "config.json").write_text(json.dumps(config()))
    written = _Folder(folder)
    _model(written)
    for pp in range(PP):
        for vp in range(VPP):
            _buffer(written, f"chained_0.optimizer.distributed.dp_group_idx_{pp}", pp, vp, list(dense_numels(pp, vp)))
            for ep in range(EP):
                name = f"chained_1.optimizer.distributed.dp_group_idx_{pp * EP + ep}"
                _buffer(written, name, pp, vp, list(expert_numels(pp, vp)), ep)
    _rest(written)
    print(f"{written.finish()} items, {sum(written.ends) / 1e12:.2f} TB")


def _stage_of(layer: int) -> int:
    return next(pp for pp in range(PP) for vp in range(VPP) if layer in layers_of(pp, vp))


def _model(written: _Folder) -> None:
    """The weights, dealt among the data parallel ranks of their stage."""
    empty = _saved(io.BytesIO())
    stage = [_stage_of(layer) for layer in range(LAYERS)]
    turn = 0

    def rank(pp: int) -> int:
        nonlocal turn
        turn += 1
        return pp * DP + turn % DP

    written.part(rank(0), "embedding.word_embeddings.weight", (VOCAB, HIDDEN), _BF16, (0, 0), (VOCAB, HIDDEN))
    for layer, pp in enumerate(stage):
        for name, shape in _ATTENTION.items():
            at = (layer, *(0 for _ in shape))
            written.part(rank(pp), f"decoder.layers.{name}", (LAYERS, *shape), _BF16, at, (1, *shape))
        for module in _STATEFUL:
            key = f"decoder.layers.self_attention.{module}._extra_state/shard_{layer}_{LAYERS}"
            written.value(rank(pp), key, empty)
        written.value(rank(pp), f"decoder.layers.pre_mlp_layernorm._extra_state/shard_{layer}_{LAYERS}", empty)
        for expert in range(EXPERTS):
            home = pp * DP + (expert * EP // EXPERTS) + EP * (turn % (DP // EP))
            for name, shape in _EXPERT.items():
                key = f"decoder.layers.mlp.experts.experts.{name}"
                halves = 2 if name.startswith("linear_fc1") else 1  # gate and up rows
                part = (shape[0] // halves, shape[1])
                for half in range(halves):
                    at = (layer, expert, half * part[0], 0)
                    written.part(home, key, (LAYERS, EXPERTS, *shape), _BF16, at, (1, 1, *part))
                place = f"{layer}.{expert}_{LAYERS}.{EXPERTS}"
                written.value(home, f"{key.removesuffix('.weight')}._extra_state/shard_{place}", empty)
    written.part(rank(PP - 1), "decoder.final_layernorm.weight", (HIDDEN,), _BF16, (0,), (HIDDEN,))
    written.value(rank(PP - 1), "decoder.final_layernorm._extra_state/shard_0_1", empty)
    written.part(rank(PP - 1), "output_layer.weight", (VOCAB, HIDDEN), _BF16, (0, 0), (VOCAB, HIDDEN))
    written.value(rank(PP - 1), "output_layer._extra_state/shard_0_1", empty)


def _buffer(written: _Folder, name: str, pp: int, vp: int, numels: list[int], ep: int | None = None) -> None:
    """A chunk's buffer: buckets of parameters in reverse order, each dealt evenly among data parallel ranks."""
    ranks = [pp * DP + dp for dp in range(DP) if ep is None or dp % EP == ep]
    limit = max(40_000_000, 1_000_000 * DP) if (pp, vp) == (0, 0) else sum(numels) + 1
    buckets: list[list[tuple[int, int]]] = [[]]
    at = 0
    for numel in reversed(numels):
        at += -at % 64
        buckets[-1].append((at, at + numel))
        at += numel
        if at >= limit:
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
    """The parts of parameters, and of gaps between them, from element `low` to `high`."""
    edges = sorted({low, high, *(edge for place in places for edge in place if low < edge < high)})
    yield from pairwise(edges)


def _rest(written: _Folder) -> None:
    """What is no tensor: param groups of every buffer's ranks, random states, and what all ranks have in common."""
    for number, groups in enumerate((PP, PP * EP)):
        for group in range(groups):
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
            rank = group * DP if not number else group // EP * DP + group % EP
            written.value(rank, f"{name}.optimizer/shard_0_1", _saved(content))
    for pp in range(PP):
        state = {"torch_rng_state": torch.get_rng_state(), "rng_tracker_states": {}}
        written.value(pp * DP, f"rng_state/shard_{pp}.0_{PP}.1", _saved([state]))
    common = {
        "args": arguments(),
        "checkpoint_version": 3.0,
        "iteration": STEP,
        "optimizer": {number: {"param_state_sharding_type": "dp_reshardable"} for number in range(2)},
        "opt_param_scheduler": {"max_lr": 4e-4, "num_steps": STEP * 2880},
        "content_metadata": {
            "distrib_optim_sharding_type": "dp_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        },
    }
    written.value(0, "common_state/shard_0_1", _saved(common))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
