"""`ckpt` without Linux's own calls, as on macOS: casts, stores, and no way to read a stand-in's hole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.support.object_store import ObjectStore
from tests.support.places import FIXTURES, REPOSITORY

_HOLE = """
from tests.support import portable
portable.remove_linux_calls()
import sys, ckpt
from ckpt.stores import placeholder_files
path = placeholder_files.local(sys.argv[1])
assert ckpt.open(sys.argv[1])
try:
    (path / "latest").read_bytes()
except RuntimeError as error:
    print(error)
"""


def run(*words: str | Path) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_large_tensor_is_cast_without_advice_to_the_kernel(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    values = np.linspace(0, 1, 1 << 18, dtype=np.float32)
    save_file({"a": values}, tmp_path / "in" / "model.safetensors")
    run("-m", "tests.support.portable", "convert", "auto", "hf", tmp_path / "in", tmp_path / "out", "--dtype", "fp16")
    written = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert written.endswith(values.astype(np.float16).tobytes())


def test_a_stored_checkpoint_is_read(store: ObjectStore, tmp_path: Path) -> None:
    url = store.upload(FIXTURES / "toy-zero3", "portable")
    run("-m", "tests.support.portable", "convert", "auto", "hf", url, tmp_path / "there")
    run("-m", "tests.support.portable", "convert", "auto", "hf", FIXTURES / "toy-zero3", tmp_path / "here")
    there, here = (tmp_path / name / "model.safetensors" for name in ("there", "here"))
    assert there.read_bytes() == here.read_bytes()
    assert "was to be opened as if it were a local file" in run("-c", _HOLE, url)


def test_windows_is_refused_with_wsl_as_the_way() -> None:
    without = (
        "import sys; sys.modules['fcntl'] = None; sys.argv = ['ckpt', 'formats']; import ckpt, ckpt.__main__ as m;"
    )
    for code, call, said in (
        (2, "ckpt.__main__.main()", "hint: run it in WSL"),
        (1, "ckpt.check('x')", "Windows itself: use WSL"),
    ):
        done = subprocess.run([sys.executable, "-c", without + call], capture_output=True, text=True, cwd=REPOSITORY)
        assert done.returncode == code and said in done.stderr
