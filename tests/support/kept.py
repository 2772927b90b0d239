"""Cache for engines' output in CKPT_TEST_CACHE (`build/test-cache`), by digest of jobs, files, code and packages."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from tests.support.places import REPOSITORY

UNUSED = 7 * 86400  # seconds before an unused entry is removed


def make_once(folder: Path, modules: tuple[str, ...], words: str, make: Callable[[], object]) -> None:
    """Fill `folder` with `make()`, or with a cached copy.

    Cache nothing if the modules import the code under test, or if `words` name an output elsewhere.
    """
    entry = _entry(folder, modules, words)
    if entry is None:
        make()
        return
    with _alone(entry):
        if entry.is_dir():
            os.utime(entry)
            shutil.copytree(entry, folder, symlinks=True, dirs_exist_ok=True)
        else:
            before = _states(folder)
            make()
            _keep(folder, before, entry)


@contextlib.contextmanager
def _alone(entry: Path) -> Iterator[None]:
    """Wait for another process that makes the same entry: on its own, it needs half the processor time of two."""
    entry.parent.parent.mkdir(parents=True, exist_ok=True)
    with entry.parent.with_suffix(".lock").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX, 1, int(entry.name[:8], 16))  # a byte for each entry
        yield


def _entry(folder: Path, modules: tuple[str, ...], words: str) -> Path | None:
    """Return the path of the cache entry, or None if the run can't be cached."""
    cache = os.environ.get("CKPT_TEST_CACHE", str(REPOSITORY / "build" / "test-cache"))
    read, sources = _read(folder, words), _sources(modules)
    if not cache or read is None or sources is None:
        return None
    digest = hashlib.sha256("\n".join([*read, *sources, *_environment()]).encode())
    return Path(cache, digest.hexdigest()[:32])


def _read(folder: Path, words: str) -> list[str] | None:
    """Return `words` with neutral paths and a digest of each input, or None if `words` name another output."""
    words = words.replace(f"{folder}/", "FOLDER/").replace(f'"{folder}"', '"FOLDER"')
    digests = [_digest(folder)]
    for path in dict.fromkeys(re.findall(r'"(/[^"]*)"', words)):
        if f'"output": "{path}"' in words or not Path(path).exists():
            return None
        digests.append(_digest(Path(path)))
        words = words.replace(f'"{path}"', f'"{digests[-1]}"')
    return [words, *digests]


def _digest(path: Path) -> str:
    """Return a digest over the names and contents of all files at a path."""
    found = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        content = file.read_bytes() if file.is_file() else b""
        found.update(f"{file.relative_to(path)} {len(content)}\n".encode() + content)
    return found.hexdigest()


def _states(folder: Path) -> dict[Path, tuple[int, int]]:
    files = (path for path in folder.rglob("*") if not path.is_dir())
    return {path: ((info := path.lstat()).st_mtime_ns, info.st_size) for path in files}


def _keep(folder: Path, before: dict[Path, tuple[int, int]], entry: Path) -> None:
    """Copy new files into the cache, all or nothing, even if this process is killed."""
    unchanged = before.items() & _states(folder).items()
    old = {path for path, _ in unchanged}
    entry.parent.mkdir(parents=True, exist_ok=True)
    for other in entry.parent.iterdir():
        if time.time() - other.stat().st_mtime > UNUSED:
            shutil.rmtree(other, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=entry.parent) as temporary:
        copy = Path(temporary, "copy")
        shutil.copytree(folder, copy, symlinks=True, ignore=lambda at, names: {n for n in names if Path(at, n) in old})
        os.utime(copy)
        copy.rename(entry)


@functools.cache
def _sources(modules: tuple[str, ...]) -> list[str] | None:
    """Return the sources a module runs from this repository, or None if it imports the code under test."""
    found: dict[Path, str] = {}
    wanted = [*modules, *_modules_of_the_trainer()]
    while wanted:
        name = wanted.pop().replace(".", "/")
        for path in (REPOSITORY / f"{name}.py", REPOSITORY / name / "__init__.py"):
            if path.is_file() and path not in found:
                found[path] = path.read_text()
                wanted += _imported(found[path])
    files = {path.relative_to(REPOSITORY).parts for path in found}
    # `ckpt.training` reads no checkpoints. Any other import from ckpt would be found here.
    if any(parts[0] in ("ckpt", "converters") and parts[:2] != ("ckpt", "training") for parts in files):
        return None
    return [f"{path.relative_to(REPOSITORY)}\n{found[path]}" for path in sorted(found)]


def _modules_of_the_trainer() -> list[str]:
    """Return all modules of the trainer, because it builds some names at run time, and the modules that start ranks."""
    paths = {path.relative_to(REPOSITORY).with_suffix("") for path in (REPOSITORY / "train").rglob("*.py")}
    paths.discard(Path("train/simple"))  # the users' trainer imports ckpt; the other modules don't import it
    starters = ("engines", "forked", "megatron_imports")
    return [*sorted(".".join(path.parts) for path in paths), *(f"tests.support.{name}" for name in starters)]


def _imported(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


@functools.cache
def _environment() -> list[str]:
    """Return the versions of Python, the processor and every installed package except the one under test."""
    packages = {f"{one.name} {one.version}" for one in metadata.distributions() if one.name != "ckpt-toolkit"}
    return [platform.python_version(), platform.machine(), *sorted(packages)]
