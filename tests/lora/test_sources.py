"""`ckpt/commands/merge_lora/find.py`, `merge.py`: what is read is never written over, nor into, and is watched while it
is read.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpt.commands.merge_lora import find as adapters
from ckpt.commands.merge_lora import merge as lora
from ckpt.errors import CorruptError
from tests.support.commands import ckpt, snapshot


@pytest.fixture
def places(fixtures: Path, tmp_path: Path) -> Path:
    """A run with an adapter, its copy, a second adapter and a base, side by side."""
    run = fixtures / "lora-zero3"
    assert ckpt("merge-lora", run, "-o", tmp_path / "base").code == 0
    assert ckpt("convert", "auto", "peft", run, "-o", tmp_path / "adapter").code == 0
    shutil.copytree(tmp_path / "adapter", tmp_path / "second")
    shutil.copytree(tmp_path / "adapter", tmp_path / "run" / "checkpoint-3")
    shutil.copytree(tmp_path / "adapter", tmp_path / "configs")
    (tmp_path / "configs" / "adapter_model.safetensors").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "adapter")
    return tmp_path


@pytest.mark.parametrize(
    ("given", "destination"),
    [
        (["adapter"], "adapter"),
        (["adapter"], "link"),
        (["adapter"], "adapter/merged"),
        (["link"], "adapter/merged"),
        (["adapter"], "base"),
        (["adapter"], "base/merged"),
        (["adapter"], "."),
        (["adapter", "second"], "second"),
        (["adapter", "second", "--adapter-weights", "1,1", "--combination", "cat"], "second/merged"),
        (["run"], "run/checkpoint-3"),
        (["run"], "run/merged"),
        (["run/checkpoint-3"], "run"),
        (["adapter", "--config", "configs"], "configs"),
    ],
)
def test_the_destination_is_none_of_the_sources(
    places: Path, given: list[str], destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(places)
    monkeypatch.chdir(places)
    for option in ("--overwrite", "--dry-run"):
        result = ckpt("merge-lora", *given, "--base", "base", "-o", destination, option)
        assert (result.code, result.out) == (2, ""), result.err
        assert "overlap" in result.err or "holds files of the source" in result.err
    assert snapshot(places) == before


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
