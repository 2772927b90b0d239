"""Hints for rare situations, found by the function that raises the error: wording may change freely."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ckpt as toolkit
from ckpt.base.errors import CkptError
from ckpt.commands.resume.resuming import _check_same_files
from ckpt.move.run import _check_same_plan
from converters.megatron.dist.optimizer import _refuse_transposed
from converters.names.megatron.config_against_args import _check_predicted
from converters.names.transformers.rules import NameRule, _Stack
from tests.cli.test_rare_hints import (
    RUN,
    Place,
    adapter,
    called,
    changed,
    empty,
    inner,
    is_lacking,
    model,
    others,
    tensors,
    text,
    typed,
)
from tests.faults.claims import write_model
from tests.quantized.test_parts import model as quantized_model
from tests.support.model_files import rewriting
from tests.support.places import FIXTURES


def copied(place: Place, fixture: str) -> Path:
    return Path(shutil.copytree(FIXTURES / fixture, place / fixture, ignore=lambda *_: {"truth"}))


def edited(path: Path, old: str, new: str) -> None:
    """Replace text in a file that contains it."""
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new))


def stubbed(place: Place, error: str) -> None:
    """Install a mfusepy whose mount fails with `error`."""
    library = f"class FUSE:\n    def __init__(self, *_, **__):\n        raise {error}\nclass Operations: pass\n"
    text(place / "modules/mfusepy.py", library)
    place.patch.setitem(sys.modules, "mfusepy", None)  # the end of the test removes the stub, too
    del sys.modules["mfusepy"]
    place.patch.syspath_prepend(place / "modules")
    place.patch.setattr("ckpt.views.mount.DEVICE", "/dev/null")


def fails_to_mount(place: Place) -> None:
    stubbed(place, "RuntimeError(1)")
    called(lambda: toolkit.mount(RUN, "hf", place / "view").serve())


def is_left_by_a_dead_mount(place: Place) -> None:
    def gone(path: Path) -> bool:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    place.patch.setattr("ckpt.views.mount.is_filled", gone)
    stubbed(place, "RuntimeError(1)")
    (place / "view").mkdir()
    called(lambda: toolkit.mount(RUN, "hf", place / "view"))


def mounts_a_store(place: Place) -> str:
    stubbed(place, "RuntimeError(1)")
    # not the function alone: the hook that guards files of stores calls it for every file
    place.patch.setattr("ckpt.stores.placeholder_files", SimpleNamespace(is_standin=lambda path: True))
    return typed("mount", "hf", RUN, place / "view")


def empty_factor(place: Place) -> str:
    """Return the error for a file from torch with an adapter saved without its partitions."""
    content = {"model.a.lora_A.default.weight": torch.ones(2, 4), "model.a.lora_B.default.weight": torch.ones(0, 2)}
    tensors(place / "run/pytorch_model.bin", **content)
    shutil.copy(adapter(place / "a") / "adapter_config.json", place / "run")
    return typed("convert", "auto", "peft", place / "run", "-o", place / "out")


def torchao(place: Place) -> str:
    parts, config = quantized_model("torchao Int8WeightOnlyConfig")
    write_model(empty(place / "a"), parts, config)
    return typed("convert", "auto", "hf", place / "a", "-o", place / "out")


def another_base(place: Place) -> str:
    run = copied(place, "megatron-bridge/lora-tp2-pp2")
    edited(run / "iter_0000002/run_config.yaml", "pretrained_checkpoint: null", "pretrained_checkpoint: org/base")
    base = copied(place, "megatron-bridge/dense")
    edited(base / "config.json", '"intermediate_size": 28', '"intermediate_size": 32')
    return typed("convert", "auto", "peft", run, "--config", base, "-o", place / "out")


def wide(place: Place) -> str:
    words = ("--ckpt-format", "fsdp_dtensor", "--dtype", "fp32", "-o", place / "out")
    return typed("convert", "auto", "megatron-dist", FIXTURES / "megatron-fsdp", *words)


def another_buffer(place: Place) -> str:
    """Return the error for a distributed optimizer without the last element of its buffers."""
    toolkit.plan(FIXTURES / "megatron-lm", "megatron").run(place / "run")
    for path in place.folder.rglob("distrib_optim.pt"):
        with rewriting(path) as content:
            for state in (state for one in content if one is not None for state in one[0].values()):
                state.update({name: value[:-1] for name, value in state.items() if isinstance(value, torch.Tensor)})
    return typed("inspect", place / "run")


#: Module and function that raise the error, and a situation for it.
SITUATIONS: dict[str, Callable[[Place], object]] = {
    "ckpt.adapters.names:tensors": empty_factor,
    "ckpt.api:_namespace": lambda at: typed("convert", "auto", "dcp", RUN, "--names", "own", "-o", at / "out"),
    "ckpt.commands.inspect.inspecting:matching_tensors": lambda at: typed("inspect", RUN, "--tensor", "zzz"),
    "ckpt.commands.merge_lora.combine:require_peft": lambda at: is_lacking(
        at,
        "peft",
        lambda: typed("merge-lora", adapter(at / "a", peft_type="LOHA"), "--base", model(at / "b"), "-o", at / "out"),
    ),
    "ckpt.commands.plot.curves:starts_of": lambda at: typed("plot", model(at / "a"), "-o", at / "page.svg"),
    "ckpt.commands.resume.resuming:_check_same_files": lambda at: inner(
        lambda: _check_same_files(model(at / "a"), others(("node0", frozenset({"model.safetensors"}))))
    ),
    "ckpt.commands.watch.watcher:watch": lambda at: typed("watch", at.folder, "--silent", "0"),
    "ckpt.move.run:_check_same_plan": lambda at: inner(
        lambda: _check_same_plan({"sources": []}, others(json.dumps({"sources": [["a", 1, 2, 3]]})))
    ),
    "ckpt.commands.mount.command:mount": mounts_a_store,
    "ckpt.state.kept_dtypes:check_place": torchao,
    "ckpt.views.mount:_check_free": is_left_by_a_dead_mount,
    "ckpt.views.mount:serve": fails_to_mount,
    "converters.megatron.dist.optimizer:_refuse_transposed": lambda at: inner(
        lambda: _refuse_transposed(
            SimpleNamespace(
                args={"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True},
                sharding="fully_sharded_model_space",
                folder=at.folder,
            )
        )
    ),
    "converters.megatron.dist.plain_write:_fsdp_dtensor": wide,
    "converters.megatron.optimizer_read:_misfit": another_buffer,
    "converters.names.megatron.adapter:_misfit": another_base,
    "converters.names.megatron.config_against_args:_check_predicted": lambda at: called(
        lambda: _check_predicted(SimpleNamespace(shapes={}, path=at.folder), {"mtp_num_layers": 1})
    ),
    "converters.names.parameters:_from_transformers": lambda at: changed(
        at,
        "converters.names.transformers.transformers_source.package",
        lambda: None,
        lambda: typed("estimate", model(at / "a", model_type="new"), "--gpus", "2"),
    ),
    "converters.names.transformers.rules:config_mismatch": lambda at: called(
        lambda: _Stack(NameRule("up", ("*.up",)), {(0, 0): "0.up"}).shape("up", {"0.up": (4, 4)}, 2)
    ),
    "converters.pytorch.full:lay_out": lambda at: typed(
        "convert", "auto", "full", RUN, "--max-shard-size", "1GB", "-o", at / "out"
    ),
    "converters.pytorch.full:_add_model": lambda at: typed(
        "inspect", copied(at, "axolotl-lora-fsdp2"), "--tag", "checkpoint-2"
    ),
}


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Return the hints of errors as they are made, by `module:function`."""
    found: dict[str, str | None] = {}
    begin = CkptError.__init__

    def begun(self: CkptError, *args: Any, **named: Any) -> None:
        begin(self, *args, **named)
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_name == "__init__":
            frame = frame.f_back
        found[f"{frame.f_globals['__name__']}:{frame.f_code.co_name}"] = self.hint

    monkeypatch.setattr(CkptError, "__init__", begun)
    return found


@pytest.mark.parametrize("place", SITUATIONS)
def test_rare_hint(place: str, raised: dict[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SITUATIONS[place](Place(tmp_path, monkeypatch))
    assert raised.get(place), raised
