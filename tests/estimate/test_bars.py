"""`ckpt/pictures/bars.py`: bars drawn by `ckpt estimate --picture`, against the table."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import ckpt
from tests.estimate.models import PUBLIC
from tests.support.commands import ckpt as run_ckpt
from tests.support.golden import agrees
from tests.support.places import REPOSITORY

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    place = tmp_path / "Llama-3-8B"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(PUBLIC["Llama-3-8B"][1]))
    return place


@pytest.mark.parametrize("options", [{}, {"gpus": 4}, {"gpus": 64, "seq_len": 128}, {"gpus": 8, "lora_r": 8}])
def test_the_parts_of_a_bar_are_the_total_of_the_table(model: Path, options: dict[str, Any]) -> None:
    for row in ckpt.estimate(model, **options).rows:
        for checkpointing in (False, True):
            parts = row.memory.at_peak(checkpointing=checkpointing)
            assert sum(parts.values()) == row.memory.total(checkpointing=checkpointing) and min(parts.values()) > 0


def test_bars_are_as_long_as_they_have_bytes_and_cut_where_they_are_far_beyond(model: Path) -> None:
    found = ckpt.estimate(model, gpus=4)
    groups = [one for one in ET.fromstring(found.picture()).iter(f"{SVG}g") if one.get("class") == "f"]
    assert len(groups) == len(found.rows)
    scale = 720 / (2 * 80e9)
    for group, row in zip(groups, found.rows, strict=True):
        upper = [one for one in group.iter(f"{SVG}rect") if one.get("height") == "17"]
        total = row.memory.total(checkpointing=False)
        assert sum(float(one.get("width", 0)) for one in upper) == pytest.approx(min(720, total * scale), abs=0.1)
        texts = [(one.text, one.get("class")) for one in group.iter(f"{SVG}text")]
        assert texts[0] == (row.title, "n") and texts[1][1] == ("r" if total > 0.9 * 80e9 else "g")
        assert ("…" in (texts[1][0] or "")) == (total > 160e9)


def test_the_picture_of_the_documentation(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    agrees(REPOSITORY / "docs/pages-memory.svg", ckpt.estimate("Llama-3-8B", gpus=4).picture())


def test_it_is_written_beside_the_table(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "memory.svg"
    done = run_ckpt("estimate", model, "--gpus", "4", "--picture", out)
    assert done.code == 0 and done.out == run_ckpt("estimate", model, "--gpus", "4").out
    assert out.read_text() == ckpt.estimate(model, gpus=4).picture()
    assert run_ckpt("estimate", model, "--picture", out).code == 2, "it is there"
    assert run_ckpt("estimate", model, "--picture", out, "--overwrite").code == 0
    assert run_ckpt("estimate", model, "--picture", tmp_path / "memory.png").code == 2
    assert "goes with --picture" in run_ckpt("estimate", model, "--overwrite").err
