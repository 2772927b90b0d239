"""One run, from model to saved checkpoint. All frameworks are hidden behind Engine."""

import gc
import importlib
import sys
from pathlib import Path

import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from train import folders, launch, models, stopping, truth
from train.config import STRATEGIES, ZERO, Config, UserError
from train.engine import Engine
from train.operations.monitoring import Operations, require_free

# Strategy -> (module, Engine factory). The module imports its framework.
ENGINES = dict.fromkeys(STRATEGIES, ("train.engines.native", "NativeEngine"))
ENGINES |= dict.fromkeys(ZERO, ("train.engines.zero", "ZeroEngine"))
ENGINES |= {"megatron": ("train.megatron.fsdp", "open_engine")}
ENGINES |= {"megatron-deepspeed": ("train.engines.pipeline", "PipelineRun")}


def run(config: Config) -> list[Path]:
    """Return the new checkpoints' folders. Needs a process group."""
    readers = dist.get_world_size()
    if config.strategy in ("megatron", "megatron-deepspeed"):  # ranks sharing a model replica read the same data
        readers = max(1, readers // (config.tp * config.pp))
    if config.batch % (readers * config.accumulate):
        raise UserError(
            f"--batch {config.batch} does not divide into {readers} ranks x {config.accumulate} micro batches"
        )
    require_free(config)
    resumed = folders.find_checkpoint(config) if config.resume else None
    with Operations(config) as beside:
        module, name = ENGINES[config.strategy]
        open_engine = getattr(importlib.import_module(module), name)
        with launch.as_user_error(f"--strategy {config.strategy} does not take these options"):
            model = models.build_model(config)
            engine: Engine = open_engine(model, config)
        try:
            if resumed:
                beside.enter("loading")
                hint = (
                    "\nhint: `ckpt check` finds damage, `ckpt resume` makes it fit other ranks, layouts and "
                    "engines; --model, --dtype and --optimizer must match the run"
                )
                with launch.as_user_error(f"--resume {Path(*resumed)}: it cannot be loaded into this run", hint):
                    engine.load(*resumed)
                    folders.load_random_states(config, *resumed)
            beside.started(engine, resumed)
            return _train(engine, model, config, beside)
        except UserError as error:
            launch.tell(error)  # before close(), so other ranks don't report closing instead
            raise
        finally:
            beside.ended()
            engine.close()
            del engine, model
            gc.collect()


def _train(engine: Engine, model: nn.Module, config: Config, beside: Operations) -> list[Path]:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    shard, num_shards = engine.data_shard
    output = Path(config.output)
    saved: list[Path] = []
    if config.steps == 0 and config.truth:
        truth.record(engine, config, f"step-{engine.step}")
    steps = beside.steps_to_take(engine.step)
    for number in tqdm(range(1, steps + 1), desc=str(output), disable=None if rank == 0 else True):
        mine = beside.next_batch().chunk(num_shards)[shard].to(launch.device())
        loss = engine.train(list(mine.chunk(config.accumulate)))
        own_loss = loss.item()
        dist.all_reduce(loss)
        mean = loss.item() / world_size
        if rank == 0:
            tqdm.write(f"step {engine.step}: loss {mean:.5f}", file=sys.stderr)
        beside.after_step(mean, own_loss)
        ends = stopping.stop_requested() or number == steps
        if ends or (config.save_every and number % config.save_every == 0):
            saved.append(_save(engine, model, config, beside))
        if ends:
            break
    return saved


def _save(engine: Engine, model: nn.Module, config: Config, beside: Operations) -> Path:
    beside.enter("saving")
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    tag = engine.save(folder)
    if dist.get_rank() == 0:
        folders.write_run_files(folder, model, config)
    folders.save_random_states(config, folder, tag)
    if config.truth:
        truth.record(engine, config, tag)
    dist.barrier()
    beside.saved(folder / tag)
    if dist.get_rank() == 0:
        print(f"saved {folder / tag}", flush=True)
    return folder / tag
