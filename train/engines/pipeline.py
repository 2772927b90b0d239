"""DeepSpeed pipelines with tensor-parallel layers under ZeRO-1 or BF16_Optimizer: Megatron-DeepSpeed's 3-D runs."""

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from train import launch, truth
from train.config import Config, UserError
from train.data import VOCABULARY
from train.engines import pipeline_layers
from train.engines.zero import DeepSpeedEngine, adam_step, decide_on_fp16, ds_config, fragment, relink, state_names
from train.models import DTYPES
from train.optimizers import build_scheduler, param_groups
from train.truth import pieces
from train.truth.pieces import Piece

TRACKER = "latest_checkpointed_iteration.txt"


class PipelineRun(DeepSpeedEngine):
    """DeepSpeed's PipelineEngine on tensor-parallel layers. The model argument only supplies sizes."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        import deepspeed  # its import reads variables set in train.engines.zero
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        world_size = dist.get_world_size()
        if world_size % (config.tp * config.pp):
            raise UserError(f"--tp {config.tp} --pp {config.pp} do not divide {world_size} ranks")
        self.config = config
        self.dp = world_size // (config.tp * config.pp)
        deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)  # reuses the existing process group
        topology = PipeModelDataParallelTopology(num_pp=config.pp, num_mp=config.tp, num_dp=self.dp)
        self.place = topology.get_coord(dist.get_rank())
        sharing = topology.get_axis_comm_lists("model") or [[rank] for rank in range(world_size)]
        group, _ = dist.new_subgroups_by_enumeration(sharing)
        decide_on_fp16(config)
        self.sizes = pipeline_layers.sizes(config, model, self.place.model, group)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # it prints the pipeline plan
            module = deepspeed.pipe.PipelineModule(
                pipeline_layers.layers(self.sizes, deepspeed.pipe),
                topology=topology,
                loss_fn=pipeline_layers.loss,
                partition_method="type:transformer",
            )
            groups = param_groups(module, config)
            options = ds_config(dataclasses.replace(config, strategy="zero1", steps=1), groups)
            if config.dtype == "bf16":  # selects BF16_Optimizer over ZeRO-1
                options.setdefault("data_types", {"grad_accum_dtype": "fp32"})
            self.engine, self.optimizer, _, _ = deepspeed.initialize(
                model=module,
                model_parameters=groups,
                lr_scheduler=build_scheduler(config) if config.scheduler == "torch" else None,
                config=options,
            )

    @property
    def data_shard(self) -> tuple[int, int]:
        return int(self.place.data), self.dp

    def train(self, micro_batches: list[torch.Tensor]) -> torch.Tensor:
        """Return the batch's mean loss, equal on every rank."""
        loss: torch.Tensor = self.engine.train_batch(iter([(batch, batch) for batch in micro_batches]))
        return loss.detach().float().clone()

    @torch.no_grad()
    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the unpadded vocabulary's logits, in the model's dtype."""
        self.engine.reset_activation_shape()
        _, found = self.engine.eval_batch(
            iter([(input_ids, input_ids)]), return_logits=True, bcast_loss=False, num_micro_batches=1
        )
        self.engine.reset_activation_shape()
        if self.place.pipe == self.config.pp - 1:
            logits = found[0] if isinstance(found, (list, tuple)) else found
            logits = logits.detach().float().contiguous()
        else:
            logits = torch.empty((*input_ids.shape, self.sizes.vocabulary), device=launch.device())
        dist.broadcast(logits, dist.get_world_size() - 1)
        return logits[..., :VOCABULARY].to(DTYPES[self.config.dtype])

    def save(self, folder: Path) -> str:
        """Save like Megatron-DeepSpeed, with the run's arguments and Megatron's tracker file."""
        tag = f"global_step{self.step}"
        self.engine.save_checkpoint(
            str(folder),
            tag=tag,
            client_state={
                "iteration": self.step,
                "args": self.args(),
                "checkpoint_version": 3.0,
                "tokens": self.sequences * self.config.length,
            },
        )
        if dist.get_rank() == 0:
            (folder / TRACKER).write_text(str(self.step))
        return tag

    def args(self) -> argparse.Namespace:
        of, config = self.sizes, self.config
        return argparse.Namespace(
            num_layers=of.layers,
            hidden_size=of.hidden,
            ffn_hidden_size=of.ffn,
            num_attention_heads=of.heads,
            num_key_value_heads=of.kv_heads,
            kv_channels=of.head_dim,
            padded_vocab_size=of.vocabulary,
            make_vocab_size_divisible_by=config.vocab_multiple,
            max_position_embeddings=128,
            seq_length=config.length,
            untie_embeddings_and_output_weights=not of.tied,
            add_bias_linear=of.bias,
            swiglu=of.gated,
            normalization="layernorm" if of.layer_norm else "rmsnorm",
            layernorm_epsilon=of.epsilon,
            use_rotary_position_embeddings=True,
            tensor_model_parallel_size=config.tp,
            pipeline_model_parallel_size=config.pp,
            data_parallel_size=self.dp,
            world_size=dist.get_world_size(),
            bf16=config.dtype == "bf16",
            fp16=config.dtype == "fp16",
            params_dtype=next(self.engine.module.parameters()).dtype,
            iteration=self.step,
            consumed_train_samples=self.sequences,
        )

    def gather(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors = pieces.collect(list(self._pieces()))
        facts = {
            "ties": {"output_layer.weight": "embedding.word_embeddings.weight"} if self.sizes.tied else {},
            "frozen": [],
            "param_groups": self._described_groups(),
            "adam_step": adam_step(self.engine),
            "vocab_size": VOCABULARY,
            "layout": {"tp": self.config.tp, "pp": self.config.pp, "dp": self.dp},
        }
        return tensors, facts

    def _pieces(self) -> Iterator[Piece]:
        relink(self.optimizer)
        for parameter in self.engine.module.parameters():
            yield Piece("weight", parameter.place, 0, parameter.detach().flatten().cpu().clone())
            for state in (None, *state_names(self.engine)):
                if piece := fragment(parameter, parameter.place, state):
                    yield piece

    def _described_groups(self) -> list[dict[str, Any]]:
        members = getattr(self.optimizer, "bf16_groups", None) or self.optimizer.bit16_groups
        names = [[parameter.place.name for parameter in group] for group in members]
        mine = truth.describe_groups(self.optimizer.param_groups, names)
        return truth.merged_groups(
            mine, lambda _, group: repr(sorted((k, v) for k, v in group.items() if k != "names"))
        )
