"""Megatron-FSDP: megatron-core's own fully sharded data parallelism.

Set up like in Megatron-LM core_v0.16.1 with --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
(megatron/training/training.py, get_model).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from train import launch
from train.config import Config
from train.megatron.cpu import numbered_device, on_this_machine
from train.megatron.engine import MegatronEngine
from train.truth import megatron as megatron_truth
from train.truth.pieces import Piece, Place, collect


class FsdpEngine(MegatronEngine):
    def _wrap(self, chunks: list[Any]) -> list[Any]:
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

        places = ((place, tensor) for chunk in self.bare for place, tensor, _ in megatron_truth.placed(chunk))
        self.places: dict[torch.Tensor, Place] = {tensor: place for place, tensor in places}
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=self.args.accumulate_allreduce_grads_in_fp32,
            use_distributed_optimizer=True,
            use_megatron_fsdp=True,
            gradient_reduce_div_fusion=launch.on_gpu(),  # gloo does not scale sums
            data_parallel_sharding_strategy=self.args.data_parallel_sharding_strategy,
            bucket_size=self.args.ddp_bucket_size,
        )
        with numbered_device():
            return [FullyShardedDataParallel(self.transformer, ddp, chunk, device=launch.device()) for chunk in chunks]

    def _initialize(self) -> None:
        super()._initialize()
        self.optimizer.optimizer.register_step_pre_hook(give_empty_gradients)

    def gather(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        with on_this_machine():
            tensors = collect(list(pieces(self._buffer, self.places, self.optimizer)))
            tensors |= collect(megatron_truth.model_pieces(self.bare, parameters=False))
        return tensors, self._facts()

    @property
    def _buffer(self) -> Any:
        return self.chunks[0].module.param_and_grad_buffer

    def _named_groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        return named_groups(self._buffer, self.places, self.optimizer)


def open_engine(model: Any, config: Config) -> MegatronEngine:
    return (FsdpEngine if config.saving == "fsdp_dtensor" else MegatronEngine)(model.config, config)


def pieces(buffer: Any, places: Mapping[torch.Tensor, Place], optimizer: Any) -> Iterator[Piece]:
    """Yield this rank's piece of every parameter, master and state. `places` maps parameters before wrapping."""
    stepped = dict(buffer.optimizer_named_parameters)
    for group in buffer.parameter_groups:
        for number, parameter in enumerate(group.params):
            place, sharded = places[parameter], stepped[buffer.param_to_name[parameter]]
            start = sharded.megatron_fsdp_slice.start
            held = {"weight": group.model_weight_buffer.get_item(number, only_shard=True)}
            if group.main_weight_buffer is not None:  # frozen parameters have neither masters nor states
                held["master"] = group.main_weight_buffer.get_item(number, only_shard=True)
            for role, state in optimizer.optimizer.state.get(sharded, {}).items():
                if role != "step":
                    held[role] = state.to_local()
            for role, elements in held.items():
                yield Piece(role, place, start, elements.detach().cpu().reshape(-1).clone())


def named_groups(
    buffer: Any, places: Mapping[torch.Tensor, Place], optimizer: Any
) -> list[tuple[dict[str, Any], list[str]]]:
    names = {sharded: places[sharded.orig_param].name for _, sharded in buffer.optimizer_named_parameters}
    groups = optimizer.optimizer.param_groups
    return [(group, [names[parameter] for parameter in group["params"]]) for group in groups]


def give_empty_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Give parameters without elements on this rank a gradient, so torch's Adam creates states for them.

    Saving is collective over all states. Transformer Engine's Adam creates them without gradients.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
