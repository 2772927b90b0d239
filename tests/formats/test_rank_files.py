"""`converters/deepspeed/rank_files.py`, `converters/megatron/entries.py`: swapped and copied rank files."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import torch

from ckpt import api
from ckpt.errors import CorruptError
from tests.support.building import groups_of, write_stage2
from tests.support.commands import ckpt, snapshot
from tests.support.model_files import rewriting

OPTIMIZER = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def exchange(a: Path, b: Path) -> None:
    between = a.with_name("between")
    a.rename(between)
    b.rename(a)
    between.rename(b)


def copy(a: Path, b: Path) -> None:
    shutil.copy(a, b)


def as_a_stream(path: Path) -> None:
    """Rewrite a file through a buffer, as some engines do. The file then contains no name.

    DeepSpeed before 0.7 also records no places of parameters.
    """
    stream = io.BytesIO()
    content = torch.load(path, weights_only=False)
    if isinstance(states := content.get("optimizer_state_dict"), dict):
        states.pop("param_slice_mappings", None)
    torch.save(content, stream)
    path.write_bytes(stream.getvalue())


def refused(run: Path, *words: str) -> None:
    before = snapshot(run)
    result = ckpt("convert", "auto", "hf", run, "-o", run.with_name("out"))
    assert (result.code, result.out) == (4, ""), result.err
    for word in words:
        assert word in result.err
    assert snapshot(run) == before and not run.with_name("out").exists()


@pytest.mark.parametrize("how", [exchange, copy])
@pytest.mark.parametrize("name", ["toy-zero1", "toy-zero2", "toy-zero3"])
def test_zero(fixtures: Path, tmp_path: Path, name: str, how: object) -> None:
    run = Path(shutil.copytree(fixtures / name, tmp_path / "run"))
    step = run / "global_step2"
    (exchange if how is exchange else copy)(step / OPTIMIZER.format(0), step / OPTIMIZER.format(1))
    refused(run, "saved under another name", f"saved as {OPTIMIZER.format(1)[:-3]}"[:40], "were files exchanged")


@pytest.mark.parametrize("how", [exchange, copy])
def test_model_files_of_zero3(fixtures: Path, tmp_path: Path, how: object) -> None:
    run = Path(shutil.copytree(fixtures / "lora-zero3", tmp_path / "run"))
    names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2)]
    (exchange if how is exchange else copy)(*(run / "global_step2" / name for name in names))
    refused(run, "saved under another name", "zero_pp_rank_1")


@pytest.mark.parametrize("name", ["toy-zero1", "toy-zero3"])
def test_a_copy_without_a_name(fixtures: Path, tmp_path: Path, name: str) -> None:
    run = Path(shutil.copytree(fixtures / name, tmp_path / "run"))
    step = run / "global_step2"
    for rank in range(3):
        as_a_stream(step / OPTIMIZER.format(rank))
    assert api.open(run).world_size == 3
    copy(step / OPTIMIZER.format(0), step / OPTIMIZER.format(2))
    refused(run, "two ranks' files have the same content", "rank: 2", "rank 0")


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("autotp-zero1", "mp_rank_*_model_states.pt"),
        ("autotp-zero1", "*optim_states.pt"),
        ("autotp-zero0", "mp_rank_*_model_states.pt"),
        ("autoep-zero2", "*zero_pp*optim_states.pt"),
        ("autoep-zero3", "*zero_pp*optim_states.pt"),
        ("autoep-zero0", "expp_rank_*.pt"),
        ("neox-zero1", "*optim_states.pt"),
        ("neox-zero0", "mp_rank_*_model_states.pt"),
        ("verl-fsdp1", "optim_*.pt"),
        ("experts-zero0", "expp_rank_*.pt"),
    ],
)
def test_a_copy_without_a_name_where_no_box_tells(fixtures: Path, tmp_path: Path, name: str, pattern: str) -> None:
    """Covers tensor and expert parallel ranks in DeepSpeed, and flat parameters in FSDP1."""
    run = Path(shutil.copytree(fixtures / name, tmp_path / "run", ignore=shutil.ignore_patterns("truth")))
    files = sorted(run.rglob(pattern))
    for file in files:
        as_a_stream(file)
    api.open(run)
    copy(files[0], files[-1])
    refused(run, "two ranks' files have the same content")


def test_ranks_that_all_hold_zeros_are_no_copies(tmp_path: Path) -> None:
    def zeros(inner: dict[str, list[torch.Tensor]], rank: int) -> None:
        inner["single_partition_of_fp32_groups"] = [t.zero_() for t in inner["single_partition_of_fp32_groups"]]

    run = write_stage2(tmp_path / "run", groups_of({"w": (8, 20)}), 2, change=zeros)
    assert api.open(run).world_size == 2


def test_universal(fixtures: Path, tmp_path: Path) -> None:
    out = tmp_path / "universal"
    assert ckpt("convert", "zero2", "universal", fixtures / "toy-zero2", "-o", out).code == 0
    state = next(out.rglob("exp_avg.pt"))
    exchange(state, state.with_name("exp_avg_sq.pt"))
    refused(out, "saved under another name", "saved as exp_avg_sq")


@pytest.fixture
def megatron(hf_llama: Path, tmp_path: Path) -> Path:
    """Convert to 2 tensor by 2 pipeline parallel ranks, and record ranks in the arguments like Megatron-LM."""
    out = tmp_path / "megatron"
    assert ckpt("convert", "hf", "megatron", hf_llama, "-o", out, "--tp", "2", "--pp", "2").code == 0
    for file in out.rglob("model_optim_rng.pt"):
        tp, pp = (int(number) for number in file.parent.name.split("_")[2:])
        with rewriting(file) as content:
            content["args"].rank, content["args"].world_size = tp + 4 * pp, 8
    return out


@pytest.fixture
def hf_llama(tmp_path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("how", [exchange, copy])
@pytest.mark.parametrize("ranks", [("00_000", "01_000"), ("00_000", "00_001"), ("01_001", "00_000")])
def test_megatron(megatron: Path, ranks: tuple[str, str], how: object) -> None:
    folder = next(megatron.rglob("mp_rank_00_000")).parent
    assert ckpt("inspect", megatron).code == 0
    (exchange if how is exchange else copy)(*(folder / f"mp_rank_{rank}" / "model_optim_rng.pt" for rank in ranks))
    refused(megatron, "another rank wrote this rank's file", "args.rank")


def test_a_copy_where_megatron_records_no_rank(megatron: Path) -> None:
    for file in megatron.rglob("model_optim_rng.pt"):
        with rewriting(file) as content:
            content["args"].rank = 0  # as converters write it
    folder = next(megatron.rglob("mp_rank_00_000")).parent
    assert ckpt("inspect", megatron).code == 0
    copy(folder / "mp_rank_00_001" / "model_optim_rng.pt", folder / "mp_rank_01_001" / "model_optim_rng.pt")
    with pytest.raises(CorruptError, match="have the same content"):
        api.open(megatron)


def test_ranks_that_hold_equal_experts_are_no_copies(tmp_path: Path) -> None:
    """An upcycled dense model has equal experts on all expert parallel ranks."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 16}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads))
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.data.copy_(parameter.data[:1].expand_as(parameter.data))
    model.save_pretrained(tmp_path / "hf")
    out = tmp_path / "megatron"
    assert ckpt("convert", "hf", "megatron", tmp_path / "hf", "-o", out, "--ep", "2").code == 0
    files = sorted(out.rglob("model_optim_rng.pt"))
    for number, file in enumerate(files):
        with rewriting(file) as content:
            content["args"].rank, content["args"].world_size = number, len(files)
    done = ckpt("convert", "auto", "hf", out, "-o", tmp_path / "again", "--config", tmp_path / "hf")
    assert done.code == 0 and "has the same elements" in done.err, done.err
    assert ckpt("verify", tmp_path / "hf", tmp_path / "again").code == 0
    copy(files[0], files[1])
    refused(out, "have the same content")


@pytest.mark.parametrize("name", ["autotp-zero1", "neox-zero1", "toy-zero1", "toy-zero2"])
def test_recorded_places_tell_where_no_name_does(fixtures: Path, tmp_path: Path, name: str) -> None:
    run = Path(shutil.copytree(fixtures / name, tmp_path / "run", ignore=shutil.ignore_patterns("truth")))
    files = sorted(run.rglob("*optim_states.pt"))
    for file in files:
        stream = io.BytesIO()
        torch.save(torch.load(file, weights_only=False), stream)
        file.write_bytes(stream.getvalue())
    api.open(run)
    exchange(files[0], files[-1])
    refused(run, "a parameter's place in the flat buffer contradicts the rank's own record")


@pytest.mark.parametrize("name", ["toy-zero1", "toy-zero2"])
def test_masters_tell_where_no_name_does(fixtures: Path, tmp_path: Path, name: str) -> None:
    """Files of two ranks are swapped and record no name. `--check` compares masters with weights."""
    run = Path(shutil.copytree(fixtures / name, tmp_path / "run"))
    files = [run / "global_step2" / OPTIMIZER.format(rank) for rank in range(3)]
    for file in files:
        as_a_stream(file)
    command = ("convert", "auto", "hf", run, "--dtype", "fp32", "--check")
    assert ckpt(*command, "-o", tmp_path / "whole").code == 0
    exchange(files[0], files[1])
    result = ckpt(*command, "-o", tmp_path / "out")
    assert (result.code, result.out) == (4, "")
    assert "a parameter's master does not match its stored weight" in result.err
    assert not (tmp_path / "out").exists()
