"""Hints for rare situations: the smallest input for each of them, so `tests/support/hints.py` tries it."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt as toolkit
from ckpt.base import entries
from ckpt.commands.resume.copies import copies_folder
from ckpt.commands.resume.resuming import _check_seen_by_all, _Way
from ckpt.containers import safetensors
from ckpt.containers.torchfile.table import allowed
from ckpt.errors import CkptError
from ckpt.plan.checkpoint import ParamGroup
from ckpt.processes import launch
from ckpt.processes.group import check_alike
from converters.pytorch.trainer import trainer_groups
from tests.support import advice
from tests.support.commands import ckpt
from tests.support.model_files import save_model
from tests.support.places import FIXTURES

RUN = FIXTURES / "toy-zero3"
#: A pickled name known to ckpt, registered again by another package.
NAMES = {("collections", "OrderedDict"): ("a",)}
#: Offline arguments for `ckpt estimate`.
MODEL = (FIXTURES / "trainer-plain/checkpoint-2", "--gpus", "2")


@dataclass(frozen=True)
class Place:
    """A test's folder, and ways to change this process."""

    folder: Path
    patch: pytest.MonkeyPatch

    def __truediv__(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def without(self, module: str) -> None:
        """Make a module look uninstalled."""
        self.patch.setitem(sys.modules, module, None)


def model(folder: Path, tensors: Mapping[str, torch.Tensor] | None = None, **config: Any) -> Path:
    return save_model(folder, tensors or {"model.a.weight": torch.ones(4, 4)}, config)


def quantized(folder: Path) -> Path:
    tensors = {
        "model.a.weight": torch.ones(128, 128).to(torch.float8_e4m3fn),
        "model.a.weight_scale_inv": torch.ones(1, 1),
    }
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return model(folder, tensors, quantization_config=method)


def adapter(folder: Path, size: int = 4, **config: Any) -> Path:
    folder.mkdir(parents=True)
    name = "base_model.model.model.a.lora_"
    save_file(
        {f"{name}A.weight": torch.ones(2, size), f"{name}B.weight": torch.ones(size, 2)},
        folder / "adapter_model.safetensors",
    )
    settings = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 2,
        "target_modules": ["a"],
        "peft_version": "0.18.0",
    } | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def text(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def pointer(path: Path) -> Path:
    return text(path, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def sharded() -> torch.nn.Module:
    layer = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4, bias=False)})
    layer["a"].weight.placements = ()
    return layer


def stacked(folder: Path) -> Path:
    tensors(folder / "model.pt", **{"model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 4, 4)})
    return text(folder / "config.json", json.dumps({"model_type": "new"})).parent


def filled(folder: Path) -> Path:
    folder.mkdir()
    return text(folder / "file", "").parent


def empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def half(folder: Path) -> Path:
    return model(folder, {"model.a.weight": torch.ones(4, 4, dtype=torch.bfloat16)})


def named(folder: Path) -> Path:
    return model(folder, {"a.weight": torch.ones(4, 4)})


@contextlib.contextmanager
def out_of_memory() -> Iterator[None]:
    raise MemoryError("no memory is left")
    yield


def program(path: Path) -> Path:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    return path


def big_endian(path: Path) -> Path:
    torch.save({"w": torch.ones(2)}, path.with_suffix(".little"))
    with zipfile.ZipFile(path.with_suffix(".little")) as little, zipfile.ZipFile(path, "w") as big:
        for item in little.infolist():
            content = little.read(item)
            big.writestr(item.filename, b"big" if item.filename.endswith("byteorder") else content)
    return path


def two_packages(place: Place) -> str:
    two = [metadata.EntryPoint("marks", f"{name}:FORMAT", "ckpt.formats") for name in ("one", "other")]
    entries.entries.cache_clear()
    place.patch.setattr(entries, "_others_register", lambda: True)
    place.patch.setattr(metadata, "entry_points", lambda group: [one for one in two if one.group == group])
    try:
        return typed("inspect", RUN)
    finally:
        entries.entries.cache_clear()


def many_names(place: Place) -> str:
    place.patch.setattr(safetensors, "MAX_HEADER", 200)
    return typed("convert", "auto", "hf", RUN, "-o", place / "out")


def is_lacking(place: Place, module: str, call: Callable[[], str]) -> str:
    place.without(module)
    return call()


def changed(place: Place, target: str, value: Any, call: Callable[[], str]) -> str:
    place.patch.setattr(target, value)
    return call()


def mounted(place: Place, library: str, view: Path) -> str:
    """Return the error of a mount if mfusepy's module has the source `library`."""
    text(place / "modules/mfusepy.py", library)
    place.patch.setitem(sys.modules, "mfusepy", None)  # the end of the test removes the stub, too
    del sys.modules["mfusepy"]
    place.patch.syspath_prepend(place / "modules")
    return called(lambda: toolkit.mount(RUN, "hf", view).__enter__())


def compressed(place: Place) -> Path:
    shutil.copytree(FIXTURES / "dcp-fsdp2", place / "dcp")
    path = next((place / "dcp").rglob(".metadata"))
    content = pickle.loads(path.read_bytes())
    for info in content.storage_data.values():
        info.transform_descriptors = ["zstd"]
    path.write_bytes(pickle.dumps(content))
    return path.parent


def launched(place: Place, size: str = "2", rank: str = "0", **environment: str) -> str:
    """Return the error from a process started by mpirun, or by torchrun if RANK is given."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_CPP_LOG_LEVEL"):
        place.patch.setenv(name, "")  # removed at the end, whatever the launch sets
        place.patch.delenv(name)
    for name, value in {"OMPI_COMM_WORLD_SIZE": size, "OMPI_COMM_WORLD_RANK": rank, **environment}.items():
        place.patch.setenv(name, value)
    place.patch.setattr(launch, "_JOINING", timedelta(seconds=0))
    start = launch.launch()
    assert start is not None
    return inner(lambda: launch._join(start, contextlib.ExitStack()))


def tensors(path: Path, **content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def ranks_of_two_runs(place: Place) -> Path:
    for count in (1, 2):
        tensors(place / f"run/model_world_size_{count}_rank_0.pt", a=torch.ones(2))
    return place / "run"


def others(first: Any) -> Any:
    """Return a group with this process as the second one; the first one gives `first`."""
    return SimpleNamespace(rank=1, size=2, gather=lambda value: [first, value])


def inner(function: Callable[[], object]) -> str:
    """Return the error of a function not reachable through the public API in this process.

    Its hint has to be advice.
    """
    with pytest.raises(CkptError) as refused:
        function()
    assert refused.value.hint is not None and advice.kind(refused.value.hint) is not None
    return str(refused.value)


def typed(*words: str | Path) -> str:
    """Return a command's error. `ckpt` types its hint."""
    return ckpt(*words).err


def called(function: Callable[[], object]) -> str:
    """Return a call's error. `tests/support/python_hints.py` types its hint."""
    with pytest.raises(CkptError) as refused:
        function()
    return str(refused.value)


#: Part of the hint, and a situation that prints it.
SITUATIONS: dict[str, Callable[[Place], str]] = {
    "--dequantize` makes a plain base": lambda at: typed(
        "convert", "auto", "hf", RUN, "--complete-from", quantized(at / "base"), "-o", at / "out"
    ),
    "-o FOLDER` makes a local one": lambda at: typed("verify", "s3://bucket/model", "--loads"),
    "uninstall one of them": two_packages,
    "give A and B, without --run": lambda at: typed("verify", RUN, RUN, "--run", "--html", at / "page.html"),
    "give a smaller --max-shard-size": many_names,
    "save the module's state_dict() with torch.save": lambda at: typed("inspect", program(at / "model.pt")),
    "run `git lfs pull` in its folder": lambda at: typed("inspect", pointer(at / "pytorch_model.bin").parent),
    "on a little-endian machine": lambda at: typed("inspect", big_endian(at / "model.pt")),
    "correct the path in the run config": lambda at: typed(
        "estimate", "--run-config", text(at / "run.yml", "deepspeed: ds.json\nbase_model: x\n"), *MODEL
    ),
    "give the model, and this file with --run-config": lambda at: typed(
        "estimate", text(at / "run.yml", "micro_batch_size: 2\n"), "--gpus", "2"
    ),
    "pass a known optimizer with equal states: --optimizer NAME": lambda at: typed(
        "estimate", "--run-config", text(at / "run.yml", "optimizer: galore_adamw\nbase_model: x\n"), *MODEL
    ),
    "leave out --revision or --create-pr": lambda at: typed(
        "push", model(at / "out"), "--repo-id", "org/name", "--revision", "dev", "--create-pr"
    ),
    "give it with --base": lambda at: typed("merge-lora", adapter(at / "a"), "-o", at / "out"),
    "give the full-precision model with --base": lambda at: typed(
        "merge-lora", adapter(at / "a", 128), "--base", quantized(at / "base"), "-o", at / "out"
    ),
    "give a folder in it": lambda at: inner(lambda: copies_folder(Path("/"))),
    "give a folder of another name": lambda at: typed("convert", "auto", "hf", RUN, "-o", at / ".out.ckpt-staging"),
    "give one with -o": lambda at: typed("convert", "auto", "hf", "/"),
    "give a folder in it with -o": lambda at: changed(
        at,
        "os.path.ismount",
        lambda path: str(path).endswith("/out"),
        lambda: typed("convert", "auto", "hf", RUN, "-o", empty(at / "out")),
    ),
    "free some space, or choose another place": lambda at: changed(
        at,
        "os.statvfs",
        lambda path: SimpleNamespace(f_bavail=0, f_frsize=1),
        lambda: typed("convert", "auto", "hf", RUN, "-o", at / "out"),
    ),
    "remove entries that change nothing": lambda at: typed(
        "convert", "peft", "peft", adapter(at / "a", brand_new=True), "--server", "vllm", "-o", at / "out"
    ),
    "use --only weights to compare the model's tensors": lambda at: typed(
        "verify", model(at / "a"), model(at / "b"), "--only", "optimizer"
    ),
    "pip install torch": lambda at: is_lacking(
        at, "torch", lambda: typed("merge-lora", adapter(at / "a"), "--base", model(at / "b"), "-o", at / "out")
    ),
    "or use `.numpy(index)` without torch": lambda at: is_lacking(
        at, "torch", lambda: called(lambda: toolkit.open(model(at / "b"))["model.a.weight"][0])
    ),
    "pip install ml_dtypes": lambda at: is_lacking(
        at, "ml_dtypes", lambda: called(lambda: toolkit.open(half(at / "b"))["model.a.weight"].numpy())
    ),
    "--workers 1 needs the least memory": lambda at: changed(
        at,
        "ckpt.commands.merge_lora.arithmetic.one_thread",
        out_of_memory,
        lambda: typed("merge-lora", adapter(at / "a"), "--base", model(at / "b"), "-o", at / "out"),
    ),
    "strict=False fills what both have": lambda at: called(
        lambda: toolkit.load_into(torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4)}), named(at / "b"))
    ),
    "is it the same model?": lambda at: called(lambda: toolkit.load_into(torch.nn.Linear(4, 4), named(at / "b"))),
    "model.to_empty(device=...) first": lambda at: called(
        lambda: toolkit.load_into(
            torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4, bias=False, device="meta")}), named(at / "b")
        )
    ),
    "in a container: --device /dev/fuse": lambda at: changed(
        at, "ckpt.views.mount.DEVICE", "/dev/no-fuse", lambda: mounted(at, "", at / "view")
    ),
    "give an empty folder, or a new name": lambda at: mounted(at, "", filled(at / "view")),
    "apt-get install fuse3": lambda at: mounted(at, "raise OSError('no libfuse')", at / "view"),
    "pip install 'ckpt-toolkit[mount]'": lambda at: is_lacking(
        at, "mfusepy", lambda: called(lambda: toolkit.mount(RUN, "hf", at / "view").__enter__())
    ),
    "load and save it again in torch, without extensions": lambda at: typed("inspect", compressed(at)),
    "update the registering package": lambda at: changed(
        at,
        "ckpt.containers.torchfile.table.entries",
        lambda group: {"names": "tests.cli.test_rare_hints:NAMES"},
        lambda: inner(allowed.__wrapped__),
    ),
    "mpirun -x MASTER_ADDR=HOST": lambda at: launched(at),
    "pip install torch, or use srun or mpirun": lambda at: is_lacking(
        at,
        "torch.distributed",
        lambda: launched(at, RANK="0", WORLD_SIZE="2", MASTER_ADDR="a", TORCHELASTIC_USE_AGENT_STORE="True"),
    ),
    "check that every process runs this command and can reach the port": lambda at: launched(
        at, "2", "1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    ),
    "start the same command everywhere": lambda at: inner(lambda: check_alike({"tag": "1"}, others({"tag": "2"}))),
    "keep the run on shared storage": lambda at: inner(
        lambda: _check_seen_by_all(_Way(str(at / "gone"), ""), others("another"))
    ),
    "fill it before it is sharded": lambda at: called(lambda: toolkit.load_into(sharded(), named(at / "b"))),
    "move the files from other runs out of the folder": lambda at: typed("inspect", ranks_of_two_runs(at)),
    "rename it to Accelerate's name": lambda at: typed(
        "inspect", tensors(at / "run/model_world_size_1_rank_0.pt", _flat_param=torch.ones(2)).parent
    ),
    "docs/new-architecture.md says how to add one": lambda at: typed(
        "convert", "auto", "megatron", model(at / "a", model_type="new"), "-o", at / "out"
    ),
    "pip install 'transformers>=5' torch": lambda at: changed(
        at,
        "converters.names.transformers.relation.converted_identifiers",
        lambda: None,
        lambda: typed("convert", "auto", "hf", stacked(at / "a"), "-o", at / "out"),
    ),
    "use the formats full or dcp to store them by name": lambda at: inner(
        lambda: trainer_groups([ParamGroup((name,), {}) for name in "abc"], "abc")
    ),
    "give the path of a run or a checkpoint": lambda at: called(lambda: toolkit.StorageReader().read_metadata()),
}


@pytest.mark.parametrize("hint", SITUATIONS)
def test_rare_hint(hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hint in SITUATIONS[hint](Place(tmp_path, monkeypatch)).rpartition("hint: ")[2]
