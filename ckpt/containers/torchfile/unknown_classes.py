"""Inert records for plain data objects with a class outside the table.

Nothing is imported, and only the class name, arguments and state are kept. The pickle may hold two forms:

- a new object (NEWOBJ) with a dict as its state, like a dataclass or a named tuple;
- a class called with one plain value (REDUCE), like an enum.

Functions, other calls, and objects with tensors inside are refused. So is every unlisted name in packages that can run
code: the standard library, numpy, and torch except `torch.distributed` and its version.
"""

from __future__ import annotations

import sys
from typing import Any

from ckpt.base.errors import UnsafeError
from ckpt.containers.torchfile.machine import Machine, way_out
from ckpt.containers.torchfile.values import Global, Record
from ckpt.plan.dtypes import DType

#: Packages that may run code, load files, or hold special tensors.
_REFUSED = frozenset(sys.stdlib_module_names) | {
    *("__builtin__", "__builtins__", "commands", "copy_reg", "cPickle"),
    *("numpy", "torch", "torchao", "torchvision", "tensordict", "bitsandbytes", "tensorflow", "keras", "jax", "pandas"),
    *("scipy", "sklearn", "sympy", "numba", "cffi", "yaml", "jinja2", "dill", "cloudpickle", "joblib", "ray"),
    *("pip", "setuptools", "pkg_resources", "wheel", "pytest", "nose", "IPython", "ipykernel", "jupyter"),
    *("sh", "plumbum", "fabric", "invoke", "paramiko", "pexpect", "psutil", "docker", "execnet", "twisted", "gevent"),
    *("requests", "urllib3", "httpx", "aiohttp", "boto3", "django", "flask"),
}
_ALLOWED_MODULES = ("torch.distributed.", "torch.torch_version.")
_PLAIN = (str, int, float, bool, type(None), bytes, DType)


def class_of(module: str, name: str) -> Global | None:
    """Return the inert class, or None if the name is refused."""
    root = module.partition(".")[0]
    if root in _REFUSED and not f"{module}.".startswith(_ALLOWED_MODULES):
        return None
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        return None
    if not name.rpartition(".")[2].lstrip("_")[:1].isupper():  # a function
        return None
    return Global(module, name, _called_record, is_listed=False)


def _called_record(machine: Machine, cls: Global, args: tuple[Any, ...]) -> Record:
    if len(args) != 1 or not _is_plain(args[0]):
        raise UnsafeError(
            f"the pickle calls {cls.typename} with arguments, as a function; nothing was imported and nothing was run",
            path=machine.path,
            hint=way_out(cls.module),
        )
    return machine.record(cls, args)


def _is_plain(value: Any) -> bool:
    values = value if type(value) is tuple else (value,)
    return all(type(one) in _PLAIN for one in values)
