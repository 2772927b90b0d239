"""`ckpt/compare/pairs.py`: float32 tensors are rounded for a comparison with 16-bit weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt
from ckpt.base.errors import UsageError
from tests.support.commands import ckpt as run_ckpt

#: Training checkpoints from FSDP (several releases and local shards), ZeRO, Megatron and HF Trainer.
RUNS = ("dcp-fsdp2", "dcp-torch21-fsdp1", "toy-zero0-fp32", "megatron-fsdp", "trainer-plain")
LONG = {"bf16": "bfloat16", "fp16": "float16"}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", RUNS)
def test_verify_rounds_as_convert_does(fixtures: Path, tmp_path: Path, name: str, dtype: str) -> None:
    """The README's assertion holds for each conversion, and fails if one bit changes."""
    run, out = fixtures / name, tmp_path / "out"
    ckpt.convert(run, "hf", out, dtype=dtype)
    for a, b in ((run, out), (out, run)):
        report = ckpt.verify(a, b, only="weights")
        assert report.equal and "equal after rounding" in str(report) and "use --exact to compare" in str(report)
    assert not ckpt.verify(run, out, only="weights", exact=True).equal
    path = out / "model.safetensors"
    tensors = load_file(path)
    changed = next(fqn for fqn, tensor in tensors.items() if tensor.dtype == getattr(torch, LONG[dtype]))
    bits = tensors[changed].contiguous().view(torch.int16)
    bits.view(-1)[-1] ^= 1
    save_file(tensors, path, {"format": "pt"})
    report = ckpt.verify(run, out, only="weights")
    assert not report.equal and report.counts["*"] == 1


def test_two_models_in_different_dtypes_are_different(fixtures: Path, tmp_path: Path) -> None:
    """Otherwise somebody may delete the float32 model because the bfloat16 one counts as equal."""
    for dtype in ("fp32", "bf16", "fp16"):
        ckpt.convert(fixtures / "toy-zero3", "hf", tmp_path / dtype, dtype=dtype)
    for a, b in (("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "fp16"), ("fp16", "fp32")):
        assert not ckpt.verify(tmp_path / a, tmp_path / b).equal
    assert ckpt.verify(tmp_path / "fp32", tmp_path / "bf16", cast=True).equal


def test_exact_on_the_command_line(fixtures: Path, tmp_path: Path) -> None:
    run, out = fixtures / "toy-zero3", tmp_path / "out"
    ckpt.convert(run, "hf", out)
    words = ("verify", run, out, "--only", "weights")
    assert (run_ckpt(*words).code, run_ckpt(*words, "--exact").code) == (0, 1)
    refused = run_ckpt(*words, "--exact", "--cast")
    assert refused.code == 2 and "--exact forbids rounding" in refused.err
    with pytest.raises(UsageError, match="exact"):
        ckpt.verify(run, out, cast=True, exact=True)
    assert run_ckpt("verify", out, "--exact").code == 2, "a manifest is of one folder"
