"""`ckpt/views/without_torch.py`: `ckpt`'s Python API without torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.places import REPOSITORY

#: Blocks importing torch.
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name="torch")
sys.meta_path.insert(0, Missing())
import ckpt
"""


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("import pydoc; print('StorageReader' in pydoc.render_doc(ckpt, renderer=pydoc.plaintext))", "True"),
        ("import inspect; print('StorageReader' in dict(inspect.getmembers(ckpt)))", "True"),
        ("print(hasattr(ckpt, 'StorageReader'), hasattr(ckpt, 'nothing'))", "True False"),
        ("print(all(hasattr(ckpt, name) for name in ckpt.__all__), 'torch' in sys.modules)", "True False"),
        ("from ckpt import *; print(StorageReader.__name__, open.__name__)", "StorageReader open"),
        ("print('StorageReader' in dir(ckpt), 'torch' in sys.modules)", "True False"),
        ("print(ckpt.errors.UsageError.exit_code)", "2"),
        ("ckpt.StorageReader('run')", "ckpt.StorageReader needs torch, but torch is not installed"),
        ("ckpt.load_into(None, 'run')", "ckpt.load_into needs torch, but torch is not installed"),
    ],
)
def test_python_looks_at_the_package(code: str, printed: str) -> None:
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    if printed.startswith("ckpt."):
        code = f"try:\n    {code}\nexcept ckpt.errors.UsageError as error:\n    print(str(error).splitlines()[0])"
    done = subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, printed, "")
