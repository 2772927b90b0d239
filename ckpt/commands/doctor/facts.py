"""Facts about the installation and the machine. No listed package is imported."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from ckpt.base.errors import CkptError
from ckpt.base.version import __version__

DISTRIBUTION = "ckpt-toolkit"
#: Another project on PyPI: its module and command have the same name.
NAMESAKE = "ckpt"
UNLOCKS = {
    "transformers": "architectures whose names only transformers knows, and `ckpt verify --loads`",
    "lora": "`ckpt merge-lora`",
    "numpy": "bfloat16 and 8-bit floats as numpy arrays in Python",
    "mount": "`ckpt mount`",
    "gguf": "`ckpt convert ... gguf`",
    "remote": "checkpoints at s3://, gs:// and az:// URLs",
    "train": "the bundled trainer, `python -m train` in a checkout",
}


@dataclass(frozen=True)
class Package:
    name: str
    takes: str
    version: str | None

    @property
    def is_good(self) -> bool:
        return self.version is not None and Requirement(self.name + self.takes).specifier.contains(self.version, True)


@dataclass(frozen=True)
class Extra:
    name: str
    unlocks: str
    packages: tuple[Package, ...]

    @property
    def missing(self) -> tuple[Package, ...]:
        return tuple(package for package in self.packages if not package.is_good)


@dataclass(frozen=True)
class System:
    name: str
    python: str
    cores: int
    memory: int | None
    available: int | None


@dataclass(frozen=True)
class Disk:
    path: str
    file_system: str
    free: int
    total: int
    is_writable: bool


@dataclass(frozen=True)
class Cache:
    path: str
    num_repositories: int
    is_offline: bool


@dataclass(frozen=True)
class Trial:
    command: str
    problem: str | None = None
    hint: str | None = None
    is_expected: bool = True


@dataclass(frozen=True)
class Facts:
    """All facts without a checkpoint. `namesake` is another project's version."""

    version: str
    packages: tuple[Package, ...]
    extras: tuple[Extra, ...]
    system: System
    disks: tuple[Disk, ...]
    cache: Cache
    mount: Trial
    namesake: str | None = None


def gather(places: list[Path], cores: int, mount: Trial) -> Facts:
    required = requirements()
    every = {package.name: package for packages in required.values() for package in packages}
    extras = tuple(Extra(name, UNLOCKS[name], required[name]) for name in UNLOCKS if name in required)
    packages = tuple(every[name] for name in sorted(every))
    return Facts(
        __version__, packages, extras, system_of(cores), tuple(map(disk_of, places)), cache(), mount, _version(NAMESAKE)
    )


def requirements() -> Mapping[str, tuple[Package, ...]]:
    """Return packages by extra, with "" for ckpt itself. Empty if ckpt is not installed."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return {}
    wanted = [Requirement(line) for line in lines]
    return {
        extra: tuple(
            Package(one.name, str(one.specifier), _version(one.name))
            for one in wanted
            if (one.marker.evaluate({"extra": extra}) if one.marker else not extra)
        )
        for extra in ("", *UNLOCKS)
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def system_of(cores: int) -> System:
    sizes = dict(re.findall(r"^(\w+): +(\d+) kB$", _text("/proc/meminfo"), re.MULTILINE))
    installed, available = (int(sizes[name]) * 1024 if name in sizes else None for name in ("MemTotal", "MemAvailable"))
    allowed = _text("/sys/fs/cgroup/memory.max").strip()
    if installed is not None and allowed.isdecimal():
        installed = min(installed, int(allowed))
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return System(platform.platform(), python, cores, installed, available)


def disk_of(path: Path) -> Disk:
    """Return the file system of the deepest mount."""
    real, found, kind = os.path.realpath(path), "", "unknown"
    for line in _text("/proc/self/mounts").splitlines():
        point, name = line.split()[1:3]
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point)
        if len(point) >= len(found) and (real + "/").startswith(point.rstrip("/") + "/"):
            found, kind = point, name
    info = os.statvfs(path)
    total, free = info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize
    return Disk(str(path), kind, free, total, os.access(path, os.W_OK))


def cache() -> Cache:
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    found = list(folder.glob("*s--*")) if folder.is_dir() else []
    return Cache(str(folder), len(found), bool(constants.HF_HUB_OFFLINE))


def attempt(command: str, proof: Callable[[], Any], is_expected: bool = True) -> Trial:
    try:
        proof()
    except CkptError as error:
        return Trial(command, ": ".join(_parts(error)), error.hint, is_expected)
    except ImportError as error:
        hint = "`ckpt doctor` alone shows which extra has it"
        return Trial(command, f"a package cannot be imported: {error}", hint, is_expected)
    return Trial(command, is_expected=is_expected)


def _parts(error: CkptError) -> Iterator[str]:
    yield error.what
    facts = error.facts()
    yield from (facts[name] for name in ("tensor", "found") if name in facts)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
