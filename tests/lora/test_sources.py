"""`ckpt/commands/merge_lora/find.py`, `merge.py`: never write over or into a source."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpt.commands.merge_lora import find as adapters
from ckpt.commands.merge_lora import merge as lora
from ckpt.errors import CorruptError
from tests.support.commands import ckpt


@pytest.fixture
def places(fixtures: Path, tmp_path: Path) -> Path:
    """Create a run with an adapter, its copy, a second adapter and a base in one folder."""
    run = fixtures / "lora-zero3"
    assert ckpt("merge-lora", run, "-o", tmp_path / "base").code == 0
    assert ckpt("convert", "auto", "peft", run, "-o", tmp_path / "adapter").code == 0
    shutil.copytree(tmp_path / "adapter", tmp_path / "second")
    shutil.copytree(tmp_path / "adapter", tmp_path / "run" / "checkpoint-3")
    shutil.copytree(tmp_path / "adapter", tmp_path / "configs")
    (tmp_path / "configs" / "adapter_model.safetensors").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "adapter")
    return tmp_path


@pytest.mark.parametrize("changed", ["adapter/adapter_model.safetensors", "second/adapter_config.json"])
def test_an_adapter_that_is_replaced_meanwhile(places: Path, changed: str) -> None:
    found = [adapters.open_adapter(str(places / name)) for name in ("adapter", "second")]
    conversion = lora.plan(found, adapters.open_base(found[0], str(places / "base")))
    file = places / changed
    shutil.copy(file, places / "new")
    (places / "new").replace(file)
    with pytest.raises(CorruptError, match="replaced while it was being read") as caught:
        conversion.run(places / "out")
    assert caught.value.path == str(file)
    assert not (places / "out").exists()
