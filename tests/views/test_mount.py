"""`ckpt/views/mount.py`: `ckpt mount`: a folder in another format, read but not written; skipped without FUSE."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ckpt
from ckpt.errors import NotFoundError, UsageError
from ckpt.plan.checkpoint import WEIGHT, Layout
from ckpt.testing.conformance import digests
from ckpt.views import mount
from tests.support.commands import ckpt as ckpt_command
from tests.support.engines import Truth, raw
from tests.support.mounting import no_fuse, unmount
from tests.support.places import REPOSITORY

ZERO3 = REPOSITORY / "fixtures" / "moe-zero3"


needs_fuse = pytest.mark.skipif(bool(no_fuse()), reason=no_fuse() or "FUSE is here")


def command(*words: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [sys.executable, "-m", "ckpt", *map(str, words)], cwd=folder, capture_output=True, text=True, env=env
    )


# -- in Python ---------------------------------------------------------------------------------------------------------
@needs_fuse
def test_a_folder_while_a_block_runs(tmp_path: Path) -> None:
    shutil.copytree(ZERO3, tmp_path / "outputs", ignore=shutil.ignore_patterns("truth"))
    ckpt.convert(tmp_path / "outputs", "hf", tmp_path / "written", manifest=False, dtype="bf16")
    with ckpt.mount(tmp_path / "outputs", "hf", dtype="bf16") as folder:
        assert digests(folder) == digests(tmp_path / "written")
    assert not folder.exists()
    with ckpt.mount(tmp_path / "outputs", "zero3", tmp_path / "view", world_size=3) as folder:
        assert folder == tmp_path / "view"
        assert len(list(folder.rglob("*optim_states.pt"))) == 3
    assert os.listdir(tmp_path / "view") == []
    with pytest.raises(UsageError, match="not an empty folder"):
        ckpt.mount(tmp_path / "outputs", "hf", tmp_path / "written")


# -- with FUSE ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def viewed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Mount and write a ZeRO-3 run as a Hugging Face folder, by relative paths."""
    folder = tmp_path_factory.mktemp("mounted")
    shutil.copytree(ZERO3, folder / "outputs", ignore=shutil.ignore_patterns("truth"))
    with contextlib.chdir(folder):
        written = ckpt_command("convert", "auto", "hf", "outputs", "-o", "written", "--no-manifest")
    assert written.code == 0, written.err
    mounted = command("mount", "hf", "outputs", "view", folder=folder)
    if "could not be mounted" in mounted.stderr:  # a container may have the device and not the right to use it
        pytest.skip(mounted.stderr)
    assert mounted.returncode == 0, mounted.stderr
    assert "fusermount3 -u view" in mounted.stderr and mounted.stdout == ""
    yield folder / "view", folder / "written"
    unmount(folder / "view")
    assert os.listdir(folder / "view") == []


@needs_fuse
class TestMounted:
    def test_a_copy_of_it_is_what_convert_writes(self, viewed: tuple[Path, Path], tmp_path: Path) -> None:
        subprocess.run(["cp", "-r", str(viewed[0]), str(tmp_path / "copy")], check=True)
        assert digests(tmp_path / "copy") == digests(viewed[1])

    def test_transformers_loads_it_bit_for_bit(self, viewed: tuple[Path, Path]) -> None:
        from transformers import AutoModelForCausalLM

        model, info = AutoModelForCausalLM.from_pretrained(viewed[0], dtype="auto", output_loading_info=True)
        assert not any(info.values()), info
        truth = Truth.load(ZERO3 / "truth" / "global_step2.safetensors").tensors
        weights = {(name, WEIGHT): raw(parameter) for name, parameter in model.named_parameters()}
        assert weights == {key: tensor for key, tensor in truth.items() if key[1] == WEIGHT}

    def test_safetensors_maps_it_into_memory(self, viewed: tuple[Path, Path]) -> None:
        from safetensors import safe_open

        with (
            safe_open(viewed[0] / "model.safetensors", "pt") as seen,
            safe_open(viewed[1] / "model.safetensors", "pt") as written,
        ):
            assert sorted(seen.keys()) == sorted(written.keys())
            for name in written.keys():  # noqa: SIM118 - safe_open has no iterator
                assert raw(seen.get_tensor(name)) == raw(written.get_tensor(name)), name

    def test_nothing_can_be_written(self, viewed: tuple[Path, Path]) -> None:
        for attempt in (lambda: (viewed[0] / "new").write_bytes(b""), lambda: (viewed[0] / "config.json").unlink()):
            with pytest.raises(OSError) as caught:
                attempt()
            assert caught.value.errno == errno.EROFS

    @pytest.mark.usefixtures("viewed")
    def test_in_the_foreground_it_ends_when_it_is_unmounted(self, tmp_path: Path) -> None:
        view = tmp_path / "view"
        words = [sys.executable, "-m", "ckpt", "mount", "zero2", str(ZERO3), str(view), "--world-size", "3"]
        serving = subprocess.Popen([*words, "--foreground"], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
        try:
            while not os.path.ismount(view):
                assert serving.poll() is None, serving.communicate()
                time.sleep(0.05)
            assert (view / "latest").read_text() == "global_step2"
            assert len(list((view / "global_step2").glob("*_optim_states.pt"))) == 3
            unmount(view)
            assert serving.wait(60) == 0
        finally:
            serving.kill()
            serving.communicate()

    @pytest.mark.usefixtures("viewed")
    def test_what_was_killed_says_what_takes_it_away(self, tmp_path: Path) -> None:
        words = [sys.executable, "-m", "ckpt", "mount", "hf", str(ZERO3), str(tmp_path / "view"), "--foreground"]
        serving = subprocess.Popen(words, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
        while not os.path.ismount(tmp_path / "view"):
            assert serving.poll() is None
            time.sleep(0.05)
        taken = ckpt_command("mount", "hf", ZERO3, tmp_path / "view")
        assert taken.code == 2 and "not an empty folder" in taken.err and "reads as" not in taken.err
        serving.kill()
        serving.wait()
        dead = ckpt_command("mount", "hf", ZERO3, tmp_path / "view")
        subprocess.run(["fusermount3", "-u", str(tmp_path / "view")], check=True)
        assert dead.code == 7 and f"`fusermount3 -u {tmp_path / 'view'}` to unmount it" in dead.err

    @pytest.mark.usefixtures("viewed")
    def test_the_page_on_views(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Run the page's terminal lines in order, the Python one in this process."""
        page = (REPOSITORY / "docs" / "views.md").read_text()
        shutil.copytree(ZERO3, tmp_path / "outputs", ignore=shutil.ignore_patterns("truth"))
        monkeypatch.chdir(tmp_path)
        mount, load, away = map(shlex.split, re.findall(r"^\$ (.+)$", page, re.MULTILINE))
        mounted = command(*mount[1:], folder=tmp_path)
        assert (mount[0], mounted.returncode) == ("ckpt", 0), mounted.stderr
        try:
            assert load[:2] == ["python", "-c"]
            exec(load[2], {})
        finally:
            subprocess.run(away, check=True)


# -- without -----------------------------------------------------------------------------------------------------------
def test_the_page_on_views_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the Python blocks without a process group, and the other block in one process."""
    import torch

    page = (REPOSITORY / "docs" / "views.md").read_text()
    load, last = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    shutil.copytree(REPOSITORY / "fixtures" / "dcp-fsdp2" / "step-2", tmp_path / "outputs")
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Module()
    model.down = torch.nn.Linear(3, 5, bias=False)
    model.gain = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match="there and not asked for"):
        exec(load, {"model": model, "optimizer": optimizer})
    truth = Truth.load(REPOSITORY / "fixtures" / "dcp-fsdp2" / "truth" / "step-2.safetensors").tensors
    assert raw(model.gain) == truth["gain", WEIGHT]
    assert raw(optimizer.state[model.gain]["exp_avg"]) == truth["gain", "exp_avg"]
    names: dict[str, Any] = {"ckpt": ckpt}
    exec(last, names)
    assert names["header_size"] > 0


def test_what_is_served_is_what_is_written(tmp_path: Path) -> None:
    """Nested folders, any range, and errno values for missing files."""
    conversion = ckpt.plan(ckpt.open(ZERO3), "zero2", Layout(world_size=3))
    conversion.run(tmp_path / "out", manifest=False)
    served = mount._Served(conversion)
    assert sorted(served.readdir("/", None)) == sorted([".", "..", *os.listdir(tmp_path / "out")])
    assert sorted(served.readdir("/global_step2", None)[2:]) == sorted(os.listdir(tmp_path / "out" / "global_step2"))
    for name in conversion.files:
        content = (tmp_path / "out" / name).read_bytes()
        assert served.getattr(f"/{name}")["st_size"] == len(content)
        for start, size in ((0, 1 << 22), (3, 10), (len(content) - 2, 10), (len(content), 10), (len(content) + 9, 1)):
            assert served.read(f"/{name}", size, start, None) == content[start : start + size]
    with pytest.raises(FileNotFoundError):
        served.getattr("/global_step2/none")


def test_reads_across_the_blocks_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount, "_BLOCK", 100)
    conversion = ckpt.plan(ckpt.open(ZERO3), "hf")
    served = mount._Served(conversion)
    with conversion.open("model.safetensors") as file:
        content = file.read()
    for start, size in ((0, 99), (50, 100), (99, 2), (100, 100), (7, 1000), (len(content) - 1, 5)):
        assert served.read("/model.safetensors", size, start, None) == content[start : start + size]


def test_a_source_that_was_replaced_is_an_error_of_the_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ZERO3, tmp_path / "run")
    served = mount._Served(ckpt.plan(ckpt.open(tmp_path / "run"), "hf"))
    for file in (tmp_path / "run").rglob("*_optim_states.pt"):
        file.write_bytes(file.read_bytes())
    with pytest.raises(OSError) as caught:
        served.read("/model.safetensors", 1 << 20, 0, None)
    assert caught.value.errno == errno.EIO
    assert "replaced while it was being read" in capfd.readouterr().err


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "mfusepy", None)
    with pytest.raises(NotFoundError, match="needs the package mfusepy") as caught:
        ckpt.mount(ZERO3, "hf", tmp_path / "view")
    assert caught.value.hint == "pip install 'ckpt-toolkit[mount]'"
    assert os.listdir(tmp_path) == []


def test_without_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "mfusepy", SimpleNamespace())
    monkeypatch.setattr(mount, "DEVICE", str(tmp_path / "fuse"))
    with pytest.raises(NotFoundError, match="this system has no FUSE"):
        ckpt.mount(ZERO3, "hf", tmp_path / "view")


def test_where_nothing_is_mounted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Over files, over a file, and within the run."""
    monkeypatch.setattr(mount, "library", lambda: None)
    shutil.copytree(ZERO3, tmp_path / "run")
    (tmp_path / "filled").mkdir()
    (tmp_path / "filled" / "a").touch()
    for view in (tmp_path / "filled", tmp_path / "filled" / "a"):
        with pytest.raises(UsageError, match="not an empty folder"):
            ckpt.mount(tmp_path / "run", "hf", view)
    with pytest.raises(UsageError, match="called without `view`"):
        ckpt.mount(tmp_path / "run", "hf").serve()
    with pytest.raises(UsageError, match="overlap"):
        ckpt.mount(tmp_path / "run", "hf", tmp_path / "run" / "view")
