"""Transformer Engine's Python modules over an empty stand-in for its compiled extension. They compute nothing."""

import enum
import importlib
import importlib.machinery
import itertools
import os
import re
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

#: Enumerations that Transformer Engine compares with its own, and the source file with all member names.
_ENUMS = {
    "DType": ("pytorch/constants.py", r"int\(tex\.DType\.(k\w+)\)"),
    "NVTE_Fused_Attn_Backend": ("pytorch/cpp_extensions/fused_attn.py", r"NVTE_Fused_Attn_Backend\.(NVTE_\w+)"),
}
_VERSIONS = {"get_cudnn_version": 91200, "get_cublasLt_version": 130000}


class _Names(type):
    """Metaclass that numbers attributes on first access, like an enumeration."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        number = next(cls.__dict__["numbers"])
        setattr(cls, name, number)
        return number


class _Extension(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Names(name, (), {"numbers": itertools.count(), "__init__": lambda self, *args, **options: None})
        setattr(self, name, found)
        return found


def install(folder: Path) -> None:
    """Make `transformer_engine` importable from `folder`, the contents of its wheel."""
    sys.path.insert(0, str(folder))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # skip loading its libraries
    extension: Any = _Extension("transformer_engine_torch")
    for name, (file, pattern) in _ENUMS.items():
        names = dict.fromkeys(re.findall(pattern, (folder / "transformer_engine" / file).read_text()))
        setattr(extension, name, enum.IntEnum(name, list(names), start=0))
    for name, number in _VERSIONS.items():
        setattr(extension, name, lambda *args, number=number: number)
    sys.modules["transformer_engine_torch"] = extension
    package: Any = types.ModuleType("transformer_engine")  # the real `__init__` imports every framework
    package.__path__ = [str(folder / "transformer_engine")]
    package.__spec__ = importlib.machinery.ModuleSpec("transformer_engine", None, is_package=True)
    package.__version__ = metadata.version("transformer_engine")
    sys.modules["transformer_engine"] = package
    from transformer_engine import common

    common.load_framework_extension = lambda framework: None  # loaded above
    package.common, package.pytorch = common, importlib.import_module("transformer_engine.pytorch")
