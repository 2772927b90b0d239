"""`ckpt/compare/pairs.py`, `digest.py`, `other_files.py`: `verify` and `hash` name everything they skip."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt import api
from ckpt.compare import transformers_loads
from ckpt.compare.compare import number_text
from ckpt.plan.checkpoint import Checkpoint
from tests.support.commands import ckpt
from tests.support.model_files import merge_json
from tests.support.places import FIXTURES

WHY = "they are outside the model and the optimizer; use `ckpt verify --run` to compare them"


def run_states(seed: int) -> dict:
    """Return a script's state after one step, with averaged weights and a queue (MoCo)."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.manual_seed(seed)
    ema = {name: torch.rand_like(value) for name, value in model.state_dict().items()}
    beside = {"ema": ema, "queue": torch.rand(4, 2), "queue_ptr": torch.zeros(1), "rng": torch.get_rng_state()}
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **beside}


@pytest.mark.parametrize("form", ["full", "dcp"])
def test_tensors_beside_model_and_optimizer(tmp_path: Path, form: str) -> None:
    for seed, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        if form == "full":
            torch.save(run_states(seed), tmp_path / name / "checkpoint.pt")
        else:
            dcp.save(run_states(seed), checkpoint_id=tmp_path / name, no_dist=True)
    report = ckpt("verify", tmp_path / "a", tmp_path / "b")
    assert report.code == 0, report
    for side in "AB":
        assert f"not compared: ema of 2 tensors of {side}: {WHY}" in report.out
        assert f"not compared: queue of 1 tensor of {side}: {WHY}" in report.out
    assert "rng of" not in report.out and "queue_ptr" not in report.out
    listed = json.loads(ckpt("verify", tmp_path / "a", tmp_path / "b", "--json").out)["not_compared"]
    assert {"side": "B", "role": "ema", "count": 2, "why": WHY} in listed
    assert "ema" not in ckpt("verify", tmp_path / "a", tmp_path / "b", "--only", "weights").out
    runs = ckpt("verify", tmp_path / "a", tmp_path / "b", "--run")
    assert runs.code == 1 and "differs  ema.weight" in runs.out and "differs  queue" in runs.out
    hashed = [ckpt("hash", tmp_path / name) for name in "ab"]
    assert hashed[0].out == hashed[1].out
    assert f"note: not in the digests: 2 tensors of ema: {WHY}" in hashed[0].err
    left_out = json.loads(ckpt("hash", tmp_path / "a", "--json").out)["not_hashed"]
    assert [line.split(":")[1].strip() for line in left_out] == ["2 tensors of ema", "1 tensor of queue"]


def test_configs_that_differ_and_unread_tensors_are_named(tmp_path: Path) -> None:
    """Equal tensors compute a different result with another epsilon or a head."""
    a = tmp_path / "a"
    assert ckpt("convert", "auto", "hf", FIXTURES / "trainer-plain", "-o", a).code == 0
    b = Path(shutil.copytree(a, tmp_path / "b"))
    config = json.loads((b / "config.json").read_text())
    (b / "config.json").write_text(json.dumps({**config, "transformers_version": "4.0", "use_cache": False}))
    same = ckpt("verify", a, b)
    assert (
        same.code == 0 and "the configs differ" not in same.out + same.err and "not compared" not in same.out + same.err
    )
    (b / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    shutil.copy(a / "model.safetensors", b / "value_head.safetensors")
    other = ckpt("verify", a, b)
    said = " ".join((other.out + other.err).split())
    assert other.code == 0 and "the configs differ between A and B: rms_norm_eps 1e-06 and 0.5" in said, said
    assert "not compared, of B: value_head.safetensors: no reader opened it" in said, said


@pytest.mark.parametrize(
    ("entry", "there", "other", "what"),
    [
        ("tie_word_embeddings", True, False, "tie_word_embeddings True and False"),
        ("quantization_config", {"bits": 4}, {"bits": 8}, "quantization_config.bits 4 and 8"),
        ("quantization_config", {"bits": 4}, None, None),
        ("architectures", ["A"], ["B"], "architectures ['A'] and ['B']"),
        ("dtype", "float32", "bfloat16", "dtype 'float32' and 'bfloat16'"),
        ("dtype", "float32", None, None),
        ("dtype", "float32", "torch.float32", None),
    ],
)
def test_a_config_entry_that_tensors_do_not_show_is_named(
    tmp_path: Path, entry: str, there: object, other: object, what: str | None
) -> None:
    """Equal tensors train or load differently if the output layer is tied, or if 4 bits are read as 8."""
    a, b = model_folders(tmp_path)
    for place, value in ((a, there), (b, other)):
        config = json.loads((place / "config.json").read_text())
        config = {name: one for name, one in (config | {entry: value}).items() if one is not None}
        (place / "config.json").write_text(json.dumps(config))
    for one, two in ((a, b), (b, a)):
        assert ("configs differ" in said_by(one, two)) is (what is not None)
    assert what is None or f"the configs differ between A and B: {what}" in said_by(a, b)


def test_a_config_entry_that_only_one_side_states_is_named(tmp_path: Path) -> None:
    a, b = model_folders(tmp_path)
    merge_json(b / "config.json", {"final_logit_softcapping": 30.0, "nothing": None})
    assert "configs differ between A and B: final_logit_softcapping 30.0 only in B" in said_by(a, b)
    assert "configs differ between A and B: final_logit_softcapping 30.0 only in A" in said_by(b, a)
    assert "nothing" not in said_by(a, b)


def model_folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return two copies of a model folder with a tokenizer."""
    a = Path(shutil.copytree(FIXTURES / "peft-experts" / "qwen3_moe", tmp_path / "a"))
    for name, (content, _) in FILES.items():
        (a / name).write_bytes(content)
    return a, Path(shutil.copytree(a, tmp_path / "b"))


def said_by(a: Path, b: Path) -> str:
    report = ckpt("verify", a, b)
    assert report.code == 0, report
    return " ".join((report.out + report.err).split())


#: A model's companion files, each with two contents.
FILES = {
    "tokenizer.json": (b'{"model": {"vocab": {"a": 0, "b": 1}}}', b'{"model": {"vocab": {"a": 1, "b": 0}}}'),
    "tokenizer_config.json": (b'{"name_or_path": "x"}', b'{"name_or_path": "y", "add_bos_token": true}'),
    "tokenizer.model": (b"\x00\x01", b"\x00\x02"),
    "generation_config.json": (b'{"eos_token_id": 2, "transformers_version": "5.0"}', b'{"eos_token_id": 3}'),
    "chat_template.jinja": (b"{{ messages }}", b"{{ messages }} "),
    "preprocessor_config.json": (b'{"size": 224}', b'{"size": 225}'),
    "tekken.json": (b'{"vocab": []}', b'{"vocab": [1]}'),
    "modeling_own.py": (b"x = 1", b"x = 2"),
}


def test_other_files_of_a_model_that_differ_are_named(tmp_path: Path) -> None:
    """The tensors are equal, but the model gets other tokens or other prompts."""
    a, b = model_folders(tmp_path)
    assert "other files" not in said_by(a, b)
    for name, (content, changed) in FILES.items():
        (b / name).write_bytes(changed)
        assert f"other files differ between A and B: differ: {name}" in said_by(a, b)
        (b / name).unlink()
        assert f"other files differ between A and B: only in A: {name}" in said_by(a, b)
        (b / name).write_bytes(content)
    (b / "tokenizer_config.json").write_text("{")
    assert "not other files in A and B: the JSON file ends too early (tokenizer_config.json)" in said_by(a, b)
    (b / "tokenizer_config.json").write_bytes(FILES["tokenizer_config.json"][0])
    (b / "config.json").unlink()
    assert "other files differ between A and B: only in B: config.json" in said_by(b, a)


def test_other_files_of_a_model_with_the_same_meaning_are_not_named(tmp_path: Path) -> None:
    a, b = model_folders(tmp_path)
    (b / "tokenizer.json").write_bytes(b'{\n "model": {"vocab": {"b": 1, "a": 0}}}')
    (b / "generation_config.json").write_bytes(b'{"transformers_version": "4.9", "eos_token_id": 2}')
    (b / "README.md").write_text("a copy")
    (b / "trainer_state.json").write_text("{}")
    assert "only tensors" not in said_by(a, b)


def test_settings_of_an_adapter_that_differ_are_named(tmp_path: Path) -> None:
    source = FIXTURES / "peft-experts" / "qwen3_moe-0.19.1"
    a, b = (Path(shutil.copytree(source, tmp_path / name)) for name in "ab")
    assert "only tensors" not in said_by(a, b)
    merge_json(b / "adapter_config.json", {"lora_alpha": 999})
    assert "other files differ between A and B: differ: adapter_config.json" in said_by(a, b)


def test_a_training_checkpoint_without_tokenizer_lacks_nothing(tmp_path: Path) -> None:
    out = tmp_path / "zero1"
    assert ckpt("convert", "auto", "zero1", FIXTURES / "toy-zero3", "-o", out).code == 0
    (out / "tokenizer.json").write_text("{}")
    assert "only tensors" not in said_by(FIXTURES / "toy-zero3", out)


@pytest.mark.parametrize("fixture", ["toy-zero3", "dcp-fsdp2", "verl-fsdp2", "moe-zero3", "trainer-zero2"])
def test_random_states_and_schedules_are_not_listed(fixture: str) -> None:
    report = ckpt("verify", FIXTURES / fixture, FIXTURES / fixture)
    assert report.code == 0 and "not compared" not in report.out, report.out
    assert "not in the digests" not in ckpt("hash", FIXTURES / fixture).err


def test_removed_prefix_of_names_leaves_nothing_out(tmp_path: Path) -> None:
    """The digests are those of the run without the prefix. A tensor that has no name on the Hub is named."""
    run, out = FIXTURES / "sentence-transformers", tmp_path / "zero3"
    assert ckpt("convert", "auto", "zero3", run, "--world-size", "1", "-o", out).code == 0
    assert any("removed the prefix" in note for note in api.plan(api.open(out), "hf").plan.target.notes)
    done = ckpt("hash", out)
    of_run = ckpt("hash", run).out
    assert next(line for line in of_run.splitlines() if "weights" in line) in done.out.splitlines()
    assert "not in the digests" not in done.err and "removed the prefix" not in done.err, done.err
    assert "not in the digests" in ckpt("hash", FIXTURES / "torchtitan-qwen3-moe").err


def test_states_that_no_reader_understands_are_listed(tmp_path: Path) -> None:
    here = replace(api.open(FIXTURES / "toy-zero3"), unread=("optimizer state q of x: it is a.B",))
    report = api.verify(here, here)
    assert report.equal and "not compared, of A: optimizer state q of x: it is a.B" in report.notes
    assert "unread" not in str(api.verify(here, here, only="weights").notes)


NUMBERS = [0, -0.0, 1, 2**53, 2**53 + 1, 2**53 + 2, -(2**53) - 1, 10**400, 0.1, 5e-324, float("inf"), float("nan")]


def test_numbers_differ_in_verify_and_in_hash() -> None:
    found = [with_step(number) for number in NUMBERS]
    assert len({api.digests(one).whole["optimizer"] for one in found}) == len(NUMBERS)
    for (a, one), (b, other) in combinations(zip(NUMBERS, found, strict=True), 2):
        assert not api.verify(one, other).equal, (a, b)


def test_the_sign_of_zero_counts_in_training_states() -> None:
    assert not api.verify_runs(with_step(0.0), with_step(-0.0)).equal
    assert api.verify_runs(with_step(0.0), with_step(0)).equal


@pytest.mark.parametrize(("a", "b"), [(4, 4.0), (2**60, 2.0**60), (True, 1), (float("nan"), -float("nan")), (0, 0.0)])
def test_numbers_are_the_same_in_verify_and_in_hash(a: float, b: float) -> None:
    one, other = with_step(a), with_step(b)
    assert number_text(a) == number_text(b) and api.verify(one, other).equal
    assert api.digests(one) == api.digests(other)


def with_step(value: float) -> Checkpoint:
    here = api.open(FIXTURES / "toy-zero3")
    steps = dict.fromkeys(here.state.scalars["step"], value)
    return replace(here, state=replace(here.state, scalars={"step": steps}))


def without(checkpoint: Checkpoint, name: str) -> Checkpoint:
    scalars = {role: values for role, values in checkpoint.state.scalars.items() if role != name}
    return replace(checkpoint, state=replace(checkpoint.state, scalars=scalars))


@pytest.mark.parametrize("other", ["zero1", "full", "dcp", "universal"])
def test_a_step_that_one_side_lacks_is_a_difference(tmp_path: Path, other: str) -> None:
    here = api.open(FIXTURES / "toy-zero3")
    api.plan(here, other).run(tmp_path / "out")
    there = api.open(tmp_path / "out")
    assert api.verify(here, there).equal
    for report in (api.verify(without(here, "step"), there), api.verify(here, without(there, "step"))):
        assert not report.equal and report.exit_code == 1
        assert {result.role for result in report.results if result.status != "="} == {"step"}


def test_a_step_that_a_torch_file_lacks(tmp_path: Path) -> None:
    for name in "ab":
        states = run_states(0)
        if name == "b":
            for values in states["optimizer"]["state"].values():
                del values["step"]
                values["other"] = 1.0
        (tmp_path / name).mkdir()
        torch.save(states, tmp_path / name / "checkpoint.pt")
    report = ckpt("verify", tmp_path / "a", tmp_path / "b")
    assert report.code == 1, report
    assert "- weight (step)" in report.out and "+ weight (other)" in report.out  # both have the same format


def test_what_cannot_be_read_is_no_difference(tmp_path: Path) -> None:
    """Disagreeing replicas are damage: exit code 4, whatever else differs, and also if nothing could be read."""
    shutil.copytree(FIXTURES / "autotp-zero1", tmp_path / "a")
    here = api.open(tmp_path / "a")
    tensor = next(one for one in here.tensors.values() if one.replicas and one.numel)
    fragment = next(iter(tensor.replicas[0].fragments(tensor.shape)))
    path = Path(fragment.extent.path)
    content = bytearray(path.read_bytes())
    content[fragment.extent.offset] ^= 1
    path.write_bytes(content)
    report = ckpt("verify", tmp_path / "a", FIXTURES / "autotp-zero1")
    assert report.code == 4 and f"! {tensor.fqn}" in report.out, report
    assert "not verified: 1 could not be read" in report.out
    assert ckpt("verify", tmp_path / "a", FIXTURES / "autotp-zero1", "-q").code == 4
    found = json.loads(ckpt("verify", tmp_path / "a", FIXTURES / "autotp-zero1", "--json").out)
    assert not found["equal"] and found["counts"]["!"] == 1


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), MemoryError(), OSError(5, "I/O error")])
def test_what_the_system_refuses_is_no_problem_of_a_model(error: Exception) -> None:
    def fail() -> None:
        raise error

    problems: list[str] = []
    with pytest.raises(type(error)):
        transformers_loads._attempt(problems, "weights", fail)
    assert problems == []
