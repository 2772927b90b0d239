"""`converters/names/adapter_settings.py`: an adapter's settings in `ckpt check` and merge-lora."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt as toolkit
from ckpt.base.errors import CkptError, CorruptError
from ckpt.commands.merge_lora.find import open_adapter
from tests.support.adapters import edited
from tests.support.commands import ckpt


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("adapter")
    get_peft_model(Layers(), LoraConfig(r=3, lora_alpha=7, target_modules=["up", "down"])).save_pretrained(folder)
    return folder


def loads_in_peft(folder: Path) -> bool:
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            PeftModel.from_pretrained(Layers(), folder).merge_and_unload()
        except Exception:
            return False
    return True


#: Values that PEFT loads and merges.
ACCEPTED: list[dict[str, Any]] = [
    *({"lora_alpha": value} for value in (16.5, 0, -4, True, 1e30)),
    *({"use_rslora": value} for value in (1, 0, None, True, "yes")),
    *({"fan_in_fan_out": value} for value in (0, None, "")),
    *({"use_dora": value} for value in (None, 0, False)),
    *({"bias": value} for value in ("all", "lora_only")),
    *({"alpha_pattern": {"up": value}} for value in (0, -3, 1.5)),
    *({"modules_to_save": value} for value in (None, [], {})),
    *({"base_model_name_or_path": value} for value in (3, None)),
    *({"init_lora_weights": value} for value in (None, False, True, "gaussian")),
    *({"revision": 3}, {"task_type": None}, {"target_parameters": None}, {"nope": None}, {"nope": 0}),
    *({"auto_mapping": 3}, {"peft_version": 3}, {"runtime_config": None}, {"trainable_token_indices": None}),
]
#: Values that PEFT rejects.
BROKEN: list[dict[str, Any]] = [
    *({"lora_alpha": value} for value in (None, "x", [16])),
    *({"r": value} for value in (None, "3", 3.0, 0, -1, True, 16)),
    *({"bias": value} for value in ("nope", ["all"])),
    *({"rank_pattern": value} for value in ([], {"up": "3"}, {"up": None}, {"(": 3}, {"up": 4})),
    *({"alpha_pattern": value} for value in ("x", {"up": "4"}, {"up": None})),
    *({"peft_type": value} for value in (None, 3, "lora", "Ia3 ", "prefix_tuning")),
    *({"target_parameters": "x"}, {"modules_to_save": [3]}),
    *({"trainable_token_indices": value} for value in ("x", {"embed": [1]}, {"embed": "x"})),
]


@pytest.mark.parametrize("entry", ACCEPTED, ids=str)
def test_settings_that_peft_merges_are_whole(entry: dict[str, Any], adapter: Path, tmp_path: Path) -> None:
    changed = edited(adapter, tmp_path / "changed", **entry)
    assert loads_in_peft(changed)
    checked = toolkit.check(changed)
    assert checked.whole, str(checked)
    open_adapter(str(changed))


@pytest.mark.parametrize("entry", BROKEN, ids=str)
def test_settings_that_peft_cannot_load_are_damage(entry: dict[str, Any], adapter: Path, tmp_path: Path) -> None:
    changed = edited(adapter, tmp_path / "changed", **entry)
    assert not loads_in_peft(changed)
    checked = ckpt("check", changed)
    assert checked.code == CorruptError.exit_code and "every part" not in checked.out
    with pytest.raises(CorruptError) as refused:
        open_adapter(str(changed))
    assert refused.value.what in checked.out


@pytest.mark.parametrize(
    "entry", [{"nope": True}, {"nope": [1]}, {"init_lora_weights": "nope"}, {"peft_type": "NOPE"}], ids=str
)
def test_unknown_settings_are_named_and_not_called_whole(entry: dict[str, Any], adapter: Path, tmp_path: Path) -> None:
    checked = ckpt("check", edited(adapter, tmp_path / "changed", **entry))
    assert checked.code == 0 and "whole" not in checked.out and "every part" not in checked.out
    assert str(next(iter(entry.values())) if "nope" not in entry else "nope") in checked.out


@pytest.mark.parametrize("entry", [{"use_qalora": True}, {"layer_replication": [[0, 1]]}], ids=str)
def test_settings_that_are_not_merged_are_noted(entry: dict[str, Any], adapter: Path, tmp_path: Path) -> None:
    changed = edited(adapter, tmp_path / "changed", **entry)
    checked = ckpt("check", changed)
    with pytest.raises(CkptError) as refused:
        open_adapter(str(changed))
    assert checked.code == 0 and refused.value.what in checked.out


def test_adapter_that_lacks_a_magnitude_or_trained_tokens_is_damaged(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file

    options: dict[str, Any] = {"use_dora": True, "trainable_token_indices": {"embed": [1, 2]}}
    get_peft_model(Layers(), LoraConfig(target_modules=["up", "down"], **options)).save_pretrained(tmp_path / "whole")
    assert toolkit.check(tmp_path / "whole").whole
    for part, what in (
        ("magnitude", "disagree about use_dora"),
        ("trainable_tokens", "lacks the trained token rows"),
    ):
        broken = edited(tmp_path / "whole", tmp_path / part)
        stored = load_file(broken / "adapter_model.safetensors")
        kept = {name: tensor for name, tensor in stored.items() if part not in name}
        save_file(kept, broken / "adapter_model.safetensors")
        checked = ckpt("check", broken)
        assert checked.code == CorruptError.exit_code and what in checked.out, checked.out


@pytest.mark.parametrize(
    ("trained", "entry"),
    [("lora_bias", "lora_bias"), ("use_dora", "use_dora"), ("kasa_config", "kasa_config"), (None, "lora_bias")],
)
def test_a_config_that_contradicts_the_tensors_is_damage(trained: str | None, entry: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.config import KasaConfig

    on: Any = KasaConfig() if entry == "kasa_config" else True
    config = LoraConfig(r=2, target_modules=["up", "down"], **{trained: on} if trained else {})
    get_peft_model(Layers(), config).save_pretrained(tmp_path / "whole")
    assert toolkit.check(tmp_path / "whole").whole
    changed = edited(tmp_path / "whole", tmp_path / "changed", **{entry: None if trained else on})
    checked = ckpt("check", changed)
    assert checked.code == CorruptError.exit_code and f"disagree about {entry}" in checked.out, checked.out
    with pytest.raises(CorruptError, match=f"disagree about {entry}"):
        open_adapter(str(changed))
