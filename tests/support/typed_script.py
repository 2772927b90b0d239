"""A user's script with all of ckpt's Python API: mypy checks it, and a test runs it.

python typed_script.py RUN ADAPTER OUT CONFIG
"""

from __future__ import annotations

import sys
from pathlib import Path

import ckpt
from ckpt.errors import UsageError

run, adapter, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])

checkpoint = ckpt.open(run)
name = next(iter(checkpoint))
rows = {fqn: tensor.shape for fqn, tensor in checkpoint.items()}
assert rows[name] == checkpoint[name].shape and len(checkpoint.values()) == len(rows)
first: float = checkpoint[name].numpy().reshape(-1)[0]
print(checkpoint.format, checkpoint.world_size, checkpoint.state.step, first)

planned = ckpt.plan(run, "hf", dtype="bf16")
print(planned, planned.files, planned.peak_buffers)
model = ckpt.convert(run, "hf", out / "hf", dtype="bf16")
resharded = ckpt.convert(checkpoint, "zero3", out / "zero3", world_size=3)
print(model.path, resharded.conversion.plan.total_bytes, sorted(resharded.to_json()))

report = ckpt.verify(run, resharded.path)
assert report.equal and not report.of_kind("values") and report.exit_code == 0
states = ckpt.verify(run, resharded.path, run=True)
assert states.equal, states.differences
written = ckpt.verify(resharded.path)
assert written.good, written.problems

digests = ckpt.hash(run, dtype="bf16", workers=1)
assert digests.whole["weights"] == ckpt.hash(model.path).whole["weights"]

whole = ckpt.check(run, every_byte=True)
assert whole.whole, [problem for one in whole.checkpoints for problem in one.problems]
print(ckpt.inspect(run, tensors=True).checkpoint.notes)

needed = ckpt.estimate(run, gpus=8, gpu_memory="24GB", strategy=["zero3", "fsdp2"], optimizer="adamw_8bit")
print([row.title for row in needed.rows], needed.suggestions)
print([one.name for one in ckpt.formats() if one.carries_optimizer])

merged = ckpt.merge_lora(adapter, out / "merged")
assert Path(merged.path).is_dir()

folder: str = ckpt.resume(run, world_size=2)
begun: str | None = ckpt.resume(out / "nothing", missing_ok=True)
assert Path(folder).is_dir() and begun is None
callback = ckpt.TrainerCallback(to="hf", verify=True, dtype="bf16")
print(callback.on_save)
try:
    ckpt.push(out / "hf", private=True)
except UsageError as error:
    print(error.what, error.hint)
