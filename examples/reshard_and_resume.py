"""Reshard a run and resume it.

The newest complete checkpoint of a run folder, for as many ranks as there are now. `ckpt.resume` does both in one call
and returns a folder that the engine loads, which is the run's own where that fits already.

    python reshard_and_resume.py RUN WORLD_SIZE
"""

import sys

import ckpt

run, world_size = sys.argv[1], int(sys.argv[2])

checkpoint = ckpt.open(run)
print(f"{run} was written by {checkpoint.world_size} ranks at step {checkpoint.state.step}")

folder = ckpt.resume(run, world_size=world_size)  # under torchrun, the world size is found out
resharded = ckpt.open(folder)
print(f"{folder} is for {resharded.world_size} ranks")

report = ckpt.verify(checkpoint, resharded)
print(report.outcome)
assert report.equal

# trainer.train(resume_from_checkpoint=folder)     HF Trainer, TRL, Axolotl
# engine.load_checkpoint(folder)                   DeepSpeed
