"""The folder to go on from: as it is, converted, found again, and the same for every process that asks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.caller import Caller, caller
from ckpt.errors import CkptError, NotFoundError, SeveralRunsError, UsageError
from ckpt.resuming import RECORD
from tests.support.commands import ckpt as run_ckpt
from tests.support.commands import snapshot
from tests.support.engines import REPOSITORY

FIXTURES = REPOSITORY / "fixtures"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of ZeRO-3 on 3 ranks, and no launcher's environment."""
    for name in ("WORLD_SIZE", "RANK", "SLURM_STEP_NUM_TASKS", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)
    return Path(shutil.copytree(FIXTURES / "toy-zero3", tmp_path / "outputs"))


class TestOneProcess:
    def test_what_fits_is_returned_as_it_is(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert ckpt.resume(run) == str(run)
        assert ckpt.resume(run / "global_step2", world_size=3) == str(run)  # DeepSpeed is given what holds `latest`
        monkeypatch.setenv("WORLD_SIZE", "3")
        assert ckpt.resume(run) == str(run)
        assert os.listdir(run.parent) == ["outputs"]

    def test_what_does_not_is_converted_once_and_removed_with_its_source(
        self, run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before, said = snapshot(run), list[str]()
        monkeypatch.setenv("WORLD_SIZE", "2")
        found = Path(ckpt.resume(run, say=said.append))
        assert found.parent == run.parent / ".outputs.ckpt-resume" and "ranks, and there are 2" in "".join(said)
        assert any("random states" in line for line in said) or "converted from" in said[-1]
        assert ckpt.open(found).world_size == 2 and (found / "latest").is_file()
        assert ckpt.verify(ckpt.open(run), ckpt.open(found)).equal
        written = snapshot(found)
        assert ckpt.resume(run) == str(found) and snapshot(found) == written
        assert snapshot(run) == before, "the run's own folder is as it was"
        (run / "global_step2").rename(run / "global_step3")
        (run / "latest").write_text("global_step3")
        again = Path(ckpt.resume(run, say=said.append))
        assert [path.name for path in again.parent.iterdir()] == [again.name] and again != found
        assert f"removed {found}, whose source has gone" in said

    def test_a_torn_checkpoint_is_passed_over_and_named(self, run: Path, tmp_path: Path) -> None:
        outputs = Path(shutil.copytree(FIXTURES / "trainer-zero2", tmp_path / "trainer"))
        next((outputs / "checkpoint-2" / "global_step2").glob("*optim_states.pt")).unlink()
        said: list[str] = []
        assert ckpt.resume(outputs, world_size=2, say=said.append) == str(outputs / "checkpoint-1")
        assert any("checkpoint-2 is skipped, it is not complete" in line for line in said)

    def test_trainers_folder_for_another_stage(
        self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        outputs = Path(shutil.copytree(FIXTURES / "trainer-zero2", tmp_path / "trainer"))
        (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
        for name, value in {"USE_DEEPSPEED": "true", "DEEPSPEED_CONFIG_FILE": str(tmp_path / "ds.json")}.items():
            monkeypatch.setenv(f"ACCELERATE_{name}", value)
        found = ckpt.resume(outputs, world_size=3)
        assert ckpt.open(found).format == "zero3" and (Path(found) / "trainer_state.json").is_file()

    def test_fsdp_is_loaded_at_any_size(self, run: Path) -> None:
        step = FIXTURES / "dcp-fsdp2" / "step-2"
        assert ckpt.resume(step, world_size=7) == str(step)

    def test_megatron_fits_its_axes(self, run: Path, tmp_path: Path) -> None:
        written = tmp_path / "megatron"
        ckpt.plan(ckpt.open(FIXTURES / "trainer-zero2"), "hf").run(tmp_path / "hf")
        ckpt.plan(ckpt.open(tmp_path / "hf"), "megatron").run(written)
        assert ckpt.resume(written, pp=1) == str(written)
        found = Path(ckpt.resume(written, pp=2))
        assert found != written and (found / "latest_checkpointed_iteration.txt").is_file()
        assert ckpt.open(found).state.args["pipeline_model_parallel_size"] == 2  # type: ignore[index]

    def test_the_command(self, run: Path) -> None:
        result = run_ckpt("resume", run, "--world-size", "2")
        assert result.code == 0 and ".outputs.ckpt-resume" in result.out and "converted from" in result.err
        assert (Path(result.out.strip()) / RECORD).is_file()
        assert run_ckpt("resume", run, "-q").out == f"{run}\n"
        assert run_ckpt("resume", run.parent / "nowhere").code == 3

    def test_a_run_that_has_no_checkpoint_yet(self, run: Path) -> None:
        said: list[str] = []
        for path in (run.parent / "nowhere", run.parent / "begun"):
            assert ckpt.resume(path, missing_ok=True, say=said.append) is None
            (run.parent / "begun").mkdir(exist_ok=True)
            (run.parent / "begun" / "config.json").write_text("{}")
        assert "holds no checkpoint: the run begins" in said[0] and len(said) == 2
        result = run_ckpt("resume", run.parent / "begun", "--missing-ok")
        assert (result.code, result.out) == (0, "") and "the run begins" in result.err
        (run.parent / "begun" / "unknown.pt").write_bytes(b"?")
        with pytest.raises(CkptError):  # something is there, and must not be trained over
            ckpt.resume(run.parent / "begun", missing_ok=True)
        assert ckpt.resume(run, missing_ok=True) == str(run)

    def test_fsdps_kind_is_what_a_live_accelerator_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Trainer makes the plugin of its arguments, and the environment says nothing of the kind."""
        from accelerate.state import AcceleratorState
        from accelerate.utils import FullyShardedDataParallelPlugin

        for kind, format in (("SHARDED_STATE_DICT", "dcp"), ("FULL_STATE_DICT", "full")):
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
            monkeypatch.setitem(AcceleratorState._shared_state, "fsdp_plugin", plugin)
            assert caller({"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "2"}) == Caller(format, 2)

    def test_several_processes_that_cannot_agree(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(UsageError, match="cannot agree"):
            ckpt.resume(run)


DEEPSPEED: dict[str, dict[str, Any]] = {
    "bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "fp16": {"enabled": False}},
    "fp32": {"zero_optimization": {"stage": 3}},
    "auto": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}},
}
CALLERS: dict[str, tuple[dict[str, str], Caller]] = {
    "nothing": ({}, Caller()),
    "torchrun": ({"WORLD_SIZE": "8", "RANK": "3"}, Caller(None, 8)),
    "srun": ({"SLURM_STEP_NUM_TASKS": "6", "SLURM_NTASKS": "6"}, Caller(None, 6)),
    "a batch script": ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, Caller()),
    "torchrun in srun": ({"WORLD_SIZE": "16", "SLURM_STEP_NUM_TASKS": "2"}, Caller(None, 16)),
    "mpirun": ({"OMPI_COMM_WORLD_SIZE": "4"}, Caller(None, 4)),
    "accelerate, DeepSpeed": (
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "WORLD_SIZE": "2"},
        Caller("zero3", 2),
    ),
    "a DeepSpeed config": (
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "{}/bf16.json"},
        Caller("zero2", None, "bf16"),
    ),
    "a DeepSpeed config of fp32": (
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "{}/fp32.json"},
        Caller("zero3", None, "fp32"),
    ),
    "a DeepSpeed config with auto": (
        {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "{}/auto.json"},
        Caller("zero3", None, None),
    ),
    "accelerate, FSDP2": ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, Caller("dcp")),
    "accelerate, FSDP, full": ({"ACCELERATE_USE_FSDP": "1", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}, Caller("full")),
}


@pytest.mark.parametrize("name", CALLERS)
def test_what_the_caller_runs_on(name: str, tmp_path: Path) -> None:
    environment, expected = CALLERS[name]
    for title, config in DEEPSPEED.items():
        (tmp_path / f"{title}.json").write_text(json.dumps(config))
    assert caller({name: value.format(tmp_path) for name, value in environment.items()}) == expected


SCRIPT = """
import json, sys, torch.distributed as dist, ckpt
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
told, found = [], {}
for name in ("outputs", "nowhere"):
    try:
        found[name] = ckpt.resume(f"{folder}/{name}", say=told.append)
    except ckpt.errors.CkptError as error:
        found[name] = [type(error).__name__, str(error)]
print(json.dumps([found, told]))
dist.destroy_process_group()
"""


def test_every_process_returns_the_same_or_raises_the_same(run: Path) -> None:
    words = [sys.executable, "-c", SCRIPT]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    started = [
        subprocess.Popen([*words, str(rank), str(run.parent)], env=env, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    results: list[Any] = [json.loads(one.communicate(timeout=240)[0]) for one in started]
    (first, told), (second, silent) = results
    assert first == second and told and not silent
    assert ".outputs.ckpt-resume" in first["outputs"] and ckpt.open(first["outputs"]).world_size == 2
    assert first["nowhere"][0] == "NotFoundError"


def test_errors_go_from_process_to_process() -> None:
    import pickle

    several = SeveralRunsError(Path("runs"), [Path("runs/a")])
    for error in (several, NotFoundError("not here", path="x", hint="look there")):
        other = pickle.loads(pickle.dumps(error))
        assert type(other) is type(error) and str(other) == str(error) and vars(other) == vars(error)
