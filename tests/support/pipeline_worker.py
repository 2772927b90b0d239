"""One rank for `tests.support.pipeline_runs`: a line is a trainer run.

With 0 `steps` it loads `resume` and gathers the truth.
"""

import gc
import sys
import time
from pathlib import Path

from train import folders, launch, loop, models, truth
from train.config import Config, read_jobs
from train.engines import pipeline


def main() -> None:
    launch.start()
    for job in read_jobs(Path(sys.argv[1])):
        start = time.perf_counter()
        if job.steps:
            loop.run(job)
        else:
            _load(job)
        gc.freeze()  # finished engines leave no garbage, so later collections can skip their objects
        if launch.is_first():
            print(f"{job.output}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    launch.stop()


def _load(config: Config) -> None:
    model, output = models.build_model(config), Path(config.output)
    folder, tag = folders.find_checkpoint(config)
    engine = pipeline.PipelineRun(model, config)
    try:
        if any((folder / tag).glob("*_optim_states.pt")):
            engine.load(folder, tag)
        else:  # like Megatron-DeepSpeed under --no-load-optim
            engine.engine.load_checkpoint(str(folder), tag, load_optimizer_states=False, load_lr_scheduler_states=False)
        output.mkdir(parents=True, exist_ok=True)
        if config.save_every:
            engine.save(output)
        tensors, facts = engine.gather()
        if launch.is_first():
            model.config.save_pretrained(output)
            truth.write(output / "truth", "truth", config, engine.step, tensors, facts)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
