"""Reshard a run and resume it.

`ckpt.resume` takes a run folder's newest complete checkpoint, reshards it to the current number of ranks, and returns a
folder for the engine to load. If the checkpoint already fits, this is the run's own folder.

    python reshard_and_resume.py RUN WORLD_SIZE
"""

import sys

import ckpt

run, world_size = sys.argv[1], int(sys.argv[2])

checkpoint = ckpt.open(run)
print(f"{run} was written by {checkpoint.world_size} ranks at step {checkpoint.state.step}")

folder = ckpt.resume(run, world_size=world_size)  # under torchrun, the world size is detected
resharded = ckpt.open(folder)
print(f"{folder} is for {resharded.world_size} ranks")

report = ckpt.verify(checkpoint, resharded)
print(report.outcome)
assert report.equal

# trainer.train(resume_from_checkpoint=folder)     HF Trainer, TRL, Axolotl
# engine.load_checkpoint(folder)                   DeepSpeed
