"""Folders of trainers: every command answers about the same model, and a broken folder is called broken."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt import api, resume
from ckpt import check as ckpt_check
from ckpt.errors import IncompleteError, SeveralRunsError
from tests.support.commands import ckpt, contents
from tests.support.sampling import sample


@pytest.fixture
def copied(fixtures: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(fixtures / name, tmp_path / name, symlinks=True, ignore=without_truth))


def without_truth(folder: str, names: list[str]) -> set[str]:
    return {"truth"} & set(names)


def check_says(said: str, *places: Path) -> None:
    """Assert that `ckpt check` finds each place damaged, for this reason."""
    for place in places:
        checked = ckpt("check", place)
        assert checked.code == 4 and said in checked.out, checked.out


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def stray(path: Path) -> None:
    torch.save({"w": torch.ones(2)}, path)


WEIGHTS = "diffusion_pytorch_model.safetensors"


def test_check_covers_every_model_in_a_step_of_diffusers(copied: Callable[[str], Path]) -> None:
    run = copied("diffusers")
    for place in (run, run / "checkpoint-2"):
        checked = ckpt("check", place)
        assert checked.code == 0 and "models unet + unet_ema" in checked.out, checked.out
        assert "optimizer.bin: not read: the run's optimizer" in checked.out
    assert f"{run}: whole (hf, " in ckpt("check", run).out
    assert ckpt("check", run, "--json").out.count('"models"') == 1


def test_several_models_in_a_step_are_never_one_of_them(
    copied: Callable[[str], Path], fixtures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied("diffusers")
    step, truth = run / "checkpoint-2", fixtures / "diffusers" / "truth"
    for command in (["inspect"], ["convert", "auto", "hf", "-o", run / "out"], ["hash"], ["resume"]):
        refused = ckpt(command[0], *command[1:3], step, *command[3:])
        assert refused.code == 2 and f" {step}/unet_ema" in refused.err, refused.err
    monkeypatch.setattr("sys.argv", ["ckpt", "hash", str(run), "--tag", "checkpoint-2"])
    assert f"  ckpt hash {step}/unet\n" in ckpt("hash", run, "--tag", "checkpoint-2").err
    for name in ("unet", "unet_ema"):
        api.convert(step / name, "hf", run / f"out-{name}", strict=False)
        found, live = load_file(run / f"out-{name}" / WEIGHTS), load_file(truth / f"{name}.safetensors")
        assert found.keys() == live.keys() and all(torch.equal(found[fqn], live[fqn]) for fqn in live)


def test_a_final_pipeline_wins_over_steps(copied: Callable[[str], Path]) -> None:
    run = copied("diffusers")
    shutil.rmtree(run / "checkpoint-2" / "unet_ema")
    chosen = api.open(run)
    assert chosen.path == str(run / "unet")
    assert any("also here: checkpoint-2 (tag takes it)" in note for note in chosen.notes)
    assert api.open(run, tag="checkpoint-2").path == str(run / "checkpoint-2" / "unet")
    (run / "unet" / WEIGHTS).unlink()
    with pytest.raises(IncompleteError, match="the pipeline's model is missing"):
        api.open(run)
    checked = ckpt("check", run)
    assert checked.code == 4 and "unet" in checked.out


@pytest.mark.parametrize(
    ("file", "act", "said"),
    [
        (f"unet_ema/{WEIGHTS}", halve, f"unet_ema/{WEIGHTS}"),
        (f"unet_ema/{WEIGHTS}", Path.unlink, "unet_ema: the model's weights are missing"),
        (f"unet/{WEIGHTS}", Path.unlink, "unet: the model's weights are missing"),
        ("more.pt", stray, "more.pt: not read"),
    ],
)
def test_a_broken_step_of_diffusers(
    copied: Callable[[str], Path], file: str, act: Callable[[Path], object], said: str
) -> None:
    step = copied("diffusers") / "checkpoint-2"
    act(step / file)
    check_says(said, step, step.parent)
    with pytest.raises((IncompleteError, SeveralRunsError)):
        api.open(step)


def test_a_lora_of_diffusers_is_whole_and_named(copied: Callable[[str], Path]) -> None:
    run = copied("diffusers-lora")
    for place, steps in ((run, 2), (run / "checkpoint-2", 1)):
        checked = ckpt("check", place)
        assert checked.code == 0 and checked.out.count(": whole (hf") == steps, checked.out
        assert "optimizer.bin: not read: the run's optimizer" in checked.out
        for target in ("hf", "peft", "dcp", "full"):
            refused = ckpt("convert", "auto", target, place, "-o", run.with_name("out"))
            assert refused.code == 2 and "an adapter with names from diffusers" in refused.err, refused.err
            assert "load_lora_weights, fuse_lora" in refused.err
        assert ckpt("resume", place).code == 6


LORA = "pytorch_lora_weights.safetensors"


@pytest.mark.parametrize(
    ("file", "act", "said"),
    [
        (LORA, Path.unlink, "only optimizer states"),
        (LORA, halve, f"{LORA}: the file ends within its header"),
        ("more.pt", stray, "more.pt: not read"),
    ],
)
def test_a_broken_step_of_a_lora_of_diffusers(
    copied: Callable[[str], Path], file: str, act: Callable[[Path], object], said: str
) -> None:
    step = copied("diffusers-lora") / "checkpoint-2"
    act(step / file)
    check_says(said, step, step.parent)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("rename", "the other LoRA factor is missing or has another name"),
        ("drop", "the other LoRA factor is missing or has another name"),
        ("turn", "LoRA factors of different ranks: [4, 2] and [4, 2]"),
        ("cut", "LoRA factors of different ranks: [1, 4] and [4, 2]"),
    ],
)
@pytest.mark.parametrize("names", ["diffusers", "kohya"])
def test_factors_of_a_lora_of_diffusers_fit(copied: Callable[[str], Path], names: str, damage: str, words: str) -> None:
    """Kohya's scripts have `_` for the dots of a module's name."""
    step = copied("diffusers-lora") / "checkpoint-2"
    tensors = load_file(step / LORA)
    if names == "kohya":
        renamed = {}
        for fqn, tensor in tensors.items():
            module, _, end = fqn.removeprefix("unet.").partition(".lora.")
            renamed[f"lora_unet_{module.replace('.', '_')}.lora_{end}"] = tensor
        tensors = renamed
    save_file(tensors, step / LORA)
    assert ckpt("check", step).code == ckpt("resume", step, "--model-only").code == 0
    first = min(tensors)
    assert tensors[first].shape == (2, 4)
    tensor = tensors.pop(first)
    changed = {"rename": {f"{first}_x": tensor}, "turn": {first: tensor.T.contiguous()}, "cut": {first: tensor[:1]}}
    save_file(tensors | changed.get(damage, {}), step / LORA)
    checked = ckpt("check", step)
    module = first.removesuffix(".weight").removesuffix("down")[: -len(".lora.")]
    assert checked.code == 4 and f"  - {module}: {words}" in checked.out, checked.out
    resumed = ckpt("resume", step, "--model-only")
    assert resumed.code == 4 and words in resumed.err, resumed.err


#: Each target converts the folders of a hook.
HOOKED = sample(
    [(stage, target) for stage in (2, 3) for target in (f"zero{stage}", "dcp", "full")],
    lambda stage_and_target: stage_and_target,
)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_run_of_diffusers_under_deepspeed_has_its_hooks_config(
    copied: Callable[[str], Path], fixtures: Path, tmp_path: Path, stage: int
) -> None:
    run, live = copied(f"diffusers-zero{stage}"), live_states(fixtures / f"diffusers-zero{stage}" / "truth")
    step = run / "checkpoint-2"
    for place in (run, step):
        assert ckpt("check", place).code == 0 and api.open(place).path == str(step / "pytorch_model")
    done = ckpt("convert", "auto", "hf", run, "--dtype", "fp32", "-o", tmp_path / "hf")
    assert done.code == 0 and "not compared with UNet2DModel" in done.err, done.err
    assert (tmp_path / "hf" / "config.json").read_bytes() == (step / "unet" / "config.json").read_bytes()
    found = load_file(tmp_path / "hf" / WEIGHTS)
    assert found.keys() == live["weight"].keys()
    assert all(torch.equal(found[fqn], one) for fqn, one in live["weight"].items())
    hooks = ["unet", "unet_ema"] if stage == 2 else ["unet"]
    for target in (target for of, target in HOOKED if of == stage):
        out = tmp_path / f"out-{target}"
        done = ckpt("convert", "auto", target, run, "--world-size", 3, "--verify", "-o", out)
        told = f"copied for the script's load hook: {', '.join(f'{name}/' for name in hooks)}"
        assert done.code == 0 and told in done.err, done.err
        for name in hooks:
            assert f"not read: ../{name}" not in done.err, done.err
            assert contents(out / name) == contents(step / name)
        assert ckpt("check", out).code == 0 and ckpt("verify", run, out).code == 0
    assert_states(tmp_path / f"out-zero{stage}", live, tmp_path / "full")
    assert resume(run, say=lambda _: None) == str(step)
    assert Path(resume(run, world_size=3, say=lambda _: None)).is_relative_to(tmp_path / f".{run.name}.ckpt-resume")


def live_states(truth: Path, step: str = "live") -> dict[str, dict[str, torch.Tensor]]:
    by_role: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(truth / f"{step}.safetensors").items():
        role, _, fqn = name.partition("/")
        by_role.setdefault(role, {})[fqn] = tensor
    return by_role


def assert_states(place: Path, live: dict[str, dict[str, torch.Tensor]], output: Path) -> None:
    """Assert that the optimizer states in `place` are the live engine's."""
    api.convert(place, "full", output)
    states = torch.load(output / "optimizer.bin", weights_only=True)["state"]
    for role in ("exp_avg", "exp_avg_sq"):
        assert states.keys() == live[role].keys()
        assert all(torch.equal(states[fqn][role], one) for fqn, one in live[role].items())


def test_models_of_a_hook_next_to_deepspeed(copied: Callable[[str], Path], fixtures: Path, tmp_path: Path) -> None:
    step, live = copied("diffusers-zero2") / "checkpoint-2", live_states(fixtures / "diffusers-zero2" / "truth")
    for name, tensors in (("unet", live["weight"]), ("unet_ema", live["ema"])):
        api.convert(step / name, "hf", tmp_path / name, strict=False)
        found = load_file(tmp_path / name / WEIGHTS)
        assert all(torch.equal(found[fqn], one.to(found[fqn].dtype)) for fqn, one in tensors.items())
    placeholders = copied("diffusers-zero3") / "checkpoint-2" / "unet"
    for command in (["check"], ["resume"], ["inspect"]):
        refused = ckpt(*command, placeholders)
        assert refused.code == 4 and "ZeRO-3 placeholders; the weights are in" in refused.out + refused.err


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2-full"])
def test_a_lora_of_diffusers_under_fsdp(
    copied: Callable[[str], Path], fixtures: Path, tmp_path: Path, kind: str
) -> None:
    """Accelerate saves the base model with the adapter's layers, and the hook the adapter alone."""
    run, live = copied(f"diffusers-{kind}"), live_states(fixtures / f"diffusers-{kind}" / "truth")
    checked = ckpt("check", run)
    assert checked.code == 0 and "pytorch_lora_weights.safetensors: not read: more weights" in checked.out
    for world_size in (None, 3):
        assert resume(run, world_size=world_size, say=lambda _: None) == str(run / "checkpoint-2")
    api.convert(run, "dcp", tmp_path / "dcp", world_size=3)
    assert ckpt("verify", run, tmp_path / "dcp").code == 0
    assert_states(tmp_path / "dcp", live, tmp_path / "full")
    stored = torch.load(tmp_path / "full" / "pytorch_model_fsdp.bin", weights_only=True)
    assert stored.keys() == live["weight"].keys()
    assert all(torch.equal(stored[fqn], one) for fqn, one in live["weight"].items())
    done = ckpt("convert", "auto", "hf", run, "-o", tmp_path / "hf")
    assert done.code == 0 and "from_pretrained cannot load this folder: config.json is missing" in done.err


SHARD = "pytorch_model/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize(
    ("fixture", "file", "act", "said", "resumes"),
    [
        ("zero2", f"unet_ema/{WEIGHTS}", halve, f"unet_ema/{WEIGHTS}: the file is shorter", 0),
        ("zero2", f"unet_ema/{WEIGHTS}", Path.unlink, f"unet_ema/{WEIGHTS}: the model's weights are missing", 0),
        ("zero2", "unet_ema/config.json", Path.unlink, "unet_ema/config.json: missing", 0),
        ("zero3", f"unet/{WEIGHTS}", Path.unlink, f"unet/{WEIGHTS}: the model's weights are missing", 0),
        ("zero3", SHARD, Path.unlink, "optim_states files are missing", 4),
        ("zero3", SHARD, halve, f"{SHARD}: the file is truncated", 4),
        ("zero2", "pytorch_model/mp_rank_00_model_states.pt", Path.unlink, "only optimizer states", 6),
        ("zero2", "pytorch_model", shutil.rmtree, "`latest` names a missing step folder", 4),
        ("zero2", "pytorch_model/more.pt", stray, "more.pt: not read", 0),
        ("fsdp2", "pytorch_model_fsdp_0", shutil.rmtree, "only optimizer states", 6),
        ("fsdp2", "optimizer_0", shutil.rmtree, "the optimizer is missing", 6),
        ("fsdp2", "optimizer_0/__1_0.distcp", halve, "optimizer_0/__1_0.distcp: the file ends before", 4),
        ("fsdp2", "more.pt", stray, "more.pt: not read", 0),
        ("fsdp2-full", "pytorch_model_fsdp.bin", Path.unlink, "pytorch_model_fsdp.bin: missing", 6),
        ("fsdp2-full", "optimizer.bin", Path.unlink, "the optimizer is missing", 6),
        ("fsdp2-full", "optimizer.bin", halve, "optimizer.bin: the file is truncated", 4),
    ],
)
def test_a_broken_step_of_diffusers_on_two_ranks(
    copied: Callable[[str], Path], fixture: str, file: str, act: Callable[[Path], object], said: str, resumes: int
) -> None:
    run = copied(f"diffusers-{fixture}")
    act(run / "checkpoint-2" / file)
    check_says(said, run)
    assert ckpt("resume", run).code == resumes


def test_a_save_hooks_model_is_copied_whole_or_not_at_all(copied: Callable[[str], Path], tmp_path: Path) -> None:
    run = copied("diffusers-zero2")
    average = run / "checkpoint-2" / "unet_ema" / WEIGHTS
    content = average.read_bytes()
    first = resume(run, world_size=3, say=lambda _: None)
    average.write_bytes(content[:-1] + b"x")
    second = resume(run, world_size=3, say=lambda _: None)
    assert second != first and Path(second, "unet_ema", WEIGHTS).read_bytes() == average.read_bytes()
    for act, told in ((halve, "shorter than"), (Path.unlink, "the model's weights are missing")):
        average.write_bytes(content)
        act(average)
        refused = ckpt("convert", "auto", "zero2", run, "--world-size", 3, "-o", tmp_path / "out")
        assert refused.code == 4 and told in refused.err and not (tmp_path / "out").exists(), refused.err


def test_a_converted_run_keeps_its_hooks_models(copied: Callable[[str], Path], tmp_path: Path) -> None:
    """The user names the folder of a conversion, and may convert it again."""
    run, first = copied("diffusers-zero2"), tmp_path / "first"
    step, hooks = run / "checkpoint-2", ("unet", "unet_ema")
    (step / "unet" / "more").mkdir()
    (step / "unet" / "more" / "sizes.json").write_text("{}")
    ckpt("convert", "auto", "zero2", run, "--world-size", 3, "-o", first)
    for target in sample(("zero2", "dcp", "full"), lambda _: ("another conversion",)):
        done = ckpt("convert", "auto", target, first, "--world-size", 4, "-v", "-o", tmp_path / target)
        assert done.code == 0 and "load hook: unet/, unet_ema/" in done.err, done.err
        for name in hooks:
            assert contents(tmp_path / target / name) == contents(step / name)
    resumed = resume(first, world_size=2, say=lambda _: None)
    assert all(contents(Path(resumed, name)) == contents(step / name) for name in hooks)
    assert ckpt("check", first).code == 0
    content = (first / "unet_ema" / WEIGHTS).read_bytes()
    halve(first / "unet_ema" / WEIGHTS)
    check_says(f"unet_ema/{WEIGHTS}: the file is shorter", first)
    (first / "unet_ema" / WEIGHTS).write_bytes(content)
    for file in first.glob("random_states_*"):  # a run of DeepSpeed alone, next to other models
        file.unlink()
    done = ckpt("convert", "auto", "zero2", first, "--world-size", 4, "-v", "-o", tmp_path / "alone")
    assert done.code == 0 and "load hook" not in done.err and not (tmp_path / "alone" / "unet").exists(), done.err


def test_a_save_hooks_adapter_is_copied(copied: Callable[[str], Path], tmp_path: Path) -> None:
    run = copied("diffusers-fsdp2")
    done = ckpt("convert", "auto", "dcp", run, "--world-size", 3, "-o", tmp_path / "out")
    assert done.code == 0 and f"copied for the script's load hook: {LORA}" in done.err, done.err
    assert f"not read: {LORA}" not in done.err, done.err
    assert (tmp_path / "out" / LORA).read_bytes() == (run / "checkpoint-2" / LORA).read_bytes()


def test_a_large_file_of_accelerate_is_copied(copied: Callable[[str], Path], tmp_path: Path) -> None:
    """`register_for_checkpointing` saves a moving average here."""
    run = copied("diffusers-fsdp2")
    large = run / "checkpoint-2" / "custom_checkpoint_0.pkl"
    large.write_bytes(b"\x80" * 10)
    os.truncate(large, 65 << 20)
    assert ckpt("convert", "auto", "dcp", run, "--world-size", 3, "-o", tmp_path / "out").code == 0
    assert (tmp_path / "out" / large.name).read_bytes() == large.read_bytes()


def test_resume_names_an_optimizer_that_it_does_not_read(copied: Callable[[str], Path]) -> None:
    run = copied("diffusers")
    shutil.rmtree(run / "checkpoint-2" / "unet_ema")
    for place in (run, run / "checkpoint-2", run / "checkpoint-2" / "unet"):
        refused = ckpt("resume", place)
        assert refused.code == 6 and "optimizer.bin" in refused.err and "with the trainer itself" in refused.err
    for folder in (run / "checkpoint-2" / "unet", run / "unet"):
        shutil.rmtree(folder)
    (run / "model_index.json").unlink()
    assert "only optimizer states" in ckpt("resume", run).err
    assert ckpt("check", run).code == 4


@pytest.mark.parametrize("target", ["dcp", "full"])
@pytest.mark.parametrize(
    ("fixture", "place", "said"),
    [
        ("diffusers", "checkpoint-2/unet", "not written: files of the run optimizer.bin, scheduler.bin"),
        ("lerobot", "", "not read: ../training_state/: next to the checkpoint: a folder with tensor files, an opt"),
    ],
)
def test_an_optimizer_that_no_format_reads_is_named(
    fixtures: Path, tmp_path: Path, fixture: str, place: str, said: str, target: str
) -> None:
    done = ckpt("convert", "auto", target, fixtures / fixture / place, "-o", tmp_path / "out")
    assert done.code == 0 and said in done.err, done.err
    assert not api.open(tmp_path / "out").optimizer_states


STATES = "training_state/optimizer_state.safetensors"


@pytest.mark.parametrize(
    ("fixture", "step", "model", "file"),
    [
        ("lerobot", "checkpoints/000002", "pretrained_model", STATES),
        ("diffusers", "checkpoint-2", "unet", "optimizer.bin"),
    ],
)
def test_no_file_tells_which_of_two_equal_shapes_a_numbered_state_has(
    copied: Callable[[str], Path], fixture: str, step: str, model: str, file: str
) -> None:
    """Two files with all names, numbers, shapes and groups alike belong to two orders, so the states are left out."""
    place = copied(fixture) / step
    before = flat_states(place / file)
    shapes = {name: tensor.shape for name, tensor in before.items()}
    one, other = "state/7/", "state/9/"
    assert shapes[f"{one}exp_avg"] == shapes[f"{other}exp_avg"]
    checked = ckpt("check", place).out
    if file == STATES:
        swapped = {name: before[exchanged(name, one, other)] for name in before}
        save_file(swapped, place / file)
    else:
        optimizer = torch.load(place / file, weights_only=True)
        optimizer["state"][7], optimizer["state"][9] = optimizer["state"][9], optimizer["state"][7]
        torch.save(optimizer, place / file)
    after = flat_states(place / file)
    assert {name: tensor.shape for name, tensor in after.items()} == shapes
    assert not torch.equal(after[f"{one}exp_avg"], before[f"{one}exp_avg"])
    assert ckpt("check", place).out == checked
    assert not api.open(place / model).optimizer_states


def exchanged(name: str, one: str, other: str) -> str:
    ends = {one: other, other: one}
    return next((ends[start] + name.removeprefix(start) for start in ends if name.startswith(start)), name)


def flat_states(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        return load_file(file)
    states = torch.load(file, weights_only=True)["state"]
    return {f"state/{number}/{role}": one for number, state in states.items() for role, one in state.items()}


@pytest.mark.parametrize(
    ("fixture", "place", "step"),
    [
        ("composer", "", "ep2-ba4"),
        ("composer-fsdp2", "", "ep1-ba2"),
        ("olmo-core", "", "step2"),
        ("lightning-plain", "checkpoints", "last"),
        ("torch-checkpointing", "", "step-3"),
        ("transformers-distributed", "sharded", "live"),
        ("transformers-distributed", "gathered", "live"),
    ],
)
def test_weights_and_states_are_the_live_trainers(
    copied: Callable[[str], Path], fixtures: Path, tmp_path: Path, fixture: str, place: str, step: str
) -> None:
    live = live_states(fixtures / fixture / "truth", step)
    assert_states(copied(fixture) / place, live, tmp_path / "full")
    stored = torch.load(tmp_path / "full" / "pytorch_model_fsdp.bin", weights_only=True)
    assert stored.keys() >= live["weight"].keys()
    assert all(torch.equal(stored[fqn], one) for fqn, one in live["weight"].items())


def test_steps_of_composer_are_found_converted_and_resumed(
    copied: Callable[[str], Path], fixtures: Path, tmp_path: Path
) -> None:
    run, live = copied("composer"), load_file(fixtures / "composer" / "truth" / "ep2-ba4.safetensors")
    newest = run / "ep2-ba4-rank0.pt"
    checkpoint = api.open(run)
    assert (checkpoint.path, checkpoint.state.step) == (str(newest), 4)
    assert [one.step for one in ckpt_check(run).checkpoints] == [4, 2]
    assert resume(run, say=lambda _: None) == str(newest)
    states = {f"{tensor.role}/{fqn}": tensor.shape for (fqn, _), tensor in checkpoint.tensors.items()}
    assert states == {name: tuple(tensor.shape) for name, tensor in live.items()}
    for target in ("full", "dcp"):
        api.convert(run, target, tmp_path / target)
        compared = ckpt("verify", newest, tmp_path / target)
        assert compared.code == 0 and "12 tensors" in compared.out, compared.out


def test_composers_sharded_step_has_its_optimizer(
    copied: Callable[[str], Path], fixtures: Path, tmp_path: Path
) -> None:
    run, live = copied("composer-fsdp2"), load_file(fixtures / "composer-fsdp2" / "truth" / "ep1-ba2.safetensors")
    assert [one.path for one in ckpt_check(run).checkpoints] == ["ep1-ba2"]
    assert resume(run, world_size=3, say=lambda _: None) == str(run / "ep1-ba2")
    checkpoint = api.open(run, tag="latest-rank0.pt")
    assert {f"{role}/{fqn}" for fqn, role in checkpoint.tensors} == live.keys()
    api.convert(run, "dcp", tmp_path / "dcp", world_size=3)
    assert ckpt("verify", run, tmp_path / "dcp").code == 0
    (run / "ep1-ba2" / "__1_0.distcp").unlink()
    assert ckpt("check", run).code == 4


def test_composers_link_is_no_step_and_its_copy_is_the_same_step(copied: Callable[[str], Path]) -> None:
    run = copied("composer")
    link = run / "latest-rank0.pt"
    assert link.is_symlink() and len(ckpt_check(run).checkpoints) == 2
    link.unlink()
    shutil.copy(run / "ep2-ba4-rank0.pt", link)
    assert api.open(run).path == str(run / "ep2-ba4-rank0.pt")
    (run / "ep2-ba4-rank0.pt").unlink()
    assert api.open(run).path == str(link)


@pytest.mark.parametrize(("act", "newest"), [(halve, None), (Path.unlink, "ep1-ba2-rank0.pt")])
def test_a_broken_step_of_composer(
    copied: Callable[[str], Path], act: Callable[[Path], object], newest: str | None
) -> None:
    run = copied("composer")
    act(run / "ep2-ba4-rank0.pt")
    checked = ckpt("check", run)
    if newest is None:
        assert checked.code == 4 and "ep2-ba4-rank0.pt: " in checked.out, checked.out
        assert "ep2-ba4-rank0.pt is skipped, it is not complete" in ckpt("hash", run).err
    else:
        assert checked.code == 0 and api.open(run).path == str(run / newest)


def test_lerobots_steps_are_whole_and_their_processors_are_carried(
    copied: Callable[[str], Path], fixtures: Path, tmp_path: Path
) -> None:
    run, live = copied("lerobot"), load_file(fixtures / "lerobot" / "truth" / "000002.safetensors")
    steps = run / "checkpoints"
    for place, whole in ((run, 2), (steps / "000002", 1), (steps / "last", 1)):
        checked = ckpt("check", place)
        assert checked.code == 0 and checked.out.count(": whole (hf") == whole, checked.out
        assert checked.out.count("training_state: not read") == whole
        assert ckpt("resume", place).code == 6 and "optimizer_state.safetensors" in ckpt("resume", place).err
    assert {api.open(run).path, api.open(run, tag="last").path, api.open(steps / "last").path} == {
        str(steps / "000002" / "pretrained_model")
    }
    done = ckpt("convert", "auto", "hf", run, "-o", tmp_path / "out")
    assert done.code == 0 and "not read: ../training_state/" in done.err and "LeRobot's class" in done.err, done.err
    source = steps / "000002" / "pretrained_model"
    others = [one.name for one in source.iterdir() if one.name != "model.safetensors"]
    assert len(others) == 6
    assert all((source / name).read_bytes() == (tmp_path / "out" / name).read_bytes() for name in others)
    found = load_file(tmp_path / "out" / "model.safetensors")
    trained = {name.removeprefix("weight/"): one for name, one in live.items() if name.startswith("weight/")}
    assert trained.keys() <= found.keys() and all(torch.equal(found[name], one) for name, one in trained.items())


def of_another_step(state: Path) -> None:
    shutil.rmtree(state)
    shutil.copytree(state.parents[1] / "000001" / state.name, state)


@pytest.mark.parametrize(
    ("file", "act", "said"),
    [
        ("training_state", shutil.rmtree, "training_state/optimizer_state.safetensors: missing"),
        ("training_state/scheduler_state.json", Path.unlink, "training_state/scheduler_state.json: missing"),
        ("training_state/optimizer_state.safetensors", halve, "training_state/optimizer_state.safetensors: "),
        ("training_state", of_another_step, "its files are from step 1"),
        ("pretrained_model/model.safetensors", halve, "pretrained_model/model.safetensors: "),
        ("pretrained_model", shutil.rmtree, "only optimizer states"),
        ("pretrained_model/more.safetensors", stray, "pretrained_model/more.safetensors: "),
    ],
)
def test_a_broken_step_of_lerobot(
    copied: Callable[[str], Path], file: str, act: Callable[[Path], object], said: str
) -> None:
    run = copied("lerobot")
    act(run / "checkpoints" / "000002" / file)
    check_says(said, run, run / "checkpoints" / "000002", run / "checkpoints" / "last")


def test_olmo_cores_step_is_resharded_and_resumed_with_its_trainer_state(
    copied: Callable[[str], Path], fixtures: Path, tmp_path: Path
) -> None:
    run, live = copied("olmo-core"), load_file(fixtures / "olmo-core" / "truth" / "step2.safetensors")
    for place in (run, run / "step2"):
        assert ckpt("check", place).code == 0
        for world_size in (None, 3):
            assert resume(place, world_size=world_size, say=lambda _: None) == str(run / "step2")
    api.convert(run, "dcp", tmp_path / "dcp", world_size=3)
    assert ckpt("verify", run, tmp_path / "dcp").code == 0
    for place in (run / "step2", tmp_path / "dcp"):
        checkpoint = api.open(place)
        assert {f"{role}/{fqn}" for fqn, role in checkpoint.tensors} == live.keys()
    done = ckpt("convert", "auto", "hf", run, "-o", tmp_path / "hf")
    assert done.code == 0 and "save_hf_model" in done.err and "--config DIR" in done.err, done.err
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert len(found) == 14 and all(torch.equal(live[f"weight/{name}"], one) for name, one in found.items())


@pytest.mark.parametrize(
    ("file", "act", "said"),
    [
        (".metadata.json", Path.unlink, ".metadata.json: missing"),
        ("train", shutil.rmtree, "train/rank0.pt: missing"),
        ("model_and_optim/.metadata", Path.unlink, "model_and_optim/.metadata: "),
        ("model_and_optim/__1_0.distcp", Path.unlink, "__1_0.distcp"),
        ("model_and_optim/__1_0.distcp", halve, "__1_0.distcp"),
        ("model_and_optim/more.pt", stray, "model_and_optim/more.pt: not read"),
        ("", lambda step: step.rename(step.with_name("step4")), "its files are from step 2"),
    ],
)
def test_a_broken_step_of_olmo_core(
    copied: Callable[[str], Path], file: str, act: Callable[[Path], object], said: str
) -> None:
    run = copied("olmo-core")
    shutil.copytree(run / "step2", run / "step1")
    torch.save({"global_step": 1}, run / "step1" / "train" / "rank0.pt")
    act(run / "step2" / file if file else run / "step2")
    check_says(said, run)


def test_lightnings_single_files_are_resumed_as_files(
    copied: Callable[[str], Path], fixtures: Path, tmp_path: Path
) -> None:
    run, live = copied("lightning-plain"), load_file(fixtures / "lightning-plain" / "truth" / "last.safetensors")
    last, first = run / "checkpoints" / "last.ckpt", run / "checkpoints" / "epoch=0-step=2.ckpt"
    fabric = run / "fabric" / "step=4.ckpt"
    assert resume(last.parent, say=lambda _: None) == str(last)
    assert resume(fabric.parent, say=lambda _: None) == str(fabric)
    assert [one.path for one in ckpt_check(fabric.parent).checkpoints] == ["step=4.ckpt"]
    assert [one.step for one in ckpt_check(last.parent).checkpoints] == [4, 2]
    for source, prefix in ((last.parent, "model."), (fabric.parent, "")):
        api.convert(source, "dcp", tmp_path / prefix / "dcp")
        assert ckpt("verify", source, tmp_path / prefix / "dcp").code == 0
        api.convert(source, "hf", tmp_path / prefix / "hf")
        found = load_file(tmp_path / prefix / "hf" / "model.safetensors")
        assert len(found) == 4
        assert all(torch.equal(live[f"weight/model.{name.removeprefix(prefix)}"], one) for name, one in found.items())
    first.unlink()
    assert resume(last.parent, say=lambda _: None) == str(last)
    halve(last)
    assert ckpt("check", last.parent).code == 4
    last.unlink()
    stray(last.parent / "more.pt")
    shutil.copy(fixtures / "lightning-plain" / "checkpoints" / first.name, first)
    assert api.open(last.parent).path == str(first)


FRESH = "no random states for {}: they start from fresh seeds"


@pytest.mark.parametrize(
    ("fixture", "place", "ranks", "told"),
    [
        ("lightning", "checkpoints", 2, None),
        ("lightning", "checkpoints", 3, "meta.pt counts the batches of each of 2 ranks, and there are 3"),
        ("accelerate-loader", "", 2, None),
        ("accelerate-loader", "", 3, FRESH.format("rank 2")),
        ("accelerate-loader", "", 3, "dl_state_dict.bin fits 2 ranks only"),
        ("trainer-plain", "", 1, None),
        ("trainer-plain", "", 2, FRESH.format("ranks 0, 1")),  # rng_state.pth is read by one process only
        ("diffusers-fsdp2", "", 2, None),
        ("diffusers-fsdp2", "", 1, None),
        ("diffusers-fsdp2", "", 3, FRESH.format("rank 2")),
        ("diffusers-fsdp2-full", "", 4, FRESH.format("ranks 2, 3")),
        ("olmo-core", "", 3, None),
    ],
)
def test_resume_on_other_ranks_tells_what_the_steps_own_files_lack(
    copied: Callable[[str], Path], fixture: str, place: str, ranks: int, told: str | None
) -> None:
    said: list[str] = []
    run = copied(fixture) / place
    assert Path(resume(run, world_size=ranks, say=said.append)).is_relative_to(run)
    about_ranks = [line for line in said if "random states" in line or "counts the" in line or "fits" in line]
    assert any(told in line for line in about_ranks) if told else not about_ranks, said


#: DCP's names of safetensors files begin with the rank's number.
SAFETENSORS_SHARD = "shard-0000"


@pytest.mark.parametrize(
    ("fixture", "file", "act", "said", "resumes"),
    [
        ("accelerate-loader", "step_4/dl_state_dict.bin", halve, "dl_state_dict.bin: the file is truncated", 4),
        ("accelerate-loader", "step_4/random_states_1.pkl", halve, "random_states_1.pkl: the file is truncated", 4),
        ("accelerate-loader", "step_4/random_states_0.pkl", Path.unlink, "random_states_0.pkl: the file of rank 0", 0),
        ("olmo-core", "step2/.metadata.json", halve, ".metadata.json: the JSON file ends too early", 4),
        (
            "transformers-distributed/sharded",
            f"{SAFETENSORS_SHARD}1-model-00001-of-00001.safetensors",
            Path.unlink,
            "hole at",
            4,
        ),
        (
            "transformers-distributed/sharded",
            f"{SAFETENSORS_SHARD}4-model-00001-of-00001.safetensors",
            Path.unlink,
            "shape (",
            4,
        ),
        ("transformers-distributed/sharded", "optimizer/.metadata", Path.unlink, "the metadata is missing", 4),
        ("transformers-distributed/gathered", "optimizer/__3_0.distcp", halve, "ends before", 4),
        ("transformers-distributed/gathered", "model.safetensors", halve, "shorter than", 4),
        ("diffusers", "unet/config.json", Path.unlink, "unet/config.json: missing, diffusers can't load", 6),
        ("diffusers", "scheduler/scheduler_config.json", Path.unlink, "scheduler: missing, model_index.json", 6),
    ],
)
def test_a_broken_file_of_a_trainer(
    copied: Callable[[str], Path], fixture: str, file: str, act: Callable[[Path], object], said: str, resumes: int
) -> None:
    run = copied(fixture)
    assert ckpt("check", run).code == 0
    act(run / file)
    check_says(said, run)
    assert ckpt("resume", run).code == resumes


@pytest.mark.parametrize(
    ("one", "other"), sample([(0, 1), (0, 2), (1, 3), (2, 3)], lambda ranks: [ranks[1] - ranks[0]])
)
def test_exchanged_files_of_an_optimizers_ranks(copied: Callable[[str], Path], one: int, other: int) -> None:
    folder = copied("transformers-distributed") / "gathered"
    files = [folder / "optimizer" / f"__{rank}_0.distcp" for rank in (one, other)]
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, reversed(contents), strict=True):
        file.write_bytes(content)
    refused = ckpt("resume", folder)
    assert refused.code in (4, 5) and "another save" in refused.err, refused.err
    assert ckpt("check", folder).code == refused.code


@pytest.mark.parametrize("place", ["sharded", "gathered"])
def test_a_tensor_of_another_name_in_transformers_files(copied: Callable[[str], Path], place: str) -> None:
    folder, name = copied("transformers-distributed") / place, b"model.layers.0.mlp.up_proj.weight"
    for file in folder.glob("*.safetensors"):
        content = file.read_bytes()
        file.write_bytes(content.replace(name, name.replace(b"up_proj", b"up_prjo")))
    checked = ckpt("check", folder)
    assert checked.code == 4 and "missing from the model" in checked.out and name.decode() in checked.out, checked.out
    assert ckpt("resume", folder).code == 4


@pytest.mark.parametrize(
    ("target", "module", "prefix"),
    sample(
        [
            ("dcp", "models", "0.auto_model."),
            ("zero3", "sparse_encoder.models.other", None),
            *((target, "base.modules.transformer", "0.model.") for target in ("full", "trainer", "dcp", "zero3")),
            *((target, "sparse_encoder.models.other", None) for target in ("dcp", "full")),
        ],
        lambda case: case[:2],
    ),
)
def test_names_have_the_prefix_of_sentence_transformers(
    copied: Callable[[str], Path], target: str, module: str, prefix: str | None
) -> None:
    """The trainer of release 6 calls the model `0.model`, of 5 `0.auto_model`; its saved folder has no prefix."""
    step = copied("sentence-transformers") / "checkpoint-2"
    modules = json.loads((step / "modules.json").read_text())
    modules[0]["type"] = f"sentence_transformers.{module}.Transformer"
    (step / "modules.json").write_text(json.dumps(modules))
    ranks = ("--world-size", "2") if target == "zero3" else ()
    done = ckpt("convert", "auto", target, step, *ranks, "-v", "-o", step.with_name("out"))
    is_unknown = prefix is None and target in ("dcp", "zero3")
    assert done.code == 0 and ("SentenceTransformerTrainer can't load this step" in done.err) == is_unknown, done.err
    names = {fqn for fqn, _ in api.open(step.with_name("out")).tensors}
    before = {fqn for fqn, _ in api.open(step).tensors}
    expected = "" if target == "trainer" else prefix or ""
    assert names == {fqn if fqn[0].isdecimal() else expected + fqn for fqn in before}
    compared = ckpt("verify", step, step.with_name("out"))
    assert " only in A" not in compared.out and (compared.code == 0 or target == "zero3"), compared
    back = ckpt("convert", "auto", "trainer", step.with_name("out"), "-o", step.with_name("back"))
    assert back.code == 0 and {fqn for fqn, _ in api.open(step.with_name("back")).tensors} == before, back


def test_a_sentence_transformer_without_optimizer_keeps_its_names(copied: Callable[[str], Path]) -> None:
    """Transformers loads `pytorch_model.bin` by the model's own names."""
    from transformers import AutoModel

    model = copied("sentence-transformers") / "final"
    assert ckpt("convert", "auto", "full", model, "-o", model.with_name("out")).code == 0
    loaded, found = AutoModel.from_pretrained(model.with_name("out"), output_loading_info=True)
    assert not found["missing_keys"]
    states = AutoModel.from_pretrained(model).state_dict()
    assert all(torch.equal(tensor, states[name]) for name, tensor in loaded.state_dict().items())


def test_a_torchtitan_step_copied_as_another_step_is_named(copied: Callable[[str], Path]) -> None:
    """Only the other step proves it: forks may count something else in their folders' names."""
    run = copied("torchtitan-loader")
    told = "the folder is called step-16, but it is from step 8, like step-8"
    assert "the folder is called" not in ckpt("check", run).out
    shutil.copytree(run / "step-8", run / "step-16")
    checked, resumed = ckpt("check", run), ckpt("resume", run)
    assert checked.code == 4 and f"step-16: {told}" in checked.out and "every part" not in checked.out, checked
    assert told in resumed.err, resumed
    shutil.rmtree(run / "step-8")
    assert ckpt("check", run).code == 0


@pytest.mark.parametrize("name", ["rng_state", "optimizer_state"])
def test_a_lerobot_model_exchanged_with_its_training_state(
    copied: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    step = copied("lerobot") / "checkpoints" / "000002"
    assert ckpt("check", step).code == 0
    model, state = step / "pretrained_model" / "model.safetensors", step / "training_state" / f"{name}.safetensors"
    exchanged = model.read_bytes(), state.read_bytes()
    state.write_bytes(exchanged[0])
    model.write_bytes(exchanged[1])
    for result in (ckpt("check", step), ckpt("convert", "auto", "hf", step, "-o", tmp_path / "out")):
        assert (result.code, "state, not a model" in result.out + result.err) == (4, True), result


def test_a_final_sentence_transformer_has_no_optimizer_to_resume_with(copied: Callable[[str], Path]) -> None:
    model = copied("sentence-transformers") / "final"
    refused = ckpt("resume", model)
    assert (refused.code, "no checkpoint here has an optimizer" in refused.err) == (6, True), refused
    assert ckpt("resume", model, "--model-only").code == 0
    (model / "model.safetensors").unlink()
    lost = ckpt("resume", model)
    assert (lost.code, "the model's weights are missing" in lost.err) == (4, True), lost


def test_a_model_next_to_the_steps_is_named(copied: Callable[[str], Path]) -> None:
    run = copied("trainer-plain")
    told = "other: a model next to the steps, not checked with them"
    (run / "other").mkdir()
    shutil.copy(run / "checkpoint-2" / "config.json", run / "other")
    assert told not in ckpt("check", run).out
    shutil.copy(run / "checkpoint-2" / "model.safetensors", run / "other")
    checked = ckpt("check", run)
    assert checked.code == 0 and told in checked.out and "every part" in checked.out, checked.out
    assert told not in ckpt("check", run / "checkpoint-2").out


@pytest.mark.parametrize(
    ("name", "folder"),
    sample(
        [
            *(("diffusers-zero2", "unet_ema"), ("diffusers", "unet")),
            *(("diffusers", "unet_ema"), ("diffusers-zero2", "unet")),
        ],
        lambda case: case,
    ),
)
def test_a_save_hooks_folder_that_other_steps_have_is_missed(
    copied: Callable[[str], Path], name: str, folder: str
) -> None:
    run = copied(name)
    shutil.copytree(run / "checkpoint-2", run / "checkpoint-1")
    told = f"{folder}/: missing; the run's other steps have it"
    assert told not in ckpt("check", run).out
    shutil.rmtree(run / "checkpoint-1" / folder)
    assert told in ckpt("check", run).out and ckpt("check", run / "checkpoint-1").code == 4
    shutil.rmtree(run / "checkpoint-2" / folder)  # a run without it
    assert told not in ckpt("check", run).out
