"""`ckpt/commands/merge_lora/find.py`, `ckpt/adapters/config.py`, `converters/huggingface/peft.py`: other trainers.

verl saves DTensors on two ranks, and mlx-lm provides live logits. Others use PEFT's layout or are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import ckpt as package
from ckpt.errors import CorruptError, UsageError
from tests.support.adapters import differing, edited, equal, load_base, merge_by_peft
from tests.support.commands import ckpt
from tests.support.places import FIXTURES

META = {"r": 3, "lora_alpha": 7, "task_type": "CAUSAL_LM"}


def by_verl(base: Path, adapter: Path, folder: Path, *, whole: bool) -> Path:
    """Save an actor on two ranks under FSDP2: the model with its adapter, or only the adapter."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(load_base(base), adapter).to(torch.bfloat16)
    state = {name: t for name, t in model.state_dict().items() if whole or ".lora_" in name}
    folder.mkdir(parents=True)
    for rank in range(2):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
            parts = {name: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for name, t in state.items()}
            torch.save(parts, folder / f"model_world_size_2_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
    (folder / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')
    (folder / "lora_train_meta.json").write_text(json.dumps(META))
    (folder / "huggingface").mkdir()
    (folder / "huggingface/config.json").write_text((base / "config.json").read_text())
    return folder


def test_a_config_further_away_is_not_that_of_verls_adapter(
    linear: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    """The previous run left its own config in the parent folder."""
    actor = by_verl(bases["llama"], linear, tmp_path / "run/actor", whole=False)
    settings = json.loads((linear / "adapter_config.json").read_text())
    (tmp_path / "run/adapter_config.json").write_text(json.dumps(settings | {"lora_alpha": 70}))
    package.convert(actor, "peft", tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["lora_alpha"] == META["lora_alpha"]


@pytest.mark.parametrize("whole", [True, False], ids=["with its base", "alone"])
def test_verls_rank_files_become_an_adapter_and_a_merged_model(
    whole: bool, linear: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    actor = by_verl(bases["llama"], linear, tmp_path / "global_step_3/actor", whole=whole)
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    assert ckpt("convert", "auto", "peft", actor, "-o", adapter).code == 0
    rounded = {name: t.bfloat16() for name, t in load_file(linear / "adapter_model.safetensors").items()}
    found = load_file(adapter / "adapter_model.safetensors")
    assert differing(found, rounded) == []
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 7, ["down_proj", "q_proj"])
    merge_by_peft(bases["llama"], [adapter], tmp_path / "peft")
    done = ckpt("merge-lora", actor, *([] if whole else ["--base", bases["llama"]]), "-o", merged)
    assert done.code == 0 and "changed the weights of 4 of 4 targets" in done.err, done.err
    assert equal(merged, tmp_path / "peft") and not equal(merged, bases["llama"])


@pytest.mark.parametrize(
    ("meta", "error", "said"),
    [
        ({"r": 3}, CorruptError, "lora_alpha is not recorded for the adapter"),
        ({**META, "use_dora": True}, UsageError, "adapter record has an unknown entry"),
        ({**META, "r": "3"}, CorruptError, "r in the adapter config is wrong"),
    ],
)
def test_what_verl_records_is_known_or_refused(
    meta: dict[str, Any], error: Any, said: str, linear: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    actor = by_verl(bases["llama"], linear, tmp_path / "actor", whole=True)
    (actor / "lora_train_meta.json").write_text(json.dumps(meta))
    with pytest.raises(error, match=said):
        package.merge_lora(actor, tmp_path / "out")


def test_the_merged_model_computes_what_mlx_did(tmp_path: Path) -> None:
    fixture = FIXTURES / "mlx-lora"
    done = ckpt("merge-lora", fixture / "adapters", "--base", fixture / "base", "--accept-base", "-o", tmp_path / "out")
    assert done.code == 0 and "changed the weights of 4 of 4 targets" in done.err, done.err
    live = load_file(fixture / "logits.safetensors")
    with torch.no_grad():
        merged, plain = (load_base(one)(input_ids=live["ids"]).logits for one in (tmp_path / "out", fixture / "base"))
    torch.testing.assert_close(merged, live["logits"], rtol=0, atol=2e-5)
    assert (plain - live["logits"]).abs().max() > 0.1


def by_mlx(adapter: Path, base: Path, folder: Path, **changes: Any) -> Path:
    """Write the adapter in mlx-lm's layout: `lora_a` [in, rank], `lora_b` [rank, out], `scale` instead of alpha."""
    folder.mkdir()
    tensors = {}
    for name, t in load_file(adapter / "adapter_model.safetensors").items():
        short = name.removeprefix("base_model.model.").removesuffix(".weight")
        tensors[short.replace("lora_A", "lora_a").replace("lora_B", "lora_b")] = t.T.contiguous()
    save_file(tensors, folder / "adapters.safetensors")
    config: dict[str, Any] = {"fine_tune_type": "lora", "model": str(base), "num_layers": 2}
    config["lora_parameters"] = {"rank": 3, "scale": 7 / 3, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    return folder


def test_an_adapter_of_mlx_is_merged_and_written_as_pefts(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = by_mlx(linear, bases["llama"], tmp_path / "mlx")
    assert ckpt("merge-lora", adapter, "-o", tmp_path / "merged").code == 0
    assert ckpt("merge-lora", linear, "-o", tmp_path / "expected").code == 0
    assert equal(tmp_path / "merged", tmp_path / "expected")
    assert ckpt("convert", "auto", "peft", adapter, "-o", tmp_path / "peft").code == 0
    found, trained = (load_file(one / "adapter_model.safetensors") for one in (tmp_path / "peft", linear))
    assert differing(found, trained) == []
    merge_by_peft(bases["llama"], [tmp_path / "peft"], tmp_path / "by-peft")
    assert equal(tmp_path / "merged", tmp_path / "by-peft")


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"fine_tune_type": "dora"}, UsageError, "ckpt reads only LoRA from mlx-lm"),
        ({"fine_tune_type": "full"}, UsageError, "ckpt reads only LoRA from mlx-lm"),
        ({"lora_parameters": {"rank": 3}}, CorruptError, "the adapter's rank and scale are not recorded"),
        ({"lora_parameters": {"rank": 4, "scale": 2.0}}, Exception, "config and its weights have different ranks"),
    ],
)
def test_what_is_no_lora_of_mlx_is_refused(
    changes: dict[str, Any], error: Any, said: str, linear: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        package.merge_lora(by_mlx(linear, bases["llama"], tmp_path / "mlx", **changes), tmp_path / "out")


def test_stacked_experts_of_mlx_are_refused(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = by_mlx(linear, bases["llama"], tmp_path / "mlx")
    save_file({"model.layers.0.mlp.switch_mlp.up_proj.lora_a": torch.zeros(4, 3, 8)}, adapter / "adapters.safetensors")
    with pytest.raises(UsageError, match="only linear layers' factors"):
        package.merge_lora(adapter, tmp_path / "out")


@pytest.mark.parametrize(
    ("names", "writer", "way"),
    [
        (["layers.0.attn.q_proj.lora_a.weight", "layers.0.attn.q_proj.lora_b.weight"], "torchtune", "adapter_model"),
        (["lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight"], "kohya", "load_lora_weights"),
        (["unet.down_blocks.0.attentions.0.to_q.lora_A.weight"], "diffusers", "fuse_lora"),
        (["text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_linear_layer.up.weight"], "diffusers", "fuse_lora"),
    ],
)
@pytest.mark.parametrize("command", [("merge-lora",), ("convert", "auto", "peft"), ("convert", "auto", "hf")])
def test_other_writers_are_refused_by_name_with_the_way_out(
    command: tuple[str, ...], names: list[str], writer: str, way: str, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    if writer == "torchtune":
        torch.save({name: torch.zeros(2, 2) for name in names}, folder / "adapter_0.pt")
        folder = folder / "adapter_0.pt"
    else:
        save_file({name: torch.zeros(2, 2) for name in names}, folder / "pytorch_lora_weights.safetensors")
    refused = ckpt(*command, folder, "-o", tmp_path / "out")
    assert refused.code == 2, refused.err
    assert (
        f"ckpt can't read an adapter with names from {writer}" in refused.err
        and way in refused.err
        and names[0] in refused.err
    )
    if folder.is_dir():
        assert "an adapter with another program's names, not a model" in ckpt("inspect", folder).out
        assert "found: an adapter alone" in ckpt("resume", folder).err


def test_torchtunes_own_copy_for_peft_is_merged(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    """Since 0.5, torchtune writes few config entries, and `adapter_model.pt` next to PEFT's file."""
    adapter = edited(linear, tmp_path / "adapter")
    config = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"], "peft_type": "LORA"}
    config["base_model_name_or_path"] = str(bases["llama"])
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    torch.save({"layers.0.attn.q_proj.lora_a.weight": torch.zeros(2, 2)}, adapter / "adapter_model.pt")
    for one, out in ((adapter, "ours"), (linear, "expected")):
        assert ckpt("merge-lora", one, "-o", tmp_path / out).code == 0
    assert equal(tmp_path / "ours", tmp_path / "expected")
