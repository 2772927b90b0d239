"""`ckpt/commands/merge_lora/merge.py`, `ckpt/adapters/config.py`: PEFT releases that treat square experts differently.

The fixture's logits come from live models under the PEFT release that trained them (fixtures/make_peft_experts.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.adapters import edited, load_base
from tests.support.commands import ckpt
from tests.support.places import FIXTURES

FIXTURE = FIXTURES / "peft-experts"
LIVE = load_file(FIXTURE / "logits.safetensors") if FIXTURE.is_dir() else {}
ADAPTERS = sorted(LIVE.keys() - {"ids"})
#: Releases with the installed release's factor layout, by model.
ALIKE = {"qwen3_moe-0.19.1", "gpt_oss-0.19.1", "gpt_oss-0.18.1"}


def base_of(name: str) -> Path:
    return FIXTURE / name.partition("-")[0]


def difference(folder: Path, name: str) -> float:
    with torch.no_grad():
        computed: torch.Tensor = load_base(folder)(input_ids=LIVE["ids"]).logits
    return float((computed - LIVE[name]).abs().max())


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_merged_model_computes_what_the_release_did(name: str, tmp_path: Path) -> None:
    base = base_of(name)
    given = ("--base", base, "--accept-base")
    done = ckpt("merge-lora", FIXTURE / name, *given, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    assert ("square experts" in done.err) == (name not in ALIKE)
    assert difference(tmp_path / "out", name) < 1e-5 and difference(base, name) > 0.01
    today = edited(FIXTURE / name, tmp_path / "today", peft_version="0.21.2")
    assert ckpt("merge-lora", today, *given, "-o", tmp_path / "wrong").code == 0
    assert (difference(tmp_path / "wrong", name) > 1e-3) == (name not in ALIKE)
    proved = ckpt("verify", base, tmp_path / "out", "--adapter", FIXTURE / name)
    assert proved.code == 0, proved.err


@pytest.mark.parametrize("version", [None, "0.18.2.dev0", "UNKNOWN", 19])
def test_a_release_that_is_not_recorded_is_asked_for(version: Any, tmp_path: Path) -> None:
    adapter = edited(FIXTURE / "qwen3_moe-0.18.1", tmp_path / "adapter", peft_version=version)
    out = tmp_path / "out"
    refused = ckpt("merge-lora", adapter, "--base", base_of("qwen3_moe-0.18.1"), "--accept-base", "-o", out)
    assert refused.code == 2 and "gate_up_proj" in refused.err and "--peft-version 0.18.1" in refused.err
    assert not out.exists()
    how = ("--base", base_of("qwen3_moe-0.18.1"), "--accept-base", "-o", out, "--peft-version", "0.18.1")
    assert ckpt("merge-lora", adapter, *how).code == 0
    assert difference(out, "qwen3_moe-0.18.1") < 1e-5


@pytest.mark.parametrize("release", ["0.18.1", "0.19.0"])
def test_factors_of_an_older_release_are_not_written_for_a_server(release: str, tmp_path: Path) -> None:
    name = f"qwen3_moe-{release}"
    command = ("convert", "peft", "peft", FIXTURE / name, "--config", base_of(name), "-o", tmp_path / "out")
    refused = ckpt(*command, "--server", "vllm")
    assert refused.code == 6 and "do not match PEFT's layout" in refused.err
