"""Merge a LoRA adapter into its base.

With the bits of PEFT's own arithmetic, and without the model in memory; it takes `pip install '.[lora]'`. The base is
the one that the adapter's config names, or that the run's checkpoint itself holds.

    python merge_lora.py RUN OUT
"""

import sys

import ckpt
from ckpt.lora import find, merge

run, out = sys.argv[1:3]

adapter = find.open_adapter(run)
base = find.open_base(adapter, None)
conversion = merge.plan([adapter], base)
conversion.run(out)

report = ckpt.verify(base, ckpt.open(out), only="weights")
changed = [result.fqn for result in report.results if result.status == "*"]
print(f"{len(changed)} tensors of {len(report.results)} were changed by the adapter:", *changed, sep="\n  ")
