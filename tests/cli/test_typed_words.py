"""`ckpt/base/typed.py`, `ckpt/cli/parser.py`, `ckpt/commands/convert/command.py`, `ckpt/runs/from_hub.py`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.base.errors import UsageError
from ckpt.runs.from_hub import is_repository
from tests.support.commands import ckpt as run_ckpt


@pytest.fixture
def run(fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(fixtures / "moe-zero3", "run"))


@pytest.mark.parametrize("word", ["bfloat16", "torch.bfloat16", "bf16"])
def test_a_dtype_has_the_names_that_torch_gives_it(run: Path, word: str) -> None:
    for words in (("--dtype", word), (f"--dtype={word}",)):
        done = run_ckpt("convert", "zero3", "hf", run, "-o", "out", "--overwrite", *words)
        assert done.code == 0 and "(model in bfloat16," in done.err, done.err


def test_a_default_dtype_may_have_a_name_of_torch(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_CONVERT_DTYPE", "torch.float32")
    assert "(model in float32)" in run_ckpt("convert", "zero3", "hf", run).err


def test_python_takes_dtypes_of_torch_and_sizes_as_ints(run: Path) -> None:
    names = ("float16", "torch.float16", torch.float16, "fp16")
    plans = [ckpt.plan(run, "hf", dtype=one, max_shard_size=10**9).to_json("out") for one in names]  # type: ignore[arg-type]
    assert all(one == plans[0] for one in plans) and {cast["to"] for cast in plans[0]["casts"]} == {"float16"}
    with pytest.raises(UsageError, match=r"takes no dtype='bf61'[\s\S]*did you mean bf16\?"):
        ckpt.plan(run, "hf", dtype="bf61")  # type: ignore[arg-type]
    for wrong in (torch.int8, 16, 1.0):
        with pytest.raises(UsageError, match="takes no dtype="):
            ckpt.plan(run, "hf", dtype=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("words", [("zero3", "hf", "run", "out"), ("run", "hf", "out"), ("auto", "hf", "run", "out")])
def test_the_last_word_is_the_output(run: Path, words: tuple[str, ...]) -> None:
    done = run_ckpt("convert", *words)
    assert (done.code, done.out) == (0, "out\n") and (Path("out") / "model.safetensors").is_file()
    assert run_ckpt("convert", "zero3", "hf", "run", "a", "-o", "b").code == 2


def test_gpus_are_ranks(run: Path) -> None:
    assert run_ckpt("convert", "zero3", "zero3", "run", "out", "--gpus", "3").code == 0
    assert ckpt.open("out").world_size == 3


@pytest.mark.parametrize("method", ["gptq", "awq", "gguf", "nf4", "q4_k_m"])
def test_quantization_methods_are_no_formats_and_the_hint_works(run: Path, method: str) -> None:
    done = run_ckpt("convert", "run", method)
    assert done.code == 2 and f"there is no format '{method}' to write" in done.err
    assert run_ckpt(*done.err.partition("`ckpt ")[2].partition("`")[0].split()).code == 0
    near = run_ckpt("convert", "run", "zerro3")
    assert near.code == 2 and "did you mean zero3" in near.err


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (("estimate",), ""),
        (("inspect", "run", "--config"), ""),
        (("merge-lora", "lora", "-o", "out", "--base"), ""),
        (("merge-lora", "-o", "out"), ""),
        (("inspect",), "hf://"),
        (("hash",), "hf://"),
        (("verify", "run"), "hf://"),
        (("convert", "zero3", "hf", "run", "-o", "out", "--complete-from"), "hf://"),
    ],
)
def test_a_model_of_the_hub_is_answered_with_what_can_be_typed(
    run: Path, fixtures: Path, words: tuple[str, ...], given: str
) -> None:
    shutil.copytree(fixtures / "lora-zero3", "lora")
    done = run_ckpt(*words, "Qwen3-8B")
    assert (done.code, f"with its owner: {given}Qwen/Qwen3-8B\n" in done.err) == (3, True), done.err
    owned = run_ckpt(*words, "Qwen/Qwen3-8B")  # without a network
    assert owned.code == 3 and "with its owner" not in owned.err
    assert not given or "hint: to read it from the Hub, give hf://Qwen/Qwen3-8B\n" in owned.err


def test_a_local_folder_comes_before_a_repository_of_its_name(run: Path) -> None:
    assert is_repository("org/name") and not is_repository("name") and not is_repository("a/b/c")
    shutil.copytree(run, "org/name")
    assert not is_repository("org/name")
    assert run_ckpt("estimate", "org/name").code == run_ckpt("inspect", "run", "--config", "org/name").code == 0
    assert "with its owner: ORG/mymodel\n" in run_ckpt("estimate", "mymodel").err
    assert "check the path" in run_ckpt("estimate", "./Qwen3-8B").err
    near = run_ckpt("inspect", "rum")
    assert near.code == 3 and "did you mean run?" in near.err and "Hub" not in near.err


def test_an_open_checkpoint_is_asked_by_name(run: Path) -> None:
    found = ckpt.open(run)
    assert found.step == 2 and found.get("nowhere") is None and found.get("model.norm.weight", "nothing") is None
    assert torch.equal(found.get("model.norm.weight")[...], found["model.norm.weight"][...])
