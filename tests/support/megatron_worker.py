"""One rank for `tests.support.megatron_runs`.

A job line for megatron has `saves` (folders by options) or `resume` (truth to `output/truth`), and `loader` (see
`matrix_loading`); other lines are trainer runs.
"""

import functools
import gc
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from train import data, launch, loop, models, truth
from train.config import Config
from train.megatron import args as megatron_args
from train.megatron import engine as megatron
from train.megatron.fsdp import open_engine

#: Megatron-LM arguments that record the save format.
_RECORDED = ("ckpt_format", "use_dist_ckpt", "dist_ckpt_optim_fully_reshardable")


def main() -> None:
    launch.start()
    for line in Path(sys.argv[1]).read_text().splitlines():
        start = time.perf_counter()
        try:
            _run(json.loads(line))
        except Exception as error:
            error.add_note(f"in the job {line}")
            raise
        dist.barrier()
        gc.freeze()  # a run collects garbage, and can skip these modules
        if launch.is_first():
            print(f"{line}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    launch.stop()


def _run(job: dict[str, Any]) -> None:
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
    config = Config(**job)
    sizes = _sizes(config.model, config.layers, config.dtype)
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


def _load(config: Config) -> None:
    engine = megatron.MegatronEngine(_sizes(config.model, config.layers, config.dtype), config)
    assert config.resume
    engine.load(Path(config.resume).parent, Path(config.resume).name)
    _gather(engine, config, [Path(config.output)])


def _gather(engine: Any, config: Config, folders: list[Path]) -> None:
    tensors, facts = engine.gather()
    if launch.is_first():
        for folder in folders:
            truth.write(folder / "truth", "truth", config, engine.step, tensors, facts)
    engine.close()


@functools.cache
def _sizes(model: str, layers: int | None, dtype: str) -> Any:
    """Return transformers' configuration for a model."""
    with torch.device("meta"):
        return models.build_model(Config(model=model, layers=layers, dtype=dtype)).config


if __name__ == "__main__":
    main()
