"""`ckpt/adapters/peft_rules.py`, `entries.py`: settings of older and newer PEFT releases."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.adapters import entries as adapter_entries
from ckpt.adapters.config import KINDS, LORA, parse_config
from ckpt.adapters.peft_rules import with_explicit_patterns
from ckpt.errors import LossError, UsageError
from tests.support.adapters import edited, save_adapter, weights
from tests.support.commands import ckpt

LAYERS = ("layers.0.q_proj", "layers.0.v_proj", "lm_head")
#: Alpha of these layers (default 8) for patterns of rank and alpha, measured on live models under PEFT 0.13.2, 0.14.0
#: and 0.15.2. PEFT 0.8.2, 0.10.0 and 0.12.0 behave like 0.13.2.
LIVE: list[tuple[dict[str, int], dict[str, int], tuple[tuple[int, ...], ...]]] = [
    ({}, {"q_proj": 64}, ((64, 8, 8), (64, 8, 8), (64, 8, 8))),
    ({}, {"q_proj|v_proj": 64}, ((64, 8, 8), (64, 8, 8), (64, 64, 8))),
    ({}, {"lm_head": 64}, ((8, 8, 64), (8, 8, 64), (8, 8, 64))),
    ({}, {"^lm_head$": 64}, ((8, 8, 8), (8, 8, 8), (8, 8, 64))),
    ({}, {"^layers.0.q_proj": 64}, ((8, 8, 8), (8, 8, 8), (64, 8, 8))),
    ({"q_proj": 4}, {".*q_proj": 64}, ((8, 8, 8), (64, 8, 8), (64, 8, 8))),
    ({"q_proj": 4}, {"q_proj": 64}, ((64, 8, 8), (64, 8, 8), (64, 8, 8))),
]
RELEASES = ("0.13.2", "0.14.0", "0.15.2")


def alphas(raw: dict[str, Any], **more: Any) -> tuple[float, ...]:
    raw = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, **raw, **more}
    ranks = {layer: raw["rank_pattern"].get("q_proj", 2) if "q_proj" in layer else 2 for layer in LAYERS}
    config = parse_config(with_explicit_patterns(raw, "adapter_config.json", ranks), Path("adapter_config.json"))
    assert {layer: config.rank_of(layer) for layer in LAYERS} == ranks
    return tuple(config.alpha_of(layer) for layer in LAYERS)


@pytest.mark.parametrize(("ranks", "given", "live"), LIVE)
def test_patterns_are_read_by_the_rule_of_the_release(
    ranks: dict[str, int], given: dict[str, int], live: tuple[tuple[int, ...], ...]
) -> None:
    patterns = {"rank_pattern": ranks, "alpha_pattern": given}
    assert tuple(alphas(patterns, peft_version=release) for release in RELEASES) == live
    if len(set(live)) == 1:
        assert alphas(patterns) == live[0], "no release is needed"
    else:
        with pytest.raises(UsageError) as refused:
            alphas(patterns)
        assert "read rank_pattern and alpha_pattern differently" in str(refused.value)


def test_entries_date_a_config_without_a_release() -> None:
    from peft import LoraConfig

    written = {
        **LoraConfig().to_dict(),
        "peft_type": "LORA",
        "alpha_pattern": {"q_proj|v_proj": 64},
        "rank_pattern": {},
        "r": 2,
    }
    later = {"peft_version", "alora_invocation_tokens", "arrow_config", "ensure_weight_tying", "target_parameters"}
    later |= {"qalora_group_size", "use_qalora", "lora_ga_config", "use_bdlora", "monteclora_config", "velora_config"}
    later |= {"kasa_config"}
    of_15 = {key: value for key, value in written.items() if key not in later}
    of_14 = {key: value for key, value in of_15.items() if key not in ("corda_config", "trainable_token_indices")}
    of_13 = {key: value for key, value in of_14.items() if key not in ("eva_config", "exclude_modules", "lora_bias")}
    assert alphas(of_15) == (64, 64, 8)
    assert alphas(of_14) == (64, 8, 8)
    assert alphas(of_13) == (64, 8, 8)
    joint = {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {".*q_proj": 64}}
    assert (alphas(of_14 | joint)[0], alphas(of_13 | joint)[0]) == (64, 8)
    for dropped in ("eva_config", "exclude_modules", "use_rslora"):  # a hand-edited config
        with pytest.raises(UsageError):
            alphas({key: value for key, value in of_14.items() if key != dropped})


def test_ranks_in_the_file_decide_between_rules() -> None:
    raw = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "rank_pattern": {"q_proj|v_proj": 4}}
    raw["alpha_pattern"] = {"q_proj|v_proj": 64}
    for rank, alpha in ((2, 8), (4, 64)):
        ranks = {"layers.0.q_proj": 4, "layers.0.v_proj": rank}
        config = parse_config(with_explicit_patterns(raw, "x", ranks), Path("x"))
        assert (config.rank_of("layers.0.v_proj"), config.alpha_of("layers.0.v_proj")) == (rank, alpha)


def scaling_of(base: Path, adapter: Path, merged: Path, layer: str) -> float:
    name, factors = f"model.layers.0.self_attn.{layer}.weight", weights(adapter)
    a, b = (factors[f"base_model.model.model.layers.0.self_attn.{layer}.lora_{one}.weight"] for one in "AB")
    added = weights(merged)[name].double() - weights(base)[name].double()
    return float((added / (b.double() @ a.double())).median())


def test_the_release_is_asked_for_and_every_answer_works(bases: dict[str, Path], tmp_path: Path) -> None:
    base, targets = bases["llama"], {"target_modules": ["q_proj", "o_proj"]}
    adapter = save_adapter(base, tmp_path / "trained", targets)
    kept = ("peft_type", "r", "lora_alpha", "target_modules", "task_type", "bias", "base_model_name_or_path")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config = {key: config[key] for key in kept} | {"alpha_pattern": {"q_proj|o_proj": 63}}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    given = ("merge-lora", adapter, "--base", base)
    refused = ckpt(*given, "-o", tmp_path / "out")
    assert (refused.code, (tmp_path / "out").exists()) == (2, False)
    assert "--peft-version 0.13" in refused.err and "o_proj" in refused.err
    for release, expected in (("0.13", 7 / 3), ("0.14", 7 / 3), ("0.15", 21)):
        out = tmp_path / release
        done = ckpt(*given, "-o", out, "--peft-version", release)
        assert done.code == 0, done.err
        assert math.isclose(scaling_of(base, adapter, out, "q_proj"), 21, rel_tol=0.05)
        assert math.isclose(scaling_of(base, adapter, out, "o_proj"), expected, rel_tol=0.05)
        assert ckpt("verify", base, out, "--adapter", adapter, "--peft-version", release).code == 0
    assert ckpt("verify", base, tmp_path / "0.13", "--adapter", adapter, "--peft-version", "0.15").code == 1
    written = edited(adapter, tmp_path / "written", peft_version="0.13.2")
    assert ckpt("merge-lora", written, "--base", base, "-o", tmp_path / "by-file").code == 0
    recorded = ckpt("merge-lora", written, "--base", base, "-o", tmp_path / "both", "--peft-version", "0.15")
    assert recorded.code == 0 and "records PEFT 0.13.2" in recorded.err
    for folder in ("by-file", "both"):
        assert torch.equal(*(weights(tmp_path / f)["model.layers.0.self_attn.o_proj.weight"] for f in (folder, "0.13")))
    assert ckpt(*given, "-o", tmp_path / "no", "--peft-version", "newest").code == 2


def test_unknown_entries_are_refused_unless_they_are_off_or_accepted(
    linear: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    entries: dict[str, Any] = {"use_newthing": True, "newthing_config": {"gate": "softmax"}}
    adapter = edited(linear, tmp_path / "newer", peft_version="0.25.0", **entries)
    given = ("merge-lora", adapter, "--base", bases["llama"])
    refused = ckpt(*given, "-o", tmp_path / "out")
    assert (refused.code, (tmp_path / "out").exists()) == (6, False)
    assert "use_newthing" in refused.err and "newthing_config" in refused.err and "0.25.0" in refused.err
    assert ckpt("verify", bases["llama"], bases["llama"], "--adapter", adapter).code == 6
    one = ckpt(*given, "-o", tmp_path / "out", "--accept-setting", "use_newthing")
    assert one.code == 6 and "found: newthing_config" in one.err
    both = ("--accept-setting", "use_newthing", "--accept-setting", "newthing_config")
    assert ckpt(*given, "-o", tmp_path / "out", *both).code == 0
    assert ckpt("verify", bases["llama"], tmp_path / "out", "--adapter", adapter, *both).code == 0
    off = edited(linear, tmp_path / "off", use_newthing=False, newthing_config=None, newthing_layers=[])
    assert ckpt("merge-lora", off, "--base", bases["llama"], "-o", tmp_path / "plain").code == 0


def test_every_entry_of_the_installed_peft_is_in_the_table() -> None:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    methods = {kind.value: made for kind, made in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    for kind in KINDS:
        fields = [field.name for field in dataclasses.fields(methods[kind])]
        assert [name for name in fields if not adapter_entries.is_known(kind, name)] == [], kind
    parts = (adapter_entries.HARMLESS, adapter_entries.READ, adapter_entries.REFUSED)
    assert sum(map(len, parts)) == len(frozenset().union(*parts))
    assert adapter_entries.HARMLESS.isdisjoint(adapter_entries.OF_PEFT)


def test_a_setting_that_the_installed_peft_would_ignore_is_refused(own: Path, tmp_path: Path) -> None:
    from ckpt.commands.merge_lora.layer import check_installed

    config = parse_config({"peft_type": "LOHA", "r": 2, "wavelet_family": "db2"}, Path("adapter_config.json"))
    with pytest.raises(UsageError) as refused:
        check_installed(config)
    assert "wavelet_family" in str(refused.value)


def test_an_unknown_entry_of_mlx_is_refused(tmp_path: Path) -> None:
    from ckpt.adapters.config import read_raw

    file = tmp_path / "adapter_config.json"
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0}
    file.write_text(json.dumps({"fine_tune_type": "lora", "lora_parameters": parameters}))
    assert read_raw(file)["lora_alpha"] == 8
    file.write_text(json.dumps({"fine_tune_type": "lora", "lora_parameters": {**parameters, "gate": "softmax"}}))
    with pytest.raises(UsageError) as refused:
        read_raw(file)
    assert "gate" in str(refused.value)


def test_an_unknown_init_is_refused_by_name() -> None:
    known = (True, False, None, "gaussian", "EVA", "olora", "pissa", "pissa_niter_4", "loftq", "mica", "orthogonal")
    assert not any(adapter_entries.unknown({"peft_type": LORA, "init_lora_weights": init}) for init in known)
    raw = {"peft_type": LORA, "init_lora_weights": "newinit"}
    with pytest.raises(LossError) as refused:
        adapter_entries.check(raw, "adapter_config.json", option="accept_settings")
    assert "init_lora_weights: 'newinit'" in str(refused.value)
    adapter_entries.check(raw, "adapter_config.json", ["init_lora_weights"])
