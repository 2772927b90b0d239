"""False claims from `push`, `mount`, `StorageReader` and `load_into`.

`push` says that the files on the Hub were verified. A mounted file that can be read, and a state dict that torch loads
without an error, say that they have the source's bits. `load_into` returns the names that it did not fill.
"""

from __future__ import annotations

import atexit
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

import ckpt
from ckpt.commands.push import push as hub
from ckpt.errors import CkptError
from ckpt.plan.checkpoint import MASTER, WEIGHT
from ckpt.views.mount import _Served
from tests.faults.claims import Lie, Maker
from tests.faults.comparisons import FILES
from tests.faults.samples import Sample
from tests.faults.tensor_files import Tensors, change, is_changeable, tensors_in
from tests.support.engines import raw
from tests.support.hub_server import TOKEN, File, HubServer

PUSHED, READS, LOADS, FILLS = "verified on the Hub", "a mounted file", "a loaded state dict", "filled"
_FORMATS = ("hf", "peft", "full", "dcp", "zero3", "universal")
_REPO = "org/name"


# -- push --------------------------------------------------------------------------------------------------------------
def other_uploads(sample: Sample, random: Random) -> Lie:
    """Change a file on the Hub, or here, while it is pushed."""
    where, kind, seed = random.choice(("on the Hub", "here")), random.choice([*FILES]), random.randrange(1 << 30)
    upload = hub._upload

    def spoiled(api: Any, folder: Path, files: Any, *rest: Any) -> Any:
        done = upload(api, folder, files, *rest)
        name = Random(seed).choice(sorted(name for name, path in files.items() if path.stat().st_size))
        if where == "here":
            FILES[kind](files[name], Random(seed))
        else:
            tree = server.repos[_REPO].branches["main"]
            with tempfile.TemporaryDirectory() as place:
                file = Path(place) / "file"
                file.write_bytes(tree[name].content)
                FILES[kind](file, Random(seed))
                is_large = tree.pop(name).is_large
                if file.is_file():
                    tree[name] = File(file.read_bytes(), is_large)
        return done

    def asked(run: Path) -> Iterator[tuple[str, str]]:
        told: list[str] = []
        server.repos.clear()
        patched = mock.patch.object(hub, "_upload", spoiled if is_false else upload)
        with _hub(server), patched, suppress(CkptError):
            ckpt.push(run, _REPO, names="own", whole_run=True, say=told.append)
        if any(line.startswith("verified: ") for line in told):
            yield PUSHED, "\n".join(told)

    def do(run: Path) -> None:
        nonlocal is_false
        is_false = True

    server, is_false = _server(), False
    what = f"{kind}, {where}"
    return Lie(what, do, (PUSHED,), kind=what, claims=asked, truth=lambda run: None, format="the Hub")


@cache
def _server() -> HubServer:
    """Start the server of this process: huggingface_hub keeps connections, and has no room for many servers."""
    server = HubServer().__enter__()
    atexit.register(server.__exit__)
    return server


@contextmanager
def _hub(server: HubServer) -> Iterator[None]:
    """Have huggingface_hub, which is imported already, talk to `server`."""
    from huggingface_hub import constants

    with (
        mock.patch.dict(os.environ, {"HF_TOKEN": TOKEN}),
        mock.patch.multiple(constants, ENDPOINT=server.endpoint, HF_HUB_DISABLE_XET=True, HF_HUB_OFFLINE=False),
    ):
        yield


# -- mount -------------------------------------------------------------------------------------------------------------
def _names(sample: Sample) -> list[Path]:
    """Return the sample's files with weights."""
    tensors = ckpt.open(sample.path).tensors
    paths = {one.extent.path for (_, role), tensor in tensors.items() if role == WEIGHT for one in tensor.fragments()}
    return [Path(path).relative_to(sample.path) for path in sorted(paths) if os.path.isabs(path)]


def changed_sources(sample: Sample, random: Random) -> Lie | None:
    """Change a source file between the mount and a read."""
    names, target = _names(sample), random.choice(_FORMATS)
    if not names:
        return None
    kind, name, seed = random.choice([*FILES]), random.choice(names), random.randrange(1 << 30)

    def read(run: Path) -> Iterator[tuple[str, str]]:
        is_false = (run / "a lie").exists()
        (run / "a lie").unlink(missing_ok=True)
        try:
            conversion = ckpt.plan(run, target)
        except CkptError:
            return
        served = _Served(conversion)
        if is_false:
            FILES[kind](run / name, Random(seed))
        before = ckpt.plan(sample.path, target)
        with suppress(OSError), mock.patch("builtins.print"):
            for file in conversion.plan.target.files:
                content = b"".join(
                    served.read(f"/{file.name}", 1 << 16, at, None) for at in range(0, file.size, 1 << 16)
                )
                with before.open(file.name) as intact:
                    is_same = content == intact.read()
                if is_false and not is_same:
                    yield READS, f"{file.name} has other bytes"
                    return
            if not is_false:
                yield READS, target

    return Lie(
        f"as {target}: {name}: {kind}",
        lambda run: (run / "a lie").touch(),
        (READS,),
        kind=kind,
        claims=read,
        format=target,
        about=target,
    )


# -- StorageReader -----------------------------------------------------------------------------------------------------
def changed_while_loading(sample: Sample, random: Random) -> Lie | None:
    """Change a source file between torch's plan and its reads."""
    names, checkpoint = _names(sample), ckpt.open(sample.path)
    if not names or checkpoint.is_adapter:
        return None
    kind, name, seed = random.choice([*FILES]), random.choice(names), random.randrange(1 << 30)
    expected = {fqn: checkpoint[fqn][...] for fqn, role in checkpoint.tensors if role == WEIGHT}

    def loaded(run: Path) -> Iterator[tuple[str, str]]:
        is_false = (run / "a lie").exists()
        (run / "a lie").unlink(missing_ok=True)
        state, reader = {fqn: torch.empty_like(one) for fqn, one in expected.items()}, ckpt.StorageReader(run)
        read_data = reader.read_data

        def read(*arguments: Any) -> Any:
            FILES[kind](run / name, Random(seed))
            return read_data(*arguments)

        changed = mock.patch.object(reader, "read_data", read) if is_false else nullcontext()
        with suppress(dcp.CheckpointException), warnings.catch_warnings(action="ignore"), changed:
            dcp.load(state, storage_reader=reader, no_dist=True)
            if not (is_false and all(raw(state[fqn]) == raw(one) for fqn, one in expected.items())):
                yield LOADS, f"{len(state)} tensors"

    what = f"{name}: {kind}"
    return Lie(what, lambda run: (run / "a lie").touch(), (LOADS,), kind=kind, claims=loaded)


# -- load_into ---------------------------------------------------------------------------------------------------------
def _renamed(tensors: Tensors, name: str) -> Tensors:
    return {f"{key}_" if key == name else key: value for key, value in tensors.items()}


#: Changes to one tensor of a file, by its name.
_TENSORS: dict[str, Callable[[Tensors, str], Tensors]] = {
    "gone": lambda tensors, name: {key: value for key, value in tensors.items() if key != name},
    "renamed": _renamed,
    "empty": lambda tensors, name: {**tensors, name: tensors[name].new_empty(0)},
    "longer": lambda tensors, name: {**tensors, name: torch.cat([tensors[name], tensors[name][:1]])},
    "of another dim": lambda tensors, name: {**tensors, name: tensors[name][None].clone()},
    "of integers": lambda tensors, name: {**tensors, name: tensors[name].to(torch.int16)},
    "without its first row": lambda tensors, name: {**tensors, name: tensors[name][1:].clone()},
}


def unfilled_models(sample: Sample, random: Random) -> Lie | None:
    """Remove or change a tensor of a model to load."""
    checkpoint = ckpt.open(sample.path)
    files = [name for name in _names(sample) if name.suffix in (".safetensors", ".bin", ".pt")]
    files = [name for name in files if is_changeable(sample.path / name)]
    if not files or checkpoint.world_size not in (None, 1) or checkpoint.is_adapter:
        return None
    name, kind = random.choice(files), random.choice([*_TENSORS])
    stored = {fqn: one for fqn, one in tensors_in(sample.path / name).items() if one.is_floating_point() and one.dim()}
    fqns = sorted(fqn for fqn, one in stored.items() if one.numel() and (fqn, WEIGHT) in checkpoint.tensors)
    if kind == "gone":  # the master fills it
        fqns = [fqn for fqn in fqns if (fqn, MASTER) not in checkpoint.tensors]
    if not fqns:
        return None
    fqn = random.choice(fqns)

    def do(run: Path) -> None:
        change(run / name, lambda tensors: _TENSORS[kind](tensors, fqn))

    def filled(run: Path) -> Iterator[tuple[str, str]]:
        model = _module(sample)
        with suppress(CkptError):
            if not ckpt.load_into(model, run):
                yield FILLS, f"{len(model.state_dict())} tensors"

    return Lie(f"{name}: {fqn} {kind}", do, (FILLS,), kind=kind, claims=filled)


def _module(sample: Sample) -> torch.nn.Module:
    """Return an empty module with the sample's names and shapes."""
    root = torch.nn.Module()
    checkpoint = ckpt.open(sample.path)
    for fqn, role in checkpoint.tensors:
        if role not in (WEIGHT, "buffer"):
            continue
        *path, leaf = fqn.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        value = torch.empty_like(checkpoint[fqn][...])
        module.register_buffer(leaf, value)
    return root


#: Each class of lies and its share in the campaign.
CLASSES: dict[str, tuple[Maker, float]] = {
    "other uploads": (other_uploads, 0.01),
    "sources that change under a mount": (changed_sources, 0.02),
    "sources that change under torch's loader": (changed_while_loading, 0.01),
    "unfilled models": (unfilled_models, 0.02),
}
