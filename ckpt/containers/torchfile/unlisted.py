"""Classes outside the table: objects of plain data become inert records, whoever defined their class.

Trainers add records of their own to what torch saves: places in storage, settings, enums, named tuples, and values
derived from str, int, tuple or dict.  Such an object is read like an object of a listed class: nothing is imported, and
only its class's name, arguments and state are kept.  The form of the pickle decides:

- a new object (NEWOBJ) with a state that is a dict, as dataclasses, named tuples and derived values have it;
- a class called with one plain value (REDUCE), as enums are pickled.

Refused are functions, any other call, objects with tensors inside, and every name in packages that can run code or
that `ckpt` reads by exact names: Python's standard library, torch but for `torch.distributed`, and numpy.
"""

from __future__ import annotations

import sys
from typing import Any

from ckpt.base.errors import UnsafeError
from ckpt.containers.torchfile.machine import Machine, way_out
from ckpt.containers.torchfile.values import Global, Record
from ckpt.plan.dtypes import DType

#: Packages without unlisted names: classes in them run code, load files or have tensors of a meaning of their own.
_REFUSED = frozenset(sys.stdlib_module_names) | {
    *("__builtin__", "__builtins__", "commands", "copy_reg", "cPickle"),
    *("numpy", "torch", "torchao", "torchvision", "tensordict", "bitsandbytes", "tensorflow", "keras", "jax", "pandas"),
    *("scipy", "sklearn", "sympy", "numba", "cffi", "yaml", "jinja2", "dill", "cloudpickle", "joblib", "ray"),
    *("pip", "setuptools", "pkg_resources", "wheel", "pytest", "nose", "IPython", "ipykernel", "jupyter"),
    *("sh", "plumbum", "fabric", "invoke", "paramiko", "pexpect", "psutil", "docker", "execnet", "twisted", "gevent"),
    *("requests", "urllib3", "httpx", "aiohttp", "boto3", "django", "flask"),
}
_ALLOWED_MODULES = ("torch.distributed.",)
_PLAIN = (str, int, float, bool, type(None), bytes, DType)


def class_of(module: str, name: str) -> Global | None:
    """Return the inert class of this name; None for a name that stays refused."""
    root = module.partition(".")[0]
    if root in _REFUSED and not f"{module}.".startswith(_ALLOWED_MODULES):
        return None
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        return None
    if not name.rpartition(".")[2].lstrip("_")[:1].isupper():  # a function
        return None
    return Global(module, name, _called, is_listed=False)


def _called(machine: Machine, cls: Global, args: tuple[Any, ...]) -> Record:
    """Return the record of a class called with one plain value, as an enum's member is pickled."""
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
