"""`converters/gguf/header.py`, `metadata.py`, `names.py`, `tokenizer.py`, `format.py`, `write.py`: GGUF files.

The files in `fixtures/gguf` were written by llama.cpp's own converter. Written files have the same keys and bytes.
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import ckpt
from ckpt.errors import CkptError, CorruptError, IncompleteError, LossError, NotFoundError, UsageError
from ckpt.plan.checkpoint import Checkpoint
from ckpt.plan.dtypes import FLOAT32
from ckpt.plan.tensors import whole
from converters.gguf.header import read_header
from converters.gguf.q8_0 import q8_0_blocks
from converters.gguf.sentencepiece import read_pieces
from converters.gguf.types import BY_NUMBER, TYPES
from tests.support.commands import ckpt as command
from tests.support.engines import raw
from tests.support.model_files import merge_json
from tests.support.places import FIXTURES

GGUF = FIXTURES / "gguf"
MODELS = ("llama", "qwen3_moe", "gpt_oss")


def content(checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of each tensor."""
    from ckpt.move.reading import read_box

    return {
        fqn: (str(one.dtype), one.shape, read_box(one, whole(one.shape), checkpoint.computed).tobytes())
        for (fqn, _), one in checkpoint.tensors.items()
    }


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def small(
    path: Path,
    tensors: Sequence[tuple[str, tuple[int, ...], int, bytes]],
    keys: Sequence[tuple[str, int, bytes]] = (),
    version: int = 3,
) -> Path:
    """Write a GGUF file with these tensors (name, dims, type's number, bytes) and keys (name, kind, bytes)."""
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(keys))
    for name, kind, value in keys:
        head += text(name) + struct.pack("<I", kind) + value
    at, data = 0, b""
    for name, dims, number, values in tensors:
        head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, number, at)
        data += values + b"\0" * (-len(values) % 32)
        at = len(data)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def changed(name: str, folder: Path, **entries: Any) -> Path:
    """Return a copy of a model with other entries in its config."""
    shutil.copytree(GGUF / name, folder)
    merge_json(folder / "config.json", entries)
    return folder


# -- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
def test_tensors_have_the_values_that_the_gguf_package_reads(kind: str) -> None:
    truth = load_file(GGUF / "truth" / f"llama-{kind}.safetensors")
    assert content(ckpt.open(GGUF / f"llama-{kind}.gguf")) == {fqn: raw(tensor) for fqn, tensor in truth.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_converts_back_to_the_original_bytes(name: str, tmp_path: Path) -> None:
    ckpt.convert(GGUF / f"{name}-bf16.gguf", "hf", tmp_path / "out", config=GGUF / name, dtype="bf16")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (GGUF / name / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", MODELS)
def test_verify_compares_across_names(name: str) -> None:
    assert ckpt.verify(GGUF / f"{name}-bf16.gguf", GGUF / name, cast=True).equal


def test_two_quantized_files_are_compared_by_their_own_values(tmp_path: Path) -> None:
    one = tmp_path / "one.gguf"
    data = bytearray((GGUF / "llama-q8_0.gguf").read_bytes())
    entry = next(one for one in read_header(GGUF / "llama-q8_0.gguf").entries if one.type.name == "q8_0")
    data[entry.stop - 1] ^= 1
    one.write_bytes(data)
    assert not ckpt.verify(one, GGUF / "llama-q8_0.gguf").equal
    assert ckpt.verify(GGUF / "llama-q8_0.gguf", GGUF / "llama-q8_0.gguf").equal


def test_other_types_are_named(tmp_path: Path) -> None:
    file = small(tmp_path / "a.gguf", [("x.weight", (256, 1), 12, bytes(144)), ("y.weight", (256, 1), 14, bytes(210))])
    opened = ckpt.open(file)
    for use in (
        lambda: ckpt.plan(file, "dcp"),
        lambda: opened["y.weight"][:],
        lambda: ckpt.verify(opened, file),
        lambda: ckpt.diff(opened, file),
        lambda: ckpt.hash(file),
    ):
        with pytest.raises(LossError) as caught:
            use()
        assert caught.value.found == "1 tensor in q4_k, 1 tensor in q6_k"
        assert caught.value.hint == "`llama-quantize --allow-requantize a.gguf f32.gguf f32` writes their values"


def test_inspect_shows_bits_by_type(tmp_path: Path) -> None:
    x = ("x.weight", (256, 1), 12, bytes(144))
    file = small(tmp_path / "a.gguf", [x, ("y.weight", (32,), 8, bytes(34)), ("z.weight", (2,), 0, bytes(8))])
    done = command("inspect", file)
    assert done.code == 0
    for line in (
        "bits        5.131 per parameter",
        "q4_k: 144 B in 1 weight, 256 parameters with 4.5 bits",
        "q8_0: 34 B in 1 weight, 32 parameters with 8.5 bits",
        "float32: 8 B in 1 weight, 2 parameters with 32 bits",
        "1 tensor stored in q4_k, with unknown values",
    ):
        assert line in done.out
    assert command("check", file).code == 0


@pytest.mark.parametrize(("name", "kind"), [("llama", "q8_0"), ("qwen3_moe", "q8_0"), ("gpt_oss", "mxfp4")])
def test_rounding_errors_are_measured(name: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    ckpt.convert(GGUF / name, "gguf", tmp_path / "out", quantize=kind)
    file = tmp_path / "out/model.gguf"
    report = ckpt.verify(GGUF / name, file, quantized=True, cast=True)
    assert report.within_bound and {one.fqn for one in report.rounded} == set(ckpt.open(file).blocks)
    entry = next(one for one in read_header(file).entries if one.type.name == kind)
    data = bytearray(file.read_bytes())
    data[entry.start + (1 if kind == "q8_0" else 0)] ^= 4  # 16 times the scale
    file.write_bytes(data)
    report = ckpt.verify(file, GGUF / name, quantized=True, cast=True)
    assert [one.fqn for one in report.rounded if one.kind == "beyond"] == [entry.name]
    assert report.exit_code == 1


def test_parts_of_a_model_are_read_together(tmp_path: Path) -> None:
    def part(number: int, name: str) -> Path:
        keys = [("split.no", 2, struct.pack("<H", number)), ("split.count", 2, struct.pack("<H", 2))]
        tensors = [(name, (2,), 0, struct.pack("<2f", number, 7))]
        return small(tmp_path / f"model-{number + 1:05d}-of-00002.gguf", tensors, keys)

    first, second = part(0, "a.weight"), part(1, "b.weight")
    for given in (tmp_path, first):
        assert {fqn for fqn, _ in ckpt.open(given).tensors} == {"a.weight", "b.weight"}
    shutil.copy(first, second)
    with pytest.raises(CorruptError, match="not the part"):
        ckpt.open(tmp_path)
    second.unlink()
    with pytest.raises(IncompleteError, match="missing"):
        ckpt.open(tmp_path)


def test_no_damaged_header_is_read(tmp_path: Path) -> None:
    whole_file = (GGUF / "llama-q8_0.gguf").read_bytes()
    end = min(one.start for one in read_header(GGUF / "llama-q8_0.gguf").entries)
    file = tmp_path / "cut.gguf"
    for length in [*range(4, end, 509), end, len(whole_file) - 1]:
        file.write_bytes(whole_file[:length])
        with pytest.raises(CorruptError):
            ckpt.open(file)
    random = np.random.default_rng(0)
    for _ in range(300):  # any result but a traceback
        data = bytearray(whole_file)
        data[random.integers(4, end)] ^= 1 << int(random.integers(8))
        file.write_bytes(data)
        try:
            ckpt.open(file)
        except CkptError:
            continue


def one(path: Path, dims: tuple[int, ...], number: int, size: int, times: int = 1) -> object:
    """Open a file whose tensor has these dims, type number and size in bytes."""
    return ckpt.open(small(path / "a.gguf", [("x.weight", dims, number, bytes(size))] * times))


def to_hf(path: Path, config: str | None, **entries: Any) -> object:
    """Plan llama's file with the config of a model, or none."""
    return ckpt.plan(GGUF / "llama-bf16.gguf", "hf", config=config and changed(config, path / "model", **entries))


ROPE = {"rope_type": "default", "rope_theta": 500000.0}
TWO_TYPES: Any = {"quantize": "q8_0", "dtype": "bf16"}
REFUSED: dict[str, tuple[Callable[[Path], object], type[CkptError], str]] = {
    "dims that are no whole blocks": (lambda path: one(path, (33,), 8, 34), CkptError, "whole blocks"),
    "data shorter than its dims": (lambda path: one(path, (1 << 40,), 0, 4), CkptError, "shorter"),
    "data longer than its dims": (lambda path: one(path, (1,), 0, 4 + 64), CkptError, "longer"),
    "unknown type": (lambda path: one(path, (1,), 99, 4), CkptError, "unknown type"),
    "nine dims": (lambda path: one(path, (1,) * 9, 0, 4), CkptError, "too many dims"),
    "a name twice": (lambda path: one(path, (1,), 0, 4, times=2), CorruptError, "twice"),
    "big-endian": (lambda path: ckpt.open(small(path / "a.gguf", [], version=3 << 24)), LossError, "big-endian"),
    "no config for hf": (lambda path: to_hf(path, None), NotFoundError, r"config\.json"),
    "another architecture's config": (lambda path: to_hf(path, "gpt_oss"), CorruptError, "another architecture"),
    "another epsilon": (lambda path: to_hf(path, "llama", rms_norm_eps=1e-5), CorruptError, "the config"),
    "another theta": (lambda path: to_hf(path, "llama", rope_parameters=ROPE), CorruptError, "the config"),
    "dtype and quantize": (lambda _: ckpt.plan(GGUF / "llama", "gguf", **TWO_TYPES), UsageError, "two types"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_damaged_files_and_contradictions_are_refused(case: str, tmp_path: Path) -> None:
    call, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        call(tmp_path)


# -- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
@pytest.mark.parametrize("name", MODELS)
def test_written_files_equal_llama_cpps(name: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    ckpt.convert(GGUF / name, "gguf", tmp_path / "out", quantize=kind, verify=kind == "bf16")
    ours, theirs = tmp_path / "out/model.gguf", GGUF / f"{name}-{kind}.gguf"
    assert read_header(ours).metadata == read_header(theirs).metadata
    assert tensors(ours) == tensors(theirs)


def tensors(path: Path) -> dict[str, Any]:
    """Return type, shape and stored bytes of each tensor."""
    data = path.read_bytes()
    return {one.name: (one.type.name, one.shape, data[one.start : one.stop]) for one in read_header(path).entries}


def test_mxfp4_is_for_experts(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    from gguf.quants import quantize

    ckpt.convert(GGUF / "gpt_oss", "gguf", tmp_path / "out", quantize="mxfp4")
    found, plain = tensors(tmp_path / "out/model.gguf"), content(ckpt.open(GGUF / "gpt_oss-bf16.gguf"))
    for name, (kind, shape, data) in found.items():
        if "_exps.weight" not in name:
            assert kind in ("bf16", "f32")
            continue
        values = (np.frombuffer(plain[name][2], np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
        assert (kind, data) == ("mxfp4", quantize(values, gguf.GGMLQuantizationType.MXFP4).tobytes())
    assert read_header(tmp_path / "out/model.gguf").metadata["general.file_type"] == 38
    read_back = ckpt.open(tmp_path / "out")
    assert {one.dtype for (fqn, _), one in read_back.tensors.items() if "_exps.weight" in fqn} == {FLOAT32}
    with pytest.raises(UsageError, match="no tensors for quantize='mxfp4'"):
        ckpt.plan(GGUF / "llama", "gguf", quantize="mxfp4")


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # in the package, for tiny numbers
@pytest.mark.parametrize("kind", ["mxfp4", "q8_0"])
def test_blocks_are_those_of_llama_cpps_c_code(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    truth = load_file(GGUF / "truth" / "blocks.safetensors")
    plain, expected = truth[f"{kind}.plain"].split(32), truth[kind].split(4 * 32)
    model = Path(shutil.copytree(GGUF / "qwen3_moe", tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    for number, part in enumerate(plain):
        name = f"model.layers.0.mlp.experts.{number % 4}.{('gate', 'up', 'down')[number // 4]}_proj.weight"
        assert weights[name].shape == part.shape
        weights[name] = part.clone()
    save_file(weights, model / "model.safetensors")
    ckpt.convert(model, "gguf", tmp_path / "out", quantize=kind)
    found = tensors(tmp_path / "out/model.gguf")
    for one, blocks in zip(("gate", "up", "down"), expected, strict=True):
        assert found[f"blk.0.ffn_{one}_exps.weight"][2] == blocks.numpy().tobytes()


@pytest.mark.parametrize("kind", TYPES)
def test_manifest_records_the_rounding_rule(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    ckpt.convert(GGUF / "qwen3_moe", "gguf", tmp_path / "out", quantize=kind)
    recorded = json.loads((tmp_path / "out/ckpt-manifest.json").read_text())["quantization"]
    assert recorded["method"] == kind and "ties" in recorded["rule"]
    assert (f"quantize_row_{kind}_ref" in recorded["rule"]) == (kind in ("q8_0", "mxfp4"))
    assert command("verify", tmp_path / "out").code == 0
    ckpt.convert(GGUF / "qwen3_moe", "gguf", tmp_path / "plain")
    assert "quantization" not in json.loads((tmp_path / "plain/ckpt-manifest.json").read_text())


def test_types_equal_the_gguf_packages() -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        if kind.name == "Q8_1":  # gguf 0.19.0 has 40, and ggml.h two float16 and 32 bytes
            size = 36
        assert BY_NUMBER[int(kind)][1:4] == (kind.name.lower(), block, size)


def test_every_bfloat16_number_has_the_packages_code() -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    from gguf.quants import quantize

    for mantissa in range(128):
        top = 16 + mantissa << 7 | mantissa
        sizes = np.arange(top + 1, dtype=np.uint16)
        blocks = np.full((-(-2 * len(sizes) // 31), 32), top, np.uint16)
        blocks[:, 1:].flat[: 2 * len(sizes)] = np.concatenate([sizes, sizes | 0x8000])
        found = q8_0_blocks([blocks], len(blocks))
        values = (blocks.astype(np.uint32) << np.uint32(16)).view(np.float32)
        assert found is not None and found.tobytes() == quantize(values, gguf.GGMLQuantizationType.Q8_0).tobytes()
    for top in (0x7F80, 149 << 7, 1):  # infinity, beyond float16, a scale without reciprocal
        assert q8_0_blocks([np.full(32, top, np.uint16)], 1) is None


#: Bytes at a tensor's start, and what `check --values` finds, by model and type.
NOT_FINITE = {
    ("llama", "q8_0"): {b"\0\x7e": "values are NaN", b"\0\xfc": "values are infinite"},
    ("gpt_oss", "mxfp4"): {
        b"\xff": "32 of 2048 values are NaN",
        b"\xff" + bytes(16): "32 of 2048 values are NaN",
        b"\xfe\x77": "values are infinite",
    },
    ("llama", "f16"): {b"\1\x7e": "values are NaN"},
    ("llama", "bf16"): {b"\x80\xff": "values are infinite"},
    ("llama", "f32"): {b"\1\0\xc0\x7f": "values are NaN"},
}


@pytest.mark.parametrize(("model", "kind"), NOT_FINITE)
def test_numbers_that_are_not_finite_are_named(model: str, kind: str, tmp_path: Path) -> None:
    """Plain numbers are carried bit for bit. No value is computed from the others."""
    pytest.importorskip("gguf", reason="gguf is not installed")
    ckpt.convert(GGUF / model, "gguf", tmp_path / "written", quantize=kind)
    file, out, is_plain = tmp_path / "written/model.gguf", tmp_path / "out", kind in ("f16", "bf16", "f32")
    entry = [one for one in read_header(file).entries if one.type.name == kind][-1]
    good = Path(shutil.copy(file, tmp_path / "good.gguf"))
    convert = ("convert", "gguf", "hf", file, "--config", GGUF / model, "-o", out)
    quantize = ("convert", "gguf", "gguf", file, "--config", GGUF / model, "-o", out, "--quantize", "q8_0")
    commands = {
        ("check", file): 0,
        ("inspect", file): 0,
        ("check", "--values", file): 4,
        ("verify", good, file): 1,
        ("verify", tmp_path / "written"): 1,
        ("check", "--bytes", tmp_path / "written"): 4,
        **({} if is_plain else {("verify", GGUF / model, file, "--quantized", "--cast"): 1}),
        convert: 0 if is_plain else 4,
        (*convert, "--dequantize"): 0 if is_plain else 4,
        quantize: 4,
    }
    for number, found in {b"": "", **NOT_FINITE[model, kind]}.items():
        data = bytearray(good.read_bytes())
        data[entry.start : entry.start + len(number)] = number
        file.write_bytes(data)
        for words, code in commands.items():
            done = command(*words)
            text = done.out + done.err
            assert done.code == (code if number else 0), (words, text)
            assert not done.code or entry.name in text or "model.gguf" in text, text
            assert "--values" not in words or found in text, text
            assert "every value was read" not in text or not number
            assert out.exists() == (words[0] == "convert" and not done.code)
            if out.exists():
                assert quantize == words or command("check", "--values", out).code == (4 if number else 0)
                shutil.rmtree(out)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "mxfp4"])
def test_all_weights_must_be_finite_with_quantize(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    shutil.copytree(GGUF / "qwen3_moe", tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    good = file.read_bytes()
    tensors = {fqn: one.source for (fqn, _), one in ckpt.open(GGUF / "qwen3_moe").tensors.items()}
    for fqn, shape, name, index in (
        ("model.layers.0.mlp.experts.1.down_proj.weight", (32, 32), "blk.0.ffn_down_exps.weight", "1, 0, 0"),
        ("model.norm.weight", (32,), "output_norm.weight", "0"),
    ):
        data = bytearray(good)
        at = next(iter(tensors[fqn].fragments(shape))).extent.offset
        data[at : at + 2] = b"\xc0\x7f"
        file.write_bytes(data)
        with pytest.raises(CorruptError, match="NaN or infinity") as caught:
            ckpt.convert(tmp_path / "model", "gguf", tmp_path / "out", quantize=kind)
        assert f"tensor: {name}" in str(caught.value)
        assert f"values are NaN, the first at [{index}]" in str(caught.value)
        assert [one.name for one in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("{1,3}", "{1,2}", "splitting text"),
        ('"normalizer": null', '"normalizer": {"type": "Lowercase"}', "splitting text"),
        ('"add_prefix_space": false', '"add_prefix_space": true', "splitting text"),
        ('"pretokenizers": [', '"pretokenizers": [{"type": "Digits", "individual_digits": true},', "splitting text"),
        ('"ignore_merges": true', '"ignore_merges": false', None),
    ],
)
def test_an_unknown_tokenizer_is_refused(old: str, new: str, what: str | None, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    shutil.copytree(GGUF / "llama", tmp_path / "model")
    file = tmp_path / "model/tokenizer.json"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    if what is None:  # every token is a result of merges
        ckpt.plan(tmp_path / "model", "gguf")
        found = json.loads(file.read_text())
        found["model"]["merges"] = found["model"]["merges"][:-1]
        file.write_text(json.dumps(found))
        what = "would split a token"
    with pytest.raises(LossError, match=what):
        ckpt.plan(tmp_path / "model", "gguf")


def too_many_tokens(model: Path) -> None:
    piece = b"\x0a\x03abc\x15" + struct.pack("<f", -2.5)
    (model / "tokenizer.model").write_bytes(b"\x0a" + bytes([len(piece)]) + piece)
    (model / "added_tokens.json").write_text('{"<pad>": 5000}')


def without_tokenizer(model: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()


LONGROPE = {"rope_type": "longrope", "factor": 4.0}
PARTIAL = {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5}
NO_KEY = r"key for|computes with another"


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("llama", {"model_type": "olmo"}, LossError, "architecture"),
        ("llama", {"hidden_act": "gelu"}, LossError, NO_KEY),
        ("llama", {"rope_parameters": LONGROPE}, LossError, NO_KEY),
        ("llama", {"rope_parameters": PARTIAL}, LossError, NO_KEY),
        ("qwen3_moe", {"norm_topk_prob": False}, LossError, NO_KEY),
        ("qwen3_moe", {"mlp_only_layers": [0]}, LossError, NO_KEY),
        ("gpt_oss", {"swiglu_limit": 5.0}, LossError, NO_KEY),
        ("gpt_oss", {"layer_types": ["full_attention"]}, LossError, NO_KEY),
        ("llama", without_tokenizer, NotFoundError, "tokenizer"),
        ("llama", too_many_tokens, LossError, "more tokens"),
    ],
)
def test_models_without_a_place_in_gguf_are_refused(
    name: str, change: Any, error: type[CkptError], words: str, tmp_path: Path
) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    model = changed(name, tmp_path / "model", **(change if isinstance(change, dict) else {}))
    if callable(change):
        change(model)
    with pytest.raises(error, match=words):
        ckpt.plan(model, "gguf")


def test_rounding_by_llama_cpp_is_noted() -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    for name, is_noted in (("gpt_oss", True), ("llama", False)):
        assert any("YaRN" in note for note in ckpt.plan(GGUF / name, "gguf").plan.target.notes) == is_noted


def test_a_file_next_to_weights_or_steps_is_an_export(tmp_path: Path) -> None:
    run = Path(shutil.copytree(FIXTURES / "trainer-plain", tmp_path / "run", ignore=shutil.ignore_patterns("truth")))
    for folder, found in ((run, "trainer"), (Path(shutil.copytree(GGUF / "llama", tmp_path / "hf")), "hf")):
        shutil.copy(GGUF / "llama-bf16.gguf", folder)
        assert ckpt.open(folder).format == found


def test_writing_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UsageError, match="needs the gguf package") as caught:
        ckpt.plan(GGUF / "llama", "gguf")
    assert "ckpt-toolkit[gguf]" in str(caught.value.hint)


def test_a_damaged_sentencepiece_model_is_refused(tmp_path: Path) -> None:
    piece = b"\x0a\x03abc\x15" + struct.pack("<f", -2.5) + b"\x18\x06"
    file = tmp_path / "tokenizer.model"
    file.write_bytes(b"\x0a" + bytes([len(piece)]) + piece)
    assert read_pieces(file) == [("abc", -2.5, 6)]
    for content in (b"\x0a", b"\x0a\xff", b"\x0f", b"\x0a\x02\x0a\x05", b"\xff" * 12, b""):
        file.write_bytes(content)
        with pytest.raises(CorruptError, match="SentencePiece"):
            read_pieces(file)


def with_number(source: Path, key: str, value: float, path: Path) -> Path:
    """Return a copy of a file with another fp32 number."""
    content, name = bytearray(source.read_bytes()), text(key) + struct.pack("<I", 6)
    at = content.index(name) + len(name)
    content[at : at + 4] = struct.pack("<f", value)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("key", ["llama.rope.freq_base", "llama.attention.layer_norm_rms_epsilon"])
def test_verify_compares_the_numbers_of_a_file(key: str, tmp_path: Path) -> None:
    """Only tensors are compared between files, but llama.cpp computes with the file's numbers."""
    for kind, options in (("q8_0", ["--quantized"]), ("bf16", [])):
        file = GGUF / f"llama-{kind}.gguf"
        other = with_number(file, key, 0.5, tmp_path / f"{kind}.gguf")
        good = command("verify", file, GGUF / "llama", "--cast", *options)
        assert good.code == 0, good.out + good.err
        bad = command("verify", other, GGUF / "llama", "--cast", *options)
        assert (bad.code, f"expected: {key} 0.5, as in the file" in bad.err) == (4, True), bad.out
        plain = GGUF / "llama-bf16.gguf"
        same_numbers, differing = (command("verify", one, plain, "--cast", *options) for one in (file, other))
        assert (same_numbers.code, "the files record" in same_numbers.out) == (0, False), same_numbers.out
        assert (differing.code, f"the files record other numbers in A and B: {key} 0.5 and" in differing.out) == (
            0,
            True,
        )
