"""One of several processes that quantize models together.

Arguments: a JSON list of [model, format, method], and a folder. Each process uses another number of threads.
"""

from __future__ import annotations

import json
import sys

import ckpt
from ckpt.processes.launch import joined, launch


def main() -> None:
    cases, folder = sys.argv[1:]
    with joined(launch()) as group:
        for model, to, method in json.loads(cases):
            output = f"{folder}/{group.size}/{model}-{to}-{method}"
            ckpt.convert(f"{folder}/{model}", to, output, quantize=method, workers=group.rank + 1, group=group)
