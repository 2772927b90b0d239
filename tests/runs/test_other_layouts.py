"""`ckpt/runs/opening.py`: the error for an unknown folder lists its content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpt import api
from ckpt.errors import NotFoundError, SeveralRunsError
from tests.support.commands import ckpt

MODEL, OTHER = "mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"
ZERO = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
STEPS = {
    "tensor parallel experts": (("layer_0_expert_0_mp_rank_01_model_states.pt", MODEL), "DeepSpeed-MoE", "ep_size 1"),
    "their optimizer": (("expp_rank_0_mp_rank_01_optim_states.pt", MODEL), "DeepSpeed-MoE", "ep_size 1"),
    "tensor parallel": ((MODEL, OTHER), "mp_rank other than 00", "get_state_dict"),
    "tensor parallel under ZeRO": ((MODEL, OTHER, ZERO), "mp_rank other than 00", "pipe_parallel_size 1"),
    "old experts": (("expert_0_mp_rank_00_model_states.pt", MODEL), "DeepSpeed-MoE", "ep_size 1"),
}


def fill(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".pt"):
            torch.save({}, folder / name)
        else:
            (folder / name).touch()
    return folder


@pytest.mark.parametrize("case", STEPS)
@pytest.mark.parametrize("format", ["auto", "zero0"])
def test_deepspeed_says_which_ranks_are_there(tmp_path: Path, case: str, format: str) -> None:
    names, what, hint = STEPS[case]
    (tmp_path / "latest").write_text("global_step2")
    step = fill(tmp_path / "global_step2", names)
    for path in (tmp_path, step):
        with pytest.raises(NotFoundError, match=what) as caught:
            api.open(path, format)
        assert hint in str(caught.value.hint) and str(step) in str(caught.value.path)


def test_files_that_stand_by_themselves_are_listed(tmp_path: Path) -> None:
    """Callbacks save an exponential moving average beside the weights."""
    for name in ("best.ckpt", "best-EMA.ckpt"):
        torch.save({"state_dict": {"a.weight": torch.ones(2)}}, tmp_path / name)
    with pytest.raises(NotFoundError, match="no checkpoint of a known format") as caught:
        api.open(tmp_path)
    assert str(caught.value.hint).endswith("give one: best-EMA.ckpt, best.ckpt")
    assert api.open(tmp_path / "best-EMA.ckpt").format == "full"


@pytest.mark.parametrize("step", [None, 4])
def test_an_average_of_the_last_weights_is_named(tmp_path: Path, step: int | None) -> None:
    for name in ("last.ckpt", "last-EMA.ckpt"):
        torch.save({"state_dict": {"a.weight": torch.ones(2)}, "global_step": step}, tmp_path / name)
    found = api.open(tmp_path)
    assert found.path == str(tmp_path / "last.ckpt")
    assert "there is also the average last-EMA.ckpt (tag takes it)" in found.notes
    assert api.open(tmp_path, tag="last-EMA.ckpt").path == str(tmp_path / "last-EMA.ckpt")


def test_models_beside_each_other_are_listed(tmp_path: Path) -> None:
    step = tmp_path / "checkpoint-5"
    for name in ("unet", "unet_ema"):
        (step / name).mkdir(parents=True)
        save_file({"a": torch.ones(2)}, step / name / "diffusion_pytorch_model.safetensors")
    for path in (tmp_path, step):
        with pytest.raises(SeveralRunsError) as caught:
            api.open(path)
        assert caught.value.runs == (str(step / "unet"), str(step / "unet_ema"))
    assert api.open(step / "unet_ema").format == "hf"


def test_a_universal_folder_is_not_taken_for_a_step_without_zero(fixtures: Path, tmp_path: Path) -> None:
    """It has only one model file, like a step without ZeRO, and the optimizer was lost in silence."""
    api.plan(api.open(fixtures / "toy-zero2"), "universal").run(tmp_path / "out")
    folder = next(path for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert [path.name for path in folder.glob("*_states.pt")] == [MODEL]
    found = api.open(folder)
    assert found.format == "universal" and "exp_avg" in found.optimizer_states


#: Components of a diffusers pipeline (diffusers 0.42, `StableDiffusionPipeline.save_pretrained`).
PIPELINE = {
    "scheduler": ["diffusers", "DDIMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "safety_checker": [None, None],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def pipeline(path: Path, *names: str, index: dict[str, list[str | None]] = PIPELINE) -> Path:
    """Write a pipeline's index, and weights for the components `names`."""
    path.mkdir()
    (path / "model_index.json").write_text(json.dumps({"_class_name": "Pipeline", "is_on": True, **index}))
    for name in ("scheduler", "tokenizer"):
        (path / name).mkdir()
        (path / name / f"{name}_config.json").write_text("{}")
    for name in names:
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps({"_class_name": name}))
        save_file({"a": torch.ones(2)}, path / name / "diffusion_pytorch_model.safetensors")
    return path


@pytest.mark.parametrize("names", [("text_encoder", "unet", "vae"), ("unet", "vae"), ("unet",)], ids=len)
def test_a_pipeline_of_several_models_is_not_one_of_them(names: tuple[str, ...], tmp_path: Path) -> None:
    """`check` called a pipeline whole if only its UNet had weights, and `verify` compared UNets alone."""
    whole = pipeline(tmp_path / "whole", "text_encoder", "unet", "vae")
    given = pipeline(tmp_path / "given", *names)
    if names == ("unet",):
        (given / "vae").mkdir()
        (given / "vae" / "config.json").write_text("{}")
    for words in (["verify", given, whole], ["verify", whole / "unet", given], ["hash", given], ["inspect", given]):
        refused = ckpt(*words)
        assert refused.code == 2 and "found: text_encoder, unet, vae" in refused.err, refused.err
        assert "equal" not in refused.out and "whole" not in refused.out
    checked, lost = ckpt("check", given), {"text_encoder", "unet", "vae"}.difference(names)
    assert checked.code == (4 if lost else 0) and "models text_encoder + unet + vae" in checked.out
    assert all(f"  - {name}: " in checked.out for name in lost), checked.out
    assert ckpt("verify", whole / "unet", given / "unet").code == 0
    assert ckpt("check", given / "unet").code == 0
    if "vae" not in names:
        assert ckpt("check", given / "vae").code == 3


def test_a_pipeline_with_one_model_is_that_model(tmp_path: Path) -> None:
    index = {name: PIPELINE[name] for name in ("scheduler", "tokenizer", "safety_checker", "unet")}
    index["guider"] = ["diffusers", "AdaptiveProjectedMixGuidance"]
    path = pipeline(tmp_path / "pipeline", "unet", index=index)
    assert api.open(path).path == str(path / "unet")
    checked = ckpt("check", path)
    assert checked.code == 0 and "unet: whole" in checked.out


def test_a_component_that_differs_is_found(tmp_path: Path) -> None:
    a, b = pipeline(tmp_path / "a", "unet", "vae"), pipeline(tmp_path / "b", "unet", "vae")
    save_file({"a": torch.zeros(2)}, b / "vae" / "diffusion_pytorch_model.safetensors")
    assert ckpt("verify", a / "unet", b / "unet").code == 0
    differ = ckpt("verify", a / "vae", b / "vae")
    assert differ.code == 1 and "1 differ" in differ.out
