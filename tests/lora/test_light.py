"""`ckpt/lora/light.py`: plain LoRA without torch's Python has the bits of PEFT's merge."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt import api
from ckpt.base.errors import StorageError
from ckpt.lora import arithmetic, light
from ckpt.lora.find import Factor
from ckpt.lora.merging import merge_lora
from ckpt.plan.precision import choices
from tests.support.adapters import merge_by_peft, same, save_adapter, save_base, weights

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
#: Values that are rounded, scaled and added in ways of their own.
SPECIAL = [float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e-45, 3e38, -65504.0]
#: Merges an adapter, and says whether torch was imported, and how many threads it has afterwards.
MERGE = """
import sys
from ckpt.lora.merging import merge_lora
merge_lora(sys.argv[1], sys.argv[3], base=sys.argv[2])
print("torch" in sys.modules)
import torch
print(torch.get_num_threads())
"""


@pytest.fixture(scope="module")
def library() -> light.TorchLibrary:
    found = light._library()
    assert found is not None, "torch's library has other functions than those that are called"
    return found


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("of_factors", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_has_the_bits_of_torchs_own_arithmetic(
    dtype: torch.dtype, of_factors: torch.dtype, transposed: bool, library: light.TorchLibrary, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    for number, (num_out, num_in, rank) in enumerate([(7, 5, 1), (300, 700, 16), (1, 9, 3), (2000, 130, 8)]):
        shape = (num_in, num_out) if transposed else (num_out, num_in)
        weight = torch.randn(shape, generator=generator).to(dtype)
        weight.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL).to(dtype)[: weight.numel()]
        a = torch.randn(rank, num_in, generator=generator).to(of_factors)
        b = torch.randn(num_out, rank, generator=generator).to(of_factors)
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file({"a": a, "b": b, "w": weight}, folder / "model.safetensors")
        checkpoint = api.open(folder)
        found = {fqn: Factor.stored(fqn, one, checkpoint) for fqn, one in choices(checkpoint, None).items()}
        for scaling in (2.0, 1.7 / 3, -16 / 3**0.5):
            plain = light.PlainLora(found["a"], found["b"], scaling, transposed)
            bits, of = light.stored(found["w"])
            ours = torch.from_numpy(plain.merge(library, bits.copy(), of)).view(dtype)
            low, high = (one.to(arithmetic.adapter_dtype(dtype)) for one in (a, b))
            theirs = arithmetic.merge_linear(weight.clone(), low, high, None, scaling=scaling, transposed=transposed)
            assert same(ours, theirs), (shape, scaling)


def test_factors_and_products_lie_as_torchs_own_tensors_do(
    library: light.TorchLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of a product may depend on where they begin; torch allocates on 64 bytes."""
    save_file({"a": torch.ones(3, 5), "b": torch.ones(7, 3), "w": torch.ones(7, 5)}, tmp_path / "model.safetensors")
    checkpoint = api.open(tmp_path)
    found = {fqn: Factor.stored(fqn, one, checkpoint) for fqn, one in choices(checkpoint, None).items()}
    places: list[int] = []

    def noted(*arrays: Any) -> None:
        places.extend(array.ctypes.data % 64 for array in arrays[:3])

    monkeypatch.setattr(library, "multiply", noted)
    for _ in range(8):
        light.PlainLora(found["a"], found["b"], 2.0, False).merge(library, *light.stored(found["w"]))
    assert places == [0] * 24


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_a_merge_takes_no_import_of_torch_and_equals_pefts(dtype: torch.dtype, tmp_path: Path) -> None:
    base = save_base("llama", dtype, tmp_path / "base")
    options: dict[str, Any] = {"target_modules": "all-linear", "use_rslora": True}
    adapter = save_adapter(base, tmp_path / "adapter", options)
    command = [sys.executable, "-c", MERGE, *map(str, (adapter, base, tmp_path / "ours"))]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.split() == ["False", "2"], done.stderr
    merge_by_peft(base, [adapter], tmp_path / "peft")
    ours, theirs = weights(tmp_path / "ours"), weights(tmp_path / "peft")
    assert ours.keys() == theirs.keys()
    assert all(same(ours[name], theirs[name]) for name in ours)
    changed = [name for name, before in load_file(base / "model.safetensors").items() if not same(before, ours[name])]
    assert len(changed) == 14


#: Merges an adapter by torch, and says whether it computes in as many threads afterwards as before, here and elsewhere.
THREADS = """
import sys, threading, torch
from ckpt.lora.merging import merge_lora
torch.set_num_threads(3)
before = torch.__config__.parallel_info()
merge_lora(sys.argv[1], sys.argv[3], base=sys.argv[2])
print(torch.__config__.parallel_info() == before, torch.get_num_threads())
threading.Thread(target=lambda: print(torch.__config__.parallel_info() == before, torch.get_num_threads())).start()
"""


def test_a_merge_by_torch_leaves_the_process_its_threads(tmp_path: Path) -> None:
    base = save_base("llama", torch.bfloat16, tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", {"target_modules": "all-linear", "use_dora": True})
    command = [sys.executable, "-c", THREADS, *map(str, (adapter, base, tmp_path / "ours"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "3"] * 2, done.stderr


def test_what_torchs_library_refuses_names_the_file_and_the_tensor(
    monkeypatch: pytest.MonkeyPatch, library: light.TorchLibrary, tmp_path: Path
) -> None:
    base = save_base("llama", torch.bfloat16, tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", {"target_modules": ["q_proj"]})
    monkeypatch.setattr(library, "_multiply", lambda *_: 1)
    monkeypatch.setattr(light, "library", lambda: library)
    with pytest.raises(StorageError) as caught:
        merge_lora(adapter, tmp_path / "out", base=base)
    assert caught.value.exit_code == 7
    assert caught.value.path == str(base / "model.safetensors") and "q_proj.weight" in str(caught.value.fqn)
    assert not (tmp_path / "out").exists()


def test_where_the_library_is_another_one_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(light, "_SET_THREADS", "none_of_this_name")
    light._library.cache_clear()
    assert light._library() is None
    light._library.cache_clear()
    assert light.library() is None, "torch is imported here"
