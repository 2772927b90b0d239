"""`ckpt/commands/merge_lora/loaded_model.py`: adapters that PEFT merges in the loaded model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ckpt.errors import CorruptError, StorageError
from tests.lora.test_kinds import case, trained
from tests.support.adapters import compare, differing, edited, load_base, merge, merge_by_peft, same, weights
from tests.support.commands import ckpt

#: Adapters whose file omits tensors that PEFT derives from the layer order.
UNTOLD: dict[str, dict[str, Any]] = {
    "FROD": {"save_projection": False, "sparse_rate": 0.1},
    "TINYLORA": {"save_projection": False, "r": 2, "u": 6, "weight_tying": 0.4},
    "UNILORA": {"theta_d_length": 31},
}
#: Adapters whose file contains them.
TOLD = {
    "FROD": {"sparse_rate": 0.1},
    "TINYLORA": {"r": 2, "u": 6, "weight_tying": 0.4},
    "UNILORA": {"theta_d_length": 31, "save_indices": True},
}
LAYERS = ["q_proj", "v_proj"]


class Tower(nn.Module):
    """A model unknown to transformers, with layers out of alphabetical order."""

    def __init__(self) -> None:
        super().__init__()
        self.right = nn.ModuleDict({"query": nn.Linear(12, 12), "key": nn.Linear(12, 8)})
        self.left = nn.ModuleDict({"query": nn.Linear(12, 12), "key": nn.Linear(12, 8)})
        self.head = nn.Linear(12, 4)


def tower() -> Tower:
    torch.manual_seed(0)
    return Tower()


@pytest.fixture
def unknown(tmp_path: Path) -> Path:
    (tmp_path / "tower").mkdir()
    save_file(tower().state_dict(), tmp_path / "tower/model.safetensors")
    return tmp_path / "tower"


def adapter_of(base: Path, folder: Path, kind: str, **options: Any) -> Path:
    trained(load_base(base), kind, {"target_modules": LAYERS} | options, folder)
    return folder


def state_of(adapter: Path) -> dict[str, torch.Tensor]:
    return load_file(adapter / "adapter_model.safetensors")


def changed(adapter: Path, folder: Path, state: dict[str, torch.Tensor]) -> Path:
    save_file(state, edited(adapter, folder) / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def is_pefts(adapter: Path, base: Path, folder: Path) -> bool:
    merge_by_peft(base, [adapter], folder / "peft")
    merge([adapter], base, folder / "ours")
    equal, total, num_changed = compare(folder / "peft", folder / "ours", base)
    return equal == total and num_changed > 0


@pytest.mark.parametrize("kind", ["FROD", "UNILORA"])
def test_an_unknown_model_is_merged_if_the_order_of_layers_does_not_matter(
    kind: str, unknown: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    for options, is_merged in ((TOLD, True), (UNTOLD, False)):
        adapter, out = tmp_path / f"adapter-{is_merged}", tmp_path / f"out-{is_merged}"
        trained(tower(), kind, case("query", "key", **options[kind]), adapter)
        done = ckpt("merge-lora", adapter, "--base", unknown, "-o", out)
        if is_merged:
            theirs = PeftModel.from_pretrained(tower(), adapter).merge_and_unload().state_dict()
            ours = load_file(out / "model.safetensors")
            assert differing(ours, theirs) == []
        else:
            assert (done.code, out.exists()) == (2, False) and "transformers doesn't know this base" in done.err


@pytest.mark.parametrize("kind", UNTOLD)
def test_modules_that_are_saved_whole_are_merged_as_well(kind: str, bases: dict[str, Path], tmp_path: Path) -> None:
    options = UNTOLD[kind] | {"modules_to_save": ["layers.0.mlp.up_proj"]}
    assert is_pefts(adapter_of(bases["qwen2"], tmp_path / "adapter", kind, **options), bases["qwen2"], tmp_path)


@pytest.mark.parametrize("kind", ["FROD", "TINYLORA"])
def test_a_tensor_that_is_missing_or_does_not_fit_is_refused_by_name(
    kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = adapter_of(bases["qwen2"], tmp_path / "adapter", kind, **TOLD[kind])
    whole = state_of(adapter)
    kinds = {re.sub(r"\d+", "", fqn).rpartition(".")[2]: fqn for fqn in sorted(whole)}  # one of each
    for number, fqn in enumerate(kinds.values()):
        for name, state in (
            ("lacks", {other: tensor for other, tensor in whole.items() if other != fqn}),
            ("short", whole | {fqn: whole[fqn][..., :-1].contiguous()}),
        ):
            folder = changed(adapter, tmp_path / f"{name}{number}", state)
            done = ckpt("merge-lora", folder, "--base", bases["qwen2"], "-o", tmp_path / "out")
            assert (done.code, (tmp_path / "out").exists()) == (CorruptError.exit_code, False), (name, fqn, done.err)
            assert fqn.rpartition(".")[2] in done.err, (name, fqn, done.err)


def test_a_basis_of_another_machine_is_used_for_both_of_its_parts(bases: dict[str, Path], tmp_path: Path) -> None:
    """An eigenvector's sign is arbitrary. PEFT decomposes by its own basis and multiplies by the saved one."""
    adapter = adapter_of(bases["qwen2"], tmp_path / "adapter", "FROD", **TOLD["FROD"])
    whole = {fqn: t * (0 if "_s_values" in fqn else 1) for fqn, t in state_of(adapter).items()}
    found = []
    for name, sign in (("same", 1), ("turned", -1)):
        state = {fqn: t * sign if ".frod_V." in fqn else t for fqn, t in whole.items()}
        merge([changed(adapter, tmp_path / name, state)], bases["qwen2"], tmp_path / f"{name}-merged")
        found.append(weights(tmp_path / f"{name}-merged"))
    assert all(torch.allclose(found[0][name].float(), found[1][name].float(), atol=1e-2) for name in found[0])


def test_several_adapters_in_turn(bases: dict[str, Path], tmp_path: Path) -> None:
    """The basis depends on weights from an earlier adapter. A later copy would hide the merge."""
    base = bases["qwen2"]
    first = adapter_of(base, tmp_path / "first", "LORA", target_modules=["o_proj"], modules_to_save=["q_proj"])
    merge([first], base, tmp_path / "between")
    second = adapter_of(tmp_path / "between", tmp_path / "second", "FROD", **UNTOLD["FROD"])
    merge_by_peft(tmp_path / "between", [second], tmp_path / "peft")
    merge([first, second], base, tmp_path / "merged")
    assert compare(tmp_path / "peft", tmp_path / "merged", base)[0] == len(weights(base))
    done = ckpt("merge-lora", second, first, "--base", base, "--accept-base", "-o", tmp_path / "out")
    assert (done.code, (tmp_path / "out").exists()) == (2, False)
    assert "contains its own copy of this parameter, and an earlier adapter changes it" in done.err


def test_peft_computes_with_as_many_threads_as_the_process(tmp_path: Path) -> None:
    """Parallel merges use one thread per tensor. With another number, FRoD's bits change."""
    from peft import PeftModel

    def wide() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict({"out": nn.Linear(512, 512)})

    base, adapter, num = tmp_path / "base", tmp_path / "adapter", torch.get_num_threads()
    base.mkdir()
    save_file(wide().state_dict(), base / "model.safetensors")
    torch.set_num_threads(2)
    try:
        trained(wide(), "FROD", case("out", **TOLD["FROD"]), adapter)
        expected = PeftModel.from_pretrained(wide(), adapter).merge_and_unload().state_dict()
        merge([adapter], base, tmp_path / "merged")
    finally:
        torch.set_num_threads(num)
    found = load_file(tmp_path / "merged/model.safetensors")
    assert all(same(found[name], expected[name]) for name in expected)


def test_the_memory_is_checked_before_anything_is_loaded(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = adapter_of(bases["qwen2"], tmp_path / "adapter", "UNILORA", **UNTOLD["UNILORA"])
    command = ("merge-lora", adapter, "--base", bases["qwen2"], "-o", tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("ckpt.commands.merge_lora.loaded_model.available_memory", lambda: 1000)
        done = ckpt(*command)
        assert (done.code, (tmp_path / "out").exists()) == (StorageError.exit_code, False)
        assert "not enough memory" in done.err and "found: 1.00 kB available" in done.err
        needed = re.search(r"expected: about (.*)", done.err)
        assert needed is not None
        assert ckpt("verify", bases["qwen2"], bases["qwen2"], "--adapter", adapter).code == StorageError.exit_code
        patch.setattr("ckpt.commands.merge_lora.loaded_model.available_memory", lambda: None)
        assert ckpt(*command, "--dry-run").code == 0
    done = ckpt(*command)
    assert done.code == 0 and f"which takes about {needed[1]} of memory" in done.err + done.out


@pytest.mark.parametrize("kind", UNTOLD)
def test_verify_compares_every_bit(kind: str, bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = adapter_of(bases["qwen2"], tmp_path / "adapter", kind, **UNTOLD[kind])
    out = tmp_path / "out"
    done = ckpt("merge-lora", adapter, "--base", bases["qwen2"], "-o", out)
    assert done.code == 0 and "changed the weights of 4 of 4 targets" in done.err + done.out
    done = ckpt("verify", bases["qwen2"], out, "--adapter", adapter)
    assert done.code == 0 and "4 tensors that it targets" in done.out and "every bit compared" in done.out
    state = weights(out)
    state["model.layers.0.self_attn.q_proj.weight"][0, 0] += 1
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (out / "ckpt-manifest.json").unlink()
    done = ckpt("verify", bases["qwen2"], out, "--adapter", adapter)
    assert done.code == 1 and "q_proj.weight: differs from the adapter's result" in done.out


def test_a_layer_to_which_nothing_is_added_is_told_from_one_that_is_rounded_away(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = adapter_of(bases["qwen2"], tmp_path / "adapter", "UNILORA", **TOLD["UNILORA"])
    base = tmp_path / "base"
    shutil.copytree(bases["qwen2"], base)
    large = {name: torch.full_like(t, 64.0) if "_proj" in name else t for name, t in weights(base).items()}
    save_file(large, base / "model.safetensors", metadata={"format": "pt"})
    for name, factor, said in (
        ("zero", 0.0, "to 4 nothing was to be added"),
        ("tiny", 1.0, "rounded away in bfloat16"),
    ):
        state = {fqn: t * factor if t.is_floating_point() else t for fqn, t in state_of(adapter).items()}
        folder = changed(adapter, tmp_path / name, state)
        done = ckpt("merge-lora", folder, "--base", base, "--accept-base", "-o", tmp_path / f"{name}-out")
        assert done.code == 0 and said in done.err + done.out, (name, done.err)


@pytest.mark.parametrize(
    ("kind", "options"), [("LOHA", {"r": 4}), ("BEFT", {}), ("VERA", {"r": 4}), ("IA3", {"feedforward_modules": []})]
)
def test_a_kind_that_the_tables_do_not_have_is_merged_by_peft(
    kind: str, options: dict[str, Any], bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test imitates a newer PEFT's kind, with the installed PEFT's config entries."""
    adapter = adapter_of(bases["qwen2"], tmp_path / "adapter", kind, **options)
    for module in ("commands.merge_lora.merge", "commands.merge_lora.layer", "adapters.entries"):
        monkeypatch.setattr(f"ckpt.{module}.KINDS", ("LORA",))
    for table in ("BY_LAYER", "BY_MODEL"):
        monkeypatch.setattr(f"ckpt.commands.merge_lora.merge.{table}", ())
    assert is_pefts(adapter, bases["qwen2"], tmp_path)
    newer = edited(adapter, tmp_path / "newer", use_newthing=True)
    done = ckpt("merge-lora", newer, "--base", bases["qwen2"], "-o", tmp_path / "out")
    assert (done.code, (tmp_path / "out").exists()) == (2, False)
    assert "does not know this adapter's settings" in done.err and "use_newthing" in done.err


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("NEWKIND", "the installed PEFT doesn't know this adapter type"),
        ("PREFIX_TUNING", "PEFT can't merge this adapter type"),
        ("LILY", "PEFT does not merge this adapter: This method is not supported for Lily"),
    ],
)
def test_a_kind_that_peft_does_not_merge_is_refused_by_name(
    kind: str, said: str, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.adapters.config.NOT_MERGED", ())
    adapter = tmp_path / "adapter"
    if kind == "LILY":
        adapter_of(bases["qwen2"], adapter, kind, r=2)
    else:
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": kind, "target_modules": LAYERS}))
        save_file({"base_model.x": torch.zeros(2)}, adapter / "adapter_model.safetensors")
    done = ckpt("merge-lora", adapter, "--base", bases["qwen2"], "-o", tmp_path / "out")
    assert (done.code, (tmp_path / "out").exists()) == (2, False)
    assert said in done.err and f"peft_type {kind}".replace("NEWKIND", "'NEWKIND'") in done.err
