"""The ranks of `tests.support.megatron_runs`: `python -m tests.support.megatron_worker jobs.jsonl RANKS`.

All ranks are forked from a process that has imported the frameworks, which takes longer than most jobs do.  Each line
of the file is a configuration of the trainer:

    megatron, `saves`   trains, saves once for each of `saves` (a folder's name: options of the trainer) into
                        `output/<name>`, with the truth that the engine gathers beside it
    megatron, `resume`  megatron-core loads the folder of one iteration as Megatron-LM does, strictly; the truth that
                        it then gathers goes to `output/truth`
    `loader`            another framework loads: see `tests.support.matrix_loading`
    any other           a run of the trainer

Nothing is imported here: a process that megatron-core spawns when it saves would import it again.
"""

import functools
import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

#: Arguments of Megatron-LM that tell how it saves.
_RECORDED = ("ckpt_format", "use_dist_ckpt", "dist_ckpt_optim_fully_reshardable")


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        jobs = [json.loads(line) for line in file]
    ranks = int(sys.argv[2])
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    import gc
    import socket

    import torch.multiprocessing as mp

    _prepare(jobs)
    gc.collect()
    gc.freeze()  # what is imported is not looked through again whenever an engine is closed
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.environ["MASTER_PORT"] = str(server.getsockname()[1])
        mp.start_processes(_rank, (jobs, ranks, server.fileno()), ranks, start_method="fork")


def _prepare(jobs: list[dict[str, Any]]) -> None:
    """Import what the jobs need, and build what they have in common."""
    for job in jobs:
        if job["strategy"] == "megatron":
            _sizes(*_named(job))
        elif "zero" in job["strategy"]:
            import train.engines.zero
        else:
            import train.engines.native
    import tests.support.megatron_imports  # noqa: F401
    import train.loop  # noqa: F401


def _rank(rank: int, jobs: list[dict[str, Any]], ranks: int, listening: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    mine = {"master_listen_fd": listening} if rank == 0 else {}
    store = dist.TCPStore(host, port, ranks, is_master=rank == 0, use_libuv=True, **mine)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    for job in jobs:
        start, output = time.perf_counter(), job["output"]
        try:
            _run(job)
        except Exception as error:
            error.add_note(f"in the job {job}")
            raise
        dist.barrier()
        if rank == 0:
            print(f"{output}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    dist.destroy_process_group()


def _run(job: dict[str, Any]) -> None:
    from train import loop
    from train.config import Config

    job = dict(job)
    if "loader" in job:
        from tests.support import matrix_loading

        matrix_loading.LOADERS[job.pop("loader")](job)
    elif job["strategy"] != "megatron":
        loop.run(Config(**job))
    elif "saves" in job:
        _train(job, job.pop("saves"))
    else:
        _load(Config(**job))


def _train(job: dict[str, Any], saves: dict[str, dict[str, Any]]) -> None:
    from pathlib import Path

    from train import data
    from train.config import Config
    from train.megatron import args as megatron_args
    from train.megatron.fsdp import open_engine

    config = Config(**job)
    sizes = _sizes(*_named(job))
    engine = open_engine(SimpleNamespace(config=sizes), config)
    shard, num_shards = engine.data_shard
    for _ in range(config.steps):
        sequences = data.batch(engine.sequences, config.batch, config.length, config.seed)
        engine.train(list(sequences.chunk(num_shards)[shard].chunk(config.accumulate)))
    for name, options in saves.items():
        engine.config = Config(**{**job, **options})
        recorded = vars(megatron_args.arguments(sizes, engine.config))
        vars(engine.args).update({option: recorded[option] for option in _RECORDED})
        folder = Path(config.output, name)
        folder.mkdir(parents=True, exist_ok=True)
        engine.save(folder)
        if hasattr(sizes, "num_nextn_predict_layers"):
            sizes.num_nextn_predict_layers = config.mtp_layers
        sizes.save_pretrained(folder)
    _gather(engine, config, [Path(config.output, name) for name in saves])


def _load(config: Any) -> None:
    from pathlib import Path

    from train.megatron import engine as megatron

    engine = megatron.MegatronEngine(_sizes(config.model, config.layers, config.dtype), config)
    engine.load(Path(config.resume).parent, Path(config.resume).name)
    _gather(engine, config, [Path(config.output)])


def _gather(engine: Any, config: Any, folders: list[Any]) -> None:
    from train import launch, truth

    tensors, facts = engine.gather()
    if launch.is_first():
        for folder in folders:
            truth.write(folder / "truth", "truth", config, engine.step, tensors, facts)
    engine.close()


@functools.cache
def _sizes(model: str, layers: int | None, dtype: str) -> Any:
    """transformers' configuration of a model."""
    from train import models
    from train.config import Config

    return models.build_model(Config(model=model, layers=layers, dtype=dtype)).config


def _named(job: dict[str, Any]) -> tuple[str, int | None, str]:
    from train.config import Config

    config = Config(**{name: value for name, value in job.items() if name in ("model", "layers", "dtype")})
    return config.model, config.layers, config.dtype


if __name__ == "__main__":
    main()
