"""`ckpt/adapters/entry_values.py`, `ckpt/adapters/shapes.py`, `ckpt/adapters/targets.py`: configs that PEFT refuses."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckpt as toolkit
from ckpt.adapters import entry_values
from ckpt.commands.merge_lora.find import open_adapter
from ckpt.errors import CorruptError
from tests.support.adapters import edited
from tests.support.commands import ckpt
from tests.support.places import FIXTURES

TARGETS = ["up", "down"]
#: Options of an adapter of each kind, as PEFT needs them for these layers.
OPTIONS: dict[str, dict[str, Any]] = {
    "LORA": {"r": 2},
    "ADALORA": {"init_r": 3, "target_r": 2, "total_step": 10},
    "BEFT": {},
    "BOFT": {"boft_block_size": 2},
    "C3A": {"block_size": 2},
    "DEFT": {"r": 2},
    "DELORA": {"r": 2},
    "FOURIERFT": {"n_frequency": 5},
    "GLORA": {"r": 2},
    "GRALORA": {"r": 2, "gralora_k": 2},
    "HIRA": {"r": 2},
    "HRA": {"r": 2},
    "IA3": {"feedforward_modules": ["down"]},
    "LN_TUNING": {"target_modules": ["norm"]},
    "LOHA": {"r": 2},
    "LOKR": {"r": 1, "decompose_both": True},
    "MISS": {"r": 2},
    "OFT": {"r": 2, "oft_block_size": 0},
    "PEANUT": {"r": 2},
    "PSOFT": {"r": 2, "psoft_alpha": 2},
    "PVERA": {"r": 2},
    "RANDLORA": {"r": 2},
    "ROAD": {"group_size": 2},
    "SHIRA": {"r": 1},
    "SUPERTUNING": {"sparsity": 0.5},
    "TINYLORA": {"r": 2, "u": 4},
    "TRAINABLE_TOKENS": {"token_indices": [0, 1], "target_modules": ["embed"]},
    "UNILORA": {"r": 2, "theta_d_length": 16},
    "VBLORA": {"vector_length": 2, "num_vectors": 5, "r": 2},
    "VERA": {"r": 2},
    "WAVEFT": {"n_frequency": 5},
}


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)


LAYERS = Layers()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: trained(kind, tmp_path_factory.mktemp("adapters") / kind) for kind in OPTIONS}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_file(LAYERS.state_dict(), folder / "model.safetensors")
    return folder


def trained(kind: str, folder: Path, **options: Any) -> Path:
    from peft import get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    settings = {"target_modules": TARGETS, **OPTIONS[kind], **options}
    made: Any = next(one for name, one in PEFT_TYPE_TO_CONFIG_MAPPING.items() if name == kind)
    get_peft_model(copy.deepcopy(LAYERS), made(**settings)).save_pretrained(folder)
    return folder


def loads_in_peft(folder: Path) -> bool:
    """Return True if PEFT loads and merges the adapter without inventing a tensor."""
    from peft import PeftModel

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            PeftModel.from_pretrained(copy.deepcopy(LAYERS), folder).merge_and_unload()
        except Exception:
            return False
    return not any("missing" in str(one.message).lower() for one in said)


def is_refused(folder: Path) -> bool:
    """Return True if `check` finds damage and merge-lora reports the same."""
    checked, error = toolkit.check(folder), refusal(folder)
    assert checked.exit_code == (error.exit_code if error else 0), str(checked)
    assert error is None or error.what in str(checked), (error.what, str(checked))
    return error is not None


def refusal(folder: Path) -> CorruptError | None:
    try:
        open_adapter(str(folder))
    except CorruptError as error:
        return error
    return None


def written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


#: Values to try for each kind of entry. PEFT accepts some of them for some entries.
VALUES: tuple[Any, ...] = (None, -1, "x", [], [3], {})
#: Entries checked only against the base, or ignored by a merge.
OF_THE_BASE = {
    *("base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision", "runtime_config"),
    *("init_lora_weights", "target_svd_config", "feedforward_modules", "alora_invocation_tokens", "sparsity"),
}


def cases(kind: str, folder: Path) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    raw = json.loads((folder / "adapter_config.json").read_text())
    unknown = {"target_modules"} if kind == "UNILORA" else set()  # its tensors name no layers
    for entry in sorted(entry_values.known(kind) & raw.keys() - OF_THE_BASE - unknown):
        for value in VALUES:
            if value != raw[entry]:
                yield entry, value, {**raw, entry: value}


@pytest.mark.parametrize("kind", OPTIONS)
def test_values_that_peft_refuses_are_refused(kind: str, adapters: dict[str, Path], tmp_path: Path) -> None:
    folder = edited(adapters[kind], tmp_path / "changed")
    assert loads_in_peft(folder) and not is_refused(folder)
    wrong = []
    for entry, value, config in cases(kind, folder):
        refused = is_refused if value is None else refusal  # `check` once for each entry
        if not refused(written(folder, config)) and not loads_in_peft(folder):
            wrong.append((entry, value))
    assert not wrong


#: Values accepted by PEFT.
TAKEN: list[tuple[str, dict[str, Any]]] = [
    *(("LORA", {"lora_dropout": value}) for value in (0, 1, 0.5, True)),
    *(("LORA", {"modules_to_save": value}) for value in ("x", {"x": 1}, ["x"], "")),
    *(("LORA", {"exclude_modules": value}) for value in (False, "", "x", [], ["x"], {})),
    *(("LORA", {"target_modules": value}) for value in ("up|down", "(up|down)", ["up", "down", "x"])),
    *(("LORA", {"layers_pattern": value}) for value in ("", [], False)),
    *(("LORA", {"eva_config": value}) for value in (None, {}, {"rho": 1.0, "tau": 1})),
    *(("LORA", {"monteclora_config": value}) for value in (False, [], "")),
    *(("LORA", {"trainable_token_indices": value}) for value in (None, {})),
    ("LORA", {"layers_to_transform": []}),
    *(("ADALORA", {"init_lora_weights": value}) for value in ("x", 3)),
    *(("LOHA", {"module_dropout": value}) for value in (None, "x", 3)),
    *(("LOKR", {"target_modules": "up|down", "layers_to_transform": value}) for value in (None, [0])),
    *(("DEFT", {"alpha": value}) for value in (None, 3, [])),
    *(("ADALORA", {entry: {}}) for entry in ("arrow_config", "megatron_config")),
    *(("ADALORA", {entry: True}) for entry in ("use_qalora", "monteclora_config", "alora_invocation_tokens")),
    ("BOFT", {"boft_dropout": 3}),
    *(("C3A", {"init_weights": value}) for value in (True, False, "gaussian", "kaiming_uniform", "xavier_uniform")),
    *(("DELORA", {"delora_lambda": value}) for value in (1, "3", True)),
    ("DELORA", {"lambda_pattern": {"up": "3"}}),
    *(("FOURIERFT", {"scaling": value}) for value in (0, True, -2.5)),
    *(("FOURIERFT", {"random_loc_seed": value}) for value in (-1, 1 << 63)),
    *(("HIRA", {"init_weights": value}) for value in (None, "", "Gaussian", True)),
    *(("MISS", {"mini_r": value}) for value in (None, "x", 3)),
    *(("PSOFT", {"num_cayley_neumann_terms": value}) for value in (None, "x")),
    *(("PVERA", {"generator_seed": value}) for value in (None, 7)),
    *(("SHIRA", {"random_seed": value}) for value in (None, -1)),
    *(("VERA", {"save_projection": value}) for value in ("x", 1)),
    *(("WAVEFT", {"wavelet_family": value}) for value in ("db1", "sym2", "coif1")),
    *(("TRAINABLE_TOKENS", {"modules_to_save": value}) for value in (None, [])),
]


def test_every_activation_and_wavelet_of_the_installed_libraries_is_taken() -> None:
    from peft.tuners.waveft.constants import WAVELET_REDUCTIONS
    from transformers.activations import ACT2FN

    for kind, entry, values in (("PEANUT", "act_fn", ACT2FN), ("WAVEFT", "wavelet_family", WAVELET_REDUCTIONS)):
        for value in values:
            entry_values.check({"peft_type": kind, entry: value}, "adapter_config.json")


@pytest.mark.parametrize(("kind", "entries"), TAKEN, ids=str)
def test_values_that_peft_takes_are_taken(
    kind: str, entries: dict[str, Any], adapters: dict[str, Path], tmp_path: Path
) -> None:
    changed = edited(adapters[kind], tmp_path / "changed", **entries)
    assert loads_in_peft(changed) and not is_refused(changed)


#: Sizes, blocks and layers that contradict the tensors, and settings that contradict each other.
CONTRADICTIONS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {"r": 1}) for kind in ("DEFT", "DELORA", "GLORA", "HIRA", "HRA", "LOHA", "MISS", "PEANUT", "PSOFT")),
    *((kind, {"r": 1}) for kind in ("LORA", "PVERA", "RANDLORA", "VBLORA", "VERA")),
    ("ADALORA", {"init_r": 2}),
    ("BOFT", {"boft_block_size": 4}),
    ("BOFT", {"boft_block_size": 0, "boft_block_num": 1}),
    ("C3A", {"block_size": 4}),
    ("C3A", {"block_size_pattern": {"up": 4}}),
    ("FOURIERFT", {"n_frequency": 4}),
    ("FOURIERFT", {"n_frequency_pattern": {"down": 4}}),
    ("GRALORA", {"gralora_k": 1}),
    ("GRALORA", {"hybrid_r": 1}),
    *(("MISS", {"init_weights": value}) for value in ("bat", "mini")),
    ("PEANUT", {"depth": 1}),
    ("PSOFT", {"use_cayley_neumann": True, "num_cayley_neumann_terms": "x"}),
    ("SUPERTUNING", {"r": 1}),
    ("SUPERTUNING", {"lora_alpha": 1}),
    ("UNILORA", {"save_indices": True}),
    *((kind, {"projection_prng_key": True}) for kind in ("PVERA", "RANDLORA", "VERA")),
    *((kind, {"save_projection": []}) for kind in ("PVERA", "RANDLORA", "TINYLORA", "VERA")),
    *((kind, {"random_loc_seed": True}) for kind in ("FOURIERFT", "WAVEFT")),
    ("SUPERTUNING", {"sparsity": 1}),
    ("DELORA", {"lambda_pattern": {"up": "x"}}),
    *((kind, {"alpha_pattern": {"up": "x"}}) for kind in ("LOHA", "LOKR")),
    ("IA3", {"feedforward_modules": ["up"]}),
    ("OFT", {"r": 4}),
    ("OFT", {"r": 0, "oft_block_size": 4}),
    ("OFT", {"block_share": True}),
    ("TINYLORA", {"u": 2}),
    ("TRAINABLE_TOKENS", {"token_indices": [1]}),
    ("UNILORA", {"theta_d_length": 8}),
    ("VBLORA", {"num_vectors": 4}),
    ("VBLORA", {"vector_length": 1}),
    ("WAVEFT", {"n_frequency": 4}),
    *((kind, {"target_modules": ["x"]}) for kind in ("LORA", "LOHA", "BOFT", "LN_TUNING", "VERA")),
    *((kind, {"target_modules": ["norm"]}) for kind in ("IA3", "OFT", "ROAD")),
    *((kind, {"target_modules": ["up"]}) for kind in ("IA3", "LOKR", "OFT", "SHIRA")),
    ("LORA", {"exclude_modules": ["up", "down"]}),
    ("LORA", {"layers_to_transform": [0], "target_modules": ["p", "n"]}),
    ("LORA", {"target_modules": "up|down", "layers_to_transform": [0]}),
    ("LORA", {"layers_pattern": "layers"}),
    ("LORA", {"kasa_config": {}}),
    ("LORA", {"velora_config": {}}),
    ("LORA", {"monteclora_config": {}}),
    ("LORA", {"use_bdlora": {}}),
    ("LORA", {"use_bdlora": {"target_modules_bd_a": ["up"], "target_modules_bd_b": ["down"], "nblocks": "x"}}),
    ("LORA", {"use_bdlora": {"target_modules_bd_b": ["up", "down"], "nblocks": 2}}),
    ("LORA", {"eva_config": {"rho": 0.5}}),
    ("LORA", {"velora_config": {"init_type": "x"}}),
    ("LORA", {"monteclora_config": {"x": 1}}),
    ("LORA", {"lora_bias": True, "use_dora": True}),
    ("LORA", {"trainable_token_indices": [1]}),
    ("ADALORA", {"trainable_token_indices": [1]}),
]


@pytest.mark.parametrize(("kind", "entries"), CONTRADICTIONS, ids=str)
def test_contradictions_are_damage(
    kind: str, entries: dict[str, Any], adapters: dict[str, Path], tmp_path: Path
) -> None:
    changed = edited(adapters[kind], tmp_path / "changed", **entries)
    assert is_refused(changed)


@pytest.mark.parametrize(
    "entry", [{"lora_dropout": 0.1}, {"fan_in_fan_out": True}, {"lora_bias": True}, {"use_dora": True}, {}], ids=str
)
def test_parameters_take_no_variant_that_peft_refuses(entry: dict[str, Any], tmp_path: Path) -> None:
    """PEFT's `ParamWrapper` refuses the same entries."""
    adapter = trained("LORA", tmp_path / "known", target_modules=[], target_parameters=["up.weight"])
    changed = edited(adapter, tmp_path / "changed", **entry)
    assert loads_in_peft(changed) != bool(entry) and is_refused(changed) == bool(entry)


def test_bd_lora_that_is_turned_off_is_damage(tmp_path: Path) -> None:
    from peft.tuners.lora.config import BdLoraConfig

    blocks: Any = BdLoraConfig(target_modules_bd_b=TARGETS, nblocks=2)
    adapter = trained("LORA", tmp_path / "whole", use_bdlora=blocks)
    assert loads_in_peft(adapter) and not is_refused(adapter)
    off = edited(adapter, tmp_path / "off", use_bdlora=None)
    assert not loads_in_peft(off) and is_refused(off)


def test_modules_without_tensors_are_not_proved(adapters: dict[str, Path], base: Path, tmp_path: Path) -> None:
    missing = edited(adapters["LORA"], tmp_path / "missing", modules_to_save=["norm"])
    checked = ckpt("check", missing)
    assert checked.code == 0 and "names norm" in checked.out and "every part" not in checked.out, checked.out
    merged = ckpt("merge-lora", missing, "--base", base, "-o", tmp_path / "out")
    assert merged.code == CorruptError.exit_code and "modules_to_save has norm" in merged.err, merged.err
    whole = trained("LORA", tmp_path / "whole", modules_to_save=["norm"])
    heads = edited(whole, tmp_path / "heads", modules_to_save=["norm", "score", "classifier"])
    assert toolkit.check(whole).whole and "norm" not in str(toolkit.check(heads))


def test_layers_that_the_config_does_not_name_are_noted(adapters: dict[str, Path], tmp_path: Path) -> None:
    partly = edited(adapters["LORA"], tmp_path / "partly", target_modules=["up"])
    checked = ckpt("check", partly)
    assert checked.code == 0 and "does not name 1 layer (down)" in checked.out, checked.out
    everything = edited(adapters["LORA"], tmp_path / "everything", target_modules="all-linear")
    assert "does not name" not in ckpt("check", everything).out


def test_a_pattern_that_is_no_regular_expression_is_damage(tmp_path: Path) -> None:
    for kind, entry in (("DELORA", "lambda_pattern"), ("LOHA", "alpha_pattern"), ("OSF", "rank_pattern")):
        with pytest.raises(CorruptError, match=f"{entry} in the adapter config is wrong"):
            entry_values.check({"peft_type": kind, entry: {"[": 1}}, tmp_path)
        entry_values.check({"peft_type": kind, entry: {"up|down": 1}}, tmp_path)


def test_a_release_that_peft_cannot_read_is_damage(tmp_path: Path) -> None:
    """PEFT compares OFT's release: older files have other tensors."""
    for release in ("x", "", None, 3):
        with pytest.raises(CorruptError, match="peft_version"):
            entry_values.check({"peft_type": "OFT", "r": 2, "peft_version": release}, tmp_path)
    for release in ("0.18.0", "0.18.1.dev0@UNKNOWN", "1.0"):
        entry_values.check({"peft_type": "OFT", "r": 2, "peft_version": release}, tmp_path)


@pytest.mark.parametrize(
    "changed", [{"target_modules": []}, {"layers_to_transform": [1]}, {"exclude_modules": ["q_proj"]}], ids=str
)
def test_layers_beside_adapted_parameters_are_compared_with_the_config(changed: dict[str, Any], tmp_path: Path) -> None:
    """PEFT skips this adapter's q_proj, and adapts only `target_parameters`."""
    known = FIXTURES / "peft-experts" / "qwen3_moe-0.19.1"
    config = json.loads((known / "adapter_config.json").read_text())
    assert config["target_parameters"] and config["target_modules"] == ["q_proj"]
    assert ckpt("check", known).code == 0
    adapter = edited(known, tmp_path / "adapter", **changed)
    base, out = FIXTURES / "peft-experts" / "qwen3_moe", tmp_path / "merged"
    for words in (("check", adapter), ("merge-lora", adapter, "--base", base, "-o", out)):
        done = ckpt(*words)
        assert done.code == 4 and "the adapter config misses some layers" in done.out + done.err, done.err
    assert not out.exists()
