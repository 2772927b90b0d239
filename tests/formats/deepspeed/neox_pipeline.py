"""DeepSpeed's pipeline engine around GPT-NeoX layers.

Run `python -m tests.formats.deepspeed.neox_pipeline SIZES FOLDER OUTPUT` on each stage. SIZES is JSON. OUTPUT/RANK.pt
gets state and logits. Names come from EleutherAI/gpt-neox, gpt2_model.py and transformer.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils import safe_get_full_optimizer_state
from torch import nn

from train import launch
from train.engines.pipeline_layers import MLP, Attention, Embedding, Linear, Norm, Sizes, loss

ROLES = ("exp_avg", "exp_avg_sq")
INPUT = torch.arange(24).view(2, 12)


class ParallelTransformerLayerPipe(nn.Module):
    def __init__(self, of: Sizes) -> None:
        super().__init__()
        self.input_layernorm = Norm("in.", of)
        self.attention = Attention("attention.", of)
        self.post_attention_layernorm = Norm("post.", of)
        self.mlp = MLP("mlp.", of)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.attention(self.input_layernorm(x)) + self.mlp(self.post_attention_layernorm(x))
        return y


class NormPipe(nn.Module):
    def __init__(self, of: Sizes) -> None:
        super().__init__()
        self.norm = Norm("norm.", of)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(x)


class ParallelLinearPipe(nn.Module):
    def __init__(self, of: Sizes) -> None:
        super().__init__()
        self.final_linear = Linear("final_linear", of.vocabulary, of.hidden, "rows", False, of)

    def forward(self, x: torch.Tensor) -> Any:
        return self.final_linear(x)


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def main() -> None:
    sizes, folder, output = json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    launch.start()
    deepspeed.init_distributed("gloo")
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    of = Sizes(**sizes, tp=1, rank=0, group=alone)
    blocks = [LayerSpec(ParallelTransformerLayerPipe, of) for _ in range(of.layers)]
    layers = [LayerSpec(Embedding, of), same, *blocks, same, LayerSpec(NormPipe, of), LayerSpec(ParallelLinearPipe, of)]
    module = PipelineModule(
        layers, num_stages=dist.get_world_size(), loss_fn=loss, partition_method="type:transformer", seed_layers=False
    )
    trained = any(Path(folder).rglob("*_optim_states.pt"))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": int(trained)},
    }
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)
    loaded, client = engine.load_checkpoint(
        folder, load_optimizer_states=trained, load_lr_scheduler_states=trained, load_module_only=not trained
    )
    assert loaded is not None
    held = {"client": dict(client), "state": dict(engine.module.state_dict())}
    if trained:  # the engine links loaded states only in a step
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for role in ROLES if trained else ():
        held[role] = {fqn: safe_get_full_optimizer_state(p, role) for fqn, p in engine.module.named_parameters()}
    if dist.get_world_size() == 1:
        with torch.no_grad():
            held["logits"] = engine.module(INPUT)
    output.mkdir(parents=True, exist_ok=True)
    torch.save(held, output / f"{dist.get_rank()}.pt")
    launch.stop()


if __name__ == "__main__":
    main()
