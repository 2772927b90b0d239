"""`ckpt/adapters/config.py`: refuse inits that move a part of the base into the adapter."""

from __future__ import annotations

import copy
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.adapters import edited, load_base, merge_by_peft, perturb, save_adapter, save_base, weights
from tests.support.commands import ckpt


def prepared(init: str, model: Any) -> Any:
    """Return the config for `init`. Inits based on data run the model, as in PEFT's own scripts."""
    from peft import LoraConfig
    from peft.tuners.lora.config import CordaConfig, LoraGAConfig
    from peft.tuners.lora.loraga import preprocess_loraga

    ids = torch.randint(0, model.config.vocab_size, (4, 32), generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"]}
    if init == "corda":
        # PEFT needs only this name from the package attrs, but does not require the package
        with mock.patch.dict(sys.modules, {"attr": types.SimpleNamespace(dataclass=dataclass)}):
            from peft.tuners.lora.corda import preprocess_corda
        config = LoraConfig(**options, init_lora_weights=init, corda_config=CordaConfig(corda_method="kpm"))
        preprocess_corda(model, config, run_model=lambda: model(input_ids=ids[:1]))
        return config
    if init == "lora_ga":
        config = LoraConfig(**options, init_lora_weights=init, lora_ga_config=LoraGAConfig())
        preprocess_loraga(model, config, lambda: model(input_ids=ids, labels=ids).loss.backward())
        return config
    return LoraConfig(**options, init_lora_weights=init)


def trained(init: str, base: Path, folder: Path) -> None:
    """Save the adapter, the base as changed by the init, and PEFT's merge of the live model."""
    from peft import get_peft_model

    base_model = load_base(base)
    model = get_peft_model(base_model, prepared(init, base_model))
    perturb(model, 1)
    model.save_pretrained(folder / "adapter")
    copy.deepcopy(model).merge_and_unload().save_pretrained(folder / "live")
    model.unload().save_pretrained(folder / "left")


@pytest.mark.parametrize("init", ["pissa_niter_4", "corda", "lora_ga"])
def test_it_is_refused_and_merged_into_the_base_that_the_init_left(init: str, tmp_path: Path) -> None:
    base = save_base("llama", torch.float32, tmp_path / "base")
    trained(init, base, tmp_path)
    refused = ckpt("merge-lora", tmp_path / "adapter", "--base", base, "-o", tmp_path / "none")
    assert refused.code == 2 and "set init_lora_weights to true in a copy of adapter_config.json" in refused.err
    plain = edited(tmp_path / "adapter", tmp_path / "plain", init_lora_weights=True)
    merge_by_peft(tmp_path / "left", [plain], tmp_path / "peft")
    done = ckpt("merge-lora", plain, "--base", tmp_path / "left", "-o", tmp_path / "ours")
    assert done.code == 0, done.err
    ours, theirs, live = (weights(tmp_path / name) for name in ("ours", "peft", "live"))
    assert ours.keys() == theirs.keys() == live.keys()
    assert all(torch.equal(ours[name], theirs[name]) and torch.equal(ours[name], live[name]) for name in ours)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(weights(tmp_path / "left")[name], weights(base)[name])


@pytest.mark.parametrize("init", ["pissa_niter_16", "corda", "loftq", "lora_ga", "LoRA_GA"])
def test_every_such_init_is_refused_by_its_name(init: str, bases: dict[str, Path], tmp_path: Path) -> None:
    adapter = save_adapter(bases["llama"], tmp_path / "adapter", {"target_modules": ["q_proj"]})
    refused = ckpt("merge-lora", edited(adapter, tmp_path / "other", init_lora_weights=init), "-o", tmp_path / "out")
    assert refused.code == 2 and f"init_lora_weights: {init!r}" in refused.err and not (tmp_path / "out").exists()
