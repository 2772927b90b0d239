"""Trainer to read and copy: eight sharding strategies, each able to resume from any other.

    torchrun --nproc-per-node 4 train/simple.py zero3 --output outputs --steps 20
    torchrun --nproc-per-node 3 train/simple.py fsdp2 --output outputs --steps 40     # from step 20

It needs torch, transformers, `ckpt`, and DeepSpeed for zero1, zero2 and zero3. `ckpt` makes the newest checkpoint fit.
You can also start it with srun (train/slurm/simple.sbatch), or alone as one rank. Each rank takes a GPU, with NCCL;
without GPUs it uses gloo.
"""

import argparse
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import ckpt

ZERO = ("zero1", "zero2", "zero3")
STRATEGIES = ("ddp", "fsdp1", "fsdp2", "hsdp", "tp-fsdp", *ZERO)
BATCH, LENGTH, VOCABULARY = 24, 32, 97  # all ranks' batch: losses don't depend on the world size
PEAK, WARMUP, DECAY = 1e-2, 4, 1000  # learning rates; independent of --steps, so runs can be extended

# FSDP1 recommends DCP, DTensor warns that two meshes take two sums, and DeepSpeed still imports distutils.
warnings.filterwarnings("ignore", message="FSDP|Please use DT|When using|`_get_pg|`torch.dis|Multiple ba|.*istutils")
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny Llama, from the newest checkpoint of any strategy.")
    parser.add_argument("strategy", choices=STRATEGIES)
    parser.add_argument("--output", default="outputs", help="folder of the checkpoints (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="the last step (%(default)s)")
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints (%(default)s)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="what is computed in (%(default)s)")
    args = parser.parse_args()
    device = join()
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    make = DeepSpeed if args.strategy in ZERO else Torch
    engine = make(build_model().to(device), args.strategy, args.dtype, device)

    # The newest checkpoint, converted if it does not fit, or None. DeepSpeed loads weights in the dtype named in its
    # files. torch steps fp32 weights, and any other dtype would round them.
    format, dtype = (args.strategy, args.dtype) if args.strategy in ZERO else ("dcp", "fp32")
    folder = ckpt.resume(args.output, format=format, dtype=dtype, missing_ok=True)
    done = engine.load(folder) if folder else 0

    for step in range(done + 1, args.steps + 1):
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = engine.train(batch(step).chunk(engine.readers)[engine.reader].to(device))
        dist.all_reduce(loss)
        say(f"step {step}: loss {loss.item() / dist.get_world_size():.6f}, lr {learning_rate(step):.6f}", flush=True)
        if step % args.save_every == 0 or step == args.steps:
            say(f"saved {engine.save(Path(args.output), step)}", flush=True)
    dist.barrier()  # gloo's threads must release their last tensors, or they block at interpreter exit
    del engine  # DDP's reducer must be destroyed before the group with its threads
    dist.destroy_process_group()


def join() -> torch.device:
    """Join the process group, and return this process's device."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    srun = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS"}
    for name, value in alone.items():
        os.environ.setdefault(name, os.environ.get(srun.get(name, ""), value))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it during import
    dist.init_process_group()
    return device


def build_model() -> LlamaForCausalLM:
    """Return the fp32 model, equal on every rank. Without dropout there are no random states to save."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 56, "intermediate_size": 150, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def batch(step: int) -> torch.Tensor:
    """Return a step's token rows, counting in fives. Real data comes from files, chosen by the step alone."""
    starts = torch.randint(VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return (starts + 5 * torch.arange(LENGTH)) % VOCABULARY


def learning_rate(step: int) -> float:
    """Return a step's rate, with linear warmup and decay. No checkpoint needs to store it."""
    return PEAK * min(step / WARMUP, max(0.1, 1 - step / DECAY))


def build_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with decay for all but norms. Norms are found by name because FSDP1's parameters are flat."""
    norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    others = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95))


class DeepSpeed:
    """Engine for ZeRO: zero1 shards optimizer states, zero2 also gradients, zero3 also weights."""

    def __init__(self, model: Any, strategy: str, dtype: str, device: torch.device) -> None:
        import deepspeed

        deepspeed.utils.logger.setLevel("ERROR")
        config = {
            "train_batch_size": BATCH,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": dtype == "bf16"},
            "zero_optimization": {"stage": int(strategy[-1]), "reduce_bucket_size": 10**7},
            "zero_allow_untested_optimizer": True,  # DeepSpeed's own optimizer would have to be compiled
            "zero_force_ds_cpu_optimizer": False,
        }
        self.optimizer = build_optimizer(model)
        self.engine = deepspeed.initialize(model=model, optimizer=self.optimizer, config=config)[0]
        self.reader, self.readers = dist.get_rank(), dist.get_world_size()

    def train(self, rows: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.engine(input_ids=rows, labels=rows).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach().float()

    def save(self, output: Path, step: int) -> Path:
        self.engine.save_checkpoint(str(output), tag=f"global_step{step}")
        return output / f"global_step{step}"

    def load(self, folder: str) -> int:
        self.engine.load_checkpoint(folder)
        return int(self.engine.global_steps)


class Torch:
    """Engine for torch: ddp replicates, fsdp1 and fsdp2 shard, hsdp shards in halves, tp-fsdp splits matrices too."""

    def __init__(self, model: Any, strategy: str, dtype: str, device: torch.device) -> None:
        self.reader, self.readers = rank, ranks = dist.get_rank(), dist.get_world_size()
        layers, two = list(model.model.layers), 2 if ranks % 2 == 0 else 1
        low = torch.bfloat16 if dtype == "bf16" else torch.float32  # DDP uses autocast instead
        self.autocast = torch.autocast(device.type, low, enabled=strategy == "ddp" and dtype != "fp32")
        if strategy == "ddp":
            model = DistributedDataParallel(model)
        elif strategy == "fsdp1":
            wrap, precision = ModuleWrapPolicy({type(layers[0])}), MixedPrecision(low, reduce_dtype=torch.float32)
            # Flat parameters would mix decaying and other parameters.
            options = {"device_id": device, "use_orig_params": True}
            model = FullyShardedDataParallel(model, auto_wrap_policy=wrap, mixed_precision=precision, **options)
        else:
            grids = {"fsdp2": {"shard": ranks}, "hsdp": {"replicate": two, "shard": ranks // two}}
            grid = grids.get(strategy, {"shard": ranks // two, "tensor": two})
            mesh = dist.init_device_mesh(device.type, tuple(grid.values()), mesh_dim_names=tuple(grid))
            if strategy == "tp-fsdp":
                self.reader, self.readers = rank // two, ranks // two  # ranks sharing a matrix read the same data
                plan: Any = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
                plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
                plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
                for layer in layers:
                    parallelize_module(layer, mesh["tensor"], plan)
                mesh = mesh["shard"]
            for module in (*layers, model):
                fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(low, reduce_dtype=torch.float32))
        self.model, self.optimizer = model, build_optimizer(model)

    def train(self, rows: torch.Tensor) -> torch.Tensor:
        with self.autocast:
            loss: torch.Tensor = self.model(input_ids=rows, labels=rows).loss
        loss.backward()
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach().float()

    def clip(self) -> None:
        if isinstance(self.model, FullyShardedDataParallel):
            self.model.clip_grad_norm_(1.0)
            return
        # torch.nn.utils.clip_grad_norm_ only takes gradients on one mesh; tp-fsdp has two.
        gradients = [parameter.grad for parameter in self.model.parameters()]
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
        whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        scale = min(1.0, 1.0 / (torch.stack(whole).norm().item() + 1e-6))
        for gradient in gradients:
            gradient.mul_(scale)

    def save(self, output: Path, step: int) -> Path:
        dcp.save(self.state(step), checkpoint_id=output / f"step-{step}")
        return output / f"step-{step}"

    def load(self, folder: str) -> int:
        state = self.state(0)
        # The default planner fails on ranks without a part of an FSDP1 tensor.
        dcp.load(state, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(flatten_sharded_tensors=False))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return int(state["train_state"]["step"])

    def state(self, step: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "train_state": {"step": step}}


if __name__ == "__main__":
    main()
