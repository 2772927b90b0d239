"""`ckpt/compare/digest.py`, `manifest.py`: `ckpt hash`: one digest for one content, in any format."""

from __future__ import annotations

import json
import weakref
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from xxhash import xxh3_128_hexdigest

from ckpt import api
from ckpt.compare import digest, manifest
from ckpt.compare.digest import MASTERS, OPTIMIZER, WEIGHTS, TensorDigest, row_major
from ckpt.compare.manifest import MANIFEST
from ckpt.errors import CorruptError
from ckpt.move import file_pieces
from ckpt.plan.checkpoint import HUB, MASTER, WEIGHT, Checkpoint, Layout, Slot, TargetFile
from ckpt.plan.dtypes import BFLOAT16, BY_NAME, FLOAT32, DType
from ckpt.plan.tensors import Extent, Fragment, Tensor, whole
from ckpt.state.naming import to_namespace
from tests.support.commands import ckpt
from tests.support.engines import Truth
from tests.support.model_files import merge_json
from tests.support.places import FIXTURES
from tests.support.sampling import sample
from tests.support.strategies import Store, shapes, stored, tensor_of

UINT8 = BY_NAME["uint8"]
#: The toy models' floating buffers. Only ZeRO's files mark them.
BUFFERS = {"mean", "shift"}
TARGETS = ("zero1", "zero2", "zero3", "universal", "dcp", "full")


def layout_of(target: str) -> Layout:
    if target == "hf":
        return Layout(names="own")  # adapters, too
    return Layout(world_size=2) if target not in ("full", "universal") else Layout()


def convert(source: Path, target: str, output: Path) -> Path:
    api.plan(api.open(source), target, layout_of(target)).run(output)
    return output


def parameters(checkpoint: Checkpoint, dtype: DType) -> set[TensorDigest]:
    return {one for one in api.digests(checkpoint, dtype=dtype).of_kind(WEIGHTS) if one.fqn not in BUFFERS}


#: Sources and targets. The sample has every target of each model, and one target of each further ZeRO stage.
PAIRS = sample(
    product(("moe-zero3", "lora-zero3", "dcp-fsdp2", "toy-zero3", "toy-zero1", "toy-zero2"), TARGETS),
    lambda pair: [pair[0], (pair[1], pair[0].split("-")[0])],
)


@pytest.mark.parametrize("name", dict(PAIRS))
def test_equal_in_every_format(name: str, tmp_path: Path) -> None:
    """Every format of a model has the same digests: optimizer states unchanged, weights in a given dtype."""
    source = api.open(FIXTURES / name)
    whole, weights = api.digests(source).whole, parameters(source, BFLOAT16)
    for target in [target for source_name, target in PAIRS if source_name == name]:
        if name in ("toy-zero1", "toy-zero2") and target == "zero3":
            continue  # these can't hold their empty frozen parameter
        written = api.open(convert(FIXTURES / name, target, tmp_path / target))
        found = api.digests(written).whole
        assert parameters(written, BFLOAT16) == weights, target
        assert found[OPTIMIZER] == whole[OPTIMIZER], target
        if target not in ("dcp", "full"):  # they store masters as weights and lose the model's dtype
            assert found == whole or name == "dcp-fsdp2", target
    written = api.open(convert(FIXTURES / name, "hf", tmp_path / "hf"))
    assert api.digests(written).whole == {WEIGHTS: whole[WEIGHTS]}
    assert parameters(written, BFLOAT16) == weights


def test_a_number_too_large_for_the_dtype_has_no_digest(tmp_path: Path) -> None:
    """`convert` refuses the same cast."""
    done = convert(FIXTURES / "trainer-plain", "hf", tmp_path / "hf")
    tensors = load_file(done / "model.safetensors")
    tensors["model.norm.weight"][2] = 1e6
    save_file(tensors, done / "model.safetensors", {"format": "pt"})
    for words in (("hash", done), ("convert", "hf", "hf", done, "-o", tmp_path / "out")):
        assert ckpt(*words, "--dtype", "bf16").code == 0
        refused = ckpt(*words, "--dtype", "fp16", *(("--overwrite",) if words[0] == "convert" else ()))
        assert refused.code == 6 and "a number is too large for float16" in refused.err, refused
        assert "model.norm.weight" in refused.err and "--dtype bf16" in refused.err and not refused.out, refused


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["toy-zero3", "trainer-plain", "marked buffer", "quantized"])
def test_a_dtype_is_applied_as_in_a_conversion(name: str, dtype: Any, tmp_path: Path) -> None:
    """Buffers that the format or the architecture names, and scales of quantized weights, are cast by neither."""
    source = FIXTURES / name
    if not source.exists():
        source = tmp_path / "source"
        assert ckpt("convert", "auto", "hf", FIXTURES / "trainer-plain", "-o", source).code == 0
        tensors, config = load_file(source / "model.safetensors"), source / "config.json"
        weight = "model.layers.0.mlp.down_proj.weight"
        if name == "quantized":
            tensors |= {weight: tensors[weight].to(torch.float8_e4m3fn), f"{weight}_scale_inv": torch.full((1, 1), 0.3)}
            method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
            merge_json(config, {"quantization_config": method})
        else:
            tensors["model.norm.running_mean"] = torch.rand(4)
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
    written = tmp_path / "written"
    done = ckpt("convert", "auto", "hf", source, "--dtype", dtype, "--names", "own", "-o", written)
    assert done.code == 0, done.err
    cast, kept = api.hash(source, dtype=dtype), api.hash(written)
    assert cast.of_kind(WEIGHTS) == kept.of_kind(WEIGHTS)
    weights = {one.dtype for one in cast.of_kind(WEIGHTS)}
    assert len(weights) > 1 or dtype == "fp32" or name == "trainer-plain", weights


def test_equal_in_megatrons_forms(tmp_path: Path) -> None:
    """In all Megatron forms, each digest and each flipped bit has the Hub's name."""
    run = FIXTURES / "megatron-dist-flattened"
    source = api.open(run)
    expected = api.digests(source)
    assert set(expected.whole) == {WEIGHTS, MASTERS, OPTIMIZER}
    megatron = {"megatron": Layout(pp=2), "megatron-dist": Layout(tp=3)}
    layouts = megatron | {target: layout_of(target) for target in (*TARGETS, "hf")}
    name = "model.layers.1.mlp.down_proj.weight"
    for target, layout in layouts.items():
        folder = tmp_path / target
        api.plan(source, target, layout).run(folder)
        written = api.digests(api.open(folder))
        kinds = [WEIGHTS] if target == "hf" else [OPTIMIZER] if target in ("dcp", "full") else expected.whole
        for kind in kinds:
            assert written.whole[kind] == expected.whole[kind], (target, kind)
        in_bf16 = api.digests(api.open(folder), dtype=BFLOAT16)
        assert in_bf16.whole[WEIGHTS] == expected.whole[WEIGHTS], target
        flip_in(to_namespace(api.open(folder), HUB), name)
        changed = api.digests(api.open(folder))
        assert changed.whole != written.whole
        assert {a.fqn for a, b in zip(changed.tensors, written.tensors, strict=True) if a != b} == {name}, target


def flip_in(checkpoint: Checkpoint, fqn: str) -> None:
    """Flip a bit of a tensor's first element that bf16 keeps, in the weight or else the master."""
    tensor = checkpoint.tensors.get((fqn, WEIGHT)) or checkpoint.tensors[fqn, MASTER]
    extent = next(iter(tensor.fragments())).extent
    flip(Path(extent.path), extent.offset + extent.dtype.itemsize - 1, 0)


def test_as_documented() -> None:
    """The expected digests are computed here from the definition and the live engine's truth."""
    truth = Truth.load(next((FIXTURES / "toy-zero3" / "truth").glob("global_step*.safetensors")))
    found = api.digests(api.open(FIXTURES / "toy-zero3"))
    states = found.of_kind(OPTIMIZER)
    of_tensors = [one for one in states if one.dtype != "number"]
    assert {one.role for one in of_tensors} == {"exp_avg", "exp_avg_sq"}
    for one in of_tensors:
        dtype, shape, data = truth.tensors[one.fqn, one.role]
        head = f"{one.fqn}\0{one.role}\0{dtype}\0{','.join(map(str, shape))}\0".encode()
        assert one.digest == xxh3_128_hexdigest(head + bytes.fromhex(xxh3_128_hexdigest(data)))
    lines = sorted(f"{one.digest} {one.role} {one.fqn}\n" for one in states)
    assert found.whole[OPTIMIZER] == xxh3_128_hexdigest("".join(lines).encode())


@given(st.data())
def test_row_major(data: st.DataObject) -> None:
    """Pieces may be transposed, have gaps and come in any order."""
    shape = data.draw(shapes())
    values = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    store: Store = {}
    tensor = tensor_of("t", values, data.draw(stored(values, "file", store)))
    with pytest.MonkeyPatch.context() as patch, InMemory(store) as reader:
        patch.setattr(digest, "_SLAB", 4 * data.draw(st.integers(1, 40)))
        patch.setattr(digest, "_CHUNK", 4 * data.draw(st.integers(1, 9)))
        found = [bits.copy() for bits in row_major(tensor, reader)]
    assert np.array_equal(np.concatenate([np.empty(0, np.uint32), *found]).view(np.int32), values.reshape(-1))


@pytest.mark.parametrize("slab", [4, 5, 7, 10, 40])
def test_row_major_with_rows_of_any_length(slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 5 elements, from a transposed tensor, in slabs shorter, equal and longer than a row."""
    monkeypatch.setattr(digest, "_SLAB", 4 * slab)
    values = np.arange(20, dtype=np.int32).reshape(4, 5)
    tensor = tensor_of("t", values, [Fragment(whole((4, 5)), Extent("file", 0, FLOAT32, (4, 5), (1, 4)))])
    with InMemory({"file": values.T.reshape(-1)}) as reader:
        found = [bits.copy() for bits in row_major(tensor, reader)]
    assert np.array_equal(np.concatenate(found).view(np.int32), np.arange(20))
    assert {part.size for part in found[:-1]} <= {slab - slab % 5 if slab > 5 else slab}, "whole rows if one fits"


def test_one_range_of_a_store_is_in_memory_at_a_time() -> None:
    answers: list[weakref.ref[np.ndarray]] = []

    class FromStore(digest.Reader):
        def fetch(self, path: str, offset: int, size: int) -> memoryview:
            assert not any(answer() is not None for answer in answers), "the last range is released first"
            content = np.arange(offset, offset + size, dtype=np.uint8)
            answers.append(weakref.ref(content))
            return memoryview(content)

    with FromStore() as reader:
        for start in (0, 100, 100):
            reader.hold(("file", start, 8))
            assert bytes(reader.fetched_bytes("file", start + 2, 3) or b"") == bytes(range(start + 2, start + 5))
        assert len(answers) == 2 and answers[1]() is not None
        reader.hold(None)  # the next tensor is read alone
        assert reader.fetched_bytes("file", 102, 3) is None and answers[1]() is None


def test_an_empty_tensor_is_the_same_in_any_format(tmp_path: Path) -> None:
    """DCP has no chunk for it."""
    tensors = {"first": torch.arange(4.0), "empty": torch.empty(0, 4), "last": torch.ones(2)}
    dcp.save({"model": tensors}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    found = api.hash(tmp_path / "dcp")
    assert found == api.hash(tmp_path / "hf")
    empty = b"empty\0weight\0float32\x000,4\0" + bytes.fromhex(xxh3_128_hexdigest(b""))
    assert {one.fqn: one.digest for one in found.tensors}["empty"] == xxh3_128_hexdigest(empty)
    assert api.verify(tmp_path / "dcp", tmp_path / "hf").equal and api.verify(tmp_path / "hf", tmp_path / "dcp").equal


class InMemory(digest.Reader):
    """Reader for in-memory arrays."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def _read(self, side: int, path: str, offset: int, into: memoryview) -> None:
        into[:] = self.store[path].view(np.uint8)[offset : offset + len(into)].data


def test_the_command(tmp_path: Path) -> None:
    run = FIXTURES / "toy-zero3"
    folder = convert(run, "hf", tmp_path / "hf")
    one, other = ckpt("hash", run), ckpt("hash", folder)
    assert one.code == other.code == 0
    assert one.out.splitlines()[0] == other.out.splitlines()[0]
    assert one.out.splitlines()[0].startswith("xxh3-128:") and "  weights  (" in one.out
    assert len(one.out.splitlines()) == 3
    report = json.loads(ckpt("hash", folder, "--json", "-q").out)
    assert report["digests"]["weights"] in other.out and report["tensors"][0]["kind"] == WEIGHTS
    listed = ckpt("hash", folder, "--tensors", "-q", "--workers", "1").out
    assert all(tensor["digest"] in listed for tensor in report["tensors"])


def test_one_other_bit_is_another_digest(tmp_path: Path) -> None:
    folder = convert(FIXTURES / "toy-zero3", "hf", tmp_path / "hf")
    before = api.digests(api.open(folder))
    flip(folder / "model.safetensors", -1, 1)
    after = api.digests(api.open(folder))
    assert before.whole != after.whole
    assert sum(a.digest != b.digest for a, b in zip(before.tensors, after.tensors, strict=True)) == 1


def test_a_file_that_is_too_short(tmp_path: Path) -> None:
    folder = convert(FIXTURES / "toy-zero3", "hf", tmp_path / "hf")
    checkpoint = api.open(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(CorruptError, match="the file ends inside a tensor"):
        api.digests(checkpoint)


def flip(path: Path, offset: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("target", ["hf", "zero3", "dcp", "full", "universal"])
def test_manifest_finds_every_flipped_bit(target: str, tmp_path: Path) -> None:
    folder, again = tmp_path / "out", tmp_path / "again"
    for output in (folder, again):
        assert ckpt("convert", "auto", target, FIXTURES / "toy-zero3", "-o", output).code == 0
    assert (folder / MANIFEST).read_bytes() == (again / MANIFEST).read_bytes()
    good = ckpt("verify", folder)
    assert good.code == 0 and "every bit" in good.out
    checkpoint = api.open(folder)
    placed: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for tensor in checkpoint.tensors.values():
        for fragment in tensor.fragments():
            of_tensor = dict.fromkeys(range(fragment.extent.offset, fragment.extent.end), tensor)
            placed[fragment.extent.path] |= of_tensor
    random = np.random.default_rng(0)
    named = 0
    for index, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        in_tensors = [*placed[str(file)]]
        for number in range(1 if target == "universal" else 8):
            bit = int(random.integers(8))
            if (index + number) % 2 and in_tensors:
                offset = int(random.choice(in_tensors))
            else:
                offset = int(random.integers(file.stat().st_size))
            flip(file, offset, bit)
            report = ckpt("verify", folder)
            flip(file, offset, bit)
            if file.name == MANIFEST:
                assert report.code == 4, report.out
                continue
            assert report.code == 1, (file, offset)
            assert str(file.relative_to(folder)) in report.out
            changed = placed[str(file)].get(offset)
            if changed is not None:
                assert f"{changed.fqn} (" in report.out and report.out.count(" has changed\n") <= 3
                named += 1
            else:
                assert "but no tensor element has" in report.out or "cannot be read" in report.out
    assert named >= 5
    assert ckpt("verify", folder).code == 0


def test_small_copied_files_are_always_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`clean` and `resume` read neither large tensors nor large copied files."""
    folder, large = tmp_path / "zero2", "unet_ema/diffusion_pytorch_model.safetensors"
    assert ckpt("convert", "auto", "zero2", FIXTURES / "diffusers-zero2", "--gpus", 3, "-o", folder).code == 0
    monkeypatch.setattr(manifest, "_MAX_COPY", (folder / large).stat().st_size - 1)
    for name in ("scheduler.bin", "random_states_1.pkl", "unet/config.json", large):
        assert manifest.check(folder, elements=False).good
        flip(folder / name, 700, 1)
        told = (f"{name}: its bytes have changed",)
        assert manifest.check(folder).problems == told, "elements of the copied model, too"
        assert manifest.check(folder, elements=False).problems == (() if name == large else told)
        flip(folder / name, 700, 1)


def test_manifest_tells_missing_short_and_unknown_files(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    ckpt("convert", "auto", "zero3", FIXTURES / "toy-zero3", "-o", folder)
    (folder / "mine.txt").write_text("a note")
    unknown = ckpt("verify", folder)
    assert unknown.code == 0 and "note: not in the manifest: mine.txt" in unknown.out
    (folder / "latest").unlink()
    file = next(folder.rglob("*_optim_states.pt"))
    file.write_bytes(file.read_bytes()[:-1])
    report = json.loads(ckpt("verify", folder, "--json").out)
    assert not report["as_written"] and len(report["problems"]) == 2
    assert "latest: the file is missing" in report["problems"]
    assert any(file.name in problem and "bytes instead of" in problem for problem in report["problems"])


def test_fp32_is_what_the_masters_are(tmp_path: Path) -> None:
    """ZeRO's masters and an fp32 folder written from them have the same digest."""
    api.plan(api.open(FIXTURES / "toy-zero3"), "hf", Layout(dtype=FLOAT32)).run(tmp_path / "hf")
    one, other = (api.open(path) for path in (FIXTURES / "lora-zero3", tmp_path / "hf"))
    assert api.digests(one, dtype=FLOAT32).whole[WEIGHTS] != api.digests(other, dtype=FLOAT32).whole[WEIGHTS]
    zero = api.open(FIXTURES / "toy-zero3")
    assert parameters(zero, FLOAT32) == parameters(other, FLOAT32)
    assert api.digests(zero, dtype=FLOAT32).whole[WEIGHTS] == api.digests(other).whole[WEIGHTS]


def test_the_manifest_has_the_digests_where_tensors_lie_in_one_piece(tmp_path: Path) -> None:
    """In safetensors, digests come for free while the file is hashed; not so in ZeRO's flat partitions."""
    folder = convert(FIXTURES / "toy-zero3", "hf", tmp_path / "hf")
    content = json.loads((folder / MANIFEST).read_text())
    found = api.digests(api.open(folder))
    assert content["digests"] == found.whole
    assert content["tensors"] == [tensor.to_json() for tensor in found.tensors]
    flat = json.loads((convert(FIXTURES / "toy-zero3", "zero3", tmp_path / "zero3") / MANIFEST).read_text())
    assert MASTERS not in flat["digests"] and OPTIMIZER not in flat["digests"]


def test_many_pieces_of_a_file_are_hashed_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest of a very large checkpoint stays small, and a change is located to a few tensors."""
    monkeypatch.setattr(file_pieces, "_MAX_PIECES", 2)
    folder = convert(FIXTURES / "toy-zero3", "hf", tmp_path / "hf")
    assert len(json.loads((folder / MANIFEST).read_text())["files"]["model.safetensors"]["pieces"]) <= 3
    extents = {
        tensor.fqn: fragment.extent
        for tensor in api.open(folder).tensors.values()
        for fragment in tensor.fragments()
        if fragment.extent.numel
    }
    smallest = min(extents, key=lambda fqn: extents[fqn].nbytes)
    flip(folder / "model.safetensors", extents[smallest].offset, 3)
    report = ckpt("verify", folder)
    assert report.code == 1 and "model.safetensors: one or several of " in report.out
    assert "have changed, or the bytes between them" in report.out and "outside" not in report.out


def test_a_small_tensor_among_large_ones_is_a_piece_of_its_own(tmp_path: Path) -> None:
    """A norm is less than a 4096th of the file; hashed with its neighbour, it lost its digest."""
    tensors = {"a.weight": torch.randn(512, 512), "b.norm": torch.randn(64), "c.weight": torch.randn(512, 512)}
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model/model.safetensors")
    folder = convert(tmp_path / "model", "hf", tmp_path / "hf")
    content = json.loads((folder / MANIFEST).read_text())
    assert content["digests"] == api.digests(api.open(folder)).whole
    norm = next(iter(api.open(folder).tensors["b.norm", WEIGHT].fragments())).extent
    flip(folder / "model.safetensors", norm.offset + 5, 2)
    report = ckpt("verify", folder)
    assert report.code == 1 and "b.norm (weight, float32 [64]) has changed" in report.out


def test_so_many_files_have_few_pieces_each() -> None:
    """A checkpoint's digests can still be read at once if it has thousands of files."""
    assert (file_pieces.max_pieces(1), file_pieces.max_pieces(1000), file_pieces.max_pieces(10**7)) == (4096, 1000, 1)


HOSTILE: dict[str, Any] = {
    "no files": {"files": None},
    "files are a list": {"files": []},
    "a file is a number": {"files": {"a": 3}},
    "a size in words": {"files": {"a": {"bytes": "10", "rest": "", "pieces": []}}},
    "no rest": {"files": {"a": {"bytes": 10, "pieces": []}}},
    "no pieces": {"files": {"a": {"bytes": 10, "rest": ""}}},
    "a piece of two": {"files": {"a": {"bytes": 10, "rest": "", "pieces": [[1, 2]]}}},
    "a length that is no whole number": {"files": {"a": {"bytes": 10, "rest": "", "pieces": [[0, 1.5, ""]]}}},
    "a piece outside": {"files": {"a": {"bytes": 10, "rest": "", "pieces": [[1 << 70, 4, ""]]}}},
    "before the file": {"files": {"a": {"bytes": 10, "rest": "", "pieces": [[-1, 4, ""]]}}},
    "pieces that overlap": {"files": {"a": {"bytes": 10, "rest": "", "pieces": [[0, 4, ""], [3, 4, ""]]}}},
    "no format": {"format": None},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_manifest_of_somebody_elses(name: str, tmp_path: Path) -> None:
    """Its own digest matches, but ckpt never writes such content."""
    folder = convert(FIXTURES / "toy-zero3", "hf", tmp_path / "hf")
    content = json.loads((folder / MANIFEST).read_text()) | HOSTILE[name]
    content["digest"] = manifest.own_digest(content)
    (folder / MANIFEST).write_text(json.dumps(content))
    report = ckpt("verify", folder)
    assert report.code == 4 and "not written by ckpt" in report.err


@pytest.mark.parametrize("file", ["../outside", "/etc/hostname"])
def test_a_manifest_that_leads_out_of_its_folder(file: str, tmp_path: Path) -> None:
    folder = convert(FIXTURES / "toy-zero3", "hf", tmp_path / "hf")
    content = json.loads((folder / MANIFEST).read_text())
    content["files"][file] = {"bytes": 1, "rest": "", "pieces": []}
    content["digest"] = manifest.own_digest(content)
    (folder / MANIFEST).write_text(json.dumps(content))
    assert ckpt("verify", folder).code == 5


@given(st.data())
def test_pieces_do_not_overlap_and_hold_every_slot(data: st.DataObject) -> None:
    """Interleaved slots share a piece, for example two halves of each row."""
    slots, at = [], 0
    for number in range(data.draw(st.integers(0, 8))):
        at += data.draw(st.integers(0, 3))
        rows, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3))
        is_split = data.draw(st.booleans())
        for half in range(1 + is_split):
            strides = ((1 + is_split) * columns, 1)
            extent = Extent("f", at + half * columns, UINT8, (rows, columns), strides)
            slots.append(Slot((f"t{number}", "weight"), whole((rows, columns)), extent))
        at += rows * columns * (1 + is_split)
    pieces = file_pieces.pieces_of(TargetFile("f", at + 2, slots=tuple(slots)), data.draw(st.integers(1, 9)))
    ends = [offset + length for offset, length in pieces]
    assert all(end <= start for end, (start, _) in zip(ends, pieces[1:], strict=False))
    for slot in slots:
        inside = [o <= slot.extent.offset and slot.extent.end <= e for (o, _), e in zip(pieces, ends, strict=True)]
        assert sum(inside) == 1 or not slot.extent.numel
