"""`ckpt/commands/check/checking.py`, `files.py`: `ckpt check` gives the reason for its findings."""

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
from tests.support.model_files import rewriting
from tests.support.places import REPOSITORY

WHOLE = ("toy-zero1", "toy-zero3", "toy-zero0", "dcp-fsdp2", "megatron-fsdp", "trainer-plain", "trainer-zero2")

Damage = Callable[[Path], object]


def test_the_metadata_of_dcp_is_read_once_for_all_of_its_files(fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, seen = fixtures / "dcp-fsdp2" / "step-2", []
    monkeypatch.setattr(files, "read_metadata", lambda place: seen.append(place) or read_metadata(place))
    count = files.ComparedBytes()
    assert [*files.read_all(folder, sorted(folder.iterdir()), count, lambda _: None)] == []
    assert len([*folder.glob("*.distcp")]) > 1 and seen == [folder]
    assert count.compared


def test_a_file_that_goes_while_it_is_looked_at(fixtures: Path) -> None:
    """A live run may remove its oldest checkpoint at any time."""
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


def flipped(pattern: str, at: int) -> Damage:
    def damage(folder: Path) -> None:
        content = bytearray(first(folder, pattern).read_bytes())
        content[at] ^= 1
        first(folder, pattern).write_bytes(content)

    return damage


def test_the_page_shows_what_is_printed(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run"))
    next(run.glob("checkpoint-2/*/*rank_1*")).unlink()
    os.truncate(run / "checkpoint-2" / "rng_state_1.pth", 100)
    printed = run_ckpt("check", run).out
    assert f"```text\n{printed}```" in (REPOSITORY / "docs" / "check.md").read_text(), printed


def test_bytes_that_changed_are_found_where_there_are_checksums(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "dcp-fsdp2", tmp_path / "run"))
    checkpoint = ckpt.open(run)
    extent = next(f.extent for t in checkpoint.tensors.values() for f in t.fragments() if f.extent.nbytes > 16)
    flipped(Path(extent.path).name, extent.offset + 5)(run)
    assert run_ckpt("check", run).code == 0  # it says that some bytes were not read
    result = run_ckpt("check", run, "--bytes")
    assert result.code == 4 and "checksum mismatch in the zip file" in result.out
    zero = Path(shutil.copytree(fixtures / "toy-zero2", tmp_path / "zero"))
    flipped("*rank_1*optim_states.pt", 4000)(zero)
    assert "rank_1" in (found := run_ckpt("check", zero, "--bytes")).out and found.code == 4


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


def test_what_is_refused_as_unsafe_is_not_said_to_be_whole(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, ("true",)

    torch.save({"weight": torch.ones(2), "more": Runs()}, tmp_path / "pytorch_model.bin")
    result = run_ckpt("check", tmp_path)
    assert result.code == 5 and ": unknown (" in result.out and "posix" in result.out, result


def test_pickles_that_are_not_looked_into_are_told(fixtures: Path, tmp_path: Path) -> None:
    """Axolotl's `training_args.bin` has a class that sets its own state, so its content is unknown but not wrong."""
    run = Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run"))
    theirs = fixtures / "axolotl-lora-fsdp2/outputs/gpt-oss-lora/checkpoint-2"
    shutil.copy(theirs / "training_args.bin", run / "checkpoint-2")
    (run / "checkpoint-1/state.bin").write_bytes(pickle.dumps([1]))
    result = run_ckpt("check", run)
    assert result.code == 0 and ckpt.check(run).whole
    assert "checkpoint-2: whole (" in result.out
    assert (
        "- training_args.bin: not looked into: the pickle sets a state for axolotl.utils.dict.DictDefault" in result.out
    )
    assert "- state.bin: not looked into: this is a plain pickle" in result.out
    shutil.copy(run / "checkpoint-2/training_args.bin", run / "checkpoint-2/global_step2/mp_rank_00_model_states.pt")
    result = run_ckpt("check", run)  # it is needed now
    assert result.code == 5 and "checkpoint-2: unknown" in result.out and "checkpoint-1: whole" in result.out


def test_steps_of_very_many_files_are_counted_alone(fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "_MANY_FILES", 5)
    run = fixtures / "trainer-zero2"
    found = checking.survey(run, checking.checkpoints_of(run))
    assert [(one.state, one.num_files, one.step) for one in found] == [("unknown", 10, 2), ("unknown", 10, 1)]
    assert "`ckpt check` does" in found[0].row()[-1]


def test_json_of_inspect_lists_the_checkpoints_of_a_run(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run"))
    os.truncate(run / "checkpoint-1" / "rng_state_1.pth", 100)
    found = json.loads(run_ckpt("inspect", run, "--json").out)["checkpoints"]
    assert [one["state"] for one in found][-2:] == ["whole", "incomplete"]
    damaged = run / "checkpoint-2/global_step2/mp_rank_00_model_states.pt"
    damaged.write_bytes(damaged.read_bytes().replace(b"module", b"Module", 1))
    found = json.loads(run_ckpt("inspect", run, "--json").out)["checkpoints"]
    assert [one["state"] for one in found] == ["damaged", "incomplete"]


def test_an_optimizer_of_a_later_save_is_not_resumed(fixtures: Path, tmp_path: Path) -> None:
    """An older whole step is used instead. An optimizer with fewer steps has started again."""
    run = Path(shutil.copytree(fixtures / "trainer-plain", tmp_path / "run"))
    state = json.loads((run / "checkpoint-2/trainer_state.json").read_text())
    later = Path(shutil.copytree(run / "checkpoint-2", run / "checkpoint-3"))
    (later / "trainer_state.json").write_text(json.dumps(state | {"global_step": 3}))
    assert run_ckpt("resume", run).out.strip() == str(later)
    with rewriting(later / "optimizer.pt") as saved:
        for values in saved["state"].values():
            values["step"] = torch.tensor(7.0)
    result = run_ckpt("resume", run)
    assert result.code == 0 and result.out.strip() == str(run / "checkpoint-2"), result
    assert "checkpoint-3 is skipped" in result.err and "the optimizer has taken 7" in result.err
    alone = run_ckpt("resume", later)
    assert alone.code == 4 and "the model is from step 3, but the optimizer has taken 7" in alone.err
    zero = Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "zero"))
    for file in (zero / "checkpoint-2/global_step2").glob("*optim_states.pt"):
        shutil.copy(file, zero / "checkpoint-1/global_step1")
    assert run_ckpt("resume", zero).code == 0
    assert run_ckpt("resume", zero / "checkpoint-1").code == 4


def test_lightnings_record_next_to_its_dcp_files_is_known(fixtures: Path, tmp_path: Path) -> None:
    """`meta.pt` holds loops and callbacks; only Lightning's own layout, DCP, keeps it."""
    step = Path(shutil.copytree(fixtures / "dcp-fsdp2" / "step-2", tmp_path / "epoch=1-step=2.ckpt"))
    torch.save({"pytorch-lightning_version": "2.6.6", "callbacks": {"best": torch.ones(3)}}, step / "meta.pt")
    report = run_ckpt("check", step)
    assert report.code == 0 and "meta.pt" not in report.out, report
    made = run_ckpt("convert", "auto", "full", step, "-o", tmp_path / "full", "-v")
    assert made.code == 0 and "files of the run meta.pt" in made.err, made
    made = run_ckpt("convert", "auto", "dcp", step, "--world-size", "3", "-o", tmp_path / "dcp", "-v")
    assert made.code == 0 and "meta.pt counts the batches of each of 2 ranks, and there are 3" in made.err, made
    assert (tmp_path / "dcp" / "meta.pt").read_bytes() == (step / "meta.pt").read_bytes()
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
    """DeepSpeed's tag folder also holds the trainer's and the tokenizer's files, and conversions copy them."""
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


def test_files_around_several_tags_are_read_once(
    fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, read = tmp_path / "run", []
    assert run_ckpt("convert", "auto", "zero3", fixtures / "trainer-zero2/checkpoint-2", "-o", run).code == 0
    (tag,) = (path for path in run.iterdir() if path.is_dir())
    shutil.copytree(tag, run / "best")
    (run / "latest").write_text("best")
    monkeypatch.setattr(files, "check_file", lambda path, _: read.append(path.name))
    checked = [one.path for one in ckpt.check(run).checkpoints]
    assert sorted(checked) == ["best", tag.name]
    assert read.count("tokenizer_config.json") == read.count("trainer_state.json") == 1


def test_folders_with_temporary_names_are_named(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "trainer-plain", tmp_path / "run"))
    for harmless in ("tmp", "notes.tmp", "tmp_cache", "temporary-step-4"):
        (run / harmless).mkdir()
    assert run_ckpt("check", run).code == 0
    names = ("checkpoint-3.tmp", ".tmp-step4", "tmp-checkpoint-4", "step-5.orbax-checkpoint-tmp-0", "last.tmp")
    for name in names:
        (run / name).mkdir()
    shutil.copy(run / "checkpoint-2/model.safetensors", run / "last.tmp")
    result = run_ckpt("check", run)
    assert result.code == 4
    for name in names:
        assert f"- {name}: it was being written: it never got its name" in result.out, result.out


@pytest.mark.parametrize("engines", [("_actor",), ("_actor", "_critic")])
def test_engines_beside_a_final_model_are_checked(fixtures: Path, tmp_path: Path, engines: tuple[str, ...]) -> None:
    """OpenRLHF keeps one run per engine next to the final model."""
    run = tmp_path / "run"
    for name in engines:
        shutil.copytree(fixtures / "toy-zero2", run / name, ignore=shutil.ignore_patterns("truth"))
    for name in ("model.safetensors", "config.json"):
        shutil.copy(fixtures / "trainer-plain" / "checkpoint-2" / name, run)
    checked = run_ckpt("check", run)
    assert checked.code == 0, checked.out
    assert [checked.out.count(f"{name}/global_step2: whole") for name in engines] == [1] * len(engines), checked.out
    told = f"using the folder's own model; also here: {', '.join(engines)} (--tag takes it)"
    assert told in run_ckpt("inspect", run).out
    assert "zero2" in run_ckpt("inspect", run, "--tag", engines[-1]).out
    next((run / engines[-1]).rglob("*rank_1*optim_states.pt")).unlink()
    checked = run_ckpt("check", run)
    assert checked.code == 4 and f"{engines[-1]}/global_step2: incomplete" in checked.out, checked.out


def test_skipped_optimizer_states_are_noted(fixtures: Path, tmp_path: Path) -> None:
    note = "note: not read: optimizer state row of "
    run = shutil.copytree(fixtures / "experts-zero0", tmp_path / "run", ignore=lambda *_: {"truth"})
    healthy = run_ckpt("check", run)
    assert healthy.code == 0 and note not in healthy.out
    for path in run.rglob("*optim_states.pt"):
        with rewriting(path) as content:
            for state in content["optimizer"]["optimizer_state_dict"]["state"].values():
                state["row"] = state["exp_avg"].mean(-1)
    checked = run_ckpt("check", run)
    assert checked.code == 0 and checked.out.count(note) == 1 and "it is not of the parameter's shape" in checked.out
    (one,) = json.loads(run_ckpt("check", run, "--json").out)["checkpoints"]
    assert len(one["skipped_states"]) == 1 and one["problems"] == []
    assert "skipped_states" not in run_ckpt("check", fixtures / "toy-zero1", "--json").out


@pytest.mark.parametrize("kind", ["dict", "list", "added"])
@pytest.mark.parametrize("largest", [23, 24])
def test_tokens_without_a_row_in_the_embedding_are_noted(
    fixtures: Path, tmp_path: Path, kind: str, largest: int
) -> None:
    """Some released models have such tokens, so this is no damage. The fixture's vocab_size is 24."""
    step = Path(shutil.copytree(fixtures / "trainer-plain" / "checkpoint-2", tmp_path / "checkpoint-2"))
    vocabulary = {"a": 0, "b": largest} if kind == "dict" else [["a", -0.1]] * (largest + 1)
    content = {"model": {"vocab": {"a": 0} if kind == "added" else vocabulary}, "added_tokens": [{"id": largest}]}
    if kind != "added":
        del content["added_tokens"]
    (step / "tokenizer.json").write_text(json.dumps(content))
    told = "  - tokenizer.json: token ids go up to 24, and config.json's vocab_size is 24: the embedding has no row"
    for config in (None, "{}", "damaged"):
        if config is not None:
            (step / "config.json").write_text(config)
        checked = run_ckpt("check", step)
        assert (told in checked.out) == (largest == 24 and config is None), checked.out
        if config is None:
            assert checked.code == 0 and f"{step}: whole (" in checked.out
            assert "every part of every tensor is there" in checked.out
