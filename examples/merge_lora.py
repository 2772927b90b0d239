"""Merge a LoRA adapter into its base.

With the bits of PEFT's own arithmetic, and without the model in memory; it takes `pip install '.[lora]'`. The base is
the one that the adapter's config names, or that the run's checkpoint itself holds.

    python merge_lora.py RUN OUT
"""

import sys

import ckpt

run, out = sys.argv[1:3]

merged = ckpt.merge_lora(run, out)
report = ckpt.verify(merged.conversion.source, out, only="weights")
changed = [result.fqn for result in report.results if result.status == "*"]
print(f"{len(changed)} tensors of {len(report.results)} were changed by the adapter:", *changed, sep="\n  ")
