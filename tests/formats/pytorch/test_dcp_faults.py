"""`converters/pytorch/dcp.py`, `converters/deepspeed/universal.py`: broken and hostile checkpoints are refused.

Sources are FSDP's and universal checkpoints. No file is changed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from ckpt import api
from ckpt.commands.inspect.svg import RED
from tests.support.commands import ckpt, process, snapshot
from tests.support.damage import AUDITED, emptied, half, one_byte_short, refused, zeroed_tail
from tests.support.dcp_folders import edit, nested, read, save, trained, write
from tests.support.drawing import parsed
from tests.support.hostile import make as hostile

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

KEY = "model.down.weight"  # [5, 3]: rank 0 has 3 rows and rank 1 has 2


@pytest.fixture
def step(fixtures: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(fixtures / "dcp-fsdp2" / "step-2", tmp_path / "source" / "step-2"))


@pytest.fixture
def universal(fixtures: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "source" / "universal"
    api.plan(api.open(fixtures / "lora-zero3"), "universal").run(folder)
    return folder


@pytest.fixture
def full(fixtures: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "source" / "full"
    api.plan(api.open(fixtures / "toy-zero3"), "full").run(folder)
    return folder


class Runs:
    """Object that runs a command when Python's unpickler or torch's reader loads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


def run_code(metadata: Any) -> None:
    metadata.planner_data["x"] = Runs()


def leave_a_hole(metadata: Any) -> None:
    metadata.state_dict_metadata[KEY].chunks.pop()


def overlap(metadata: Any) -> None:
    second = metadata.state_dict_metadata[KEY].chunks[1]
    metadata.storage_data[MetadataIndex(KEY, (2, 0))] = metadata.storage_data[MetadataIndex(KEY, second.offsets)]
    metadata.state_dict_metadata[KEY].chunks[1] = ChunkStorageMetadata((2, 0), second.sizes)


def begin_twice(metadata: Any) -> None:
    first = metadata.state_dict_metadata[KEY].chunks[0]
    metadata.state_dict_metadata[KEY].chunks.append(ChunkStorageMetadata(first.offsets, torch.Size([1, 1])))


def run_past_the_end(metadata: Any) -> None:
    metadata.state_dict_metadata[KEY].size = torch.Size([4, 3])


def lead_to(name: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = name

    return change


METADATA: dict[str, tuple[Callable[[Any], None], int, tuple[str, ...]]] = {
    "runs-code": (run_code, 5, (".metadata", "system")),
    "climbs-out": (lead_to("../../outside.distcp"), 5, ("outside.distcp", "leads out")),
    "is-absolute": (lead_to("/etc/passwd"), 5, ("/etc/passwd", "leads out")),
    "has-a-nul": (lead_to("a\0b"), 5, ("leads out",)),
    "leaves-a-hole": (leave_a_hole, 4, ("tensor: down.weight\n", "hole at elements 9:15")),
    "overlaps": (overlap, 4, ("tensor: down.weight\n", "overlap")),
    "begins-twice": (begin_twice, 4, ("tensor: model.down.weight\n", "two chunks of a tensor begin at the same")),
    "runs-past-the-end": (run_past_the_end, 4, ("tensor: down.weight\n", "outside at [3:5, 0:3]")),
}


@pytest.mark.parametrize("format", ["auto", "dcp"])
@pytest.mark.parametrize("case", METADATA)
def test_metadata_that(step: Path, case: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(step.parent.parent)
    change, code, words = METADATA[case]
    edit(step, change)
    refused(step, code, *words, format=format)
    assert not Path("executed").exists()


def test_a_file_of_items_that_nothing_describes(step: Path) -> None:
    """Ranks without tensor elements write such items. ckpt doesn't look for the file."""

    def add(metadata: Any) -> None:
        index = MetadataIndex("model.nothing", torch.Size([0]))
        metadata.storage_data[index] = replace(next(iter(metadata.storage_data.values())), relative_path="__7_0.distcp")

    before = api.open(step)
    edit(step, add)
    assert api.open(step).tensors.keys() == before.tensors.keys()


DRAWN = {"leaves-a-hole": "#ffffff", "overlaps": RED, "runs-past-the-end": None}


@pytest.mark.parametrize("case", DRAWN)
def test_what_is_damaged_has_a_picture(step: Path, tmp_path: Path, case: str) -> None:
    """`inspect` draws without a proof, but reports the same faults as `convert`."""
    change, code, words = METADATA[case]
    edit(step, change)
    done = ckpt("inspect", step, "--picture", tmp_path / "out.svg")
    assert done.code == code
    assert all(word in done.err for word in words)
    row = parsed((tmp_path / "out.svg").read_text()).row("down.weight", "weight float32")
    assert any(words[-1] in note for note in row.notes)
    assert DRAWN[case] in {None, *(fill for fill, _ in row.patches)}


def test_metadata_that_runs_code_seen_from_outside(step: Path, tmp_path: Path) -> None:
    """The attack starts no process, imports nothing and creates no file."""
    edit(step, run_code)
    before = snapshot(step)
    empty = tmp_path / "empty"
    empty.mkdir()
    result = process("convert", "dcp", "hf", step, "-o", tmp_path / "out", script=AUDITED, cwd=empty)
    assert (result.code, result.out) == (5, "events [] modules [] folder []\n"), result.err
    assert snapshot(step) == before and not (tmp_path / "out").exists()


def test_a_symlink_that_leads_out(step: Path, tmp_path: Path) -> None:
    (step / "__1_0.distcp").rename(tmp_path / "elsewhere")
    (step / "__1_0.distcp").symlink_to(tmp_path / "elsewhere")
    refused(step, 5, "__1_0.distcp", "symlink")


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
def test_a_file_is_missing(step: Path, name: str) -> None:
    (step / name).unlink()
    refused(step, 4, name, format="dcp")


def test_a_model_whose_halves_are_equal_is_written_and_read(tmp_path: Path) -> None:
    """Each rank has one half. Equal halves are no copied file."""
    import numpy as np
    from safetensors.numpy import save_file

    period = np.arange(64, dtype=np.float32)
    (tmp_path / "hf").mkdir()
    save_file({f"w{n}": np.tile(period, 8).reshape(16, 32) for n in range(3)}, tmp_path / "hf" / "model.safetensors")
    done = ckpt("convert", "hf", "dcp", tmp_path / "hf", "-o", tmp_path / "out", "--world-size", "2")
    assert done.code == 0, done.err
    assert "are equal byte for byte" in ckpt("inspect", tmp_path / "out").out
    assert ckpt("verify", tmp_path / "hf", tmp_path / "out").code == 0


@pytest.mark.parametrize("damage", [half, one_byte_short, emptied, zeroed_tail])
@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
def test_a_file_is_truncated(step: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(step / name)
    refused(step, 4, name)


def test_ranks_of_different_steps(tmp_path: Path) -> None:
    """A save over an older checkpoint stopped before every rank had written."""
    model, optimizer = trained()
    states = nested(model, optimizer)[1]
    for name, number in (("old", 1.0), ("new", 2.0)):
        for values in states["state"].values():
            values["step"].fill_(number)
        whole = save({"model": model.state_dict(), "optimizer": states}, tmp_path / f"whole-{name}")
        write(read(whole), tmp_path / "source" / name, 2)
    shutil.copy(tmp_path / "source" / "new" / "__1_0.distcp", tmp_path / "source" / "old")
    refused(tmp_path / "source" / "old", 4, "different steps", "__1_0.distcp", "step 1", "step 2")


def test_universal_without_a_file(universal: Path) -> None:
    for pattern in ("*/zero/*/fp32.pt", "*/zero/*/exp_avg.pt", "*/*_model_states.pt"):
        path = max(universal.glob(pattern))
        content = path.read_bytes()
        path.unlink()
        refused(universal, 4, path.parent.name, "missing")
        path.write_bytes(content)


@pytest.mark.parametrize("damage", [half, one_byte_short, emptied, zeroed_tail])
def test_universal_with_a_truncated_file(universal: Path, damage: Callable[[Path], None]) -> None:
    for pattern in ("*/zero/*/fp32.pt", "*/zero/optimizer_state.pt", "*/*_model_states.pt"):
        path = min(universal.glob(pattern))
        content = path.read_bytes()
        damage(path)
        refused(universal, 4, f"file: {path}\n")
        path.write_bytes(content)


@pytest.mark.parametrize("damage", [half, one_byte_short, emptied, zeroed_tail])
def test_full_with_a_truncated_file(full: Path, damage: Callable[[Path], None]) -> None:
    for name in ("pytorch_model_fsdp.bin", "optimizer.bin", "training_state.pt"):
        content = (full / name).read_bytes()
        damage(full / name)
        refused(full, 4, f"file: {full / name}\n")
        (full / name).write_bytes(content)


def test_files_that_run_code(full: Path, universal: Path) -> None:
    content = hostile.archive(hostile.records(hostile.PICKLES["stack-global-os-system"].content))
    paths = [*(full / name for name in ("pytorch_model_fsdp.bin", "optimizer.bin", "training_state.pt"))]
    paths += [min(universal.glob(pattern)) for pattern in ("*/zero/*/fp32.pt", "*/zero/optimizer_state.pt")]
    for path in paths:
        original = path.read_bytes()
        path.write_bytes(content)
        refused(full if path.parent == full else universal, 5, "os.system", path.name)
        path.write_bytes(original)
