"""`converters/deepspeed/zero.py`, `converters/huggingface/hf.py`, `ckpt/move/files.py`: faults on the command line.

Broken, hostile and odd checkpoints. tests/README.md has the table of faults.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt import api
from ckpt.move.files import Staging
from ckpt.plan.checkpoint import Layout
from tests.support.building import MODEL_NAME, RANK_MODEL_NAME, Groups, groups_of, write_stage2, write_stage3
from tests.support.commands import ckpt as run_ckpt
from tests.support.commands import process, snapshot
from tests.support.damage import AUDITED, emptied, half, one_byte_short, refused, zeroed_tail
from tests.support.engines import raw
from tests.support.hostile import make as hostile
from tests.support.model_files import edit
from tests.support.places import REPOSITORY
from tests.support.sampling import sample

STAGES = ("zero1", "zero2", "zero3")
SOURCES = (*STAGES, "hf")
GROUPS = groups_of({"a.weight": (5, 7), "b.weight": (3,)}, {"c": ()})

Damage = Callable[[Path], object]


@pytest.fixture(scope="session")
def hub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the toy model in several shards."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    api.plan(api.open(REPOSITORY / "fixtures" / "toy-zero2"), "hf", Layout(max_shard_size=2000)).run(folder)
    return folder


@pytest.fixture
def source(request: pytest.FixtureRequest, fixtures: Path, hub_folder: Path, tmp_path: Path) -> Path:
    """Copy a checkpoint in the parametrized format."""
    kind = request.param
    return Path(shutil.copytree(hub_folder if kind == "hf" else fixtures / f"toy-{kind}", tmp_path / "source" / kind))


def of(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("source", kinds, indirect=True)


def files_of(source: Path) -> list[Path]:
    return sorted([*source.glob("global_step2/*.pt"), *source.glob("*.safetensors")])


def optimizer_file(source: Path, rank: int = 1) -> Path:
    return next(source.rglob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))


def model_file(source: Path, rank: int = 0) -> Path:
    whole = source / "global_step2" / MODEL_NAME
    return whole if whole.exists() else source / "global_step2" / RANK_MODEL_NAME.format(rank)


def converted(source: Path, *options: str | Path, format: str = "auto") -> tuple[dict[str, torch.Tensor], str]:
    """Return the written tensors and the messages. Check that the source is unchanged."""
    before = snapshot(source)
    destination = source.parent / f"{source.name}-converted"
    result = run_ckpt("convert", format, "hf", source, "-o", destination, "-v", *options)
    assert result.code == 0, result.err
    assert snapshot(source) == before
    tensors: dict[str, torch.Tensor] = {}
    for path in destination.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors, result.err


# -- 3 to 7: missing, leftover, mixed and truncated files -------------------------------------------------------------
@of(*STAGES)
def test_an_optimizer_file_is_missing(source: Path) -> None:
    for rank in (0, 1, 2):
        path = optimizer_file(source, rank)
        content = path.read_bytes()
        path.unlink()
        refused(source, 4, f"rank: {rank}\n", path.name, "3 files", "found: 2 files", "every parameter", "hint: ")
        path.write_bytes(content)


@of("zero3")
def test_a_model_file_is_missing(source: Path) -> None:
    path = model_file(source, 1)
    path.unlink()
    refused(source, 4, path.name, "model", "hint: ")


@of(*STAGES)
def test_all_model_files_are_missing(source: Path) -> None:
    for path in source.rglob("*model_states.pt"):
        path.unlink()
    refused(source, 6, "has only optimizer states", "expected: the model's files, *_model_states.pt", "hint: ")


@of("hf")
def test_a_shard_is_missing(source: Path) -> None:
    path = files_of(source)[1]
    lost = min(load_file(path))
    path.unlink()
    refused(source, 4, path.name, lost, "no file", "hint: ")


@of(*STAGES)
def test_files_of_more_ranks_than_the_run_had(source: Path) -> None:
    for path in (optimizer_file(source), model_file(source, 1)):
        if "rank_1_" not in path.name:
            continue
        extra = path.with_name(path.name.replace("rank_1_", "rank_3_"))
        shutil.copy(path, extra)
        refused(source, 4, "rank: 3\n", "earlier, larger run", "expected: 3 ranks", "found: 4 files", "hint: ")
        extra.unlink()


@of(*STAGES)
def test_two_files_of_one_rank(source: Path) -> None:
    """A run in another precision left the second file, with another prefix."""
    path = optimizer_file(source)
    shutil.copy(path, path.with_name(path.name.removeprefix("bf16_")))
    refused(source, 4, "rank: 1\n", path.name, "hint: ")


def test_files_of_a_run_with_another_number_of_ranks(tmp_path: Path) -> None:
    for name, write in (("two", write_stage2), ("three", write_stage3)):
        source = write(tmp_path / "source" / name, GROUPS, 3)
        other = write(tmp_path / "other" / name, GROUPS, 2)
        shutil.copy(optimizer_file(other), optimizer_file(source))
        refused(source, 4, "rank: 1\n", "on 3 ranks", "on 2 ranks")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_optimizer_file_of_another_step(fixtures: Path, tmp_path: Path, rank: int) -> None:
    run = Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "source" / "run"))
    stale = optimizer_file(run / "checkpoint-1", rank)
    shutil.copy(stale, run / "checkpoint-2" / "global_step2" / stale.name)
    text = refused(run / "checkpoint-2", 4, "ranks from different steps", "step 1.0 in", "step 2.0 in")
    for name in (optimizer_file(run, 0).name, optimizer_file(run, 1).name):
        assert name in text


@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_of_another_step_under_stage_3(tmp_path: Path, rank: int) -> None:
    def older_state(inner: dict[str, Any], at: int) -> None:
        if at == rank:
            inner["optimizer_state_dict"]["state"][0]["step"] = torch.tensor(1.0)

    def older_schedule(inner: dict[str, Any], at: int) -> None:
        inner["optimizer_state_dict"]["param_groups"][0]["lr"] = 0.25 if at == rank else 0.5

    def older_model(model: dict[str, Any], at: int) -> None:
        model["global_steps"] = 1 if at == rank else 2

    for name, changes in (
        ("state", {"change": older_state}),
        ("schedule", {"change": older_schedule}),
        ("model", {"change_model": older_model}),
    ):
        source = write_stage3(tmp_path / "source" / name, GROUPS, 3, **changes)
        words = ("from different steps", f"zero_pp_rank_{rank}_")
        refused(source, 4, *words, f"rank: {rank}\n", "found in 2 of 3 files")


def two_steps(folder: Path) -> Path:
    """Write steps 1 and 2, both complete. `latest` records step 2."""
    for step in (1, 2):
        write_stage3(folder, GROUPS, 2, tag=f"global_step{step}")
    return folder


LATEST: dict[str, tuple[Damage, str]] = {
    "missing": (lambda run: (run / "latest").unlink(), "global_step2"),
    "empty": (lambda run: (run / "latest").write_text(""), "global_step2"),
    "stale": (lambda run: (run / "latest").write_text("global_step3"), "global_step2"),
    "no-optimizer-files": (lambda run: [path.unlink() for path in run.glob("*2/*optim*")], "global_step1"),
    "rank-missing": (lambda run: optimizer_file(run / "global_step2").unlink(), "global_step1"),
    "rank-0-missing": (lambda run: optimizer_file(run / "global_step2", 0).unlink(), "global_step1"),
    "rank-0-half": (lambda run: os.truncate(optimizer_file(run / "global_step2", 0), 900), "global_step1"),
    "rank-0-empty": (lambda run: os.truncate(optimizer_file(run / "global_step2", 0), 0), "global_step1"),
    "model-half": (lambda run: os.truncate(model_file(run, 1), 900), "global_step1"),
    "folder-empty": (lambda run: [path.unlink() for path in run.glob("*2/*")], "global_step1"),
    "folder-gone": (lambda run: shutil.rmtree(run / "global_step2"), "global_step1"),
}


@pytest.mark.parametrize(
    ("case", "format"), sample([(case, one) for one in ("auto", "zero3") for case in LATEST], lambda case: case)
)
def test_latest_is_stale_or_its_step_incomplete(tmp_path: Path, case: str, format: str) -> None:
    damage, complete = LATEST[case]
    source = two_steps(tmp_path / "source" / "run")
    damage(source)
    refused(source, 4, f"hint: the newest complete step here is {complete}: --tag {complete}", format=format)
    tensors, said = converted(source, "--tag", complete, format=format)
    assert set(tensors) == {"a.weight", "b.weight", "c"}
    assert f"taking {complete}" in said


TRUNCATIONS = (half, one_byte_short, emptied, zeroed_tail)


@pytest.mark.parametrize(
    ("source", "damage"),
    sample([(STAGES[n % 3], TRUNCATIONS[n % 4]) for n in range(3 * 4)], lambda case: case),
    indirect=["source"],
)
def test_truncated(source: Path, damage: Damage) -> None:
    for path in files_of(source):
        content = path.read_bytes()
        damage(path)
        text = refused(source, 4, f"file: {path}\n")
        assert "expected: " in text or "found: " in text
        path.write_bytes(content)
    assert converted(source)


@pytest.mark.parametrize("damage", [half, one_byte_short, emptied])
@of("hf")
def test_a_truncated_shard(source: Path, damage: Damage) -> None:
    for path in files_of(source):
        content = path.read_bytes()
        damage(path)
        refused(source, 4, path.name, "expected: ", "found: ")
        path.write_bytes(content)


@pytest.mark.parametrize("damage", [half, emptied, zeroed_tail])
@of("hf")
def test_a_truncated_index(source: Path, damage: Damage) -> None:
    damage(source / "model.safetensors.index.json")
    refused(source, 4, "model.safetensors.index.json")


# -- 9 to 16: holes, replicas, unknown names, ties, padding, placeholders, omissions ----------------------------------
def test_partitions_that_are_too_short(tmp_path: Path) -> None:
    def shorter2(inner: dict[str, Any], rank: int) -> None:
        if rank == 1:
            kept = inner["single_partition_of_fp32_groups"]
            kept[0] = kept[0][:-2].clone()

    def shorter3(inner: dict[str, Any], rank: int) -> None:
        if rank == 1:
            inner["fp32_flat_groups"][0] = inner["fp32_flat_groups"][0][:-2].clone()

    source = write_stage2(tmp_path / "source" / "two", GROUPS, 3, change=shorter2)
    refused(source, 4, "a.weight", "stored nowhere", "hole at", options=("--dtype", "fp32"))
    source = write_stage3(tmp_path / "source" / "three", GROUPS, 3, change=shorter3)
    refused(source, 4, "too short", "rank: 1\n", "expected: 13 elements of master", "found: 11 elements")


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def offsets_of(header: dict[str, Any]) -> list[int]:
    entry = next(value for name, value in header.items() if name != "__metadata__" and 0 not in value["shape"])
    return list(entry["data_offsets"])


def set_offsets(header: dict[str, Any], start: int, stop: int) -> None:
    name = next(n for n, value in header.items() if n != "__metadata__" and 0 not in value["shape"])
    header[name]["data_offsets"] = [start, stop]


@of("hf")
def test_shards_whose_offsets_are_wrong(source: Path) -> None:
    path = max(files_of(source), key=lambda p: len(load_file(p)))
    content = path.read_bytes()
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda header: set_offsets(header, *[x + 2 for x in offsets_of(header)]),
        lambda header: set_offsets(header, 0, 10**9),
        lambda header: set_offsets(header, *reversed(offsets_of(header))),
        lambda header: header.pop(next(name for name in header if name != "__metadata__")),
    ]
    for change in changes:
        edit_header(path, change)
        refused(source, 4, path.name)
        path.write_bytes(content)


@of("zero3")
def test_buffers_that_differ_between_ranks(source: Path) -> None:
    values = {rank: torch.load(model_file(source, rank), weights_only=True)["module"]["mean"] for rank in range(3)}
    values[1][4] = 77.0
    edit(model_file(source, 1), lambda saved: saved["module"]["mean"].copy_(values[1]))
    tensors, said = converted(source)
    assert raw(tensors["mean"]) == raw(values[0])
    assert "every rank saved its own values of" in said and "ckpt reads rank 0's" in said
    for rank in range(3):
        tensors, said = converted(source, "--replica", str(rank), "--overwrite")
        assert "every rank" not in said
        assert raw(tensors["mean"]) == raw(values[rank])
    refused(source, 6, "rank 3 holds no replica", options=("--replica", "3"))


@of("zero3")
def test_buffers_of_different_kinds(source: Path) -> None:
    edit(model_file(source, 2), lambda saved: saved["module"].update(mean=torch.zeros(3)))
    refused(source, 4, "tensor: mean", "rank: 2\n", "expected: float32 [7]", "found: float32 [3]")


@of("zero3")
def test_a_buffer_that_rank_0_lacks(source: Path) -> None:
    edit(model_file(source, 0), lambda saved: saved["module"].pop("mean"))
    refused(source, 4, "rank 0 lacks a buffer", "tensor: mean", "expected: the buffer of rank 1")


@pytest.mark.parametrize("shape", [(5,), (3, 1, 6)])
def test_what_maps_nowhere_stops_before_a_byte_is_written(
    fixtures: Path, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """Fused experts with this shape can't be split into the Hub's names."""
    name = "model.layers.1.mlp.experts.gate_up_proj"
    source = write_stage3(tmp_path / "source" / "run", groups_of({name: shape}), 2)
    shutil.copy(fixtures / "moe-zero3" / "config.json", source)
    words = ("related tensors have incompatible shapes", f"tensor: {name}\n", f"found: {list(shape)}")
    refused(source, 6, *words, "hint: does the config belong")


def test_no_cast_from_what_is_no_number(tmp_path: Path) -> None:
    source = tmp_path / "source" / "model"
    source.mkdir(parents=True)
    save_file({"w": torch.randn(4), "q": torch.zeros(4, dtype=torch.float8_e8m0fnu)}, source / "model.safetensors")
    tensors, said = converted(source, "--dtype", "fp32")
    assert tensors["q"].dtype == torch.float8_e8m0fnu
    assert "q" in said or "float8_e8m0fnu" in said


@of(*STAGES)
def test_a_tie_is_written_once(source: Path) -> None:
    tensors, said = converted(source)
    assert "embed.weight" in tensors
    assert "head.weight" not in tensors
    assert "tied: written once as embed.weight, not again as head.weight" in said


@of("zero3")
def test_placeholders_are_never_data(source: Path) -> None:
    tensors, _ = converted(source)
    assert all(tensor.numel() for tensor in tensors.values())
    edit(model_file(source), lambda saved: saved["module"].update(extra=torch.empty(0)))
    refused(source, 4, "tensor: extra", "stored nowhere")


def test_state_of_single_ranks_is_listed(fixtures: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run"))
    _, said = converted(run)
    left_out = "\n".join(line for line in said.splitlines() if "not written" in line)
    for name in ("rng_state_0.pth", "rng_state_1.pth", "trainer_state.json", "exp_avg", "lr_scheduler", "step 2"):
        assert name in left_out


# -- 17 to 22: hostile content ----------------------------------------------------------------------------------------
EXECUTING = ("reduce-os-system", "builtins-eval", "newobj-ex-popen", "getattr-of-a-type", "torch-load")


#: Attacks with the kind of file that contains them, by turns.
ATTACKS = sample(
    [(attack, ("optimizer", "model")[(n + turn) % 2]) for turn in (0, 1) for n, attack in enumerate(EXECUTING)],
    lambda case: case,
)


@pytest.mark.parametrize(("attack", "kind"), ATTACKS)
def test_a_pickle_that_runs_code(fixtures: Path, tmp_path: Path, attack: str, kind: str) -> None:
    """The attack starts no process, imports nothing and creates no file, whichever file contains it."""
    run = Path(shutil.copytree(fixtures / "toy-zero3", tmp_path / "source" / "run"))
    empty = tmp_path / "empty"
    empty.mkdir()
    path = optimizer_file(run, 0) if kind == "optimizer" else model_file(run, 2)
    path.write_bytes(hostile.archive(hostile.records(hostile.PICKLES[attack].content)))
    before = snapshot(run)
    result = process("convert", "zero3", "hf", run, "-o", tmp_path / "out", script=AUDITED, cwd=empty)
    assert result.code == 5, result.err
    assert result.out == "events [] modules [] folder []\n"
    assert path.name in result.err
    assert "Traceback" not in result.err
    assert snapshot(run) == before
    assert not (tmp_path / "out").exists()


def test_the_global_is_named(tmp_path: Path) -> None:
    run = write_stage2(tmp_path / "source" / "run", GROUPS, 2)
    optimizer_file(run).write_bytes(hostile.archive(hostile.records(hostile.PICKLES["stack-global-os-system"].content)))
    refused(run, 5, "os.system", optimizer_file(run).name)


def test_files_that_are_not_needed_are_not_opened(fixtures: Path, tmp_path: Path) -> None:
    """`training_args.bin` and similar pickles may contain anything, so ckpt never reads them."""
    run = Path(shutil.copytree(fixtures / "trainer-zero2", tmp_path / "run"))
    for name in ("training_args.bin", "rng_state_0.pth", "scheduler.pt"):
        (run / "checkpoint-2" / name).write_bytes(hostile.PICKLES["reduce-os-system"].content)
    assert converted(run)


OUTSIDE = ["../secret", "/etc/hostname", "global_step2/../../secret", "nul\0"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_latest_leads_out(tmp_path: Path, name: str) -> None:
    run = write_stage2(tmp_path / "source" / "run", GROUPS, 2)
    (run / "latest").write_text(name)
    refused(run, 5, "leads out")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/secret.safetensors", "a\0.safetensors"])
@of("hf")
def test_the_index_leads_out(source: Path, name: str) -> None:
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    fqn = next(iter(content["weight_map"]))
    content["weight_map"][fqn] = name
    index.write_text(json.dumps(content))
    refused(source, 5, fqn, "outside its folder")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "latest", "global_step2"])
def test_a_symlink_leads_out(fixtures: Path, tmp_path: Path, name: str) -> None:
    run = Path(shutil.copytree(fixtures / "moe-zero3", tmp_path / "source" / "run"))
    secret = tmp_path / "secret"
    if name == "global_step2":
        shutil.move(run / name, secret)
    else:
        secret.write_text("{}" if name.endswith("json") else "global_step2")
        (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(secret)
    refused(run, 5, "symlink leads out", str(secret), "hint: ")


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40, 100 << 20])
@of("hf")
def test_a_header_of_any_length(source: Path, length: int) -> None:
    path = files_of(source)[0]
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    start = time.process_time()
    refused(source, 4, path.name)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    "text", ['{"weight_map": ' + "[" * 100_000, '{"weight_map": {"a": "x", "a": "y"}}', "[]", "{}"]
)
@of("hf")
def test_an_index_that_is_no_index(source: Path, text: str) -> None:
    (source / "model.safetensors.index.json").write_text(text)
    refused(source, 4, "model.safetensors.index.json")


@pytest.mark.parametrize("shape", [(2**62, 4), (2**40,), (-1,), (2**200,)])
def test_an_enormous_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    def larger(model: dict[str, Any], rank: int) -> None:
        model["param_shapes"][0]["a.weight"] = shape

    for name, write in (("two", write_stage2), ("three", write_stage3)):
        refused(write(tmp_path / "source" / name, GROUPS, 2, change_model=larger), 4, "file: ")


HOSTILE_NAME = "evil\x1b[2J\x1b]0;pwned\x07<script>\u202e\r\nname"


def test_names_are_escaped(tmp_path: Path) -> None:
    groups: Groups = [{HOSTILE_NAME: torch.randn(4), "x" * 100_000: torch.randn(2)}]
    run = write_stage2(tmp_path / "run", groups, 2)
    commands = [
        ("inspect", run, "--tensors"),
        ("inspect", run, "--tensors", "--json"),
        ("convert", "auto", "hf", run, "--dry-run", "-v"),
        ("convert", "auto", "hf", run, "-o", tmp_path / "out"),
        ("verify", run, run, "-v"),
    ]
    for command in commands:
        result = run_ckpt(*command)
        assert result.code == 0, result.err
        for text in (result.out, result.err):
            assert not any(c in text for c in "\x1b\x07\r\u202e")
            assert len(text) < 20_000
    edit(model_file(run), lambda saved: saved["param_shapes"][0].update({HOSTILE_NAME: (2**40,)}))
    result = run_ckpt("convert", "auto", "hf", run, "-o", tmp_path / "out2")
    assert result.code == 4
    assert "\x1b" not in result.err


def test_names_of_files_are_escaped(tmp_path: Path) -> None:
    run = write_stage2(tmp_path / "ru\x1b[2Jn", GROUPS, 2)
    optimizer_file(run).unlink()
    result = run_ckpt("convert", "auto", "hf", run)
    assert result.code == 4
    assert "\x1b" not in result.err
    assert "ru\\x1b[2Jn" in result.err


# -- 23: bits ---------------------------------------------------------------------------------------------------------
#: Quiet and signalling NaN with payloads, -0.0, the least subnormal, the largest finite number, infinities.
BITS = [0x7FC00000, 0x7F800001, 0xFFC12345, 0x80000000, 0x00000001, 0x7F7FFFFF, 0x7F800000, 0xFF800000]


@pytest.mark.parametrize("write", [write_stage2, write_stage3])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_masters_keep_their_bits(tmp_path: Path, write: Callable[..., Path], num_ranks: int) -> None:
    master = torch.tensor(BITS, dtype=torch.int64).to(torch.int32).view(torch.float32).reshape(2, 4)
    groups: Groups = [{"w": master, "zero_dim": torch.tensor(-0.0)}]
    tensors, _ = converted(write(tmp_path / "run", groups, num_ranks), "--dtype", "fp32")
    assert {name: raw(t) for name, t in tensors.items()} == {name: raw(t) for name, t in groups[0].items()}


def test_every_dtype_keeps_its_bits(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    bytes_ = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    names = ["uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "float8_e4m3fn"]
    tensors = {name: bytes_.clone().view(getattr(torch, name)) for name in names}
    tensors |= {
        "bool": torch.tensor([True, False, True]),
        "zero_dim": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, source / "model.safetensors")
    written, _ = converted(source)
    assert {name: raw(t) for name, t in written.items()} == {name: raw(t) for name, t in tensors.items()}
    assert run_ckpt("verify", source, tmp_path / "model-converted").code == 0


def test_strided_weights(tmp_path: Path) -> None:
    """One weight was saved as a transposed view, another shares its storage with others."""
    base = torch.randn(6, 4).bfloat16()

    def views(model: dict[str, Any], rank: int) -> None:
        model["module"] |= {"t": base.t(), "part": base[1:3, ::2], "expanded": base[:1].expand(3, 4)}

    tensors, _ = converted(write_stage2(tmp_path / "run", GROUPS, 2, change_model=views))
    for name, expected in (("t", base.t()), ("part", base[1:3, ::2]), ("expanded", base[:1].expand(3, 4))):
        assert raw(tensors[name]) == raw(expected)


# -- 25 to 30: places, replaced files, the disk, Ctrl-C, newer versions -----------------------------------------------
PLACES = ["", ".", "global_step2", "global_step2/new", "new", "..", "../..", "../link", "../link/new"]


@pytest.mark.parametrize("place", PLACES)
def test_the_destination_overlaps_the_source(fixtures: Path, tmp_path: Path, place: str) -> None:
    run = Path(shutil.copytree(fixtures / "toy-zero2", tmp_path / "source" / "run"))
    (tmp_path / "source" / "link").symlink_to(run)
    before = snapshot(tmp_path)
    for option in ("--overwrite", "--dry-run"):
        result = run_ckpt("convert", "auto", "hf", run, "-o", run / place, option)
        assert result.code == 2, result.err
        assert "overlap" in result.err
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("place", ["second", "second/new"])
def test_the_destination_is_the_source_by_a_bind_mount(hub_folder: Path, tmp_path: Path, place: str) -> None:
    model = Path(shutil.copytree(hub_folder, tmp_path / "model"))
    (tmp_path / "second").mkdir()
    shell = (  # a separate mount namespace, so that nothing stays mounted
        f"mount --bind {model} {tmp_path}/second || exit 99\n"
        f"{sys.executable} -m ckpt convert hf hf {tmp_path}/second -o {model} --overwrite; first=$?\n"
        f"{sys.executable} -m ckpt convert hf hf {model} -o {tmp_path}/{place} --overwrite\n"
        "exit $((10 * first + $?))"
    )
    before = snapshot(model)
    result = subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", shell], capture_output=True)
    if result.returncode in (1, 99, 127):
        pytest.skip("no mounts for users here")
    assert result.returncode == 22, result.stderr.decode()
    assert snapshot(model) == before


def test_the_destination_is_where_the_config_stands(fixtures: Path, hub_folder: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(hub_folder, tmp_path / "base"))
    (base / "config.json").write_text('{"model_type": "toy"}')
    before = snapshot(base)
    run = fixtures / "toy-zero2"
    for place in (base, tmp_path):
        result = run_ckpt("convert", "auto", "hf", run, "--config", base, "-o", place, "--overwrite")
        assert result.code == 2, result.err
    assert snapshot(base) == before


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def lengthened(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"x")


def replaced(path: Path) -> None:
    info = path.stat()
    shutil.copy(path, path.with_suffix(".new"))
    os.utime(path.with_suffix(".new"), ns=(info.st_atime_ns, info.st_mtime_ns))
    path.with_suffix(".new").rename(path)


def shortened(path: Path) -> None:
    os.truncate(path, 0)


def removed(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [touched, lengthened, replaced, shortened, removed])
@of(*SOURCES)
def test_a_file_is_replaced_while_it_is_read(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Damage
) -> None:
    create = Staging.create
    path = files_of(source)[-1]

    def create_and_change(staging: Staging, name: str, size: int) -> int:
        change(path)
        return create(staging, name, size)

    monkeypatch.setattr(Staging, "create", create_and_change)
    result = run_ckpt("convert", "auto", "hf", source, "-o", tmp_path / "output" / "out")
    assert result.code == 4, result.err
    what = "replaced" if path.exists() else "has gone"
    for word in (path.name, f"{what} while it was being read", "expected: ", "mtime", "inode", "found: ", "hint: "):
        assert word in result.err
    is_kept = "kept: " in result.err  # finished parts of other files, if a missing file may come back
    assert not (is_kept and path.exists())
    assert [one.name for one in (tmp_path / "output").iterdir()] == [".out.ckpt-staging"][:is_kept]


@of(*SOURCES)
def test_what_is_no_readable_file(source: Path) -> None:
    path = files_of(source)[1]
    path.unlink()
    for make in (lambda: path.symlink_to(path.name), path.mkdir, lambda: os.mkfifo(path)):
        make()
        result = run_ckpt("convert", "auto", "hf", source)
        assert result.code in (4, 5, 7), result.err
        assert path.name in result.err
        assert not source.with_name(f"{source.name}-hf").exists()
        path.rmdir() if path.is_dir() else path.unlink()


@of(*SOURCES)
def test_no_permission_to_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system call itself fails, because tests may run as root."""
    path = files_of(source)[1]
    opened = os.open

    def denied(name: Any, *args: Any, **options: Any) -> int:
        if os.fspath(name) == str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(name, *args, **options)

    monkeypatch.setattr(os, "open", denied)
    result = run_ckpt("convert", "auto", "hf", source)
    assert (result.code, result.out) == (7, ""), result.err
    assert "Permission denied" in result.err
    assert f"file: {path}" in result.err


@of(*SOURCES)
def test_a_place_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    before = snapshot(tmp_path)
    result = run_ckpt("convert", "auto", "hf", source, "-o", tmp_path / "file" / "out")
    assert (result.code, result.out) == (7, ""), result.err
    assert run_ckpt("convert", "auto", "hf", source, "-o", tmp_path / "file", "--overwrite").code == 2
    assert snapshot(tmp_path) == before


@of("zero2")
def test_modes_follow_the_umask(source: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        assert run_ckpt("convert", "auto", "hf", source, "-o", tmp_path / "out").code == 0
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o640


BLOCKED = """
import sys, threading
import ckpt.move.blocks
from ckpt.cli import main
def wait(*args):
    sys.stderr.write("moving\\n")  # in one piece: several threads say it
    sys.stderr.flush()
    threading.Event().wait()
ckpt.move.blocks.SpanBatch.carry_out = wait
main()
"""


@pytest.fixture
def interrupted(fixtures: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Start a conversion that blocks while it moves data."""
    run = Path(shutil.copytree(fixtures / "toy-zero3", tmp_path / "run"))
    command = [sys.executable, "-c", BLOCKED, "convert", "zero3", "hf", str(run), "-q"]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert child.stderr is not None
        assert child.stderr.readline() == "moving\n"
        yield child, tmp_path
    finally:
        child.kill()
        child.communicate()


def test_ctrl_c(interrupted: tuple[subprocess.Popen[str], Path]) -> None:
    child, folder = interrupted
    before = snapshot(folder / "run")
    assert (folder / ".run-hf.ckpt-staging").exists()
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert out == ""
    assert "interrupted" in err
    assert "Traceback" not in err
    assert [path.name for path in folder.iterdir()] == ["run"]
    assert snapshot(folder / "run") == before


def test_ctrl_c_while_the_command_is_being_imported() -> None:
    """The import takes a tenth of a second, and a traceback could come from any module."""
    code = "\n".join(
        [
            "import sys",
            "class Interrupting:",
            "    def find_spec(self, name, *_):",
            "        if name == 'ckpt.base.errors':",
            "            raise KeyboardInterrupt",
            "sys.meta_path.insert(0, Interrupting())",
            "from ckpt.__main__ import main",
            "main()",
        ]
    )
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted; the destination is unchanged\n")


def future(content: dict[str, Any], rank: int) -> None:
    content["ds_version"] = "99.1"
    content["invented_later"] = {"anything": [1, 2, 3]}


@pytest.mark.parametrize("write", [write_stage2, write_stage3])
def test_a_newer_version_with_a_known_structure(tmp_path: Path, write: Callable[..., Path]) -> None:
    run = write(tmp_path / "run", GROUPS, 2, change=future, change_model=future)
    for path in run.glob("*/*optim_states.pt"):
        torch.save(torch.load(path) | {"ds_version": "99.1"}, path)
    tensors, said = converted(run)
    assert "deepspeed 99.1" in said
    assert "invented_later" in said
    assert set(tensors) == {"a.weight", "b.weight", "c"}


@pytest.mark.parametrize("write", [write_stage2, write_stage3])
def test_a_newer_version_with_another_structure(tmp_path: Path, write: Callable[..., Path]) -> None:
    def changed(inner: dict[str, Any], rank: int) -> None:
        future(inner, rank)
        inner["single_partition_of_fp32_groups" if write is write_stage2 else "fp32_flat_groups"] = 7

    run = write(tmp_path / "source" / "run", GROUPS, 2, change=changed, change_model=future)
    refused(run, 4, "file: ", "deepspeed")


def test_a_stage_of_the_future(tmp_path: Path) -> None:
    run = write_stage2(tmp_path / "source" / "run", GROUPS, 2, stage=4)
    refused(run, 4, "stage", "found: 4")
