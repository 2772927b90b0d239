"""`ckpt/commands/merge_lora/merge.py`, `ckpt/adapters/config.py`: adapters for stacked experts, trained by Unsloth.

The fixture's logits come from the live model under Unsloth's own forward pass (fixtures/make_unsloth.py).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt as package
from ckpt.commands.merge_lora.find import ExpertLayout, open_adapter
from ckpt.commands.merge_lora.merge import plan
from ckpt.compare import manifest
from ckpt.errors import StorageError, UsageError
from ckpt.plan.checkpoint import TRANSFORMERS
from ckpt.state.naming import to_namespace
from tests.support.adapters import edited, equal, load_base, merge_by_peft
from tests.support.commands import ckpt
from tests.support.places import FIXTURES

FIXTURE = FIXTURES / "unsloth-moe"
BASE = FIXTURE / "base"
GROUPED = FIXTURE / "grouped_by_expert"
RECORD = ("lora_B_layout", "unsloth_fused_expert_lora")
AUTO_MAPPING = {"base_model_class": "Qwen3MoeForCausalLM", "parent_library": "transformers", "unsloth_fixed": True}
UNRECORDED: dict[str, Any] = {**dict.fromkeys(RECORD), "auto_mapping": AUTO_MAPPING}


def merged(adapter: Path, folder: Path, *options: str) -> Path:
    outcome = ckpt("merge-lora", adapter, "--base", BASE, "--accept-base", "-o", folder, *options)
    assert outcome.code == 0, outcome.err
    return folder


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        computed: torch.Tensor = load_base(folder)(input_ids=load_file(FIXTURE / "logits.safetensors")["ids"]).logits
    return computed


@pytest.mark.parametrize("layout", ["grouped_by_expert", "rank_major"])
def test_the_merged_model_computes_what_the_trained_one_did(layout: str, tmp_path: Path) -> None:
    live = load_file(FIXTURE / "logits.safetensors")[layout]
    ours = logits(merged(FIXTURE / layout, tmp_path / "ours"))
    torch.testing.assert_close(ours, live, rtol=0, atol=1e-5)
    other = "peft" if layout == "grouped_by_expert" else "unsloth"
    wrong = logits(merged(FIXTURE / layout, tmp_path / "wrong", "--expert-layout", other))
    assert (wrong - live).abs().max() > 0.01


def test_it_is_pefts_merge_of_the_same_adapter_in_pefts_layout(tmp_path: Path) -> None:
    shutil.copytree(GROUPED, tmp_path / "in-pefts-layout")
    file = tmp_path / "in-pefts-layout" / "adapter_model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name and "lora_B" in name]:
        b = tensors[name]
        tensors[name] = b.reshape(len(b), 5, 3).transpose(1, 2).reshape(len(b), 15).contiguous()
    save_file(tensors, file)
    merge_by_peft(BASE, [tmp_path / "in-pefts-layout"], tmp_path / "peft")
    assert equal(merged(GROUPED, tmp_path / "ours"), tmp_path / "peft")


@pytest.mark.parametrize(
    "changes",
    [
        {**UNRECORDED, "lora_B_layout": "grouped_by_expert"},
        {**UNRECORDED, "auto_mapping": {**AUTO_MAPPING, "lora_B_layout": "grouped_by_expert"}},
        {
            **UNRECORDED,
            "unsloth_fused_expert_lora": {
                "parameters": {name: {"lora_B_layout": "grouped_by_expert"} for name in ("gate_up_proj", "down_proj")}
            },
        },
    ],
    ids=["for all", "in auto_mapping", "by name"],
)
def test_each_record_of_the_layout_is_taken(changes: dict[str, Any], tmp_path: Path) -> None:
    adapter = edited(GROUPED, tmp_path / "adapter", **changes)
    assert equal(merged(adapter, tmp_path / "ours"), merged(GROUPED, tmp_path / "recorded"))


@pytest.mark.parametrize(
    "changes",
    [
        UNRECORDED,
        *({**UNRECORDED, "lora_B_layout": wrong} for wrong in ("mixed", ["rank_major"], {"a": 1}, 10**400)),
        {**UNRECORDED, "lora_B_layout": "rank_major", "auto_mapping": {"lora_B_layout": "grouped_by_expert"}},
    ],
    ids=["no record", "no layout", "a list", "a mapping", "a number", "two records"],
)
def test_unsloths_mark_without_a_layout_is_refused_and_both_ways_are_named(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    adapter = edited(GROUPED, tmp_path / "adapter", **changes)
    outcome = ckpt("merge-lora", adapter, "--base", BASE, "--accept-base", "-o", tmp_path / "out")
    assert outcome.code == 2
    assert "--expert-layout unsloth" in outcome.err
    assert "--expert-layout peft" in outcome.err
    assert not (tmp_path / "out").exists()
    assert equal(
        merged(adapter, tmp_path / "unsloth", "--expert-layout", "unsloth"), merged(GROUPED, tmp_path / "recorded")
    )
    merge_by_peft(BASE, [adapter], tmp_path / "by-peft")
    assert equal(merged(adapter, tmp_path / "peft", "--expert-layout", "peft"), tmp_path / "by-peft")


@pytest.mark.parametrize(("tag", "code"), [("unsloth", 2), ("base_model:adapter:unsloth/Qwen3-30B-A3B", 0)])
def test_unsloths_mark_may_be_in_the_model_card_alone(tag: str, code: int, tmp_path: Path) -> None:
    """TRL's trainer writes this tag when it wraps the model itself. A base's name is not the tag."""
    adapter = edited(GROUPED, tmp_path / "adapter", **{**UNRECORDED, "auto_mapping": None})
    card = adapter / "README.md"
    card.write_text(f"---\nlibrary_name: peft\ntags:\n- sft\n- {tag}\n---\n\n- unsloth\n")
    outcome = ckpt("merge-lora", adapter, "--base", BASE, "--accept-base", "-o", tmp_path / "out")
    assert outcome.code == code, outcome.err
    assert code == 0 or ("README.md" in outcome.err and "--expert-layout unsloth" in outcome.err)
    served = ckpt("convert", "peft", "peft", adapter, "--server", "vllm", "--config", BASE, "-o", tmp_path / "served")
    assert served.code == code, served.err


def test_a_stopped_merge_does_not_go_on_in_another_layout(tmp_path: Path) -> None:
    adapter = edited(GROUPED, tmp_path / "adapter", **UNRECORDED)
    base = to_namespace(package.open(BASE), TRANSFORMERS)
    layouts: tuple[ExpertLayout, ...] = ("peft", "unsloth")
    plans = [plan([open_adapter(str(adapter), expert_layout=layout)], base) for layout in layouts]
    computed = [set(one.plan.checkpoint.computed) for one in plans]
    assert computed[0] and computed[0].isdisjoint(computed[1])


def test_in_python(tmp_path: Path) -> None:
    adapter = edited(GROUPED, tmp_path / "adapter", **UNRECORDED)
    with pytest.raises(UsageError, match="unknown layout for Unsloth's experts") as refused:
        package.merge_lora(adapter, tmp_path / "out", base=BASE, accept_base=True)
    assert "expert_layout='unsloth'" in str(refused.value)
    package.merge_lora(adapter, tmp_path / "out", base=BASE, accept_base=True, expert_layout="unsloth")
    assert equal(tmp_path / "out", merged(GROUPED, tmp_path / "recorded"))


def test_a_merge_by_another_layout_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_is_full(*_: object) -> None:
        raise StorageError("no space on the disk")

    how: dict[str, Any] = {"base": BASE, "accept_base": True}
    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(manifest, "make_manifest", disk_is_full)
        package.merge_lora(GROUPED, tmp_path / "out", expert_layout="unsloth", **how)
    with pytest.raises(UsageError, match="has other options or another source"):
        package.merge_lora(GROUPED, tmp_path / "out", expert_layout="peft", **how)
    assert package.merge_lora(GROUPED, tmp_path / "out", expert_layout="unsloth", **how).num_done


def test_a_model_without_stacked_experts_needs_no_layout(linear: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = edited(linear, tmp_path / "adapter", auto_mapping=AUTO_MAPPING)
    plain = json.loads((linear / "adapter_config.json").read_text())
    assert plain["auto_mapping"] is None or "unsloth_fixed" not in plain["auto_mapping"]
    for one in (adapter, linear):
        assert ckpt("merge-lora", one, "--base", bases["llama"], "-o", tmp_path / one.parent.name).code == 0
    assert equal(tmp_path / adapter.parent.name, tmp_path / linear.parent.name)
