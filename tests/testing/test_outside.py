"""`ckpt/plan/registry.py`, `ckpt/testing/conformance.py`: a format, a store and a command from other packages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckpt.containers.torchfile.unpickle import load_pickle
from ckpt.errors import UnsafeError
from tests.support.places import REPOSITORY

pytestmark = pytest.mark.slow

EXAMPLE, STORE, COMMAND = (Path(__file__).parents[1] / f"example_{what}" for what in ("format", "store", "command"))
SAMPLE = EXAMPLE / "ckpt_mlx" / "sample"

Run = Callable[..., subprocess.CompletedProcess[str]]
#: pip would start several processes for each project.
_BUILD = """
import os, sys
from setuptools import build_meta
for project in sys.argv[2:]:
    if not os.fork():
        os.chdir(project)
        build_meta.build_wheel(sys.argv[1])
        os._exit(0)
    assert not os.wait()[1]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function to run a module in an environment with ckpt's and the examples' wheels.

    The environment also has this interpreter's packages.
    """
    folder = tmp_path_factory.mktemp("scratch")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
    # as in the process of the tests, nothing waits for the disk
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\nimport os; os.fsync = lambda fd: None\n")
    projects = (REPOSITORY, EXAMPLE, STORE, COMMAND)
    for project in projects:
        ignored = (".*", "build", "fixtures", "*.egg-info", *(["tests"] if project is REPOSITORY else []))
        shutil.copytree(project, folder / project.name, ignore=shutil.ignore_patterns(*ignored))
    build = [sys.executable, "-c", _BUILD, folder / "wheels", *(folder / project.name for project in projects)]
    subprocess.run(build, check=True, capture_output=True)
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*install, "--target", site, *(folder / "wheels").iterdir()], check=True)

    def run(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
        command = [folder / "venv" / "bin" / "python", "-m", *arguments]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    where = subprocess.run(
        [folder / "venv" / "bin" / "python", "-c", "import ckpt, ckpt.testing; print(ckpt.__file__)"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert where.stdout.startswith(str(site)), "the wheel is what is tested"
    return run


@pytest.mark.parametrize(
    "module", [EXAMPLE / "ckpt_mlx", STORE / "ckpt_sqlite", COMMAND / "ckpt_sizes"], ids=lambda path: path.name
)
def test_each_is_one_short_module(module: Path) -> None:
    assert [path.name for path in module.glob("*.py")] == ["__init__.py"]
    assert len((module / "__init__.py").read_text().splitlines()) < 150


def test_a_checkpoint_goes_into_the_store_and_back(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_SQLITE", str(tmp_path))
    zero, options = REPOSITORY / "fixtures" / "toy-zero3", ("--world-size", "2")
    run("ckpt", "convert", "zero3", "zero3", zero, *options, "-o", "sqlite://runs/two")
    run("ckpt", "convert", "zero3", "zero3", zero, *options, "-o", tmp_path / "two")
    assert "equal" in run("ckpt", "verify", "sqlite://runs/two", tmp_path / "two").stdout
    assert "every bit of them" in run("ckpt", "verify", tmp_path / "two").stdout
    refused = run("ckpt", "convert", "zero3", "hf", "sqlite://nothing/here", "-o", tmp_path / "out", code=3)
    assert "Traceback" not in refused.stderr


def test_a_command_from_outside_is_a_command(run: Run) -> None:
    run_folder = REPOSITORY / "fixtures" / "toy-zero3"
    found = json.loads(run("ckpt", "sizes", run_folder, "--json").stdout)
    weights = json.loads(run("ckpt", "sizes", run_folder, "--json", "--role", "weight").stdout)
    assert sum(found.values()) > sum(weights.values()) > 0
    assert "sizes" in run("ckpt", "--help").stdout.split("\nLook and compare:\n")[1].split("\n\n")[0]
    assert "did you mean sizes?" in run("ckpt", "sizez", code=2).stderr
    refused = run("ckpt", "sizes", run_folder, "--config", "https://there.example/x", code=2)
    assert "`ckpt sizes` takes no URL here" in refused.stderr
    assert run("ckpt", "sizes", "nowhere", code=3).stderr.startswith("error: ")


def test_it_is_listed_and_its_option_is_in_the_help(run: Run) -> None:
    rows = [line.split() for line in run("ckpt", "formats").stdout.splitlines()]
    assert ["mlx", "yes", "yes", "-", "MLX", "safetensors"] in rows
    own = run("ckpt", "convert", "--help").stdout.split("\nOptions of mlx:\n")[1]
    assert own.strip().startswith("--mlx-stem TEXT")


def test_it_is_converted_both_ways(run: Run, tmp_path: Path) -> None:
    """To the Hub's names, one tensor per expert, and back to MLX's names and in-memory state."""
    source = tmp_path / "mlx"
    shutil.copytree(SAMPLE, source, ignore=shutil.ignore_patterns("truth.npz"))
    assert "mlx: mlx (mlx)" in run("ckpt", "convert", "auto", "hf", source).stderr
    assert run("ckpt", "verify", source, tmp_path / "mlx-hf", "--json").stdout
    options = ("-o", tmp_path / "back", "--mlx-stem", "model-of-tests", "--max-shard-size", "1KB")
    run("ckpt", "convert", "hf", "mlx", tmp_path / "mlx-hf", *options)
    with np.load(SAMPLE / "truth.npz") as truth:
        held = dict(truth)
    hub, mlx = stored(tmp_path / "mlx-hf"), stored(tmp_path / "back")
    assert mlx == {name: value.tobytes() for name, value in held.items()}
    experts = [name for name in hub if ".experts." in name]
    assert len(experts) == 12
    for name in experts:
        number = int(name.split(".experts.")[1].split(".")[0])
        stack = held[name.replace(f"experts.{number}", "switch_mlp")]
        assert hub[name] == stack[number].tobytes()
    assert {name: value for name, value in hub.items() if name not in experts}.items() <= mlx.items()
    names = sorted(file.name for file in (tmp_path / "back").glob("*.safetensors"))
    assert len(names) > 2 and all(name.startswith("model-of-tests-0000") for name in names)


def stored(folder: Path) -> dict[str, bytes]:
    import torch
    from safetensors.torch import load_file

    tensors = [item for file in folder.glob("*.safetensors") for item in load_file(file).items()]
    return {name: tensor.view(torch.uint16).numpy().tobytes() for name, tensor in tensors}


def test_an_option_of_its_own_is_refused_elsewhere(run: Run, tmp_path: Path) -> None:
    refused = run("ckpt", "convert", "mlx", "hf", SAMPLE, "--mlx-stem", "model-x", "-o", tmp_path / "out", code=2)
    assert "the format 'hf' does not support the options of mlx" in refused.stderr
    named = run("ckpt", "convert", "mlx", "mlx", SAMPLE, "--mlx-stem", "weights", "-o", tmp_path / "out", code=2)
    assert "mlx_lm would not load these files" in named.stderr


def test_a_pickle_may_hold_its_name(run: Run, tmp_path: Path) -> None:
    """With the example installed, its class loads as an inert record; without it, the pickle is refused."""
    found = tmp_path / "training.pkl"
    found.write_bytes(b"cmlx_lm.tuner.trainer\nTrainingArgs\n)R.")  # the name, no arguments, REDUCE
    look = f"from ckpt.containers.torchfile.unpickle import load_pickle; print(load_pickle({str(found)!r}))"
    assert "TrainingArgs" in run("timeit", "-n1", "-r1", look).stdout
    with pytest.raises(UnsafeError, match=r"mlx_lm\.tuner\.trainer"):
        load_pickle(found)


def test_it_passes_the_suite_that_ckpt_ships(run: Run, tmp_path: Path) -> None:
    """With a base of its own, this pytest doesn't remove the folders of earlier runs, which can take minutes."""
    done = run(
        "pytest", "-q", "-p", "no:cacheprovider", "-rs", "--basetemp", tmp_path / "base", "--pyargs", "ckpt.testing"
    )
    last = done.stdout.splitlines()[-1]
    assert "passed" in last and "failed" not in last
