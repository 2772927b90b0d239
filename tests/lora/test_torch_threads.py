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

#: Merges an adapter, then prints if torch kept its number of threads, in this thread and in a new one.
THREADS = """
import sys, threading, torch
from ckpt.commands.merge_lora import arithmetic
from ckpt.commands.merge_lora.merging import merge_lora
torch.set_num_threads(3)
before, seen, product = torch.__config__.parallel_info(), set(), arithmetic.merge_linear
arithmetic.merge_linear = lambda *given, **named: (seen.add(torch.get_num_threads()), product(*given, **named))[1]
merge_lora(sys.argv[1], sys.argv[3], base=sys.argv[2], workers=3)
print(seen, torch.__config__.parallel_info() == before, torch.get_num_threads())
threading.Thread(target=lambda: print(torch.__config__.parallel_info() == before, torch.get_num_threads())).start()
"""


def test_each_tensor_takes_one_thread_and_the_process_keeps_its_number(tmp_path: Path) -> None:
    base = save_base("llama", BF16, tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", {"target_modules": "all-linear"})
    command = [sys.executable, "-c", THREADS, *map(str, (adapter, base, tmp_path / "ours"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["{1} True 3", "True 3"], done.stderr


def test_a_tensor_that_torch_cannot_compute_is_named(
    linear: Path, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(arithmetic, "merge_linear", fails)
    with pytest.raises(StorageError) as caught:
        merge_lora(linear, tmp_path / "out", base=bases["llama"])
    assert caught.value.exit_code == 7 and "can't allocate memory" in caught.value.what
    assert caught.value.path == str(bases["llama"] / "model.safetensors")
    assert "_proj.weight" in str(caught.value.fqn) and not (tmp_path / "out").exists()
