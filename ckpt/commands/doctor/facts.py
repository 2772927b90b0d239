"""Facts about the installation and the machine.  Versions are read from metadata: no package that is listed is loaded.

Which packages there are, and which extra takes which, is said by the metadata of ckpt's own distribution alone.
"""

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
#: Another project on PyPI, which installs a module and a command of the same name.
NAMESAKE = "ckpt"
#: What each extra is for.  Those that only developers take are not listed.
UNLOCKS = {
    "transformers": "architectures whose names only transformers knows, and `ckpt verify --loads`",
    "lora": "`ckpt merge-lora`",
    "numpy": "bfloat16 and 8-bit floats as numpy arrays in Python",
    "mount": "`ckpt mount`",
    "remote": "checkpoints at s3://, gs:// and az:// URLs",
    "train": "the bundled trainer, `python -m train` in a checkout",
}


@dataclass(frozen=True)
class Package:
    """A package that is taken, and the version that is installed; None where it is not."""

    name: str
    takes: str
    version: str | None

    @property
    def is_good(self) -> bool:
        return self.version is not None and Requirement(self.name + self.takes).specifier.contains(self.version, True)


@dataclass(frozen=True)
class Extra:
    """An extra of the package: what it is for, and the packages that it takes."""

    name: str
    unlocks: str
    packages: tuple[Package, ...]

    @property
    def lacking(self) -> tuple[Package, ...]:
        return tuple(package for package in self.packages if not package.is_good)


@dataclass(frozen=True)
class System:
    """The operating system and what this process has of it; `memory` is None where nothing tells it."""

    name: str
    python: str
    cores: int
    memory: int | None
    available: int | None


@dataclass(frozen=True)
class Disk:
    """A folder and the file system that it lies on."""

    path: str
    file_system: str
    free: int
    total: int
    is_writable: bool


@dataclass(frozen=True)
class Cache:
    """The cache of the Hugging Face Hub."""

    path: str
    num_repositories: int
    is_offline: bool


@dataclass(frozen=True)
class Trial:
    """A command, and what stands in its way; nothing does where `problem` is None.

    `is_expected` says that users of such a checkpoint expect it to work.
    """

    command: str
    problem: str | None = None
    hint: str | None = None
    is_expected: bool = True


@dataclass(frozen=True)
class Facts:
    """All that `ckpt doctor` finds out without a checkpoint; `namesake` is the version of another project, `ckpt`."""

    version: str
    packages: tuple[Package, ...]
    extras: tuple[Extra, ...]
    system: System
    disks: tuple[Disk, ...]
    cache: Cache
    mount: Trial
    namesake: str | None = None


def gather(places: list[Path], cores: int, mount: Trial) -> Facts:
    """The facts of here and now; `places` are folders that exist."""
    required = requirements()
    every = {package.name: package for packages in required.values() for package in packages}
    extras = tuple(Extra(name, UNLOCKS[name], required[name]) for name in UNLOCKS if name in required)
    packages = tuple(every[name] for name in sorted(every))
    return Facts(
        __version__, packages, extras, system_of(cores), tuple(map(disk_of, places)), cache(), mount, _version(NAMESAKE)
    )


def requirements() -> Mapping[str, tuple[Package, ...]]:
    """What the package itself (under the empty name) and each of its listed extras take; none of one not installed."""
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
    """The system, `cores` that this process may use, and memory: what is installed, or what its cgroup allows."""
    sizes = dict(re.findall(r"^(\w+): +(\d+) kB$", _text("/proc/meminfo"), re.MULTILINE))
    installed, available = (int(sizes[name]) * 1024 if name in sizes else None for name in ("MemTotal", "MemAvailable"))
    allowed = _text("/sys/fs/cgroup/memory.max").strip()
    if installed is not None and allowed.isdecimal():
        installed = min(installed, int(allowed))
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return System(platform.platform(), python, cores, installed, available)


def disk_of(path: Path) -> Disk:
    """The file system that holds `path`: of all that are mounted above it, the last and deepest."""
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
    """Where downloads from the Hub are kept, by the Hub's own library."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE)
    found = list(folder.glob("*s--*")) if folder.is_dir() else []
    return Cache(str(folder), len(found), bool(constants.HF_HUB_OFFLINE))


def attempt(command: str, proof: Callable[[], Any], is_expected: bool = True) -> Trial:
    """Whether `command` would work: whether `proof`, which does of it what writes nothing, raises no error."""
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
    """What the system says in a file; empty where it has none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
