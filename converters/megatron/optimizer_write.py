"""Writer for the optimizer's state in Megatron-LM's `torch` format, described in `optimizer_read`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt.containers.torchfile.write import FromSource, NewTensor, state_number, with_gaps
from ckpt.plan.checkpoint import Key
from ckpt.plan.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from converters.megatron.buffers import bucket_sizes, by_buffer, stored_buffer
from converters.megatron.chunks import Chunk, ChunkTensor
from converters.megatron.optimizer import ADAM, KINDS, Group, MegatronOptimizer
from converters.names.megatron.model.axes import Rank
from converters.names.megatron.model.spelling import is_expert


def new_tensor(tensor: ChunkTensor, key: Key, dtype: DType) -> NewTensor:
    return NewTensor(dtype, tensor.shape, tuple(FromSource(key, p.box, p.offset) for p in tensor.pieces))


class RankOptimizers(MegatronOptimizer):
    kinds = KINDS

    def _split(self, chunks: Sequence[Chunk]) -> list[tuple[list[Group], list[tuple[int, ChunkTensor]]]]:
        everything = [(c.vp, p) for c in chunks for p in c.tensors if p.fqn in self.masters]
        dense = [(vp, p) for vp, p in everything if not (self.apart and is_expert(p.fqn))]
        groups = [group for group in self.groups if not group.expert]
        parts = [(groups, dense)]
        if self.args.get("overlap_param_gather_with_optimizer_step"):
            parts = [(groups, [one for one in dense if one[0] == 0]), (groups, [one for one in dense if one[0] > 0])]
        if self.apart:
            experts = [group for group in self.groups if group.expert]
            parts.append((experts, [(vp, p) for vp, p in everything if is_expert(p.fqn)]))
        return parts

    def of_rank(self, chunks: Sequence[Chunk]) -> Any:
        contents: list[dict[str, Any]] = []
        for groups, members in self._split(chunks):
            if self.distributed:  # distrib_optimizer.py, `state_dict`
                contents.append({"optimizer": {"param_groups": [dict(group.options) for group in groups]}})
                contents[-1] |= self.scaler
            else:
                contents.append(self._plain(groups, [one for _, one in members]))
        return contents[0] if len(contents) == 1 else contents

    def _plain(self, groups: Sequence[Group], placed: Sequence[ChunkTensor]) -> dict[str, Any]:
        """Follow `Float16OptimizerWithFloat16Params.state_dict` and `FP32Optimizer.state_dict`."""
        state: dict[int, dict[str, Any]] = {}
        masters: list[list[Any]] = []
        listed = []
        identity = 0
        for group in groups:
            members = [one for one in placed if self.kind(one.name, one.fqn, len(one.shape)) == group.kind]
            ids = list(range(identity, identity + len(members)))
            identity += len(members)
            listed.append({**group.options, "params": ids})
            halves = []
            for number_, one in zip(ids, members, strict=True):
                values = self._state_of(one, "step" in group.options)
                if values:
                    state[number_] = values
                if self.model.chosen[one.fqn].dtype in (BFLOAT16, FLOAT16):
                    halves.append(self.new_tensor(one, (one.fqn, self.masters[one.fqn].role), FLOAT32))
            masters.append(halves)
        inner = {"state": state, "param_groups": listed}
        if not any(choice.dtype in (BFLOAT16, FLOAT16) for choice in self.model.chosen.values()):
            return inner
        return {"optimizer": inner, **self.scaler, "fp32_from_fp16_params": masters}

    def _state_of(self, one: ChunkTensor, step_in_group: bool) -> dict[str, Any]:
        values = {
            name: state_number(name, by_fqn[one.fqn])
            for name, by_fqn in self.model.checkpoint.state.scalars.items()
            if one.fqn in by_fqn and not (name == "step" and step_in_group)
        }
        states = self.states[one.fqn].items()
        return values | {role: self.new_tensor(one, (one.fqn, role), tensor.dtype) for role, tensor in states}

    def new_tensor(self, one: ChunkTensor, key: Key, dtype: DType) -> Any:
        return new_tensor(one, key, dtype)

    def distributed_state(self, rank: Rank, chunks: Sequence[Chunk]) -> Any:
        """Return a rank's `distrib_optim.pt`: None if another rank with the same data gathers it."""
        contents = []
        for groups, members in self._split(chunks):
            expert = any(group.expert for group in groups)
            gathers = rank.in_stage < (self.model.grid.etp * self.model.grid.ep if expert else self.model.grid.tp)
            contents.append(self._buffers(rank, chunks, members) if gathers else None)
        return contents[0] if len(contents) == 1 else contents

    def _buffers(
        self, rank: Rank, chunks: Sequence[Chunk], members: Sequence[tuple[int, ChunkTensor]]
    ) -> dict[Any, Any]:
        """Follow distrib_optimizer.py, `get_parameter_state_dp_zero`."""
        content: dict[Any, Any] = {"buckets_coalesced": True}
        buffers = by_buffer((vp, self.model.chosen[placed.fqn].dtype, placed) for vp, placed in members)
        for index, (vp, dtype, ones) in enumerate(buffers):
            numel = sum(placed.numel for placed in chunks[vp].tensors)
            size = next(bucket_sizes(self.args, rank.pp, vp, numel))
            buffer = stored_buffer([one.numel for one in ones], [one.shared for one in ones], size)
            reduced = FLOAT32 if self.args.get("accumulate_allreduce_grads_in_fp32", True) else dtype
            tensors: dict[str, Any] = {}
            for name in ("param", *ADAM):
                fill = []
                for start, one in zip(buffer.starts, ones, strict=True):
                    key = one.fqn, self.masters[one.fqn].role if name == "param" else name
                    fill += [FromSource(key, piece.box, start + piece.offset) for piece in one.pieces]
                tensors[name] = NewTensor(FLOAT32, (buffer.numel,), tuple(with_gaps(fill, buffer.numel)))
            content[index] = {(dtype, reduced): tensors | {"numel_unpadded": buffer.numel}}
        return content
