"""`ckpt/commands/check/checking.py`, `files.py`: `ckpt check` gives the reason for what damage leaves."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.commands.check import checking, files
from ckpt.containers.dcp.metadata import read_metadata
from tests.support.commands import ckpt as run_ckpt
from tests.support.commands import snapshot
from tests.support.golden import agrees
from tests.support.places import REPOSITORY

GOLDEN = Path(__file__).parent / "golden"
WHOLE = ("toy-zero1", "toy-zero3", "toy-zero0", "dcp-fsdp2", "megatron-fsdp", "trainer-plain", "trainer-zero2")

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in three shards, with an index."""
    out, source = tmp_path_factory.mktemp("sharded") / "model", REPOSITORY / "fixtures" / "moe-zero3"
    made = run_ckpt("convert", "auto", "hf", source, "-o", out, "--max-shard-size", "4KB", "--no-manifest")
    assert made.code == 0 and len(list(out.glob("*-of-00003.safetensors"))) == 3
    return out


def test_the_metadata_of_dcp_is_read_once_for_all_of_its_files(fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen = fixtures / "dcp-fsdp2" / "step-2", []
    monkeypatch.setattr(files, "read_metadata", lambda place: seen.append(place) or read_metadata(place))
    count = files.ComparedBytes()
    assert [*files.read_all(folder, sorted(folder.iterdir()), count, lambda _: None)] == []
    assert len([*folder.glob("*.distcp")]) > 1 and seen == [folder]
    assert count.compared


def test_a_file_that_goes_while_it_is_looked_at(fixtures: Path) -> None:
    """As where a run that is still training removes its oldest checkpoint."""
    folder, seen = fixtures / "toy-zero3", []
    there = min(path for path in folder.rglob("*.pt") if path.is_file())
    paths = [folder / "gone.pt", there, folder / "gone.distcp", folder / "gone.json"]
    found = [*files.read_all(folder, paths, files.ComparedBytes(), seen.append)]
    assert sorted(problem.where for problem in found) == ["gone.distcp", "gone.json", "gone.pt"]
    assert all("No such file" in problem.what and problem.exit_code == 7 for problem in found)
    assert seen == [0, there.stat().st_size, 0, 0]


@pytest.mark.parametrize("options", [(), ("--bytes",)])
@pytest.mark.parametrize("name", WHOLE)
def test_what_frameworks_wrote_is_whole(fixtures: Path, name: str, options: tuple[str, ...]) -> None:
    before = snapshot(fixtures / name)
    result = run_ckpt("check", fixtures / name, *options)
    assert (result.code, result.err) == (0, ""), result.out
    assert ": whole (" in result.out and "incomplete" not in result.out and "  - " not in result.out
    assert snapshot(fixtures / name) == before


def first(folder: Path, pattern: str) -> Path:
    return min(folder.rglob(pattern))


def replaced(name: str, link: str | None) -> Damage:
    """A link, or a folder, in the place of a file."""

    def damage(run: Path) -> None:
        (run / name).unlink()
        (run / name).symlink_to(link) if link else (run / name).mkdir()

    return damage


def cut(pattern: str, share: float = 0.5) -> Damage:
    def damage(folder: Path) -> None:
        file = first(folder, pattern)
        os.truncate(file, int(file.stat().st_size * share))

    return damage


def gone(pattern: str) -> Damage:
    return lambda folder: first(folder, pattern).unlink()


def flipped(pattern: str, at: int) -> Damage:
    def damage(folder: Path) -> None:
        content = bytearray(first(folder, pattern).read_bytes())
        content[at] ^= 1
        first(folder, pattern).write_bytes(content)

    return damage


def zeroed(pattern: str) -> Damage:
    return lambda folder: first(folder, pattern).write_bytes(bytes(first(folder, pattern).stat().st_size))


def written(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


def renamed(name: str, new: str) -> Damage:
    return lambda folder: (folder / name).rename(folder / new)


def edited(name: str, old: str, new: str) -> Damage:
    def damage(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return damage


TRACKER = "latest_checkpointed_iteration.txt"
#: The fixture, the damage done to it, and the report: the file, and the reason.
CASES: dict[str, tuple[str, Damage, str, str]] = {
    "half an optimizer": (
        "trainer-plain",
        cut("checkpoint-2/optimizer.pt"),
        "checkpoint-2: incomplete",
        "optimizer.pt: the file is truncated",
    ),
    "a scheduler of nothing": (
        "trainer-plain",
        cut("checkpoint-2/scheduler.pt", 0),
        "checkpoint-2: incomplete",
        "scheduler.pt: the file is empty",
    ),
    "half a state": (
        "trainer-zero2",
        cut("checkpoint-2/trainer_state.json"),
        "checkpoint-2: incomplete",
        "trainer_state.json: the JSON file ends too early",
    ),
    "ended early": (
        "trainer-zero2",
        gone("checkpoint-2/trainer_state.json"),
        "checkpoint-2: incomplete",
        "writes it last, and checkpoint-1 has it",
    ),
    "half a model": (
        "trainer-plain",
        cut("checkpoint-2/*.safetensors"),
        "checkpoint-2: incomplete",
        "model.safetensors: ",
    ),
    "no random state": (
        "trainer-zero2",
        gone("checkpoint-2/rng_state_0.pth"),
        "checkpoint-2: incomplete",
        "the file of rank 0 is missing",
    ),
    "no rank's optimizer": (
        "trainer-zero2",
        gone("checkpoint-2/*/*rank_1*"),
        "checkpoint-2: incomplete",
        "optim_states files are missing",
    ),
    "a random state that contradicts itself": (
        "trainer-zero2",
        flipped("checkpoint-2/rng_state_1.pth", 40),
        "checkpoint-2: unknown",
        "rng_state_1.pth: the header of a record contradicts the directory",
    ),
    "half a rank's": (
        "trainer-zero2",
        cut("checkpoint-2/*/*rank_1*"),
        "checkpoint-2: incomplete",
        "the file is truncated",
    ),
    "a latest of nothing": (
        "toy-zero3",
        written("latest", "global_step9"),
        "latest: it names global_step9",
        "which is not there",
    ),
    "no metadata": ("dcp-fsdp2", gone("step-2/.metadata"), "step-2: incomplete", "the metadata is missing"),
    "half a shard": ("dcp-fsdp2", cut("step-2/__1_0.distcp"), "step-2: incomplete", "the file ends before"),
    "zeros": ("toy-zero1", zeroed("*model_states.pt"), "global_step2: incomplete", "zeros"),
    "no latest": ("toy-zero3", gone("latest"), "latest: missing; DeepSpeed writes it last", "loads no step by itself"),
    "a tracker of nothing": (
        "megatron-fsdp",
        written(TRACKER, "7"),
        f"{TRACKER}: it names step 7",
        "which is not there",
    ),
    "no file of megatron-core's that is the last": (
        "megatron-0.15-fully",
        gone("iter_0000002/metadata.json"),
        "iter_0000002: incomplete (megatron-dist",
        "metadata.json: missing; megatron-core writes it last",
    ),
    "nor in a run of a newer version": (
        "megatron-lm",
        gone("iter_0000002/metadata.json"),
        "iter_0000002: incomplete (dcp",
        "metadata.json: missing; megatron-core writes it last",
    ),
    "a step of another number": (
        "megatron-fsdp",
        renamed("iter_0000002", "iter_0000009"),
        "the folder is called iter_0000009",
        "its files are of step 2",
    ),
    "a checkpoint of another number": (
        "trainer-zero2",
        renamed("checkpoint-2", "checkpoint-9"),
        "the folder is called checkpoint-9",
        "its files are of step 2",
    ),
    "a tracker of weights that are not there": (
        "megatron-fsdp",
        written(TRACKER, "release"),
        f"{TRACKER}: it names release",
        "which is not there",
    ),
    "a tracker that says nothing": ("megatron-fsdp", written(TRACKER, "\x72"), f"{TRACKER}: it names no step", "'r'"),
    "a tracker that leads nowhere": (
        "megatron-fsdp",
        replaced(TRACKER, "nowhere"),
        f"{TRACKER}: it is no file",
        TRACKER,
    ),
    "a folder for latest": (
        "toy-zero0",
        replaced("latest", None),
        "latest: missing; DeepSpeed writes it last",
        "latest",
    ),
    "a config of a wider model": (
        "megatron-fsdp",
        edited("config.json", '"intermediate_size": 7', '"intermediate_size": 9'),
        "iter_0000002: damaged",
        "decoder.layers.0.mlp.linear_fc1.weight: a tensor has not the shape that the config tells (",
    ),
    "a config of more layers": (
        "megatron-fsdp",
        edited("config.json", '"num_hidden_layers": 1', '"num_hidden_layers": 2'),
        "iter_0000002: damaged",
        "config.json: the config is that of another model than the run trained (expected num_layers 1",
    ),
    "an empty tracker": ("verl-fsdp2", written(TRACKER, ""), f"{TRACKER}: the file is empty", TRACKER),
    "a latest with a hole": ("toy-zero3", written("latest", "global\0step2"), "latest: it names no step", "\\x00"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_whole_is_told_with_its_reason(fixtures: Path, tmp_path: Path, case: str) -> None:
    name, damage, where, why = CASES[case]
    run = Path(shutil.copytree(fixtures / name, tmp_path / "run"))
    damage(run)
    result = run_ckpt("check", run)
    assert result.code == (5 if "unknown" in where else 4), result.out
    assert where in result.out and why in result.out, result.out
    if name == "trainer-zero2":
        assert "checkpoint-1: whole" in result.out
    assert run_ckpt("check", run, "-q").out == ""


@pytest.mark.parametrize("deeper", ["run", "out put/run"])
def test_the_record_of_a_run_is_looked_for_in_the_run(fixtures: Path, tmp_path: Path, deeper: str) -> None:
    run = Path(shutil.copytree(fixtures / "toy-zero2", tmp_path / "all" / deeper))
    whole = run_ckpt("check", tmp_path / "all")
    assert whole.code == 0 and "latest" not in whole.out, whole.out
    (run / "latest").unlink()
    without = run_ckpt("check", tmp_path / "all")
    assert without.code == 4 and f"- {deeper}/latest: missing; DeepSpeed writes it last" in without.out, without.out
    (run / "latest").write_text("global_step9")
    other = run_ckpt("check", tmp_path / "all")
    assert other.code == 4 and f"- {deeper}/latest: it names global_step9" in other.out, other.out


def test_the_page_shows_what_is_printed(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run"))
    gone("checkpoint-2/*/*rank_1*")(run)
    os.truncate(run / "checkpoint-2" / "rng_state_1.pth", 100)
    printed = run_ckpt("check", run).out
    assert f"```text\n{printed}```" in (REPOSITORY / "docs" / "check.md").read_text(), printed


def test_what_names_and_shapes_were_not_held_against_is_said(fixtures: Path, tmp_path: Path) -> None:
    """The run has no record of its arguments and no config; then a config of an architecture without a table."""
    run = Path(shutil.copytree(fixtures / "nemo" / "model", tmp_path / "run"))
    bare = run_ckpt("check", run)
    assert "config.json: none is here, and no record of the run tells which tensors" in bare.out and bare.code == 0
    (run / "config.json").write_text('{"model_type": "own"}')
    found = run_ckpt("check", run)
    assert "config.json: names and shapes were not held against it: there is no mapping" in found.out
    assert found.code == 0, found.out


MODEL: dict[str, tuple[Damage, str]] = {
    "a shard": (gone("*-00002-of-00003.safetensors"), "model-00002-of-00003.safetensors: "),
    "half a shard": (cut("*-00003-of-00003.safetensors"), "model-00003-of-00003.safetensors: "),
    "an index cut off": (cut("*.index.json"), "model.safetensors.index.json: the JSON file ends too early"),
}


def test_a_shard_of_another_save_beside_a_whole_set_is_nothing_missing(sharded: Path, tmp_path: Path) -> None:
    """The index names none of it, and every loader goes by the index; six shards were said to be missing."""
    model = Path(shutil.copytree(sharded, tmp_path / "model"))
    shutil.copy(model / "model-00001-of-00003.safetensors", model / "model-00001-of-00007.safetensors")
    found = run_ckpt("check", model)
    assert found.code == 0 and "whole (hf" in found.out


@pytest.mark.parametrize("case", MODEL)
def test_an_interrupted_save_of_shards(sharded: Path, tmp_path: Path, case: str) -> None:
    damage, words = MODEL[case]
    model = Path(shutil.copytree(sharded, tmp_path / "model"))
    assert run_ckpt("check", model).code == 0
    damage(model)
    result = run_ckpt("check", model)
    assert result.code == 4 and words in result.out, result.out
    assert result.out.count(f"- {words.split(':')[0]}:") == 1  # each file once


def test_every_missing_file_is_listed(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = Path(shutil.copytree(sharded, "model"))
    for number in (1, 3):
        (model / f"model-{number:05}-of-00003.safetensors").unlink()
    os.truncate(model / "model-00002-of-00003.safetensors", 5)
    agrees(GOLDEN / "check-shards.txt", run_ckpt("check", "model").out)


def test_bytes_that_changed_are_found_where_there_are_checksums(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "dcp-fsdp2", tmp_path / "run"))
    checkpoint = ckpt.open(run)
    extent = next(f.extent for t in checkpoint.tensors.values() for f in t.fragments() if f.extent.nbytes > 16)
    flipped(Path(extent.path).name, extent.offset + 5)(run)
    assert run_ckpt("check", run).code == 0  # which says that bytes were not read
    result = run_ckpt("check", run, "--bytes")
    assert result.code == 4 and "a checksum of the zip file does not fit" in result.out
    zero = Path(shutil.copytree(fixtures / "toy-zero2", tmp_path / "zero"))
    flipped("*rank_1*optim_states.pt", 4000)(zero)
    assert "rank_1" in (found := run_ckpt("check", zero, "--bytes")).out and found.code == 4


def test_a_manifest_is_compared(tmp_path: Path, fixtures: Path) -> None:
    out = tmp_path / "out"
    assert run_ckpt("convert", "auto", "hf", fixtures / "toy-zero3", "-o", out).code == 0
    assert run_ckpt("check", out, "--bytes").code == 0
    flipped("model.safetensors", -3)(out)
    assert run_ckpt("check", out).code == 0
    result = run_ckpt("check", out, "--bytes")
    assert result.code == 4 and "ckpt-manifest.json: model.safetensors: " in result.out


def test_staging_folders_and_json(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run"))
    (run / "tmp-checkpoint-3").mkdir()
    result = run_ckpt("check", run, "--json")
    found = json.loads(result.out)
    assert result.code == 4 and found["whole"] is ckpt.check(run).whole is False
    states = [(one["path"], one["state"], one["step"]) for one in found["checkpoints"]]
    assert states[-2:] == [("checkpoint-2", "whole", 2), ("checkpoint-1", "whole", 1)]
    assert found["problems"] == [
        {"kind": "incomplete", "where": "tmp-checkpoint-3", "what": "it was being written: it never got its name"}
    ]
    assert json.loads(run_ckpt("check", run, "--tag", "checkpoint-1", "--json").out)["whole"] is True
    assert run_ckpt("check", run, "--tag", "..").code == 5
    assert run_ckpt("check", run, "--tag", "checkpoint-9").code == 3


def test_one_file_of_several_is_whole_by_itself(sharded: Path) -> None:
    result = run_ckpt("check", next(sharded.glob("*-00002-of-*")))
    assert result.code == 0 and ": whole (hf, " in result.out, result.out


def test_what_is_refused_as_unsafe_is_not_said_to_be_whole(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, ("true",)

    torch.save({"weight": torch.ones(2), "more": Runs()}, tmp_path / "pytorch_model.bin")
    result = run_ckpt("check", tmp_path)
    assert result.code == 5 and ": unknown (" in result.out and "posix" in result.out, result


def test_pickles_that_are_not_looked_into_are_told(fixtures: Path, tmp_path: Path) -> None:
    """Axolotl's `training_args.bin` has a class that sets its own state: nothing is wrong, and nothing is known."""
    run = Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run"))
    theirs = fixtures / "axolotl-lora-fsdp2/outputs/gpt-oss-lora/checkpoint-2"
    shutil.copy(theirs / "training_args.bin", run / "checkpoint-2")
    (run / "checkpoint-1/state.bin").write_bytes(pickle.dumps([1]))
    result = run_ckpt("check", run)
    assert result.code == 0 and ckpt.check(run).whole
    assert "checkpoint-2: whole (" in result.out
    assert (
        "- training_args.bin: not looked into: the pickle sets a state of axolotl.utils.dict.DictDefault" in result.out
    )
    assert "- state.bin: not looked into: this is a plain pickle" in result.out
    shutil.copy(run / "checkpoint-2/training_args.bin", run / "checkpoint-2/global_step2/mp_rank_00_model_states.pt")
    result = run_ckpt("check", run)  # it is needed now
    assert result.code == 5 and "checkpoint-2: unknown" in result.out and "checkpoint-1: whole" in result.out


@pytest.mark.parametrize("path", ["nowhere", "empty", "empty/x.txt"])
def test_what_is_no_checkpoint(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/x.txt").write_text("x")
    result = run_ckpt("check", tmp_path / path)
    assert (result.code, result.out) == (3, "") and "error: " in result.err


def test_steps_of_very_many_files_are_counted_alone(fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "_MANY_FILES", 5)
    run = fixtures / "trainer-zero2"
    found = checking.survey(run, checking.checkpoints_of(run))
    assert [(one.state, one.num_files, one.step) for one in found] == [("unknown", 10, 2), ("unknown", 10, 1)]
    assert "`ckpt check` does" in found[0].row()[-1]


def test_inspecting_a_run_lists_its_checkpoints(
    fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path(shutil.copytree(fixtures / "trainer-zero2", "run"))
    os.truncate(run / "checkpoint-1" / "rng_state_1.pth", 100)
    result = run_ckpt("inspect", "run")
    agrees(GOLDEN / "inspect-run.txt", result.out.split("\n\n")[1])
    found = json.loads(run_ckpt("inspect", "run", "--json").out)["checkpoints"]
    assert [one["state"] for one in found][-2:] == ["whole", "incomplete"]
    assert "\n\n" not in run_ckpt("inspect", "run/checkpoint-2").out


def test_inspecting_a_run_whose_newest_is_damaged_lists_the_others(
    fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path(shutil.copytree(fixtures / "trainer-zero2", "run"))
    damaged = run / "checkpoint-2/global_step2/mp_rank_00_model_states.pt"
    damaged.write_bytes(damaged.read_bytes().replace(b"module", b"Module", 1))
    result = run_ckpt("inspect", "run")
    head, newest, older = result.out.splitlines()
    assert result.code == 4 and result.err.startswith("error: ")
    assert "--tag checkpoint-1 takes the checkpoint before" in result.err
    assert head.startswith("checkpoint ") and newest.startswith("checkpoint-2  ?") and older.endswith("whole")
    assert "damaged: global_step2/mp_rank_00_model_states.pt: " in newest
    found = json.loads(run_ckpt("inspect", "run", "--json").out)
    assert [one["state"] for one in found["checkpoints"]] == ["damaged", "whole"]


def test_files_of_two_saves_are_not_whole(fixtures: Path, tmp_path: Path) -> None:
    """The model's file is of step 1 and the optimizer's are of step 2, as `inspect` says."""
    run = Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run"))
    for file in (run / "checkpoint-2/global_step2").glob("*optim_states.pt"):
        shutil.copy(file, run / "checkpoint-1/global_step1")
    for path, tag in (
        (run, ("--tag", "checkpoint-1")),
        (run / "checkpoint-1", ()),
        (run / "checkpoint-1/global_step1", ()),
    ):
        assert "are all files of one save?" in run_ckpt("inspect", path, *tag).out
        result = run_ckpt("check", path, *tag)
        assert result.code == 4 and "unknown (zero2, step 1" in result.out
        assert "the model is of step 1, and the optimizer has taken 2: are all files of one save?" in result.out


def test_an_optimizer_of_a_later_save_than_trainers_own_state(fixtures: Path, tmp_path: Path) -> None:
    """One that has taken fewer steps is no sign of it: an overflow made them void."""
    run = Path(shutil.copytree(fixtures / "trainer-plain", tmp_path / "run"))
    folder = run / "checkpoint-2"
    state = json.loads((folder / "trainer_state.json").read_text())
    for step, code in ((1, 4), (2, 0), (3, 0)):
        folder = folder.rename(run / f"checkpoint-{step}")
        (folder / "trainer_state.json").write_text(json.dumps(state | {"global_step": step}))
        result = run_ckpt("check", run)
        assert result.code == code
        said = f"the model is of step {step}, and the optimizer has taken 2: are all files of one save?"
        assert (said in result.out) == (code != 0)


def test_an_optimizer_of_a_later_save_is_not_resumed(fixtures: Path, tmp_path: Path) -> None:
    """An older whole step is taken instead; an optimizer that has taken fewer steps began anew."""
    run = Path(shutil.copytree(fixtures / "trainer-plain", tmp_path / "run"))
    state = json.loads((run / "checkpoint-2/trainer_state.json").read_text())
    later = Path(shutil.copytree(run / "checkpoint-2", run / "checkpoint-3"))
    (later / "trainer_state.json").write_text(json.dumps(state | {"global_step": 3}))
    assert run_ckpt("resume", run).out.strip() == str(later)
    saved = torch.load(later / "optimizer.pt", weights_only=False)
    for values in saved["state"].values():
        values["step"] = torch.tensor(7.0)
    torch.save(saved, later / "optimizer.pt")
    result = run_ckpt("resume", run)
    assert result.code == 0 and result.out.strip() == str(run / "checkpoint-2"), result
    assert "checkpoint-3 is skipped" in result.err and "the optimizer has taken 7" in result.err
    alone = run_ckpt("resume", later)
    assert alone.code == 4 and "the model is of step 3, and the optimizer has taken 7" in alone.err
    zero = Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "zero"))
    for file in (zero / "checkpoint-2/global_step2").glob("*optim_states.pt"):
        shutil.copy(file, zero / "checkpoint-1/global_step1")
    assert run_ckpt("resume", zero).code == 0
    assert run_ckpt("resume", zero / "checkpoint-1").code == 4


def test_lightnings_record_next_to_its_dcp_files_is_known(fixtures: Path, tmp_path: Path) -> None:
    """`meta.pt` holds loops and callbacks; a conversion says that it stays behind."""
    step = Path(shutil.copytree(fixtures / "dcp-fsdp2" / "step-2", tmp_path / "epoch=1-step=2.ckpt"))
    torch.save({"pytorch-lightning_version": "2.6.6", "callbacks": {"best": torch.ones(3)}}, step / "meta.pt")
    report = run_ckpt("check", step)
    assert report.code == 0 and "meta.pt" not in report.out, report
    for target in ("dcp", "full"):
        made = run_ckpt("convert", "auto", target, step, "-o", tmp_path / target, "-v")
        assert made.code == 0 and "files of the run meta.pt" in made.err, made
    (step / "meta.pt").rename(step / "other_meta.pt")
    assert run_ckpt("check", step).code == 4


def cut(path: Path) -> None:
    path.write_text("{")


def link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("tokenizer_config.json", cut, "the JSON file ends too early"),
        ("tokenizer_config.json", link_to_nothing, "a symlink leads to nothing"),
        ("config.json", link_to_nothing, "a symlink leads to nothing"),
        ("trainer_state.json", link_to_nothing, "a symlink leads to nothing"),
        ("rng_state_0.pth", lambda path: path.write_bytes(b""), "the file is empty"),
    ],
)
def test_check_and_convert_reject_damaged_files_around_the_tag(
    fixtures: Path, tmp_path: Path, name: str, damage: Damage, words: str
) -> None:
    """DeepSpeed's tag lies in a folder with the files of the trainer and the tokenizer, and they are copied."""
    run = tmp_path / "run"
    shutil.copytree(fixtures / "trainer-zero2" / "checkpoint-2", run)
    zero3, dcp = tmp_path / "zero3", tmp_path / "dcp"
    assert run_ckpt("convert", "auto", "zero3", run, "-o", zero3).code == 0
    assert run_ckpt("check", zero3).code == 0
    damage(zero3 / name)
    checked = run_ckpt("check", zero3)
    assert checked.code == 4 and f"{name}: {words}" in checked.out
    converted = run_ckpt("convert", "auto", "dcp", zero3, "-o", dcp)
    assert converted.code == 4 and words in converted.err and not dcp.exists()
