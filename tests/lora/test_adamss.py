"""`ckpt/commands/merge_lora/loaded_model.py`, `ckpt/commands/merge_lora/layer.py`: AdaMSS.

PEFT recomputes AdaMSS's row groups with scikit-learn. `make test-peft` installs scikit-learn.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt.errors import CorruptError, LossError
from tests.lora.test_kinds import LINEAR, Layers, base, case, trained
from tests.support.adapters import compare, differing, edited, load_base, merge, merge_by_peft, same
from tests.support.commands import ckpt

needs_sklearn = pytest.mark.skipif(find_spec("sklearn") is None, reason="scikit-learn is not installed")
CASES = [
    case(*LINEAR, r=8),
    case("first", "bare", r=4, num_subspaces=3, subspace_rank=2, random_seed=5),
    case("bare", r=6, num_subspaces=3, use_dynamic_rank=True, svd_threshold=0.1),
    case("first", r=8, use_asa=True, asa_target_subspaces=3, modules_to_save=["second"]),
]


@pytest.fixture(scope="module")
def adapter(own: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adamss") / "adapter"
    trained(base(own), "ADAMSS", CASES[0], folder)
    return folder


def changed(adapter: Path, folder: Path, state: dict[str, torch.Tensor]) -> Path:
    save_file(state, edited(adapter, folder) / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


@needs_sklearn
@pytest.mark.parametrize("options", CASES)
def test_it_equals_pefts_own_merge(options: dict[str, Any], own: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    trained(base(own), "ADAMSS", options, tmp_path / "adapter")
    state = PeftModel.from_pretrained(base(own), tmp_path / "adapter").merge_and_unload().state_dict()
    merge([tmp_path / "adapter"], own, tmp_path / "merged")
    found, before = load_file(tmp_path / "merged/model.safetensors"), load_file(own / "model.safetensors")
    theirs = {k.replace(".modules_to_save.default", ""): t for k, t in state.items() if ".original_module." not in k}
    assert differing(found, theirs) == []
    targets = {*options["target_modules"], *options.get("modules_to_save", [])}
    assert {name.rpartition(".")[0] for name in found if not same(found[name], before[name])} == targets


@needs_sklearn
def test_it_equals_pefts_own_merge_in_bf16(bases: dict[str, Path], tmp_path: Path) -> None:
    layers = ["q_proj", "down_proj"]
    trained(load_base(bases["qwen2"]), "ADAMSS", case(*layers, r=8), tmp_path / "adapter")
    merge_by_peft(bases["qwen2"], [tmp_path / "adapter"], tmp_path / "peft")
    merge([tmp_path / "adapter"], bases["qwen2"], tmp_path / "ours")
    equal, total, num_changed = compare(tmp_path / "peft", tmp_path / "ours", bases["qwen2"])
    assert equal == total and num_changed >= 2 * len(layers)


@needs_sklearn
def test_what_was_made_anew_is_said(adapter: Path, own: Path, tmp_path: Path) -> None:
    done = ckpt("merge-lora", adapter, "--base", own, "-o", tmp_path / "out")
    assert done.code == 0 and "found the rows that factors are for again" in done.err + done.out
    done = ckpt("verify", own, tmp_path / "out", "--adapter", adapter)
    assert done.code == 0 and "found the rows that factors are for again" in done.err + done.out


@needs_sklearn
def test_another_base_is_refused(adapter: Path, tmp_path: Path) -> None:
    """PEFT continues, and adds updates trained for some rows to other rows."""
    (tmp_path / "other").mkdir()
    torch.manual_seed(9)
    save_file(Layers().state_dict(), tmp_path / "other/model.safetensors")
    done = ckpt("merge-lora", adapter, "--base", tmp_path / "other", "-o", tmp_path / "out")
    assert (done.code, (tmp_path / "out").exists()) == (LossError.exit_code, False)
    assert "unknown rows for this adapter's factors" in done.err


@needs_sklearn
def test_groups_of_other_sizes_are_refused(adapter: Path, own: Path, tmp_path: Path) -> None:
    state = load_file(adapter / "adapter_model.safetensors")
    fqn = "base_model.model.first.adamss_B.0"
    folder = changed(adapter, tmp_path / "short", state | {fqn: state[fqn][:-1].contiguous()})
    done = ckpt("merge-lora", folder, "--base", own, "-o", tmp_path / "out")
    assert (done.code, (tmp_path / "out").exists()) == (LossError.exit_code, False) and fqn in done.err


@needs_sklearn
def test_a_factor_that_lacks_is_refused_by_name(adapter: Path, own: Path, tmp_path: Path) -> None:
    state = load_file(adapter / "adapter_model.safetensors")
    for number, fqn in enumerate(sorted(state)):
        folder = changed(adapter, tmp_path / str(number), {k: t for k, t in state.items() if k != fqn})
        done = ckpt("merge-lora", folder, "--base", own, "-o", tmp_path / "out")
        assert (done.code, (tmp_path / "out").exists()) == (CorruptError.exit_code, False) and fqn in done.err


@pytest.mark.skipif(find_spec("sklearn") is not None, reason="scikit-learn is installed")
@pytest.mark.parametrize("has_folder", [False, True])
def test_without_scikit_learn_it_is_asked_for(
    has_folder: bool, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder named sklearn is not the package, and no other adapter kind needs scikit-learn."""
    if has_folder:
        (tmp_path / "sklearn").mkdir()
        monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "ADAMSS", "target_modules": ["first"], "r": 2}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    state = {"base_model.model.first.adamss_A.0": torch.zeros(1, 2)}
    save_file(state, tmp_path / "adapter/adapter_model.safetensors", metadata={"format": "pt"})
    done = ckpt("merge-lora", tmp_path / "adapter", "--base", own, "-o", tmp_path / "out")
    assert (done.code, (tmp_path / "out").exists()) == (2, False) and "PEFT needs another package" in done.err
    assert "scikit-learn" in done.err or "sklearn" in done.err
    trained(base(own), "LORA", {"target_modules": ["first"], "r": 2}, tmp_path / "lora")
    assert ckpt("merge-lora", tmp_path / "lora", "--base", own, "-o", tmp_path / "out").code == 0
