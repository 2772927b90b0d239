"""`ckpt/commands/merge_lora/merge.py`: PEFT's own list of adapters, merged bit for bit."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt.errors import CkptError
from tests.support.adapters import merge, same

pytestmark = pytest.mark.slow

#: A case's outcomes: PEFT's bits, not merged by PEFT itself, refused although PEFT merges it, no adapter available.
EQUAL, NOT_MERGED = "equal bits", "not merged by PEFT"
REFUSED, NOT_MADE = "refused", "not made by PEFT here"
#: Number of cases with each outcome in peft 0.21.2's list, by kind.
EXPECTED: dict[str, dict[str, int]] = {
    "AdaLoraConfig": {EQUAL: 4},
    "AdamssConfig": {EQUAL if find_spec("sklearn") else NOT_MADE: 7},
    "BOFTConfig": {EQUAL: 12},
    "BeftConfig": {EQUAL: 5},
    "C3AConfig": {EQUAL: 6},
    "DeftConfig": {EQUAL: 9},
    "DeloraConfig": {EQUAL: 5},
    "FourierFTConfig": {EQUAL: 6},
    "FrodConfig": {EQUAL: 5},
    "GloraConfig": {EQUAL: 6},
    "GraloraConfig": {EQUAL: 8},
    "HRAConfig": {EQUAL: 5},
    "HiraConfig": {EQUAL: 14},
    "IA3Config": {EQUAL: 22},
    "LNTuningConfig": {EQUAL: 5},
    "LilyConfig": {NOT_MERGED: 5},
    "LoHaConfig": {EQUAL: 20},
    "LoKrConfig": {EQUAL: 23},
    "LoraConfig": {EQUAL: 42, NOT_MERGED: 4},
    "MissConfig": {EQUAL: 8},
    "OFTConfig": {EQUAL: 17},
    "OSFConfig": {EQUAL: 2},
    "PeanutConfig": {EQUAL: 5},
    "PsoftConfig": {EQUAL: 10},
    "PveraConfig": {EQUAL: 6},
    "RandLoraConfig": {EQUAL: 7},
    "RoadConfig": {EQUAL: 6},
    "ShiraConfig": {EQUAL: 5},
    "SupertuningConfig": {EQUAL: 5},
    "TinyLoraConfig": {REFUSED: 8},
    "TrainableTokensConfig": {EQUAL: 1},
    "UniLoraConfig": {REFUSED: 6},
    "VBLoRAConfig": {EQUAL: 6},
    "VeraConfig": {EQUAL: 6},
    "WaveFTConfig": {EQUAL: 20},
}


class Listed:
    """PEFT's list by config class, and the models it names."""

    def __init__(self, folder: Path) -> None:
        package = ModuleType("peft_tests")
        package.__path__ = [str(folder.resolve())]
        helpers = {
            "testing_common": ["_skip_if_merging_not_supported"],
            "testing_utils": ["get_state_dict", "hub_online_once", "require_non_cpu", "set_init_weights_false"],
        }
        stand_ins = {"peft_tests": package}
        for name, functions in helpers.items():  # they need diffusers and datasets, but the list doesn't
            module = stand_ins[f"peft_tests.{name}"] = ModuleType(name)
            vars(module).update({one: lambda given: given for one in functions}, PeftCommonTester=object)
        sys.modules.update(stand_ins)
        found = importlib.import_module("peft_tests.test_custom_models")
        self.wrapper: Any = found.MockTransformerWrapper
        self.cases: dict[str, list[tuple[str, str, Any, dict[str, Any]]]] = {}
        for title, model, config, options in found.TEST_CASES:
            self.cases.setdefault(config.__name__, []).append((title, model, config, options))

    def base(self, model: str) -> Any:
        torch.manual_seed(0)
        return self.wrapper.from_pretrained(model)


@pytest.fixture(scope="module")
def listed() -> Listed:
    folder = os.environ.get("PEFT_TESTS")
    if not folder:
        pytest.skip("PEFT_TESTS names no folder of PEFT's own tests")
    return Listed(Path(folder))


def trained(base: Any, config: Any, folder: Path) -> Path:
    from peft import get_peft_model

    torch.manual_seed(1)
    wrapped = get_peft_model(base, config)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape).to(parameter.dtype)
    wrapped.save_pretrained(folder)
    return folder


def merged_by_peft(base: Any, adapter: Path) -> dict[str, torch.Tensor]:
    """Return the merged model's tensors, with fully trained modules in place of the base's."""
    from peft import PeftModel

    torch.manual_seed(5)
    state = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    kept = {name: tensor for name, tensor in state.items() if ".original_module." not in name}
    return {name.replace(".modules_to_save.default", ""): tensor for name, tensor in kept.items()}


def becomes(listed: Listed, model: str, config: Any, options: dict[str, Any], folder: Path) -> str:
    """Return the outcome of a case, or the names of differing tensors."""
    try:
        adapter = trained(listed.base(model), config(**copy.deepcopy(options)), folder / "adapter")
    except ImportError:
        return NOT_MADE
    try:
        theirs = merged_by_peft(listed.base(model), adapter)
    except (NotImplementedError, ValueError, AttributeError, TypeError):
        return NOT_MERGED
    base = folder / "base"
    base.mkdir(parents=True)
    save_file(listed.base(model).state_dict(), base / "model.safetensors")
    try:
        merge([adapter], base, folder / "merged")
    except CkptError:
        return REFUSED
    ours = load_file(folder / "merged/model.safetensors")
    others = [name for name in theirs if name not in ours or not same(theirs[name], ours[name])]
    return ", ".join([*others, *(ours.keys() - theirs.keys())]) or EQUAL


@pytest.mark.parametrize("kind", EXPECTED)
def test_every_case_becomes_what_it_did(kind: str, listed: Listed, tmp_path: Path) -> None:
    found = {}
    for number, (title, model, config, options) in enumerate(listed.cases[kind]):
        found[f"{number} {title}"] = becomes(listed, model, config, options, tmp_path / str(number))
    assert Counter(found.values()) == EXPECTED[kind], found


def test_there_is_no_other_kind_in_the_list(listed: Listed) -> None:
    assert listed.cases.keys() == EXPECTED.keys()
