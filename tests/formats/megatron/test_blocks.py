"""`converters/names/megatron/model/splits.py` (`GateBlocks`): gate and up rows that alternate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckpt import api
from ckpt.errors import CorruptError, UsageError
from ckpt.plan.checkpoint import WEIGHT, Checkpoint, Layout
from converters.names.megatron.facts import MegatronFacts
from converters.names.megatron.model.splits import ROUTED_BLOCK, SHARED_BLOCK, GateBlocks, model_rows
from tests.names.test_megatron import saved
from tests.support.commands import ckpt
from tests.support.describing import content
from tests.support.model_files import rewriting

EVEN = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "moe_intermediate_size": 8}
EVEN |= {"intermediate_size": 16, "shared_expert_intermediate_size": 16, "hidden_size": 16}
FIRST = ".linear_fc1.weight"


def contiguous(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Return a rank's rows in megatron-core's order: 0.18.2, transformer/moe/experts.py, `_remove_glu_interleaving`."""
    return rows.reshape(-1, 2, block, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def part(full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return the gate and up rows of rank `rank` of `size`."""
    return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])


def values(checkpoint: Checkpoint, role: str = WEIGHT) -> dict[str, torch.Tensor]:
    found = {}
    for (fqn, own), tensor in checkpoint.tensors.items():
        if own == role:
            name, shape, data = content(tensor)
            found[fqn] = torch.frombuffer(bytearray(data), dtype=getattr(torch, name)).reshape(shape)
    return found


def contents(checkpoint: Checkpoint) -> dict[Any, Any]:
    return {key: content(tensor) for key, tensor in checkpoint.tensors.items()}


def in_blocks(source: Checkpoint, routed: int | None, shared: int | None = None) -> Checkpoint:
    """Return `source` as a run with expert rows in blocks."""
    args = {**(source.state.args or {}), ROUTED_BLOCK: routed, SHARED_BLOCK: shared}
    plain = {name: value for name, value in args.items() if isinstance(value, (int, float, str, list))}
    state = replace(source.state, args=plain)
    return replace(source, state=state, facts=MegatronFacts(blocks=GateBlocks(routed, shared)))


def stored_tensor(folder: Path, key: str) -> torch.Tensor:
    entry = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    state = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state[key]


def written(source: Checkpoint, to: str, folder: Path, **layout: Any) -> Checkpoint:
    api.plan(source, to, Layout(**layout)).run(folder)
    return api.open(folder)


@pytest.mark.parametrize(("etp", "ep", "grouped"), [(1, 1, True), (2, 2, True), (2, 1, False)])
def test_ranks_files_hold_what_megatron_core_computes_with(
    etp: int, ep: int, grouped: bool, fixtures: Path, tmp_path: Path
) -> None:
    source = api.open(fixtures / "megatron-lm")
    run = in_blocks(source, 2)
    impl = {"moe_grouped_gemm": grouped, "transformer_impl": "transformer_engine" if grouped else "local"}
    run = replace(run, state=replace(run.state, args={**(run.state.args or {}), **impl}))
    back = written(run, "megatron", tmp_path / "run", tp=2, etp=etp, ep=ep)
    weights, num_experts = values(source), 4 // ep
    compared = 0
    for file in tmp_path.rglob("model_optim_rng.pt"):
        numbers = [int(number) for number in file.parent.name.split("_")[2:]]
        tp, of_ep = numbers[0], numbers[-1] if ep > 1 else 0
        for name, tensor in torch.load(file, weights_only=False)["model"].items():
            if ".experts." not in name or "linear_fc1.weight" not in name:
                continue
            layer, expert = name.split(".")[2], int(name.rpartition("weight")[2] or name.split(".")[6])
            fqn = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert + of_ep * num_experts}{FIRST}"
            expected = part(weights[fqn], tp % etp, etp)
            assert not torch.equal(tensor, expected)
            assert torch.equal(contiguous(tensor, 2), expected)
            compared += 1
    assert compared == 2 * 2 * num_experts * ep  # tp ranks, layers
    assert contents(back) == contents(source)  # masters and states as well


@pytest.mark.parametrize("etp", [1, 2])
def test_distributed_files_hold_what_megatron_core_loads_at_their_own_size(
    etp: int, fixtures: Path, tmp_path: Path
) -> None:
    source = api.open(fixtures / "megatron-lm")
    back = written(in_blocks(source, 2), "megatron-dist", tmp_path / "run", tp=2, etp=etp)
    folder, weights = tmp_path / "run/iter_0000002", values(source)
    for role, prefix in (("weight", ""), ("exp_avg", "optimizer.state.exp_avg.")):
        key = f"{prefix}decoder.layers.mlp.experts.experts{FIRST}"
        stored = stored_tensor(folder, key)
        for layer, expert in ((0, 1), (1, 3)):
            full = values(source, role)[f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}{FIRST}"]
            for rank in range(etp):
                own = part(stored[layer, expert], rank, etp)
                assert torch.equal(contiguous(own, 2), part(full, rank, etp))
                assert not torch.equal(own, part(full, rank, etp))
    assert weights and contents(back) == contents(source)
    assert back.bound_to_ranks  # at another size megatron-core would mix the rows


@pytest.mark.parametrize("form", ["torch_dcp", "fsdp_dtensor"])
def test_plain_forms_keep_the_blocks(form: str, fixtures: Path, tmp_path: Path) -> None:
    source = api.open(fixtures / "megatron-lm")
    back = written(in_blocks(source, 4), "megatron-dist", tmp_path / "run", ckpt_format=form)
    known = contents(source)
    assert {key: value for key, value in contents(back).items() if key in known} == {
        key: value for key, value in known.items() if key in back.tensors
    }
    names = dcp.FileSystemReader(tmp_path / "run/iter_0000002").read_metadata().state_dict_metadata
    first = next(key for key in sorted(names) if re.fullmatch(r"model\..*experts\.0\.linear_fc1\.weight(_w)?", key))
    stored = stored_tensor(tmp_path / "run/iter_0000002", first)
    role = WEIGHT if form == "torch_dcp" else "master"
    full = values(source, role)[f"decoder.layers.0.mlp.experts.local_experts.0{FIRST}"]
    gate, up = full.chunk(2)
    expected = torch.cat([gate[:4], up[:4], gate[4:], up[4:]])
    assert torch.equal(stored, expected[: len(stored)])


def test_shared_experts_have_blocks_of_their_own_and_the_hub_gets_gate_and_up(tmp_path: Path) -> None:
    tensors = saved(tmp_path / "hub", "qwen2_moe", **EVEN)
    source = written(api.open(tmp_path / "hub"), "megatron", tmp_path / "plain", tp=2)
    run = written(in_blocks(source, 2, 4), "megatron", tmp_path / "run", tp=2)
    assert contents(run) == contents(source)
    (tp0, _) = sorted((tmp_path / "run").rglob("model_optim_rng.pt"))
    state = torch.load(tp0, weights_only=False)["model"]
    for name, block in ((f"experts.local_experts.0{FIRST}", 2), (f"shared_experts{FIRST}", 4)):
        own = state[f"decoder.layers.1.mlp.{name}"]
        assert torch.equal(contiguous(own, block), part(values(source)[f"decoder.layers.1.mlp.{name}"], 0, 2))
    done = ckpt("convert", tmp_path / "run", "hf", "-o", tmp_path / "back", "--config", tmp_path / "hub")
    assert done.code == 0, done.err
    assert f"gate and up rows alternate in blocks ({ROUTED_BLOCK} 2, {SHARED_BLOCK} 4)" in done.err
    back = values(api.open(tmp_path / "back"))
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_verify_sees_scrambled_rows(tmp_path: Path) -> None:
    """Older ckpt versions ignored the setting. verify now reports their output as different."""
    saved(tmp_path / "hub", "qwen3_moe", **EVEN)
    source = written(api.open(tmp_path / "hub"), "megatron", tmp_path / "plain")
    written(in_blocks(source, 2), "megatron", tmp_path / "run")
    same = ckpt("verify", tmp_path / "run", tmp_path / "hub")
    assert same.code == 0, same.out + same.err
    accepted = ("--accept-setting", ROUTED_BLOCK)
    scrambled = ckpt("convert", tmp_path / "run", "hf", "-o", tmp_path / "old", "--config", tmp_path / "hub", *accepted)
    assert scrambled.code == 0, scrambled.err
    assert ckpt("verify", tmp_path / "run", tmp_path / "old").code == 1
    assert ckpt("verify", tmp_path / "run", tmp_path / "old", *accepted).code == 0


def test_rows_that_do_not_divide_into_blocks(fixtures: Path, tmp_path: Path) -> None:
    source = in_blocks(api.open(fixtures / "megatron-lm"), 8)
    with pytest.raises(UsageError, match="do not divide into alternating blocks") as caught:
        api.plan(source, "megatron", Layout(tp=2, etp=2))
    assert caught.value.hint and "--etp" in caught.value.hint


@pytest.mark.parametrize(
    ("args", "blocks"),
    [
        ({"swiglu": True, ROUTED_BLOCK: 8}, GateBlocks(8)),
        ({"quick_geglu": True, ROUTED_BLOCK: 8, SHARED_BLOCK: 4}, GateBlocks(8, 4)),
        ({"swiglu": False, ROUTED_BLOCK: 8}, GateBlocks()),  # without gate rows megatron-core ignores it
        ({"swiglu": True}, GateBlocks()),
        ({"swiglu": True, ROUTED_BLOCK: 0}, GateBlocks(0)),
    ],
)
def test_what_arguments_record(args: Mapping[str, Any], blocks: GateBlocks) -> None:
    assert GateBlocks.of_args(args) == blocks
    assert GateBlocks.of_args(args, {ROUTED_BLOCK, SHARED_BLOCK}) == GateBlocks()


@pytest.mark.parametrize("size", ["8", True, -1, 2.0, [2]])
def test_a_block_that_is_no_number_of_rows_can_be_ignored(size: object) -> None:
    args = {"swiglu": True, SHARED_BLOCK: size}
    with pytest.raises(CorruptError, match=f"the argument {SHARED_BLOCK} is not a row count") as caught:
        GateBlocks.of_args(args)
    assert f"accept_settings=['{SHARED_BLOCK}'] ignores it" in str(caught.value)
    assert GateBlocks.of_args(args, {SHARED_BLOCK}) == GateBlocks()


def test_rows_of_stored_tensors_are_each_there_once() -> None:
    assert model_rows(16, 1, 2) == (0, 8, 2, 10, 4, 12, 6, 14)
    assert model_rows(16, 2, 2) == (0, 8, 4, 12, 2, 10, 6, 14)


def test_a_pipeline_that_megatron_core_refuses_is_not_called_damage(fixtures: Path, tmp_path: Path) -> None:
    source = in_blocks(api.open(fixtures / "megatron-lm"), None)
    written(source, "megatron", tmp_path / "run", pp=2)
    for file in tmp_path.rglob("model_optim_rng.pt"):
        with rewriting(file) as content:
            content["args"].decoder_first_pipeline_num_layers = 5
    done = ckpt("inspect", tmp_path / "run")
    assert done.code == 6 and "megatron-core rejects the recorded pipeline" in done.err, done.err
