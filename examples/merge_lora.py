"""Merge a LoRA adapter into its base.

The result equals PEFT's own arithmetic bit for bit, without loading the model into memory. It needs `pip install
'.[lora]'`. The base is named in the adapter's config, or is part of the run's checkpoint.

    python merge_lora.py RUN OUT
"""

import sys

import ckpt

run, out = sys.argv[1:3]

merged = ckpt.merge_lora(run, out)
report = ckpt.verify(merged.conversion.source, out, only="weights")
changed = [result.fqn for result in report.results if result.status == "*"]
print(f"{len(changed)} tensors of {len(report.results)} were changed by the adapter:", *changed, sep="\n  ")
