"""`converters/pytorch/full.py`, `state_dicts.py`, `state.py`, `ckpt/containers/weights.py`: full state dicts.

ckpt must match the files that torch, Accelerate's functions and transformers read and write.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import api
from ckpt.containers.torchfile.values import Record
from ckpt.errors import CkptError, CorruptError, NotFoundError, UnsafeError
from ckpt.plan.checkpoint import MASTER, WEIGHT, Checkpoint, Layout, ParamGroup, SourceFile, TrainingState
from ckpt.plan.dtypes import BFLOAT16, FLOAT32
from ckpt.plan.tensors import Tensor
from converters.pytorch.full import FULL
from tests.support.describing import content
from tests.support.engines import raw
from tests.support.fsdp_runs import run_ranks


class Net(nn.Module):
    """Module with tied weights, a transposed view, a buffer and a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.norm(self.embed(ids)) * self.scale)
        return y


def trained(steps: int = 2, **kwargs: Any) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Net()
    named = kwargs.pop("named", False)
    optimizer = torch.optim.AdamW(list(model.named_parameters() if named else model.parameters()), **kwargs)
    for _ in range(steps):
        model(torch.arange(6) % 7).square().mean().backward()
        optimizer.step()
    return model, optimizer


def by_name(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()
    groups = [{**g, "params": [names[i] for i in g["params"]]} for g in state["param_groups"]]
    return {"state": {names[i]: v for i, v in state["state"].items()}, "param_groups": groups}


def assert_holds(checkpoint: Checkpoint, model: nn.Module, optimizer: dict[str, Any] | None) -> None:
    state = model.state_dict()
    assert checkpoint.ties == {"head.weight": "embed.weight"}
    assert {fqn for fqn, role in checkpoint.tensors if role == WEIGHT} == set(state) - {"head.weight"}
    for (fqn, role), tensor in checkpoint.tensors.items():
        expected = state[fqn] if role == WEIGHT or optimizer is None else optimizer["state"][fqn][role]
        assert content(tensor) == raw(expected)
    if optimizer is None:
        assert not checkpoint.optimizer_states
        return
    assert checkpoint.optimizer_states == ("exp_avg", "exp_avg_sq", "step")
    assert checkpoint.state.scalars["step"] == {fqn: v["step"].item() for fqn, v in optimizer["state"].items()}
    found = {fqn: group.options for group in checkpoint.state.param_groups for fqn in group.fqns}
    for group in optimizer["param_groups"]:
        for fqn in group["params"]:
            assert all(found[fqn][k] == group[k] for k in ("lr", "betas", "eps", "weight_decay"))


def flat(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Flatten the optimizer like `StateDictOptions(flatten_optimizer_state_dict=True)`."""
    found = {f"state.{fqn}.{k}": v for fqn, values in optimizer["state"].items() for k, v in values.items()}
    for group in optimizer["param_groups"]:
        for fqn in group["params"]:
            found |= {f"param_groups.{fqn}.{k}": v for k, v in group.items() if k != "params"}
    return found


@pytest.mark.parametrize("spelling", ["nested", "flat", "recorded", "numbered"])
@pytest.mark.parametrize("layout", ["bundle", "beside", "torchtitan", "legacy"])
def test_every_spelling(tmp_path: Path, layout: str, spelling: str) -> None:
    model, optimizer = trained(named=spelling == "recorded")
    named = by_name(optimizer, model)
    spelled = {"nested": named, "flat": flat(named)}.get(spelling, optimizer.state_dict())
    scheduler = {"last_epoch": 4, "_last_lr": [0.1]}
    if layout == "beside":
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        torch.save(spelled, tmp_path / "optimizer.bin")
        torch.save(scheduler, tmp_path / "scheduler.bin")
        (tmp_path / "trainer_state.json").write_text('{"global_step": 2}')
    else:
        rest = {"optimizer": spelled, "lr_scheduler": scheduler, "train_state": {"step": 2}}
        root = {**model.state_dict(), **rest} if layout == "torchtitan" else {"model": model.state_dict(), **rest}
        torch.save(root, tmp_path / "model.pt", _use_new_zipfile_serialization=layout != "legacy")
    checkpoint = api.open(tmp_path)
    assert checkpoint.format == "full"
    assert checkpoint.state.step == 2
    assert checkpoint.state.lr_scheduler == scheduler
    assert_holds(checkpoint, model, None if spelling == "numbered" else named)
    assert any("numbered" in note for note in checkpoint.notes) == (spelling == "numbered")


@pytest.mark.parametrize("is_hf_trainer", [False, True])
def test_only_hf_trainers_step_counts_the_optimizers(tmp_path: Path, is_hf_trainer: bool) -> None:
    """Other scripts may count batches, and step the schedule for each."""
    model, optimizer = trained()
    content = {"optimizer": by_name(optimizer, model), "lr_scheduler": {"last_epoch": 8, "_last_lr": [0.1]}}
    torch.save({"model": model.state_dict(), **content, "train_state": {"step": 8}}, tmp_path / "model.pt")
    if is_hf_trainer:
        (tmp_path / "trainer_state.json").write_text('{"global_step": 8}')
    told = [note for note in api.open(tmp_path).notes if "are all files from one save" in note]
    what = "the model and the schedule are from step 8, but the optimizer has taken 2"
    assert told == [f"{what}: are all files from one save?"] * is_hf_trainer


@pytest.mark.parametrize("wrong", [None, "swapped", "unknown"])
def test_numbers_are_the_names_of_groups_of_one_parameter(tmp_path: Path, wrong: str | None) -> None:
    """Adam-mini's optimizer sorts parameters in its own way and names groups. Names that don't fit prove nothing."""
    model = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3))
    parts = [{"params": [parameter], "name": fqn} for fqn, parameter in reversed(list(model.named_parameters()))]
    optimizer = torch.optim.AdamW(parts)
    model(torch.rand(2, 5)).square().mean().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    first, *_, last = saved["param_groups"]
    if wrong == "swapped":
        first["name"], last["name"] = last["name"], first["name"]
    elif wrong:
        first["name"] = "another"
    torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / "model.pt")
    checkpoint = api.open(tmp_path)
    if wrong:
        assert {role for _, role in checkpoint.tensors} == {WEIGHT}
        assert any("left out the optimizer states" in note for note in checkpoint.notes)
        return
    for fqn, parameter in model.named_parameters():
        assert content(checkpoint.tensors[fqn, "exp_avg"]) == raw(optimizer.state[parameter]["exp_avg"])


@pytest.mark.parametrize("groups", [1, 2])
def test_numbers_are_names_where_the_shapes_prove_them(tmp_path: Path, groups: int) -> None:
    """A script saves one group, or a second group for biases. Equal square layers rely on their order."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.LayerNorm(5))
    parts = [[p for p in model.parameters() if (p.ndim < 2) == without] for without in (False, True)]
    parts = parts if groups == 2 else [list(model.parameters())]
    optimizer = torch.optim.AdamW([{"params": part} for part in parts])
    model(torch.arange(6)).square().mean().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "model.pt")
    checkpoint = api.open(tmp_path)
    for fqn, parameter in model.named_parameters():
        for role in ("exp_avg", "exp_avg_sq"):
            assert content(checkpoint.tensors[fqn, role]) == raw(optimizer.state[parameter][role])
    names = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    assert [list(g.fqns) for g in checkpoint.state.param_groups] == [[names[id(p)] for p in part] for part in parts]


@pytest.mark.parametrize("form", ["module.{}", "_orig_mod.{}", "_fsdp_wrapped_module.{}", "module._orig_mod.{}"])
def test_wrappers(tmp_path: Path, form: str) -> None:
    model, optimizer = trained()
    named = by_name(optimizer, model)
    inner = {name: name.replace("norm.", "norm._checkpoint_wrapped_module.") for name in model.state_dict()}
    state = {form.format(inner[name]): value for name, value in model.state_dict().items()}
    wrapped = {
        "state": {form.format(inner[name]): value for name, value in named["state"].items()},
        "param_groups": [{**g, "params": [form.format(inner[n]) for n in g["params"]]} for g in named["param_groups"]],
    }
    torch.save({"state_dict": state, "optimizer_state_dict": wrapped}, tmp_path / "last.ckpt")
    assert_holds(api.open(tmp_path), model, named)
    assert_holds(api.open(tmp_path / "last.ckpt"), model, named)


def test_two_names_that_become_one_are_refused(tmp_path: Path) -> None:
    torch.save({"a._orig_mod.w": torch.ones(1), "a.w": torch.ones(1), "b": torch.ones(1)}, tmp_path / "model.pt")
    with pytest.raises(CorruptError, match="same name"):
        api.open(tmp_path)


def test_views_and_shared_storages(inside: Path, tmp_path: Path) -> None:
    """Only the same view of the same storage is a tie. Equal values and overlapping views are not."""
    base = torch.randn(6, 4)
    state = OrderedDict(
        whole=base,
        again=base.view(6, 4),
        transposed=base.t(),
        part=base[1:3],
        strided=base[::2, 1],
        reshaped=base.view(24),
        equal=base.clone(),
        expanded=torch.randn(1, 3).expand(5, 3),
        empty=base[:0],
        empty2=base[:0],
    )
    for legacy in (False, True):
        torch.save(state, inside / "model.pt", _use_new_zipfile_serialization=not legacy)
        checkpoint = api.open(inside)
        assert checkpoint.ties == {"again": "whole"}
        for fqn, tensor in state.items():
            if fqn != "again":
                assert content(checkpoint.tensors[fqn, WEIGHT]) == raw(tensor), fqn
        output = tmp_path / f"out-{legacy}"
        api.plan(checkpoint, "full").run(output)
        loaded = torch.load(output / "pytorch_model.bin", weights_only=True)
        assert {k: raw(v) for k, v in loaded.items()} == {k: raw(v) for k, v in state.items()}
        assert loaded["again"].data_ptr() == loaded["whole"].data_ptr()
        assert loaded["equal"].data_ptr() != loaded["whole"].data_ptr()


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    """Return a folder for sources, so that output can be written next to it."""
    folder = tmp_path / "in"
    folder.mkdir()
    return folder


def written(checkpoint: Checkpoint, output: Path, layout: Layout | None = None) -> Path:
    api.plan(checkpoint, "full", layout).run(output)
    return output


def test_the_optimizer_goes_on_as_torch_loads_it(inside: Path, tmp_path: Path) -> None:
    """After a round trip of model and optimizer, three more steps give the same bits as without a break."""
    model, optimizer = trained(lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    bundle = {
        "model": model.state_dict(),
        "optimizer": by_name(optimizer, model),
        "lr_scheduler": scheduler.state_dict(),
        "step": 2,
        "args": {"x": 1},
    }
    torch.save(bundle, inside / "model.pt")
    output = written(api.open(inside), tmp_path / "out")
    other, fresh = trained(0)
    other.load_state_dict(torch.load(output / "pytorch_model_fsdp.bin", weights_only=True))
    states = torch.load(output / "optimizer.bin", weights_only=True)
    names = [name for name, _ in other.named_parameters()]
    groups = [{**g, "params": [names.index(n) for n in g["params"]]} for g in states["param_groups"]]
    fresh.load_state_dict({"state": {names.index(n): v for n, v in states["state"].items()}, "param_groups": groups})
    for one, its in ((model, optimizer), (other, fresh)):
        for _ in range(3):
            its.zero_grad()
            one(torch.arange(6) % 7).square().mean().backward()
            its.step()
    assert all(raw(a) == raw(b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    rest = torch.load(output / "training_state.pt", weights_only=True)
    assert rest == {"step": 2, "args": {"x": 1}, "lr_scheduler": scheduler.state_dict()}
    assert torch.load(output / "scheduler.pt", weights_only=True) == scheduler.state_dict()
    again = api.open(output)
    assert again.format == "full" and again.state.step == 2
    assert api.verify(again, api.open(inside / "model.pt")).equal


def test_masters_are_what_the_optimizer_updates(tmp_path: Path) -> None:
    """With an optimizer, ckpt writes the fp32 master. Without one or on request, it writes the bf16 weight."""
    master, weight = torch.randn(3, 4), torch.randn(3, 4).bfloat16()
    torch.save({"weight": weight, "master": master, "exp_avg": master * 2}, tmp_path / "raw.pt")
    described = api.open(tmp_path / "raw.pt")
    roles = {"weight": WEIGHT, "master": MASTER, "exp_avg": "exp_avg"}
    tensors = {
        ("w", roles[fqn]): Tensor("w", roles[fqn], t.dtype, t.shape, t.source)
        for (fqn, _), t in described.tensors.items()
    }
    state = TrainingState(5, (ParamGroup(("w",), {"lr": 0.5}),), {"step": {"w": 5.0}})
    source = Checkpoint(described.path, "zero2", tensors, described.files, state=state)
    output = written(source, tmp_path / "a")
    assert raw(torch.load(output / "pytorch_model_fsdp.bin")["w"]) == raw(master)
    states = torch.load(output / "optimizer.bin")
    assert raw(states["state"]["w"]["exp_avg"]) == raw(master * 2)
    assert raw(states["state"]["w"]["step"]) == raw(torch.tensor(5.0))
    assert states["param_groups"] == [{"lr": 0.5, "params": ["w"]}]

    asked = api.plan(source, "full", Layout(dtype=BFLOAT16))
    asked.run(tmp_path / "b")
    assert raw(torch.load(tmp_path / "b/pytorch_model_fsdp.bin")["w"]) == raw(weight)
    assert any("masters" in line for line in asked.plan.target.not_written)

    weights = Checkpoint(
        described.path, "zero2", {k: v for k, v in tensors.items() if k[1] in (WEIGHT, MASTER)}, described.files
    )
    assert raw(torch.load(written(weights, tmp_path / "c") / "pytorch_model.bin")["w"]) == raw(weight)
    fp32 = written(weights, tmp_path / "d", Layout(dtype=FLOAT32))
    assert raw(torch.load(fp32 / "pytorch_model.bin")["w"]) == raw(master)


@pytest.mark.parametrize("shared", [True, False])
def test_sharded(inside: Path, tmp_path: Path, shared: bool) -> None:
    state = OrderedDict((f"l.{i}.w", torch.randn(10, 10)) for i in range(7))
    if shared:
        state["tied"] = state["l.1.w"]
    torch.save(state, inside / "model.pt")
    output = written(api.open(inside), tmp_path / "out", Layout(max_shard_size=900))
    names = sorted(p.name for p in output.glob("*.bin"))
    assert names == [f"pytorch_model-{i:05d}-of-00004.bin" for i in range(1, 5)]
    index = json.loads((output / "pytorch_model.bin.index.json").read_text())
    assert index["metadata"] == {"total_size": 2800}
    loaded: dict[str, torch.Tensor] = {}
    for name in names:
        shard = torch.load(output / name, weights_only=True)
        assert set(shard) == {fqn for fqn, where in index["weight_map"].items() if where == name}
        loaded |= shard
    assert {k: raw(v) for k, v in loaded.items()} == {k: raw(v) for k, v in state.items()}
    for path in (output, output / "pytorch_model.bin.index.json"):
        again = api.open(path)
        assert api.verify(again, api.open(inside / "model.pt")).equal
        assert again.ties == ({"tied": "l.1.w"} if shared else {})


def test_faults_of_sharded_folders(inside: Path, tmp_path: Path) -> None:
    state = OrderedDict((f"l.{i}.w", torch.randn(10, 10)) for i in range(4))
    torch.save(state, inside / "model.pt")
    output = written(api.open(inside), tmp_path / "out", Layout(max_shard_size=900))
    index = output / "pytorch_model.bin.index.json"
    content = json.loads(index.read_text())

    def broken(weight_map: Any, error: type[CkptError], match: str) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(error, match=match):
            api.open(output)

    good = content["weight_map"]
    broken({**good, "x": "../model.pt"}, UnsafeError, "outside its folder")
    broken({**good, "x": "/etc/passwd"}, UnsafeError, "outside its folder")
    broken({**good, "x": 3}, CorruptError, "file name")
    broken({**good, "x": "pytorch_model-00001-of-00002.bin"}, CorruptError, "missing from its file")
    broken({k: v for k, v in good.items() if k != "l.3.w"}, CorruptError, "missing from the index")
    broken({**good, "x": "pytorch_model-00009-of-00002.bin"}, CorruptError, "missing")
    broken({**good, "x": "config.json"}, CorruptError, "not a torch file")
    broken([], CorruptError, "no weight_map")
    (output / "link.bin").symlink_to("/etc/passwd")
    broken({**good, "x": "link.bin"}, UnsafeError, "symlink")
    index.write_text(json.dumps(content))
    api.open(output)
    (output / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CorruptError, match="a file of weights is missing"):
        api.open(output)


def test_faults_of_single_files(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(1000)}, path)
    good = path.read_bytes()
    for bad in (b"", b"\0" * 500, good[:-50], good[:2000], good[:2000] + bytes(len(good) - 2000)):
        path.write_bytes(bad)
        with pytest.raises(CorruptError):
            api.open(tmp_path)
    torch.save([1, 2, 3], path)
    with pytest.raises(NotFoundError, match="no state dict"):
        api.open(tmp_path)
    torch.save({"a": 1, "net": {"w": {"x": torch.ones(1)}}}, path)
    with pytest.raises(NotFoundError, match="no state dict"):
        api.open(tmp_path)
    model, optimizer = trained()
    state = by_name(optimizer, model)
    for stranger in ("9" * 5000, "stranger"):
        state["state"] = {**by_name(optimizer, model)["state"], stranger: {}}
        torch.save({"model": model.state_dict(), "optimizer": state}, path)
        with pytest.raises(CorruptError, match="in no param group"):
            api.open(tmp_path)
    state["param_groups"][0]["params"].append("stranger")
    torch.save({"model": model.state_dict(), "optimizer": state}, path)
    with pytest.raises(CorruptError, match="missing from the model"):
        api.open(tmp_path)
    torch.save({"model": model.state_dict(), "optimizer": 3}, path)
    with pytest.raises(CorruptError, match="not an optimizer state"):
        api.open(tmp_path)
    state = by_name(optimizer, model)
    first = next(iter(state["state"].values()))
    first["weight"] = first.pop("exp_avg")
    torch.save({"model": model.state_dict(), "optimizer": state}, path)
    with pytest.raises(CorruptError, match="uses a role's name"):
        api.open(tmp_path)


class Opens:
    """Object that runs code in Python's own unpickler."""

    def __reduce__(self) -> Any:
        return (open, ("never", "w"))


def test_a_hostile_file_runs_nothing(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "x": Opens()}, tmp_path / "model.pt")
    with pytest.raises(UnsafeError, match="open"):
        api.open(tmp_path)


def test_what_is_no_full_state_dict_is_not_found(tmp_path: Path) -> None:
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "mp_rank_00_model_states.pt"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
        assert FULL.find(tmp_path / name, None) is None
    assert FULL.find(tmp_path, None) is None
    (tmp_path / "notes.bin").write_text("no torch file")
    assert FULL.find(tmp_path, None) is None and FULL.find(tmp_path / "notes.bin", None) is None
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert FULL.find(tmp_path, None) == tmp_path
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert FULL.find(tmp_path, None) is None
    assert FULL.find(tmp_path / "pytorch_model.bin", None) is not None
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model_fsdp.bin")
    assert FULL.find(tmp_path, None) == tmp_path


def test_large_files_are_found_by_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs also write `.bin`. A file without torch's naming is a model only if the user names it."""
    for name, found in (("weights.pt", True), ("a.pytorch_model.fp16.bin", True), ("train.bin", False)):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).touch()
        os.truncate(folder / name, 2 << 20)
        with monkeypatch.context() as patched:
            patched.setattr("builtins.open", None)  # no file is opened
            assert (FULL.find(folder, None) == folder) is found, name
            assert FULL.find(folder / name, None) == folder / name


def test_the_newest_step_of_a_run(tmp_path: Path) -> None:
    for step in (9, 10):
        (tmp_path / f"step-{step}").mkdir()
        torch.save({"model": {"w": torch.ones(step)}, "step": step}, tmp_path / f"step-{step}/model.pt")
    (tmp_path / "step-11").mkdir()
    checkpoint = api.open(tmp_path)
    assert Path(checkpoint.path).name == "step-10" and checkpoint.state.step == 10
    assert api.open(tmp_path, tag="step-9").state.step == 9


def test_what_cannot_be_written_is_said(inside: Path, tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2), "x._extra_state": b"abc"}, "epoch": 3}, inside / "model.pt")
    checkpoint = api.open(inside)
    others = {"torch": {**checkpoint.state.private["torch"], "part": Record("torch.distributed.tensor", "DTensor")}}
    plan = api.plan(replace(checkpoint, state=replace(checkpoint.state, private=others)), "full")
    assert any("part" in line for line in plan.plan.target.not_written)
    plan.run(tmp_path / "out")
    assert torch.load(tmp_path / "out/training_state.pt") == {"epoch": 3}
    assert torch.load(tmp_path / "out/pytorch_model.bin")["x._extra_state"] == b"abc"
    assert SourceFile.stat(str(inside / "model.pt")) in checkpoint.files


@pytest.mark.parametrize("dtype", [None, FLOAT32])
def test_transformers_reads_weights_alone(tmp_path: Path, dtype: Any) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    model.config.save_pretrained(tmp_path / "in")
    torch.save(model.state_dict(), tmp_path / "in/pytorch_model.bin")
    checkpoint = api.open(tmp_path / "in")
    assert checkpoint.ties == {"lm_head.weight": "model.embed_tokens.weight"}
    output = written(checkpoint, tmp_path / "out", Layout(dtype=dtype))
    loaded = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    for fqn, tensor in model.state_dict().items():
        assert raw(loaded.state_dict()[fqn]) == raw(tensor if dtype is None else tensor.float()), fqn
    api.plan(checkpoint, "hf").run(tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert all(raw(loaded.state_dict()[fqn]) == raw(tensor) for fqn, tensor in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["load-fsdp1", "load-fsdp2"])
def test_fsdp_resumes_from_what_is_written(tmp_path: Path, kind: str) -> None:
    """FSDP 1 and 2 on 3 ranks load ckpt's output from a 2-rank run, through Accelerate's own functions."""
    run_ranks("fsdp2", 2, tmp_path)
    weights = torch.load(tmp_path / "full/pytorch_model_fsdp.bin")
    states = torch.load(tmp_path / "full/optimizer.bin")
    shutil.copytree(tmp_path / "full", tmp_path / "alone")
    checkpoint = api.open(tmp_path / "alone")
    assert checkpoint.framework == "accelerate"
    written(checkpoint, tmp_path / "out/ours")
    run_ranks(kind, 3, tmp_path / "out/ours")
    gathered = torch.load(tmp_path / "out/ours/gathered.pt")
    assert {k: raw(v) for k, v in gathered["model"].items()} == {k: raw(v) for k, v in weights.items()}
    for fqn, values in states["state"].items():
        assert {k: raw(v) for k, v in values.items()} == {
            k: raw(v) for k, v in gathered["optimizer"]["state"][fqn].items()
        }
    assert gathered["optimizer"]["param_groups"][0]["lr"] == states["param_groups"][0]["lr"]


@pytest.mark.parametrize("declared", [True, False])
def test_what_is_gathered_apart_is_tied_as_the_config_says(tmp_path: Path, declared: bool) -> None:
    """FSDP2 with FULL_STATE_DICT saves two copies of a tied weight, and an optimizer with one of the names."""
    names = ("model.embed_tokens.weight", "lm_head.weight")
    weight = torch.randn(4, 3)
    torch.save(OrderedDict((name, weight.clone()) for name in names), tmp_path / "pytorch_model_fsdp.bin")
    state = {"state": {names[0]: {"exp_avg": weight}}, "param_groups": [{"lr": 0.5, "params": [names[0]]}]}
    torch.save(state, tmp_path / "optimizer.bin")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": declared}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = api.open(tmp_path)
    assert checkpoint.ties == ({names[1]: names[0]} if declared else {})
    assert len(list(checkpoint.with_role(WEIGHT))) == (1 if declared else 2)
    (tmp_path / "optimizer.bin").unlink()
    assert not api.open(tmp_path).ties


def test_from_zero(tmp_path: Path, fixtures: Path) -> None:
    """A ZeRO-3 run and its optimizer become one pair of files."""
    source = api.open(fixtures / "toy-zero3")
    output = written(source, tmp_path / "out")
    model = torch.load(output / "pytorch_model_fsdp.bin", weights_only=True)
    states = torch.load(output / "optimizer.bin", weights_only=True)
    for (fqn, role), tensor in source.tensors.items():
        if role == MASTER:
            assert raw(model[fqn]) == content(tensor)
        elif role not in (WEIGHT, "buffer"):
            assert raw(states["state"][fqn][role]) == content(tensor)
    assert [g["params"] for g in states["param_groups"]] == [list(g.fqns) for g in source.state.param_groups]
    again = api.open(output)
    assert again.state.step == source.state.step
    assert again.state.scalars == source.state.scalars
    assert api.verify(again, source).equal


def test_an_optimizer_under_a_name_of_its_own_is_said_to_be_no_optimizer(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.save({"model": model.state_dict(), "optim_g": optimizer.state_dict()}, tmp_path / "model.pt")
    notes = api.open(tmp_path / "model.pt").notes
    assert any("'optim_g' looks like an optimizer with its own name" in note for note in notes), notes


@pytest.mark.parametrize("name", ["optimizer_states", "optimizers", "optimizer"])
def test_optimizers_in_a_list(tmp_path: Path, name: str) -> None:
    """Lightning's `.ckpt` has a list of optimizers. A single one is used, and several are never guessed."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    whole = {"state_dict": model.state_dict(), name: [optimizer.state_dict()], "global_step": 1}
    torch.save(whole, tmp_path / "epoch=0-step=1.ckpt")
    checkpoint = api.open(tmp_path)
    for fqn, parameter in model.named_parameters():
        for role in ("exp_avg", "exp_avg_sq"):
            assert content(checkpoint.tensors[fqn, role]) == raw(optimizer.state[parameter][role])
    torch.save(whole | {name: [optimizer.state_dict()] * 2}, tmp_path / "epoch=0-step=1.ckpt")
    checkpoint = api.open(tmp_path)
    assert not checkpoint.optimizer_states and any(f"{name!r} holds several" in note for note in checkpoint.notes)


def test_an_entry_called_optimizer_that_only_names_one(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    torch.save({"model": model.state_dict(), "optimizer": "adamw"}, tmp_path / "model.pt")
    checkpoint = api.open(tmp_path)
    assert len(checkpoint.tensors) == 2 and checkpoint.state.entries()["optimizer"] == "adamw"


def test_a_count_is_no_parameter_that_a_number_may_stand_for(tmp_path: Path) -> None:
    """An integer such as BatchNorm's `num_batches_tracked` must not match a 0-d parameter."""
    model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(2.0)), "weight": nn.Parameter(torch.ones(3))})
    model.register_buffer("count", torch.tensor(3))
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "model.pt")
    (group,) = api.open(tmp_path / "model.pt").state.param_groups
    assert group.fqns == ("scale", "weight")
