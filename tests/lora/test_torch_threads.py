"""`ckpt/commands/merge_lora/arithmetic.py`, `ckpt/commands/merge_lora/merge.py`: torch uses one thread per tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.base.errors import StorageError
from ckpt.commands.merge_lora import arithmetic
from ckpt.commands.merge_lora.merging import merge_lora
from tests.support.adapters import BF16, save_adapter, save_base

#: Merges an adapter, then prints torch's numbers of threads: in computations, in this thread and in a new one. The rest
#: of `parallel_info` is about the machine, which may change while a busy one runs this.
THREADS = """
import re, sys, threading, torch
from ckpt.commands.merge_lora import arithmetic
from ckpt.commands.merge_lora.merging import merge_lora
def numbers():
    found = re.findall(r"(?:get_num|get_max)_threads\\(\\) : (\\d+)", torch.__config__.parallel_info())
    return torch.get_num_threads(), found
torch.set_num_threads(3)
seen, add = set(), arithmetic._add
arithmetic._add = lambda *given: (seen.add(torch.get_num_threads()), add(*given))[1]
merge_lora(sys.argv[1], sys.argv[3], base=sys.argv[2], workers=3)
print("merged:", seen, numbers())
threading.Thread(target=lambda: print("new thread:", numbers())).start()
"""


def test_each_tensor_takes_one_thread_and_the_process_keeps_its_number(tmp_path: Path) -> None:
    base = save_base("llama", BF16, tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", {"target_modules": "all-linear"})
    command = [sys.executable, "-c", THREADS, *map(str, (adapter, base, tmp_path / "ours"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = [line for line in done.stdout.splitlines() if line.startswith(("merged:", "new thread:"))]
    assert printed == ["merged: {1} (3, ['3', '3', '3'])", "new thread: (3, ['3', '3', '3'])"], (
        done.stdout + done.stderr
    )


def test_a_tensor_that_torch_cannot_compute_is_named(
    linear: Path, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(arithmetic, "_add", fails)
    with pytest.raises(StorageError) as caught:
        merge_lora(linear, tmp_path / "out", base=bases["llama"])
    assert caught.value.exit_code == 7 and "can't allocate memory" in caught.value.what
    assert caught.value.path == str(bases["llama"] / "model.safetensors")
    assert "_proj.weight" in str(caught.value.fqn) and not (tmp_path / "out").exists()
