"""`--verify` reads back every written byte, and calls nothing else verified."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import ckpt
from ckpt.errors import CkptError
from ckpt.plan.checkpoint import Layout
from tests.support.places import FIXTURES


def flipped(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


#: A target, one of its files, and the damage to the file on the disk.
DAMAGES: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "config gone": ("hf", "config.json", lambda file: file.unlink()),
    "config is a folder": ("hf", "config.json", lambda file: (file.unlink(), file.mkdir())),
    "other config": ("hf", "config.json", lambda file: flipped(file, 5)),
    "longer tokenizer config": ("hf", "tokenizer_config.json", lambda file: file.write_bytes(file.read_bytes() + b" ")),
    "cut model": ("hf", "model.safetensors", lambda file: os.truncate(file, 100)),
    "metadata of a header": ("hf", "model.safetensors", lambda file: flipped(file, 9)),
    "element": ("hf", "model.safetensors", lambda file: flipped(file, -1)),
    "trainer state": ("zero3", "trainer_state.json", lambda file: file.write_bytes(b"")),
    "random state": ("zero3", "rng_state_1.pth", lambda file: flipped(file, 300)),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_disk_that_changes_what_is_written(name: str, tmp_path: Path) -> None:
    target, file, damage = DAMAGES[name]
    conversion = ckpt.plan(FIXTURES / "trainer-zero2", target, Layout())

    def spoil(folder: Path) -> dict[str, bytes]:
        damage(folder / file)
        return {}

    with pytest.raises(CkptError) as caught:
        conversion.run(tmp_path / "out", verify=True, describe=spoil)
    assert file in f"{caught.value.what} {caught.value.found} {caught.value.path}" or name == "element"
    assert not (tmp_path / "out").exists()
    conversion.run(tmp_path / "out", verify=True)
    assert (tmp_path / "out" / file).is_file()
