"""`converters/megatron/read.py`, `converters/megatron/dist/read.py`: megatron-core's models with an encoder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import ckpt
from tests.support.engines import fork

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    fork([(1, "tests.support.megatron_encoders", [str(folder)])], ["tests.support.megatron_imports"])
    return folder


@pytest.mark.parametrize("model", ["bert", "t5"])
@pytest.mark.parametrize(("saved", "format"), [("torch", "megatron"), ("torch_dist", "megatron-dist")])
def test_a_model_with_an_encoder_is_refused_by_name(folder: Path, model: str, saved: str, format: str) -> None:
    done = ckpt("convert", format, "hf", folder / model / saved, "-o", folder / "no")
    assert done.code == 3, done.err
    assert "with an encoder (BertModel, T5Model) is not read" in done.err
    assert "tensor: encoder." in done.err


def test_biases_by_relative_position_need_transformer_engine(folder: Path) -> None:
    """So nothing here can tell whether a table of T5's would be right."""
    assert "Attention bias is not supported" in (folder / "relative").read_text()
