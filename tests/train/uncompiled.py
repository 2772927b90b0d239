"""DeepSpeed without its slow builds, and then a script: `python -m tests.train.uncompiled SCRIPT ...`."""

import runpy
import sys

import deepspeed

vars(deepspeed.ops)["__compatible_ops__"] = {}

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
