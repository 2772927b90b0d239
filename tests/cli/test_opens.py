"""Reads of a run's step record, folder listings, and opens of an adapter file in one command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

#: Run each command in a new process. An audit hook counts opens of `latest` and of adapters below the runs, and folder
#: listings there and in the outputs. A name with the prefix `ckpt.` is a Python function.
_COUNT = """
import json, os, sys
from collections import Counter
import ckpt
from ckpt.cli import main

seen = Counter()

def watch(event, given):
    path = os.path.abspath(os.fsdecode(given[0])) if given and isinstance(given[0], (str, bytes)) else ""
    counted = path.endswith(("/latest", "/adapter_model.safetensors")) and ".ckpt-" not in path
    root = next((root for root in roots if path.startswith(root)), None)
    if root and (event in ("os.listdir", "os.scandir") or counted):
        seen[event.removeprefix("os."), os.path.relpath(path, root)] += 1

roots, commands = json.loads(sys.argv[1])
sys.addaudithook(watch)
for command in commands:
    if "merge" in command[0]:
        import torch  # once for all: it takes longer than a merge
    if os.fork():
        os.wait()
        continue
    sys.argv = ["ckpt", *command, "-q"]
    try:
        if command[0].startswith("ckpt."):
            _, adapter, base, output = command
            getattr(ckpt, command[0][5:])(adapter, output, base=base, accept_base=True)
        else:
            main()
        code = 0
    except SystemExit as stop:
        code = stop.code
    opens = {path: times for (event, path), times in seen.items() if event == "open"}
    lists = {path: times for (event, path), times in seen.items() if event != "open" and times > 1}
    code_of = {name for name in sys.modules if not hasattr(sys.modules[name], "__path__") and "options" not in name}
    families = sorted({name.split(".")[1] for name in code_of if name.startswith("converters.")})
    print(json.dumps([code, opens, lists, families]), file=sys.stderr, flush=True)
    os._exit(0)
"""


def test_a_command_opens_and_lists_once(fixtures: Path, tmp_path: Path) -> None:
    moved = str(shutil.copytree(fixtures / "toy-zero3", tmp_path / "sources" / "moved"))
    run, other = str(fixtures / "toy-zero3"), str(fixtures / "toy-zero2")
    adapter, base = (
        str(fixtures / name) for name in ("trl-lora-zero3/outputs/qwen3-lora", "trl-zero3/outputs/qwen3-sft")
    )
    once, both = {"toy-zero3/latest": 1}, {"toy-zero3/latest": 1, "toy-zero2/latest": 1}
    merged = {f"{one[len(str(fixtures)) + 1 :]}/checkpoint-2/latest": 1 for one in (base, adapter)}
    merged[f"{adapter[len(str(fixtures)) + 1 :]}/checkpoint-2/adapter_model.safetensors"] = (
        2  # its header and its factors
    )
    commands = {
        ("inspect", run): once,
        ("convert", "zero3", "hf", run, str(tmp_path / "outputs" / "hf")): once,
        ("convert", "zero3", "hf", run, str(tmp_path / "outputs" / "hf"), "--overwrite"): once,
        ("convert", "zero3", "zero3", run, str(tmp_path / "outputs" / "zero3"), "--world-size", "2"): once,
        ("verify", run, other): both,
        ("check", run): once,
        ("resume", run): once,
        ("resume", moved, "--missing-ok"): {"latest": 1},
        ("resume", moved, "--world-size", "2"): {"latest": 1},
        ("merge-lora", adapter, "--base", base, "--accept-base", "-o", str(tmp_path / "outputs" / "merged")): merged,
        ("ckpt.merge_lora", adapter, base, str(tmp_path / "outputs" / "by-function")): merged,
    }
    roots = [str(fixtures), str(tmp_path / "sources" / "moved"), str(tmp_path / "outputs")]
    given = json.dumps([roots, [list(command) for command in commands]])
    ended = subprocess.run([sys.executable, "-c", _COUNT, given], capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("[")]
    for (command, opens), (code, opened, listed_again, families) in zip(commands.items(), found, strict=True):
        again = {".zero3.ckpt-staging": 2} if command[2:3] == ("zero3",) else {}  # before and after writing
        again |= {"hf": 2} if "--overwrite" in command else {}  # again before it is replaced
        assert (command[0], opened, listed_again) == (command[0], opens, again), command
        assert (code or 0) == (command[0] == "verify"), command
        if command[:3] == ("convert", "zero3", "hf"):  # a folder next to the step, `truth`, asks no other format
            assert families == ["deepspeed", "huggingface", "names", "optimizers", "quantized"]
