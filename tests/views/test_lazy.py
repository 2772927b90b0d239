"""`ckpt/views/lazy.py`: `checkpoint["fqn"][...]` against the truth, in pieces."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt
from ckpt.errors import UsageError
from tests.support.engines import raw


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parts_of_tensors(fixtures: Path, stage: int) -> None:
    from safetensors import safe_open

    run = fixtures / f"toy-zero{stage}"
    checkpoint = ckpt.open(run)
    with safe_open(run / "truth" / "global_step2.safetensors", "pt") as truth:
        checked = 0
        for fqn, role in checkpoint.tensors:
            expected = truth.get_tensor(f"{role}/{fqn}")
            lazy = checkpoint[fqn, role]
            assert raw(lazy[...]) == raw(expected)
            if expected.ndim and expected.numel():
                assert raw(lazy[1:3]) == raw(expected[1:3])
                assert raw(lazy[-1]) == raw(expected[-1])
                assert raw(lazy[..., 0]) == raw(expected[..., 0])
            if expected.ndim > 1 and expected.numel():
                assert raw(lazy[0, 1:]) == raw(expected[0, 1:])
            checked += 1
        assert checked == len(checkpoint.tensors)


def test_a_parameter_is_found_by_name_or_alias(fixtures: Path) -> None:
    checkpoint = ckpt.open(fixtures / "toy-zero3")
    assert checkpoint["embed.weight"].dtype == "float32"
    assert raw(checkpoint["head.weight"][...]) == raw(checkpoint["embed.weight"][...])
    with pytest.raises(KeyError):
        checkpoint["nothing"]


def test_indices_that_cannot_be_read(fixtures: Path) -> None:
    lazy = ckpt.open(fixtures / "toy-zero3")["embed.weight"]
    with pytest.raises(IndexError):
        lazy[10**6]
    with pytest.raises(UsageError):
        lazy[::2]
    with pytest.raises(UsageError):
        lazy[0, 0, 0]


def bits_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("stage", [1, 3])
def test_numpy_arrays_take_no_torch(fixtures: Path, stage: int) -> None:
    """Whole and in pieces, bit for bit, in a process that cannot import torch."""
    program = f"""
import sys
sys.modules["torch"] = None
import ckpt, numpy as np
checkpoint = ckpt.open({str(fixtures / f"toy-zero{stage}")!r})
for (fqn, role), tensor in checkpoint.tensors.items():
    lazy = checkpoint[fqn, role]
    whole = lazy.numpy()
    assert whole.shape == lazy.shape and np.asarray(lazy).dtype == whole.dtype and whole.dtype.name == lazy.dtype
    print(fqn, role, whole.tobytes().hex())
    if whole.ndim and whole.size:
        assert lazy.numpy(slice(1, 3)).tobytes() == whole[1:3].tobytes()
        assert lazy.numpy((..., 0)).tobytes() == whole[..., 0].tobytes()
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    truth = load_file(fixtures / f"toy-zero{stage}" / "truth" / "global_step2.safetensors")
    lines = [line.split(" ") for line in printed.splitlines()]
    assert len(lines) == len(ckpt.open(fixtures / f"toy-zero{stage}").tensors)
    assert all(bytes.fromhex(bits) == bits_of(truth[f"{role}/{fqn}"]) for fqn, role, bits in lines)


def test_bfloat16_is_that_of_ml_dtypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": torch.randn(3, 5).bfloat16(), "b": torch.randn(7).to(torch.float8_e4m3fn), "c": torch.tensor(True)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = ckpt.open(tmp_path)
    for name, tensor in tensors.items():
        array = checkpoint[name].numpy()
        assert array.dtype.name == str(tensor.dtype).removeprefix("torch.") and array.tobytes() == bits_of(tensor)
    assert np.asarray(checkpoint["a"], np.float32).tolist() == tensors["a"].float().tolist()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(UsageError, match="pip install ml_dtypes"):
        checkpoint["a"].numpy()
    assert checkpoint["c"].numpy()


def test_a_checkpoint_is_like_a_dict_of_its_parameters(fixtures: Path) -> None:
    checkpoint = ckpt.open(fixtures / "toy-zero3")
    names = list(checkpoint)
    assert names == list(checkpoint.keys()) == [fqn for fqn, _ in checkpoint.items()] and len(checkpoint) == len(names)
    assert set(names) == {fqn for fqn, role in checkpoint.tensors if role in ("weight", "master", "buffer")}
    assert "embed.weight" in checkpoint and "head.weight" in checkpoint and "nothing" not in checkpoint
    assert "head.weight" not in names  # it is tied: the same tensor, counted once
    assert ("embed.weight", "exp_avg") in checkpoint and ("embed.weight", "nothing") not in checkpoint
    assert len(repr(checkpoint)) < 400 and "zero3, 3 ranks, step 2" in repr(checkpoint)
    assert dir(ckpt) == sorted(ckpt.__all__)
    with pytest.raises(ckpt.CkptError, match="no such file or folder"):
        ckpt.open(fixtures / "nowhere")


def test_a_checkpoint_is_looked_into_in_a_shell(fixtures: Path) -> None:
    checkpoint = ckpt.open(fixtures / "toy-zero3")
    assert checkpoint._ipython_key_completions_() == list(checkpoint)
    items = checkpoint.items()
    assert len(items) == len(checkpoint) and len(list(items)) == len(list(items)) == len(list(checkpoint.values()))
    with pytest.raises(KeyError, match=r"no tensor 'embed.weigt': did you mean embed.weight"):
        checkpoint["embed.weigt"]
    with pytest.raises(KeyError, match=r"'embed.weight' has no 'exp_av': did you mean exp_avg"):
        checkpoint["embed.weight", "exp_av"]
    with pytest.raises(KeyError, match=r"'embed.weight' has no 'rng': it has "):
        checkpoint["embed.weight", "rng"]
    assert {"items", "format", "state"} <= set(dir(checkpoint)) and all(
        hasattr(checkpoint, one) for one in dir(checkpoint)
    )
    assert not {"passed_over", "facts_of", "given", "of"} & set(dir(checkpoint))
    html = checkpoint._repr_html_()
    assert html.startswith("<pre>&lt;") and "embed.weight" in html and html.count("\n") == len(checkpoint) + 1


def test_a_tensor_is_read_by_torch_and_numpy(fixtures: Path) -> None:
    stored = ckpt.open(fixtures / "toy-zero3")["embed.weight"]
    assert torch.equal(torch.as_tensor(stored), stored[...]) and torch.as_tensor(stored).dtype == stored[...].dtype
    assert torch.equal(torch.from_dlpack(stored), stored[...])


@pytest.mark.parametrize("index", ["x", 1.5, None, slice("a", None), [0, 1]])
def test_other_indices_are_mistakes(fixtures: Path, index: object) -> None:
    with pytest.raises(UsageError):
        ckpt.open(fixtures / "toy-zero3")["embed.weight"][index]  # type: ignore[index]


def test_what_is_indexed_takes_torch(fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = ckpt.open(fixtures / "toy-zero1")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match=r"torch is not installed(.|\n)*pip install torch; or use `.numpy\(index\)`"):
        checkpoint["embed.weight"][0:2]


def test_what_is_shown_in_a_shell_is_one_line(fixtures: Path) -> None:
    a, b = ckpt.open(fixtures / "toy-zero1"), ckpt.open(fixtures / "toy-zero2")
    conversion, report = repr(ckpt.plan(a, "hf")), repr(ckpt.verify(a, b))
    assert conversion.endswith("toy-zero1/global_step2 to hf: 1 file, 4.98 kB>"), conversion
    assert report.endswith("toy-zero2/global_step2: different, 39 tensors compared>"), report
