"""One rank of `tests.megatron_runs`: trains and saves with the trainer's Megatron engine, or loads and gathers.

Each line of the file of jobs is a configuration of the trainer.  `resume` names the checkpoint of one iteration, which
megatron-core loads as Megatron-LM does: `load_state_dict` of every chunk, strictly, then of the optimizer, then its
parameter state.  What is written is the truth that the engine gathers, and with `steps` a checkpoint.
"""

import sys
import time
from pathlib import Path
from typing import Any

from train import data, launch, megatron, models, truth
from train.config import Config, read_jobs


def main() -> None:
    launch.start()
    for job in read_jobs(Path(sys.argv[1])):
        start = time.perf_counter()
        _run(job)
        if launch.is_first():
            print(f"{job.output}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    launch.stop()


def _run(config: Config) -> None:
    model = models.build_model(config)
    engine = megatron.open_engine(model, config)
    output = Path(config.output)
    try:
        if config.resume:
            _hide_steps(engine.optimizer)
            engine.load(Path(config.resume).parent, Path(config.resume).name)
        shard, num_shards = engine.data_shard
        for _ in range(config.steps):
            sequences = data.batch(engine.sequences, config.batch, config.length, config.seed)
            engine.train(list(sequences.chunk(num_shards)[shard].chunk(config.accumulate)))
        if config.steps:
            output.mkdir(parents=True, exist_ok=True)
            engine.save(output)
        tensors, facts = engine.gather()
        if launch.is_first():
            if config.steps:
                model.config.save_pretrained(output)
            truth.write(output / "truth", "truth", config, engine.step, tensors, facts)
    finally:
        engine.close()


def _hide_steps(optimizer: Any) -> None:
    """Let the distributed optimizer load its states where torch's AdamW stands in for the fused one of GPUs.

    AdamW counts steps in a state of each parameter, the fused one in the param group.  megatron-core 0.16.1 looks for
    whatever states there are in the file (`_set_main_param_and_optimizer_states`), and fails at this one.
    """
    load = optimizer.load_parameter_state

    def load_without_steps(*args: Any, **options: Any) -> None:
        states = [state for one in optimizer.chained_optimizers for state in one.optimizer.state.values()]
        steps = [state.pop("step") for state in states]
        load(*args, **options)
        for state, step in zip(states, steps, strict=True):
            state["step"] = step

    optimizer.load_parameter_state = load_without_steps


if __name__ == "__main__":
    main()
