"""`ckpt/runs/unread_files.py`: files that no reader opened are named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.errors import CorruptError
from ckpt.runs.unread_files import ListedName, judged, list_unread
from ckpt.testing import Declaration
from tests.formats.declarations import DECLARATIONS
from tests.support.commands import ckpt as run_ckpt
from tests.support.sampling import sample

TENSORS = {"w": torch.ones(3)}


def saved(name: str, **options: bool) -> Callable[[Path], object]:
    return lambda folder: torch.save(TENSORS, folder / name, **options)


def written(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


#: Stray file makers by name, and the expected kind (None: harmless).
STRAYS: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "layer_wise_optimizer_0.pt": (saved("layer_wise_optimizer_0.pt"), "state"),  # from megatron-core's Muon
    "shard_9.npy": (written("shard_9.npy", b"\x93NUMPY"), "state"),
    "__9_0.distcp": (written("__9_0.distcp", b"elements"), "state"),
    "ema.safetensors": (written("ema.safetensors", (2).to_bytes(8, "little") + b"{}"), "state"),
    "extra.bin": (saved("extra.bin"), "state"),
    "older.bin": (saved("older.bin", _use_new_zipfile_serialization=False), "state"),
    "named.otherwise": (written("named.otherwise", (16).to_bytes(8, "little") + b'{"__metadata__":'), "state"),
    "blob.dat": (written("blob.dat", b"what is it"), "other"),
    "notes.txt": (written("notes.txt", b"a text"), None),
    ".hidden.pt": (saved(".hidden.pt"), None),
}


#: Strays of "state", and all others. A `.distcp` file is tested alone, because several of its checks differ.
STATES = [name for name, (_, kind) in STRAYS.items() if kind == "state" and not name.endswith(".distcp")]
TOGETHER = [STATES, [name for name, (_, kind) in STRAYS.items() if kind != "state"], ["__9_0.distcp"]]
#: Rounds with the printed text: what a round finds depends on the format, but not how it is said.
SAID = sample(
    [(one.format, number) for one in DECLARATIONS for number in range(len(TOGETHER) + 1)], lambda case: case[1:]
)


@pytest.mark.parametrize("declaration", [pytest.param(d, id=d.format, marks=d.marks) for d in DECLARATIONS])
def test_a_stray_file_in_every_format(declaration: Declaration, tmp_path: Path) -> None:
    """Put strays together into the folder, and two into a subfolder with read files."""
    (tmp_path / "sample").mkdir()
    path, _ = declaration.make(tmp_path / "sample")
    checkpoint = ckpt.open(path, declaration.format)
    named = ("--format", declaration.format)
    planned = ("convert", declaration.format, "dcp", path, "--world-size", "2", "-o", tmp_path / "out", "--dry-run")
    assert not list_unread(checkpoint)
    (intact,) = json.loads(run_ckpt("check", path, *named, "--json").out)["checkpoints"]
    before = [problem["where"] for problem in intact["problems"]]
    assert intact["state"] == "whole" and before in ([], ["optimizer"]), "verl's run has a parameter without states"
    folder = Path(checkpoint.path)
    inner = [Path(file.path).parent for file in checkpoint.files if Path(file.path).parent.parent == folder]
    rounds = [*((folder, together) for together in TOGETHER), *((one, STATES[:2]) for one in inner[:1])]
    for number, (place, names) in enumerate(rounds):
        for name in names:
            STRAYS[name][0](place)
        kinds = {str((place / name).relative_to(folder)): STRAYS[name][1] for name in names}
        strays = sorted((stray, kind) for stray, kind in kinds.items() if kind)
        has_state = "state" in kinds.values()
        is_said = (declaration.format, number) in SAID
        commands = (("inspect", path, *named), planned, ("check", path, *named))
        texts = [run_ckpt(*words) for words in commands if is_said]
        jsons = [json.loads(run_ckpt(*one, "--json").out) for one in (("inspect", path, *named), planned)]
        found_by_check = run_ckpt("check", path, *named, "--json")
        checked = json.loads(found_by_check.out)
        if names != ["__9_0.distcp"]:
            assert ckpt.open(path).format == declaration.format, names
        for name in names:
            (place / name).unlink()
        assert [one.code for one in texts] == [0, 0, 4 if has_state else 0][: len(texts)], texts
        assert found_by_check.code == (4 if has_state else 0)
        for result in texts:
            assert "not read" in result.out, result.out
            assert all((stray in result.out) == bool(kind) for stray, kind in kinds.items()), result.out
        for found in jsons:
            assert sorted((one["name"], one["kind"]) for one in found["not_read"]) == strays
        (one,) = checked["checkpoints"]
        wheres = [problem["where"] for problem in one["problems"] if problem["where"] not in before]
        if any(where.endswith(".metadata") for where in wheres):  # without it `.distcp` files are no whole set
            wheres = wheres[1:] if names == ["__9_0.distcp"] and one["state"] == "incomplete" else []
        else:
            assert one["state"] == ("not all read" if has_state else "whole")
        assert sorted(wheres) == [stray for stray, _ in strays]


def test_convert_and_resume_write_and_say_so(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "toy-zero2", tmp_path / "run"))
    torch.save(TENSORS, run / "global_step2" / "layer_wise_optimizer_0.pt")
    done = run_ckpt("convert", "auto", "hf", run, "--names", "own")
    line = "not read: layer_wise_optimizer_0.pt: its name suggests training state"
    assert done.code == 0 and line in done.err.splitlines()
    quiet = run_ckpt("convert", "auto", "full", run, "-q")
    assert quiet.code == 0 and quiet.err == f"{line}\n"
    said: list[str] = []
    ckpt.resume(run, format="zero2", world_size=5, say=said.append)
    assert line in said


def test_the_list_of_a_run_says_which_step_is_not_all_read(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run"))
    torch.save(TENSORS, run / "checkpoint-1" / "global_step1" / "optimizer_rank_9.pt")
    table = run_ckpt("inspect", run).out
    assert "not all read: global_step1/optimizer_rank_9.pt: not read: its name suggests training state" in table
    assert run_ckpt("check", run).code == 4


def test_a_file_next_to_the_folder_of_a_step_is_named_by_every_command(fixtures: Path, tmp_path: Path) -> None:
    """HF Trainer's step contains DeepSpeed's folder; a head saved next to that folder belongs to the step."""
    run = Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run"))
    assert run_ckpt("check", run).code == 0
    torch.save(TENSORS, run / "checkpoint-2" / "value_head.bin")
    line = "../value_head.bin: next to the checkpoint: a torch file"
    assert line in run_ckpt("inspect", run).out
    checked = run_ckpt("check", run)
    assert checked.code == 4
    assert "checkpoint-2: not all read" in checked.out and "every part of every tensor" not in checked.out
    assert "  - value_head.bin: not read: next to the checkpoint: a torch file" in checked.out.splitlines()
    assert f"not read: {line}" in run_ckpt("convert", "auto", "full", run, "-o", tmp_path / "out").err.splitlines()
    said: list[str] = []
    ckpt.resume(run, format="zero2", world_size=5, say=said.append)
    assert f"not read: {line}" in said


@pytest.mark.parametrize("fixture", ["toy-zero1", "dcp-fsdp2", "megatron-dist-flattened", "trainer-plain"])
def test_tensors_next_to_the_steps_of_a_run_are_listed_once(fixtures: Path, tmp_path: Path, fixture: str) -> None:
    run = Path(shutil.copytree(fixtures / fixture, tmp_path / "run"))
    before = run_ckpt("check", run)
    torch.save(TENSORS, run / "ema_rank_0.dat")
    assert [(one.name, one.kind) for one in list_unread(ckpt.open(run))] == [("../ema_rank_0.dat", "other")]
    after = run_ckpt("check", run)
    assert (before.code, after.code) == (0, 0) and after.out.count("ema_rank_0.dat") == 1


def test_what_a_trainer_leaves_next_to_a_checkpoint_is_not_listed(fixtures: Path, tmp_path: Path) -> None:
    """A final model, its shards, an older adapter, the data position, logs, and other steps."""
    run = Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run"))
    for name in ("pytorch_model.bin", "model-00001-of-00002.safetensors", "adapter_model.bin", "data.pt"):
        torch.save(TENSORS, run / name)
        torch.save(TENSORS, run / "checkpoint-2" / name)
    (run / "run.log").write_text("a log")
    (run / "runs").mkdir()
    torch.save(TENSORS, run / "runs" / "other.pt")
    assert not list_unread(ckpt.open(run / "checkpoint-2" / "global_step2"))


def test_neighbours_of_a_checkpoint_of_one_file_are_not_listed(tmp_path: Path) -> None:
    one = tmp_path / "model.pt"
    torch.save(TENSORS, one)
    torch.save(TENSORS, tmp_path / "optimizer_0.pt")
    assert not list_unread(ckpt.open(one))


def test_no_fixture_has_a_file_that_is_not_read(fixtures: Path) -> None:
    places = [fixtures / "toy-zero1", fixtures / "dcp-fsdp2", fixtures / "local-flat", fixtures / "trl-fsdp2/outputs"]
    places += [fixtures / name for name in ("trainer-plain", "verl-fsdp2", "megatron-fsdp", "neox-zero1")]
    assert [list_unread(ckpt.open(place)) for place in places] == [()] * len(places)


def names(opened: set[str], *entries: str, empty: bool = False) -> list[tuple[str, str]]:
    listing = [ListedName(e.rstrip("/"), None if e.endswith("/") else 0 if empty else 1) for e in entries]
    return [(one.name, one.kind) for one in judged(listing, opened, lambda name: b"")]


def test_a_folder_with_another_model_is_named(fixtures: Path, tmp_path: Path) -> None:
    """An average next to the weights, inside the step."""
    shutil.copytree(fixtures / "trainer-plain/checkpoint-2", tmp_path / "step_2/model")
    shutil.copytree(tmp_path / "step_2/model", tmp_path / "step_2/model_ema")
    shutil.copytree(tmp_path / "step_2/model", tmp_path / "step_2/model/ema")
    found = {one.name: one.why for one in list_unread(ckpt.open(tmp_path / "step_2"))}
    why = "a folder with a model's weights"
    assert found.get("ema/") == why and found.get("../model_ema/") == f"next to the checkpoint: {why}", found


def test_models_beside_the_one_that_was_read() -> None:
    shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    other = "pytorch_model.bin", "model.fp16.safetensors", "consolidated.safetensors", "adapter_model.safetensors"
    assert names(shards, *other) == [(name, "other") for name in other]
    assert names(shards, "model-00003-of-00009.safetensors") == [("model-00003-of-00009.safetensors", "other")]
    assert names(shards, "model-00003-of-00002.safetensors", "model.safetensors") == [
        ("model-00003-of-00002.safetensors", "state"),
        ("model.safetensors", "state"),
    ]
    assert names({"__0_0.distcp", ".metadata"}, "model.safetensors") == [("model.safetensors", "other")]


def test_repositories_of_models() -> None:
    """Companion files in openai-community/gpt2, mistralai and quantized repositories don't belong to a run."""
    opened = {"model.safetensors"}
    other = ["64.tflite", "flax_model.msgpack", "tf_model-00001-of-00002.h5", "x-q4-00001-of-00003.gguf"]
    assert names(opened, *other, "merges.txt", "LICENSE", "vocab.bpe", "onnx/", "original/", ".gitattributes") == [
        (name, "other") for name in other
    ]


def test_megatrons_place_in_its_data_is_named() -> None:
    other = ["train_dataloader_dprank000.pt", "train_state.pt"]
    assert names({"__0_0.distcp", "common.pt"}, *other, "run_config.yaml") == [(name, "other") for name in other]


def test_an_optimizer_beside_weights_alone_is_the_runs() -> None:
    assert names({"adapter_model.safetensors"}, "optimizer.pt", "scheduler.pt") == [("optimizer.pt", "other")]
    assert names({"__0_0.distcp"}, "optimizer.bin") == [("optimizer.bin", "state")]


def test_folders_of_which_nothing_was_read() -> None:
    """Other steps, pictures and logs are unrelated; a second optimizer's file is not."""
    opened = {"pytorch_model_fsdp_0/__0_0.distcp", "zero/a/fp32.pt"}
    assert not names(opened, "runs/", "checkpoint-3/", "zero/", "zero/a/", "pytorch_model_fsdp_0/", ".git/")
    assert names(opened, "optimizer_1/", "zero/b/") == [("optimizer_1/", "state"), ("zero/b/", "other")]


@pytest.mark.parametrize(
    "fixture", ["toy-zero3", "dcp-fsdp2/step-2", "megatron-dist-flattened", "trainer-plain/checkpoint-2"]
)
def test_another_checkpoint_in_a_folder_is_named(fixtures: Path, tmp_path: Path, fixture: str) -> None:
    run = Path(shutil.copytree(fixtures / fixture, tmp_path / "run", ignore=shutil.ignore_patterns("truth")))
    folder = Path(ckpt.open(run).path)
    (folder / "ema").mkdir()
    torch.save(TENSORS, folder / "ema" / "ema.pt")
    (folder / "pictures").mkdir()
    (folder / "pictures" / "loss.dat").write_bytes(b"a picture")
    assert [(one.name, one.kind) for one in list_unread(ckpt.open(run))] == [("ema/", "other")]
    assert "not read: ema/: a folder with tensor files" in run_ckpt("convert", "auto", "full", run).err
    assert run_ckpt("check", run).code == 0


def test_a_file_of_torchs_without_tensors_is_no_state(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "dcp-fsdp2" / "step-2", tmp_path / "run"))
    torch.save({"losses": list(range(20_000))}, run / "numbers.pt")
    torch.save({"losses": torch.ones(3)}, run / "data.pt")
    assert [(one.name, one.kind) for one in list_unread(ckpt.open(run))] == [
        ("data.pt", "state"),
        ("numbers.pt", "other"),
    ]


def test_a_rank_without_items_leaves_an_empty_file() -> None:
    """torch.distributed.checkpoint opens one for each rank."""
    assert not names({"__0_0.distcp"}, "__1_0.distcp", empty=True)


def test_what_cannot_be_looked_into_is_named_and_nothing_waits(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "dcp-fsdp2" / "step-2", tmp_path / "run"))
    os.mkfifo(run / "pipe.pt")
    (run / "gone.pt").symlink_to("nowhere")
    (run / "zero.pt").symlink_to("/dev/zero")
    found = list_unread(ckpt.open(run))
    assert [(one.name, one.kind) for one in found] == [(f"{name}.pt", "other") for name in ("gone", "pipe", "zero")]


def test_only_what_looks_like_state_is_opened() -> None:
    opened: list[str] = []
    checked = judged([ListedName(n, 1) for n in ("optimizer.x", "a.txt", "b.safetensors", "c.q")], set(), opened.append)
    with pytest.raises(AttributeError):
        list(checked)
    assert opened == ["c.q"]


def test_the_folder_and_those_of_its_files_are_listed_once(fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, listed = ckpt.open(fixtures / "trl-fsdp2/outputs/llama-sft"), []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(Path(path).name) or scandir(path))
    assert not list_unread(checkpoint)
    assert listed == ["checkpoint-2", "optimizer_0", "pytorch_model_fsdp_0", "llama-sft"]


@pytest.mark.parametrize("name", ["best.pth", ".hidden.pt", "model.pt"])
@pytest.mark.parametrize(
    "fixture",
    ["local-flat", "trl-fsdp2/outputs/llama-sft", "verl-fsdp2", "mlx-lora/adapters", "axolotl-lora-fsdp2/outputs"],
)
def test_a_stray_torch_file_is_not_taken_for_the_checkpoint(
    fixtures: Path, tmp_path: Path, fixture: str, name: str
) -> None:
    run = Path(shutil.copytree(fixtures / fixture, tmp_path / "run"))
    before = ckpt.open(run)
    torch.save(TENSORS, Path(before.path) / name)
    found = ckpt.open(run)
    assert (found.format, found.path, found.tensors.keys()) == (before.format, before.path, before.tensors.keys())


#: Conversions with files that the format's readers don't need.
WRITTEN = {
    "a universal checkpoint that all stages load": ("toy-zero0", "universal", ()),
    "a step of HF Trainer": ("trainer-zero2", "trainer", ()),
    "what Accelerate loads": ("trainer-zero2", "full", ()),
    "folders of shards": ("trainer-zero2", "dcp", ("--world-size", "3")),
    "files of ranks": ("trainer-zero2", "fsdp-ranks", ("--world-size", "3")),
    "ZeRO-3": ("trainer-zero2", "zero3", ("--world-size", "3")),
    "a Megatron run": ("megatron-dist-flattened", "megatron", ("--pp", "2")),
    "a distributed one": ("megatron-dist-flattened", "megatron-dist", ()),
    "a pipeline": ("megatron-dist-flattened", "megatron-deepspeed", ("--pp", "2", "--world-size", "4")),
}


@pytest.mark.parametrize("what", WRITTEN)
def test_all_that_is_written_is_read(fixtures: Path, tmp_path: Path, what: str) -> None:
    name, target, options = WRITTEN[what]
    made = run_ckpt("convert", "auto", target, fixtures / name, "-o", tmp_path / "out", *options)
    assert made.code == 0, made.err
    checked = json.loads(run_ckpt("check", tmp_path / "out", "--json").out)
    assert checked["whole"] and not any(one["problems"] for one in checked["checkpoints"]), checked


def test_the_training_state_beside_a_trainers_step_is_read(fixtures: Path, tmp_path: Path) -> None:
    source = ckpt.open(fixtures / "megatron-dist-flattened")
    ckpt.plan(source, "trainer").run(tmp_path / "out")
    found = ckpt.open(tmp_path / "out")
    assert (found.format, found.state.step) == ("trainer", 2)
    assert "opt_param_scheduler" in found.state.entries()


def test_ranks_of_a_universal_checkpoint_are_looked_into_beside_the_one_of_all(fixtures: Path, tmp_path: Path) -> None:
    ckpt.plan(ckpt.open(fixtures / "dcp-fsdp2"), "universal").run(tmp_path / "out")
    ranks = sorted(tmp_path.glob("out/*/zero_pp_rank_*_model_states.pt"))
    assert len(ranks) == 2
    ranks[1].unlink()
    with pytest.raises(CorruptError, match="model files are missing"):
        ckpt.open(tmp_path / "out")
