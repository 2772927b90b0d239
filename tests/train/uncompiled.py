"""A script in a process whose DeepSpeed builds nothing: `python -m tests.train.uncompiled SCRIPT ...`.

It would take minutes of a compiler, for another way to add up on one machine.
"""

import runpy
import sys

import deepspeed

vars(deepspeed.ops)["__compatible_ops__"] = {}

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
