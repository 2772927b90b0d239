"""`converters/quantized/quantize.py`, `converters/quantized/methods/compressed_tensors.py`: other libraries' view.

llm-compressor quantizes models to the same bits as `--quantize`. transformers loads them and computes with them. For
`fp8-block` and gpt-oss's `mxfp4`, transformers is enough, so `tests/quantized/test_quantize.py` has their tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quantized.test_dequantize import dequantize, load
from tests.quantized.test_quantize import quantize
from tests.quantizers.test_read import attempt, compress, logits, one_scale_changed
from tests.support.adapters import differing, same, weights
from tests.support.commands import ckpt

pytestmark = pytest.mark.slow
SCHEMES = {"fp8-dynamic": "FP8_DYNAMIC", "int8": "INT8", "mxfp4": "MXFP4A16", "nvfp4a16": "NVFP4A16"}


@pytest.mark.parametrize("model", ["llama", "moe"])
@pytest.mark.parametrize("method", SCHEMES)
def test_bits_are_llm_compressors(method: str, model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(model)
    ours = weights(quantize(source, tmp_path / "ours", method))
    theirs = weights(compress(source, tmp_path / "theirs", SCHEMES[method]))
    scaled = [name for name in differing(ours, theirs) if name.endswith("_global_scale")]
    # In llm-compressor, an expert's gate and up have a global scale each. `ckpt` writes the smaller one for both.
    assert len(scaled) == (6 if (method, model) == ("nvfp4a16", "moe") else 0)
    assert all(".experts." in name and ours[name] < theirs[name] for name in scaled)
    parts = [name.replace("_global_scale", part) for name in scaled for part in ("_global_scale", "_packed", "_scale")]
    assert differing(ours, theirs) == sorted(parts)


@pytest.mark.parametrize("method", SCHEMES)
def test_transformers_computes_with_the_plain_values(method: str, llama: Path, tmp_path: Path) -> None:
    from compressed_tensors.quantization import disable_quantization

    ours = quantize(llama, tmp_path / "ours", method)
    expected = logits(load(dequantize(ours, tmp_path / "plain")))
    model = load(ours)
    assert same(logits(model), expected) == (method in ("mxfp4", "nvfp4a16"))  # the others round activations
    assert same(logits(model.apply(disable_quantization)), expected)
    assert ckpt("verify", "--loads", ours).code == 0
    with one_scale_changed(ours):
        model = load(ours)
        logits(model)
        assert not same(logits(model.apply(disable_quantization)), expected)


@pytest.mark.parametrize(
    ("method", "is_loaded", "is_right"), [("mxfp4", True, True), ("nvfp4a16", True, False), ("int8", False, False)]
)
def test_transformers_loads_only_some_experts(
    method: str, is_loaded: bool, is_right: bool, moe: Path, tmp_path: Path
) -> None:
    """Experts in nvfp4a16 are loaded without their global scales."""
    ours = quantize(moe, tmp_path / "ours", method)
    expected, found = logits(load(dequantize(ours, tmp_path / "plain"))), attempt(lambda: load(ours))
    assert (found is not None) == is_loaded
    assert (found is not None and same(found, expected)) == is_right
