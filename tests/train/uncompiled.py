"""A script with DeepSpeed's slow builds turned off: `python -m tests.train.uncompiled SCRIPT ...`."""

import runpy
import sys

import deepspeed

vars(deepspeed.ops)["__compatible_ops__"] = {}

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
