"""`ckpt/commands/resume/resuming.py`, `caller.py`: the folder to resume from: unchanged, converted or reused."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt import api
from ckpt.base.words import Message
from ckpt.commands.resume.caller import Caller, caller
from ckpt.commands.resume.resuming import RECORD, _in_all
from ckpt.compare import manifest
from ckpt.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    LossError,
    NotFoundError,
    SeveralRunsError,
    StorageError,
    UsageError,
)
from ckpt.move.journal import JOURNAL
from ckpt.plan.checkpoint import Layout
from tests.support.commands import ckpt as run_ckpt
from tests.support.commands import contents, snapshot
from tests.support.dcp_folders import edit
from tests.support.engines import RESUMING, fork
from tests.support.places import FIXTURES


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy a ZeRO-3 run on 3 ranks, and clear the launchers' variables."""
    for name in ("WORLD_SIZE", "RANK", "SLURM_STEP_NUM_TASKS", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)
    return Path(shutil.copytree(FIXTURES / "toy-zero3", tmp_path / "outputs"))


class TestOneProcess:
    def test_what_fits_is_returned_as_it_is(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert ckpt.resume(run) == str(run)
        assert ckpt.resume(run / "global_step2", world_size=3) == str(run)  # DeepSpeed needs the folder with `latest`
        monkeypatch.setenv("WORLD_SIZE", "3")
        assert ckpt.resume(run) == str(run)
        assert os.listdir(run.parent) == ["outputs"]

    def test_another_form_of_megatrons_than_the_one_asked_for_does_not_fit(self, tmp_path: Path) -> None:
        run = Path(shutil.copytree(FIXTURES / "megatron-torch-dcp", tmp_path / "run"))
        assert ckpt.resume(run, world_size=3, ckpt_format="torch_dcp") == str(run)
        found = ckpt.resume(run, world_size=3, ckpt_format="torch_dist")
        assert found != str(run) and (ckpt.open(found).state.args or {})["ckpt_format"] == "torch_dist"

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
        assert f"removed {found}: its source is gone or changed" in said

    def test_what_a_killed_one_left_is_gone_on_with_or_removed(
        self, run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def is_killed(world_size: int) -> Path:
            """Return a conversion's staging folder with everything but the manifest."""
            with monkeypatch.context() as patch, pytest.raises(StorageError):
                patch.setattr(manifest, "make_manifest", disk_is_full)
                patch.setenv("WORLD_SIZE", str(world_size))
                ckpt.resume(run, say=said.append)
            (left,) = (run.parent / ".outputs.ckpt-resume").glob(f".*-on-{world_size}-*.ckpt-staging")
            return left

        def disk_is_full(*_: object) -> None:
            raise StorageError("no space on the disk")

        said = list[str]()
        left = is_killed(2)
        found = ckpt.resume(run, world_size=2, say=said.append)
        assert any(line.startswith(f"continuing {left}") for line in said)
        assert any("B were there already" in line for line in said) and not left.exists()
        ckpt.plan(ckpt.open(run), "zero3", Layout(world_size=2)).run(run.parent / "unbroken")
        assert ckpt.verify(ckpt.open(found), ckpt.open(run.parent / "unbroken")).equal
        left = is_killed(4)  # from another ckpt version
        begin, *rest = (left / JOURNAL).read_text().splitlines(keepends=True)[1:]
        (left / JOURNAL).write_text("".join(["\n", json.dumps(json.loads(begin) | {"version": "0"}), "\n", *rest]))
        assert ckpt.open(ckpt.resume(run, world_size=4, say=said.append)).world_size == 4
        assert any(line.startswith(f"removed {left}") and "another version of ckpt" in line for line in said)
        left = is_killed(5)
        assert ckpt.resume(run, say=said.append) == str(run)
        assert f"note: {left} belongs to another resume, killed or still running" in said and left.exists()
        (run / "global_step2" / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
        kept = sorted(path.name for path in left.parent.iterdir())
        assert ckpt.resume(run, say=said.append) == str(run)
        assert len(kept) == 3 and list(left.parent.iterdir()) == []
        assert f"removed {left}, left by a killed resume: its source is gone or changed" in said

    def test_a_torn_checkpoint_is_passed_over_and_named(self, run: Path, tmp_path: Path) -> None:
        outputs = Path(shutil.copytree(FIXTURES / "trainer-zero2", tmp_path / "trainer"))
        next((outputs / "checkpoint-2" / "global_step2").glob("*optim_states.pt")).unlink()
        said: list[str] = []
        assert ckpt.resume(outputs, world_size=2, say=said.append) == str(outputs / "checkpoint-1")
        assert any("checkpoint-2 is skipped, it is not complete" in line for line in said)

    @pytest.mark.parametrize("state", [None, b"", b'{"global_step": 2, "log_his'])
    def test_what_trainer_had_not_ended_is_passed_over(self, run: Path, tmp_path: Path, state: bytes | None) -> None:
        """Trainer writes its state last. Without the state, Trainer fails or restarts with trained weights."""
        outputs = Path(shutil.copytree(FIXTURES / "trainer-zero2", tmp_path / "trainer"))
        record = outputs / "checkpoint-2" / "trainer_state.json"
        record.unlink() if state is None else record.write_bytes(state)
        said: list[str] = []
        assert ckpt.resume(outputs, world_size=2, say=said.append) == str(outputs / "checkpoint-1")
        assert any("checkpoint-2 is skipped, it is not complete" in line for line in said)

    def test_wherever_it_is_called_the_conversion_is_found_again(
        self, run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A relative path would name other source files in another folder."""
        said: list[str] = []
        monkeypatch.chdir(run.parent)
        found = ckpt.resume("outputs", world_size=2, say=said.append)
        monkeypatch.chdir(run)
        for path in (".", "../outputs", run):
            assert ckpt.resume(path, world_size=2, say=said.append) == found
        assert Path(found).is_dir() and not any(line.startswith("removed") for line in said)

    @pytest.mark.parametrize("name", ["trainer_state.json", "rng_state_1.pth"])
    def test_training_state_that_changes_is_converted_again(self, run: Path, tmp_path: Path, name: str) -> None:
        outputs, said = Path(shutil.copytree(FIXTURES / "trainer-zero2", tmp_path / "trainer")), list[str]()
        stale = ckpt.resume(outputs, world_size=3, say=said.append)
        file = outputs / "checkpoint-2" / name
        if name.endswith(".json"):
            file.write_bytes(file.read_bytes() + b"\n")
        else:
            torch.save({"cpu": torch.zeros(4)}, file)
        content = file.read_bytes()
        found = Path(ckpt.resume(outputs, world_size=3, say=said.append))
        assert (found / name).read_bytes() == content
        assert f"removed {stale}: its source is gone or changed" in said

    @pytest.mark.parametrize(
        "asked", [{"dtype": "float64"}, {"world_size": "2"}, {"world_size": 0}, {"tpp": 2}, {"format": "zero9"}]
    )
    def test_what_cannot_be_meant(self, run: Path, asked: dict[str, Any]) -> None:
        with pytest.raises(UsageError):
            ckpt.resume(run, **asked)

    def test_hints_are_for_who_resumes(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def is_full(*_: object, **__: object) -> int:
            raise StorageError("no space", hint=Message("free some space, or choose another place with {output}"))

        plan = api.plan

        def another_is_quicker(*what: Any) -> api.Conversion:
            conversion = plan(*what)
            with monkeypatch.context() as patch:
                patch.setattr(api, "plan", plan)
                ckpt.resume(run, world_size=2)
            return conversion

        with monkeypatch.context() as patch, pytest.raises(StorageError) as full:
            patch.setattr(api.Conversion, "run", is_full)
            ckpt.resume(run, world_size=2)
        assert f"`ckpt convert auto zero3 {run} -o FOLDER`" in str(full.value.hint)
        with monkeypatch.context() as patch, pytest.raises(UsageError, match="exists") as raced:
            patch.setattr(api, "plan", another_is_quicker)
            ckpt.resume(run, world_size=2)
        assert "another resume" in str(raced.value.hint) and "overwrite" not in str(raced.value.hint)

    def test_weights_alone_are_said_to_be(self, run: Path, tmp_path: Path) -> None:
        said: list[str] = []
        ckpt.plan(ckpt.open(FIXTURES / "trainer-zero2"), "hf").run(tmp_path / "hf")
        with pytest.raises(LossError, match="no checkpoint here has an optimizer") as refused:
            ckpt.resume(tmp_path / "hf")
        assert "--model-only" in str(refused.value.hint)
        assert ckpt.resume(tmp_path / "hf", model_only=True, say=said.append) == str(tmp_path / "hf")
        assert f"note: {tmp_path / 'hf'} holds no optimizer: its states are reset" in said
        assert run_ckpt("resume", tmp_path / "hf").code == 6
        assert run_ckpt("resume", tmp_path / "hf", "--model-only").out == f"{tmp_path / 'hf'}\n"

    def test_what_is_not_whole_is_not_handed_on(self, run: Path, tmp_path: Path) -> None:
        """On load, torch leaves missing rows unchanged in memory.

        An incomplete step or truncated file is never returned.
        """
        step = Path(shutil.copytree(FIXTURES / "dcp-fsdp2" / "step-2", tmp_path / "step-2"))
        assert ckpt.resume(step) == str(step)
        edit(step, lambda metadata: metadata.state_dict_metadata["model.down.weight"].chunks.pop())
        with pytest.raises(CorruptError, match="stored nowhere"):
            ckpt.resume(step)
        found = Path(ckpt.resume(run, world_size=2))
        os.truncate(next(found.rglob("*_optim_states.pt")), 3000)
        with pytest.raises(CorruptError, match="converted before, and damaged since"):
            ckpt.resume(run, world_size=2)

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
        assert ckpt.resume(written, pp=1, model_only=True) == str(written)
        found = Path(ckpt.resume(written, pp=2, model_only=True))
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
        for record, code in (("latest", 4), ("latest_checkpointed_iteration.txt", 3)):  # the run's steps are gone
            (run.parent / "begun" / record).write_text("5")
            lost = run_ckpt("resume", run.parent / "begun", "--missing-ok")
            assert lost.code == code and f"`{record}`" in lost.err and "'5'" in lost.err, lost.err
            (run.parent / "begun" / record).unlink()
        (run.parent / "begun" / "unknown.pt").write_bytes(b"?")
        with pytest.raises(CkptError):  # the folder is not empty, and must not be overwritten
            ckpt.resume(run.parent / "begun", missing_ok=True)
        assert ckpt.resume(run, missing_ok=True) == str(run)

    def test_fsdps_kind_is_what_a_live_accelerator_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Trainer makes the plugin from its arguments and sets no variable for it."""
        from accelerate.state import AcceleratorState
        from accelerate.utils import FullyShardedDataParallelPlugin

        for kind, format in (("SHARDED_STATE_DICT", "dcp"), ("FULL_STATE_DICT", "full")):
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
            monkeypatch.setitem(AcceleratorState._shared_state, "fsdp_plugin", plugin)
            assert caller({"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "2"}) == Caller(format, 2)

    @pytest.mark.parametrize(
        ("version", "kind", "is_said"),
        [(1, "SHARDED_STATE_DICT", True), (2, "SHARDED_STATE_DICT", False), (1, "FULL_STATE_DICT", False)],
    )
    def test_accelerate_skips_the_optimizer(
        self, version: int, kind: str, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from accelerate.state import AcceleratorState
        from accelerate.utils import FullyShardedDataParallelPlugin

        run = Path(shutil.copytree(FIXTURES / "trl-fsdp2", tmp_path / "run"))
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind)
        monkeypatch.setitem(AcceleratorState._shared_state, "fsdp_plugin", plugin)
        lines: list[str] = []
        ckpt.resume(run, say=lines.append)
        assert any("Accelerate will not load the optimizer" in line for line in lines) == is_said
        lines.clear()
        ckpt.resume(run, format="full", say=lines.append)
        assert not any("Accelerate will not load the optimizer" in line for line in lines)

    def test_the_stage_is_what_a_live_accelerator_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without transformers, only the plugin knows the stage."""
        from accelerate.state import AcceleratorState
        from accelerate.utils import DeepSpeedPlugin

        plugin = DeepSpeedPlugin(hf_ds_config=DEEPSPEED["fp32"])
        plugin._set_selected(True)
        monkeypatch.setitem(AcceleratorState._shared_state, "deepspeed_plugins", plugin)
        assert caller({"ACCELERATE_USE_DEEPSPEED": "true", "WORLD_SIZE": "2"}) == Caller("zero3", 2, "fp32")

    def test_a_step_behind_a_link_or_without_permission_is_a_checkpoint(
        self, run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (run / "latest").unlink()
        shutil.rmtree(run / "truth")
        linked = run.with_name("linked")
        linked.mkdir()
        (linked / "global_step2").symlink_to(run / "global_step2")
        for path in (run, linked):
            with pytest.raises(IncompleteError, match="`latest` does not name a step"):
                ckpt.resume(path, missing_ok=True)

        def closed(path: Path, scan: Any = os.scandir) -> Any:
            if Path(path).name == "global_step2":
                raise PermissionError(13, "Permission denied", str(path))
            return scan(path)

        monkeypatch.setattr(os, "scandir", closed)
        for path in (run, linked):
            with pytest.raises(StorageError, match="Permission denied"):
                ckpt.resume(path, missing_ok=True)

    def test_several_processes_that_cannot_agree(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(UsageError, match="several processes can't share one conversion"):
            ckpt.resume(run)


FINISHED = {
    "axolotl-fsdp2/outputs/gpt-oss-out": "dcp",
    "trl-zero2/outputs/llama-sft": "zero2",
    "trl-zero3/outputs/qwen3-sft": "zero3",
    "trl-fsdp2/outputs/llama-sft": "dcp",
    "trl-lora-zero3/outputs/qwen3-lora": "zero3",
    "trainer-zero2": "zero2",
    "trainer-plain": "trainer",
    "local-orig": "dcp",
}


class TestAFinishedRun:
    """The final model lies in the run's folder, beside its checkpoints."""

    @pytest.fixture(params=FINISHED)
    def finished(self, request: pytest.FixtureRequest, run: Path, tmp_path: Path) -> tuple[Path, str]:
        """Save the newest step's model or adapter as the final one."""
        folder = Path(shutil.copytree(FIXTURES / request.param, tmp_path / "all" / "finished"))
        bare = "peft" if "lora" in request.param else "hf"
        if not any(folder.glob("*.safetensors")):
            ckpt.plan(ckpt.open(folder), bare).run(tmp_path / "model")
            for file in (tmp_path / "model").iterdir():
                if file.suffix in (".safetensors", ".json") and file.name != "ckpt-manifest.json":
                    shutil.copy(file, folder)
        assert ckpt.open(folder).format == bare, "what `ckpt convert` takes"
        return folder, FINISHED[request.param]

    def test_its_newest_step_is_gone_on_from(self, finished: tuple[Path, str]) -> None:
        folder, format = finished
        for path in (folder, folder.parent):
            said: list[str] = []
            found = Path(ckpt.resume(path, world_size=3, say=said.append))
            checkpoint = ckpt.open(found)
            assert checkpoint.format == format and {"exp_avg", "exp_avg_sq"} <= set(checkpoint.optimizer_states)
            assert checkpoint.world_size == 3 or format not in ("zero2", "zero3")
            assert not any("states are reset" in line for line in said)
            assert path != folder or any("skipped the model" in line for line in said)
            assert ckpt.verify(ckpt.open(folder, tag=self.newest(folder)), checkpoint).equal

    def test_a_newer_step_is_taken_though_the_model_was_saved_before(self, finished: tuple[Path, str]) -> None:
        folder, _ = finished
        newer = folder / "checkpoint-30"
        shutil.copytree(folder / self.newest(folder), newer)
        said: list[str] = []
        ckpt.resume(folder, say=said.append)
        assert any(line.startswith("note: taking checkpoint-30") for line in said)

    def test_a_model_alone_is_refused_and_taken_where_that_is_asked_for(self, finished: tuple[Path, str]) -> None:
        folder, format = finished
        newest = folder / self.newest(folder)
        if format in ("zero2", "zero3"):
            shutil.rmtree(next(newest.glob("global_step*")))
            (newest / "latest").unlink()
        elif format == "trainer":
            (newest / "optimizer.pt").unlink()
        else:
            shutil.rmtree(newest)
        for older in folder.glob("checkpoint-1"):
            shutil.rmtree(older)
        for path in (folder, newest) if any(newest.glob("*.safetensors")) else (folder,):
            with pytest.raises(LossError, match="no checkpoint here has an optimizer"):
                ckpt.resume(path, world_size=3)
            said: list[str] = []
            assert ckpt.resume(path, world_size=3, model_only=True, say=said.append) == str(path)
            assert any("states are reset" in line for line in said)

    def test_an_incomplete_step_is_no_reason_to_begin_anew(self, finished: tuple[Path, str]) -> None:
        folder, format = finished
        for step in folder.glob("checkpoint-*"):
            for file in step.rglob("optimizer.pt" if format == "trainer" else "*optim_states.pt"):
                os.truncate(file, 0)
            for file in step.rglob(".metadata"):
                file.unlink()
        with pytest.raises(CkptError):
            ckpt.resume(folder, model_only=format != "dcp")

    @staticmethod
    def newest(folder: Path) -> str:
        return max(step.name for step in folder.glob("checkpoint-*"))


def test_an_optimizer_that_only_its_engine_knows_is_gone_on_with_as_it_is(run: Path, tmp_path: Path) -> None:
    """HF Trainer numbers its states, and nothing records the parameter order."""
    outputs = Path(shutil.copytree(FIXTURES / "trainer-plain", tmp_path / "run"))
    for way in ("safetensors", "bin"):
        step = outputs / "checkpoint-2"
        (step / "config.json").unlink(missing_ok=True)
        if way == "bin":
            weights = load_file(step / "model.safetensors")
            torch.save(dict(sorted(weights.items())), step / "pytorch_model.bin")
            (step / "model.safetensors").unlink()
        assert any("left out" in note for note in ckpt.open(outputs).notes)
        assert not ckpt.open(outputs).optimizer_states
        assert ckpt.resume(outputs, world_size=2) == str(step)
        with pytest.raises(LossError, match="would be lost"):
            ckpt.resume(outputs, format="dcp")
        assert ckpt.open(ckpt.resume(outputs, format="dcp", model_only=True)).format == "dcp"


class TestStepsOfSeveralEngines:
    """A chain of runs in one folder: DeepSpeed's `latest` only covers its own steps."""

    @pytest.fixture
    def mixed(self, run: Path) -> Path:
        shutil.copytree(FIXTURES / "dcp-fsdp2/step-2", run / "step-8")
        return run

    def test_the_highest_is_gone_on_from(self, mixed: Path) -> None:
        said: list[str] = []
        assert ckpt.resume(mixed, format="dcp", world_size=2, say=said.append) == str(mixed / "step-8")
        assert "note: taking step-8" in said
        found = ckpt.resume(mixed, format="zero3", world_size=2, say=said.append)
        assert ckpt.verify(ckpt.open(mixed, tag="step-8"), ckpt.open(found)).equal

    def test_what_others_take_names_it(self, mixed: Path) -> None:
        told = "later than the selected step: step-8 (tag takes it)"
        opened = ckpt.open(mixed)
        assert opened.format == "zero3" and told in opened.notes and told in opened.passed_over
        result = run_ckpt("convert", "auto", "full", mixed, "-o", mixed.with_name("full"), "-q")
        assert (result.code, result.err) == (0, f"note: {told.replace('tag', '--tag')}\n")
        assert "step-8" in run_ckpt("convert", "zero3", "full", mixed, "--dry-run", "-o", mixed.with_name("f")).err

    def test_latest_is_a_rollback_among_deepspeeds_own(self, mixed: Path) -> None:
        shutil.rmtree(mixed / "step-8")
        shutil.copytree(mixed / "global_step2", mixed / "global_step4")
        said: list[str] = []
        assert ckpt.resume(mixed, say=said.append) == str(mixed)
        assert "note: global_step2 is recorded in `latest`; there is also global_step4 (--tag takes it)" in said
        assert ckpt.open(mixed).path.endswith("global_step2")

    @pytest.mark.parametrize("lost", ["latest", "trainer_state.json", "*rank_1*optim_states.pt"])
    def test_a_torn_one_is_passed_over_and_named(self, mixed: Path, lost: str) -> None:
        for step in (1, 2):
            shutil.copytree(FIXTURES / f"trainer-zero2/checkpoint-{step}", mixed / f"checkpoint-{step + 10}")
        next((mixed / "checkpoint-12").rglob(lost)).unlink()
        said: list[str] = []
        assert ckpt.resume(mixed, say=said.append) == str(mixed / "checkpoint-11")
        assert any(line.startswith("note: checkpoint-12 is skipped, it is not complete: ") for line in said)
        assert any("step-8" in note and "checkpoint-12" in note for note in ckpt.open(mixed).passed_over)

    def test_an_older_one_is_not_taken(self, mixed: Path) -> None:
        (mixed / "step-8").rename(mixed / "step-1")
        assert ckpt.resume(mixed) == str(mixed)

    def test_a_newer_model_alone_is_passed_over_and_named(self, mixed: Path) -> None:
        ckpt.plan(ckpt.open(mixed), "hf").run(mixed.with_name("model"))
        mixed.with_name("model").rename(mixed / "step-9")
        said: list[str] = []
        assert ckpt.resume(mixed, say=said.append) == str(mixed / "step-8")
        assert "note: step-9 is skipped, it holds no checkpoint with an optimizer" in said


class TestAKeptConversion:
    def test_a_save_that_ends_in_between_is_not_kept_under_the_older_steps_name(self, run: Path) -> None:
        def save(line: str) -> None:
            """Put step 4 in its place after step 2 was found not to fit."""
            said.append(line)
            if "does not fit" in line and not (run / "global_step4").exists():
                shutil.copytree(run / "global_step2", run / "global_step4")
                flip_an_element(run / "global_step4")
                (run / "latest").write_text("global_step4")

        said: list[str] = []
        found = ckpt.resume(run, world_size=2, say=save)
        (run / "latest").write_text("global_step2")
        assert ckpt.verify(ckpt.open(run), ckpt.open(found)).equal and f"converted from {run}/global_step2" in said[-1]
        assert ckpt.resume(run, world_size=2) == found, "a rollback finds its own"

    def test_one_that_is_not_of_the_checkpoint_is_refused(self, run: Path) -> None:
        found = Path(ckpt.resume(run, world_size=2))
        record = json.loads((found / RECORD).read_text())
        record["source"][0][0] += "x"
        (found / RECORD).write_text(json.dumps(record))
        with pytest.raises(CorruptError, match="it was converted from another checkpoint"):
            ckpt.resume(run, world_size=2)

    @pytest.mark.parametrize("whole", [True, False])
    def test_a_flipped_bit_of_it_is_found(self, run: Path, monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
        """Elements in a large file are not checked."""
        from ckpt.commands.resume import resuming

        found = Path(ckpt.resume(run, world_size=2))
        monkeypatch.setattr(resuming, "_AFFORDABLE", 10**9 if whole else 0)
        if whole:
            flip_an_element(found)
        else:
            flip(next(found.rglob("*rank_1*optim_states.pt")), -30)
        with pytest.raises(CorruptError) as damaged:
            ckpt.resume(run, world_size=2)
        assert f"remove {found}" in str(damaged.value.hint)

    @pytest.mark.parametrize("name", ["trainer_state.json", "rng_state_1.pth"])
    def test_a_flipped_bit_in_its_trainers_files_is_found(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """These files are copied, and read even if the conversion is large."""
        from ckpt.commands.resume import resuming

        outputs = Path(shutil.copytree(FIXTURES / "trainer-zero2", tmp_path / "trainer"))
        found = Path(ckpt.resume(outputs, world_size=3))
        monkeypatch.setattr(resuming, "_AFFORDABLE", 0)
        assert ckpt.resume(outputs, world_size=3) == str(found)
        flip(found / name, -30)
        with pytest.raises(CorruptError, match="doesn't match its manifest"):
            ckpt.resume(outputs, world_size=3)

    def test_its_size_is_said_and_it_goes_when_a_newer_step_is_taken(self, run: Path) -> None:
        said: list[str] = []
        found = Path(ckpt.resume(run, world_size=2, say=said.append))
        assert any(line.startswith(f"{found} takes ") and "kB: " in line for line in said)
        again: list[str] = []
        assert ckpt.resume(run, world_size=2, say=again.append) == str(found)
        assert any(line.startswith(f"{found} takes ") for line in again)
        ckpt.resume(run, world_size=4)
        assert len(list(found.parent.iterdir())) == 2, "the same step, for another number of ranks"

    def test_it_goes_when_a_newer_step_is_taken(self, run: Path, tmp_path: Path) -> None:
        outputs, said = Path(shutil.copytree(FIXTURES / "trainer-zero2", tmp_path / "trainer")), list[str]()
        (outputs / "checkpoint-2").rename(tmp_path / "later")
        first = Path(ckpt.resume(outputs, world_size=3))
        (tmp_path / "later").rename(outputs / "checkpoint-2")
        for path, tag in ((outputs, "checkpoint-2"), (outputs / "checkpoint-2", None)):
            newer = Path(ckpt.resume(path, tag=tag, world_size=3, say=said.append))
            assert first.is_dir(), "who names a step removes nothing"
        assert ckpt.resume(outputs, tag="checkpoint-1", world_size=3) == str(first) and newer.is_dir()
        assert ckpt.resume(outputs, world_size=3, say=said.append) == str(newer)
        assert f"removed {first}: its step 1 is older than step 2" in said
        assert sorted(newer.parent.iterdir()) == [newer]


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def flip_an_element(folder: Path) -> None:
    """Flip one bit in an exp_avg."""
    tensor = next(ckpt.open(folder).with_role("exp_avg"))
    extent = next(tensor.source.fragments(tensor.shape)).extent
    flip(Path(extent.path), extent.offset + 1)


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
    "accelerate, FSDP1": (
        {"ACCELERATE_USE_FSDP": "1", "FSDP_VERSION": "1", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"},
        Caller("dcp", skips_optimizer=True),
    ),
    "accelerate, FSDP, full": ({"ACCELERATE_USE_FSDP": "1", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}, Caller("full")),
}


@pytest.mark.parametrize("name", CALLERS)
def test_what_the_caller_runs_on(name: str, tmp_path: Path) -> None:
    environment, expected = CALLERS[name]
    for title, config in DEEPSPEED.items():
        (tmp_path / f"{title}.json").write_text(json.dumps(config))
    assert caller({name: value.format(tmp_path) for name, value in environment.items()}) == expected


def resumed_on_two_nodes(folder: Path, *calls: dict[str, Any]) -> list[Any]:
    """Return what each rank of `tests.resume.nodes` has found."""
    for rank in range(2):
        (folder / f"node{rank}").mkdir(exist_ok=True)
    fork([(2, "tests.resume.nodes", [str(folder), json.dumps(calls)])], RESUMING)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_every_process_does_its_share_and_returns_the_same_or_raises_the_same(run: Path) -> None:
    """Only the first node has the whole `run`. Both nodes have their own ranks' files in `other`."""
    for node, name in itertools.product((0, 1), ("run", "other")):
        there = Path(shutil.copytree(run, run.parent / f"node{node}" / name))
        for rank in () if (node, name) == (0, "run") else (1,) if node else (0, 2):
            next((there / "global_step2").glob(f"*zero_pp_rank_{rank}_*optim_states.pt")).unlink()
    paths = {"outputs on 2": str(run), "nowhere on 2": str(run.parent / "nowhere")}
    paths |= {"run on 3": "run", "run on 2": "run", "other on 3": "other"}
    calls = {key: (path, {"world_size": int(key[-1])}) for key, path in paths.items()}
    results = resumed_on_two_nodes(run.parent, calls, calls)
    (first, told, one_share, total), (second, silent, other_share, _) = results
    assert first == second and told and not silent and total == 2
    assert ".outputs.ckpt-resume" in first["outputs on 2"] and ckpt.open(first["outputs on 2"]).world_size == 2
    ckpt.plan(ckpt.open(run), "zero3", Layout(world_size=2)).run(run.parent / "alone")
    of_others = {RECORD, "ckpt-manifest.json"}
    together, alone = (contents(Path(folder)) for folder in (first["outputs on 2"], run.parent / "alone"))
    assert {name for name in together if together[name] != alone.get(name)} == of_others
    assert 0.3 < one_share / (one_share + other_share) < 0.7, "the work is dealt out"
    assert first["nowhere on 2"][0] == "NotFoundError"
    lacks = {
        "run on 3": ("see the checkpoint: it is not on shared storage", "node1 (rank 1) lacks "),
        "run on 2": ("the nodes see different files", "node1 (rank 1) lacks 1 file: global_step2/"),
        "other on 3": ("the nodes see different files", "node0 (rank 0) lacks 2 files: global_step2/"),
    }
    for name, words in lacks.items():
        kind, text, *_ = first[name]
        assert kind == "StorageError" and "optim_states.pt" in text and all(word in text for word in words), text


def test_processes_that_ask_for_different_things_are_told(run: Path) -> None:
    """Nothing has to be converted here, so the first process's answer would fit all of them."""
    other = str(Path(shutil.copytree(run, run.with_name("other"))))
    given = {"path": other, "format": "zero2", "dtype": "bf16", "world_size": 2, "tag": "global_step2"}
    given |= {"config": other, "model_only": True, "missing_ok": True, "nothing": None}
    same = {name: (str(run), {"world_size": 3}) for name in given}
    asked = {name: (str(run), {"world_size": 3, name: value}) for name, value in given.items()}
    asked |= {"path": (other, {"world_size": 3}), "nothing": same["nothing"]}
    (first, *_), (second, *_) = resumed_on_two_nodes(run.parent, same, asked)
    assert first == second and first.pop("nothing") == str(run)
    assert first.keys() == given.keys() - {"nothing"}
    for name, (kind, _, what, expected, found) in first.items():
        assert kind == "UsageError" and f"different options: {name} (in rank 1" in what, (name, what)
        assert found == str(given[name]) and expected.endswith(", as rank 0")


def test_errors_go_from_process_to_process() -> None:
    import pickle

    several = SeveralRunsError(Path("runs"), [Path("runs/a")])
    for error in (several, NotFoundError("not here", path="x", hint="look there")):
        other = pickle.loads(pickle.dumps(error))
        assert type(other) is type(error) and str(other) == str(error) and vars(other) == vars(error)


def test_an_interrupt_is_not_sent_to_the_other_processes(tmp_path: Path) -> None:
    group = Mock()
    with pytest.raises(KeyboardInterrupt):
        _in_all(Mock(side_effect=KeyboardInterrupt), tmp_path, group)
    assert group.gather.call_count == 0


def test_an_option_of_convert_is_proposed_as_its_command(tmp_path: Path) -> None:
    """The hint named an option missing from resume."""
    run = Path(shutil.copytree(FIXTURES / "quantized-zero2" / "bnb8", tmp_path / "outputs"))
    with pytest.raises(LossError) as raised:
        ckpt.resume(run, format="dcp", world_size=2)
    for error in (run_ckpt("resume", run, "--format", "dcp", "--world-size", "2").err, str(raised.value)):
        assert "hint: `ckpt convert zero2 dcp " in error and "--optimizer-dtype fp32` writes the values" in error


@pytest.mark.parametrize("target", ["nowhere", "training_args.bin"])
def test_a_broken_link_beside_the_step_is_refused(fixtures: Path, tmp_path: Path, target: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(fixtures / "trainer-plain", run)
    args = run / "checkpoint-2" / "training_args.bin"
    args.unlink()
    args.symlink_to(target)
    with pytest.raises(IncompleteError, match="a symlink leads to nothing"):
        ckpt.resume(run, format="dcp", world_size=5, say=lambda _: None)
