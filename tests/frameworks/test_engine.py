"""`converters/megatron/chunks.py`, `read.py`, `dist/read.py`, `dist/write.py`: layers of Transformer Engine.

Megatron-LM builds, saves and loads grouped experts, a shared expert and a router with bias.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt import api
from tests.frameworks.runs import DISTRIBUTED, Held, Job, run
from tests.support.commands import ckpt
from tests.support.describing import content

pytestmark = pytest.mark.slow

FP8 = f"{DISTRIBUTED} --fp8-format hybrid --fp8-recipe delayed"
SOURCES = [
    Job("dist", 4, pp=2, ep=2, steps=2, engine=True),
    Job("fp8", 2, FP8, ep=2, steps=2, engine=True),
    Job("torch", 2, f"{DISTRIBUTED} --ckpt-format torch", ep=2, steps=2, engine=True),
]
#: (run, job that loads it, target format, ckpt options)
MOVES = [
    ("dist", Job("dist-ep4", 4, ep=4, engine=True), "megatron-dist", "--world-size 4 --pp 1 --ep 4"),
    ("dist", Job("dist-tp2", 2, tp=2, engine=True), "megatron-dist", "--world-size 2 --tp 2 --pp 1 --ep 1 --etp 1"),
    ("fp8", Job("fp8-ep4", 4, FP8, ep=4, engine=True), "megatron-dist", "--world-size 4 --ep 4"),
    ("dist", Job("to-torch", 2, ep=2, engine=True), "megatron", "--world-size 2 --pp 1 --ep 2"),
    ("torch", Job("from-torch", 2, ep=2, engine=True), "megatron-dist", ""),
]
NAMES = [target.name for _, target, _, _ in MOVES]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def saved(home: Path) -> dict[str, Held]:
    return run([replace(job, save=home / f"{job.name} run") for job in SOURCES], home / "saved")


@pytest.fixture(scope="module")
def loaded(home: Path, saved: dict[str, Held]) -> dict[str, Held]:
    """Return what Megatron-LM's ranks hold after they load ckpt's output and save it again."""
    jobs = []
    for source, target, format, options in MOVES:
        output = home / target.name
        result = ckpt("convert", "auto", format, home / f"{source} run", *options.split(), "-o", output)
        assert result.code == 0, result.err
        arguments = f"{target.arguments} --no-load-rng"
        if format == "megatron":
            arguments += " --ckpt-format torch"
        jobs.append(replace(target, arguments=arguments, load=output, save=home / f"{target.name} again"))
    return run(jobs, home / "loaded")


@pytest.mark.parametrize("job", SOURCES, ids=lambda job: job.name)
def test_every_bit_is_what_the_ranks_held(job: Job, home: Path, saved: dict[str, Held]) -> None:
    read, known = api.open(home / f"{job.name} run"), saved[job.name]
    assert any(".local_experts.7.linear_fc1.weight" in fqn for fqn, _ in known.tensors)
    assert any(fqn.endswith("shared_experts.gate_weight") for fqn, _ in known.tensors)
    assert any(fqn.endswith("router.expert_bias") for fqn, _ in known.tensors)
    assert read.tensors.keys() == known.tensors.keys()
    assert [key for key, tensor in read.tensors.items() if content(tensor) != known.tensors[key]] == []


@pytest.mark.parametrize("name", NAMES)
def test_megatron_lm_loads_every_bit(name: str, saved: dict[str, Held], loaded: dict[str, Held]) -> None:
    source = next(source for source, target, _, _ in MOVES if target.name == name)
    known, found = saved[source], loaded[name]
    assert found.tensors.keys() == known.tensors.keys()
    assert [key for key in known.tensors if found.tensors[key] != known.tensors[key]] == []
    for fact in ("scheduler", "steps"):
        assert found.facts[fact] == known.facts[fact]


def test_scales_of_fp8_go_where_their_modules_go(home: Path, loaded: dict[str, Held]) -> None:
    """Grouped experts save no scales until their next FP8 step, and that step needs a GPU."""
    known, written, again = (_scales(home / folder) for folder in ("fp8 run", "fp8-ep4", "fp8-ep4 again"))
    assert len(known) == 10 * (4 + 2 * 8) and known == written
    assert len({tuple(scales) for scales in known.values()}) > 10  # scales differ between modules
    assert again == {name: scales for name, scales in known.items() if ".local_experts." not in name}


def _scales(run: Path) -> dict[str, list[float]]:
    """Return each module's first scales from Transformer Engine's pickled state."""
    found = {}
    for name, stored in api.open(run).state.entries()["fp8_state"].items():
        with open(stored.extent.path, "rb") as file:
            file.seek(stored.extent.offset)
            state = _Unpickler(io.BytesIO(file.read(stored.extent.numel))).load()
        found[name] = state["scale_fwd"].tolist() + state["scale_bwd"].tolist()
    return found


class _Unpickler(pickle.Unpickler):
    """Unpickler for tensors. It skips the content of recipes, a class of Transformer Engine."""

    def find_class(self, module: str, name: str) -> Any:
        if not module.startswith("transformer_engine"):
            return super().find_class(module, name)
        return type(name, (), {"__init__": lambda self, *args: None, "__setstate__": lambda self, state: None})
