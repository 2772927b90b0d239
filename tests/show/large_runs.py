"""Descriptions of production-size checkpoints, without files."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from functools import cache

from ckpt.containers.dcp.tensors import Chunks
from ckpt.plan.checkpoint import MASTER, WEIGHT, Checkpoint, TrainingState
from ckpt.plan.dtypes import BFLOAT16, FLOAT32
from ckpt.plan.tensors import Extent, Shape, Source, Tensor
from converters.deepspeed.flat_groups import InSlots, slot_size

RANKS = 512
#: A Mixture of Experts: its tensors with masters and Adam states are 100,000.
LAYERS, EXPERTS, HIDDEN, INNER = 61, 134, 2048, 768


def parameters() -> Iterator[tuple[str, Shape]]:
    yield "model.embed_tokens.weight", (151936, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (HIDDEN,)
        for name, rows in (("q", 4096), ("k", 512), ("v", 512), ("o", HIDDEN)):
            yield f"{at}.self_attn.{name}_proj.weight", (rows, HIDDEN if name != "o" else 4096)
        yield f"{at}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{at}.mlp.gate.weight", (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
                yield f"{at}.mlp.experts.{expert}.{name}_proj.weight", shape
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (151936, HIDDEN)


def zero3() -> Checkpoint:
    """Return a run with a slot for every parameter on every rank."""
    extents = [Extent.contiguous(f"rank{rank}.pt", 0, FLOAT32, (1 << 36,)) for rank in range(RANKS)]
    return _checkpoint("zero3", lambda shape, at: InSlots(extents, at))


def fsdp2() -> Checkpoint:
    """Return a run where every rank has rows from every parameter, cut like torch's."""
    files = [(f"__{rank}_0.distcp", rank) for rank in range(RANKS)]

    @cache
    def rows(shape: Shape) -> array[int]:
        found, size = array("q"), slot_size(shape[0], RANKS)
        for rank, start in enumerate(range(0, shape[0], size)):
            offsets, sizes = (start, *(0,) * (len(shape) - 1)), (min(size, shape[0] - start), *shape[1:])
            found.extend((rank, 0, *offsets, *sizes))
        return found

    def source(shape: Shape, at: int) -> Source:
        return Chunks(files, FLOAT32, rows(shape))

    return _checkpoint("dcp", source)


def _checkpoint(format: str, source: Callable[[Shape, int], Source]) -> Checkpoint:
    tensors, at = {}, 0
    for fqn, shape in parameters():
        for role in (WEIGHT, MASTER, "exp_avg", "exp_avg_sq"):
            native = BFLOAT16 if role == MASTER else None
            tensors[fqn, role] = Tensor(fqn, role, FLOAT32, shape, source(shape, at), native)
        at += 1 << 16
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    state = TrainingState(step=120_000, zero_stage=3 if format == "zero3" else None)
    return Checkpoint("/runs/moe/step-120000", format, tensors, (), None, None, RANKS, state=state, config=config)
