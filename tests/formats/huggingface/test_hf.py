"""`converters/huggingface/hf.py`: reader and writer match safetensors, huggingface_hub and transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ckpt import api
from ckpt.errors import CkptError, CorruptError, NotFoundError, UnsafeError
from ckpt.move.run import execute
from ckpt.plan.checkpoint import (
    BUFFER,
    HUB,
    MASTER,
    OWN,
    WEIGHT,
    Checkpoint,
    Layout,
    ReadRequest,
    SourceFile,
    TrainingState,
)
from ckpt.plan.dtypes import BFLOAT16, BOOL, BY_NAME, FLOAT16, FLOAT32, INT64, DType
from ckpt.plan.planner import make_plan
from ckpt.plan.precision import choose
from ckpt.plan.tensors import Extent, Tensor, Whole
from ckpt.runs.model_files import companions
from converters.huggingface.hf import HF
from converters.names.transformers.ties import kept_names
from tests.support.commands import ckpt
from tests.support.places import REPOSITORY

PT = {"format": "pt"}


def read(path: Path, **request: Any) -> Checkpoint:
    found = HF.find(path, None)
    assert found is not None
    return HF.read(found, ReadRequest(**request))


def convert(checkpoint: Checkpoint, out: Path, **layout: Any) -> Path:
    execute(make_plan(checkpoint, HF.lay_out(checkpoint, Layout(**layout)), carries_optimizer=False), out)
    return out


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "complex64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
]


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return random bits. They may include NaN payloads, infinities and -0.0."""
    size = getattr(torch, dtype).itemsize
    count = size * int(torch.tensor(shape).prod()) if shape else size
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    if dtype == "bool":
        raw = raw & 1
    return raw.view(getattr(torch, dtype)).reshape(shape)


def test_the_writer_writes_what_safetensors_writes(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.{dtype}": random_tensor(dtype, (i % 4, 3, 2), i) for i, dtype in enumerate(DTYPES)}
    tensors |= {"scalar": torch.tensor(3), 'ünï\ncödé"\\\x01': torch.ones(3), "a" * 300: torch.zeros(0)}
    tensors |= {f"layers.{i}.weight": torch.ones(i) for i in (2, 10)}
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors", metadata=PT)
    out = convert(read(tmp_path / "in"), tmp_path / "out")
    assert content(out) == content(tmp_path / "in")


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda s: s != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
        max_size=8,
    )
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tensors_come_out_as_safetensors_writes_them(tmp_path: Path, wanted: dict[str, Any]) -> None:
    tensors = {}
    for name, (dtype, shape) in wanted.items():
        if dtype == "float4_e2m1fn_x2" and not shape:
            shape = [1]
        tensors[name] = random_tensor(dtype, tuple(shape))
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata=PT)
    checkpoint = read(path)
    assert {f: tuple(t.shape) for (f, _), t in checkpoint.tensors.items()} == {
        n: tuple(t.shape) for n, t in tensors.items()
    }
    target = HF.lay_out(checkpoint, Layout())
    written = target.files[0]
    assert written.size == path.stat().st_size
    assert path.read_bytes().startswith(written.literals[0][1])
    for slot in written.slots:
        assert next(checkpoint.tensors[slot.key].fragments()).extent.offset == slot.extent.offset


# -- folders and indexes --------------------------------------------------------------------------------------
def sharded(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({"a": torch.ones(2), "b": torch.zeros(2)}, folder / "model-00001-of-00002.safetensors", metadata=PT)
    save_file({"c": torch.ones(3)}, folder / "model-00002-of-00002.safetensors", metadata=PT)
    names = dict.fromkeys("ab", "model-00001-of-00002.safetensors") | {"c": "model-00002-of-00002.safetensors"}
    index = {"metadata": {"total_size": 28}, "weight_map": names} | changes
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    checkpoint = read(sharded(tmp_path))
    assert sorted(f for f, _ in checkpoint.tensors) == ["a", "b", "c"]
    assert (checkpoint.namespace, checkpoint.notes, len(checkpoint.files)) == (OWN, (), 2)


def test_a_wrong_total_size_is_a_note(tmp_path: Path) -> None:
    checkpoint = read(sharded(tmp_path, metadata={"total_size": 7}))
    assert checkpoint.notes == ("model.safetensors.index.json: total_size says 7 bytes, the tensors have 28",)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("../model-00001-of-00002.safetensors", UnsafeError),
        ("a/../../x.safetensors", UnsafeError),
        ("/etc/x.safetensors", UnsafeError),
        ("x\0.safetensors", UnsafeError),
        ("", UnsafeError),
        (7, CorruptError),
        (None, CorruptError),
        (["x"], CorruptError),
        ("model.bin", CorruptError),
        ("model-00003-of-00003.safetensors", CorruptError),
        ("model-00002-of-00002.safetensors", CorruptError),
    ],
)
def test_an_index_that_lies_about_files(tmp_path: Path, name: object, error: type[CkptError]) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    with pytest.raises(error):
        read(sharded(tmp_path, weight_map={"a": name, "b": first, "c": second}))


def test_a_missing_shard_is_named_with_its_tensors(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CorruptError, match="a file of weights is missing") as caught:
        read(folder)
    assert caught.value.fqn == "a, b" and str(caught.value.path).endswith("model-00001-of-00002.safetensors")


def test_a_tensor_that_the_index_does_not_name(tmp_path: Path) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    with pytest.raises(CorruptError, match="missing from the index"):
        read(sharded(tmp_path, weight_map={"a": first, "c": second}))
    with pytest.raises(CorruptError, match="missing from its file"):
        read(sharded(tmp_path, weight_map={"a": first, "b": first, "c": second, "d": second}))


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(CorruptError, match="two files"):
        read(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": ' + "[" * 100_000,
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        '{"weight_map": {"a": "\\ud800.safetensors"}}',
        "[" + "[]," * 3_000_000 + "[]]",
    ],
    ids=lambda text: text[:30],
)
def test_a_hostile_index(tmp_path: Path, text: str) -> None:
    folder = sharded(tmp_path)
    (folder / "model.safetensors.index.json").write_text(text)
    start = time.process_time()
    with pytest.raises(CkptError):
        read(folder)
    assert time.process_time() - start < 2


def test_a_set_of_shards_without_an_index(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    assert len(read(folder).tensors) == 3
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CorruptError, match="set of shards is not complete"):
        read(folder)


def test_both_a_single_file_and_an_index(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    save_file({"z": torch.ones(1)}, folder / "model.safetensors")
    checkpoint = read(folder)
    assert [f for f, _ in checkpoint.tensors] == ["z"] and "are both in the folder" in checkpoint.notes[0]


def test_what_is_not_a_model(tmp_path: Path) -> None:
    assert HF.find(tmp_path, None) is None
    assert HF.find(tmp_path / "nothing", None) is None
    save_file({"base_model.model.x.lora_A.weight": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert HF.find(tmp_path, None) is None
    assert HF.find(tmp_path / "adapter_model.safetensors", None) is None
    with pytest.raises(NotFoundError, match="no safetensors model weights"):
        HF.read(tmp_path, ReadRequest())
    rank_shards = tmp_path / "ranks"
    rank_shards.mkdir()
    save_file({"a": torch.ones(1)}, rank_shards / "shard-00001-model-00001-of-00001.safetensors")
    assert HF.find(rank_shards, None) is None


def test_shards_of_a_distributed_checkpoint_are_refused(tmp_path: Path) -> None:
    info = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [0]}}), "DCP_VERSION": "1.0"}
    save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00001.safetensors", metadata=PT | info)
    with pytest.raises(NotFoundError, match="pieces of tensors"):
        read(tmp_path)


def test_a_tag_names_a_folder_inside(tmp_path: Path) -> None:
    sharded(tmp_path / "checkpoint-3")
    assert HF.find(tmp_path, "checkpoint-3") == tmp_path / "checkpoint-3"
    assert HF.find(tmp_path, None) is None
    with pytest.raises(UnsafeError):
        HF.find(tmp_path, "../x")


def test_a_snapshot_of_the_hub_cache(tmp_path: Path) -> None:
    """Files in a snapshot are symlinks into `blobs`. Links elsewhere are refused."""
    model = tmp_path / "models--org--name"
    snapshot, blobs = model / "snapshots" / "abc", model / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"a": torch.ones(3)}, blobs / "123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    checkpoint = read(snapshot)
    assert [f for f, _ in checkpoint.tensors] == ["a"]
    assert load_file(convert(checkpoint, tmp_path / "out") / "model.safetensors")["a"].tolist() == [1, 1, 1]

    save_file({"a": torch.ones(3)}, tmp_path / "elsewhere")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeError, match="symlink"):
        read(snapshot)


def test_a_config_symlink_that_leads_out_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "model")
    (tmp_path / "secret.json").write_text('{"model_type": "llama"}')
    (folder / "config.json").symlink_to("../secret.json")
    with pytest.raises(UnsafeError):
        read(folder)


# -- sharding -------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 11, "vocab_size": 40}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("size", [10_000, 1500, 700, 100, 50_000_000])
def test_shards_and_index_are_those_of_huggingface_hub(tmp_path: Path, llama: Path, size: int) -> None:
    """For naturally sorted names, files and index equal transformers' output byte for byte."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from transformers.core_model_loading import dot_natural_key

    tensors = load_file(llama / "model.safetensors")
    tensors = dict(sorted(tensors.items(), key=lambda item: dot_natural_key(item[0])))
    split = split_torch_state_dict_into_shards(
        tensors, max_shard_size=size, filename_pattern="model{suffix}.safetensors"
    )
    wanted = tmp_path / "wanted"
    wanted.mkdir()
    for name, members in split.filename_to_tensors.items():
        save_file({member: tensors[member] for member in members}, wanted / name, metadata=PT)
    if split.is_sharded:
        count = sum(t.numel() for t in tensors.values())
        index = {"metadata": {"total_parameters": count, **split.metadata}, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (wanted / "model.safetensors.index.json").write_text(text)
    out = content(convert(read(llama), tmp_path / "out", max_shard_size=size))
    for name in ("config.json", "generation_config.json"):
        assert out.pop(name) == (llama / name).read_bytes()
    assert out == content(wanted)


def test_a_sharded_folder_loads_and_reads_back(tmp_path: Path, llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = convert(read(llama), tmp_path / "out", max_shard_size=3000)
    a, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    b = AutoModelForCausalLM.from_pretrained(llama)
    for (name, x), (_, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        assert x.dtype == y.dtype == torch.bfloat16 and torch.equal(x, y), name
    assert content(convert(read(out), tmp_path / "again"))["model.safetensors"] == (
        (llama / "model.safetensors").read_bytes()
    )


# -- precision ------------------------------------------------------------------------------------------------
def tensor(fqn: str, role: str, dtype: DType, native: DType | None = None) -> Tensor:
    return Tensor(fqn, role, dtype, (2,), Whole(Extent.contiguous("x", 0, dtype, (2,))), native)


W16 = tensor("w", WEIGHT, BFLOAT16)
M32 = tensor("w", MASTER, FLOAT32, BFLOAT16)
FP8 = tensor("w", WEIGHT, BY_NAME["float8_e4m3fn"])
INT = tensor("w", WEIGHT, BY_NAME["int32"])


@pytest.mark.parametrize(
    ("weight", "master", "asked", "role", "dtype"),
    [
        (W16, M32, None, WEIGHT, "bfloat16"),
        (W16, None, None, WEIGHT, "bfloat16"),
        (None, M32, None, MASTER, "bfloat16"),
        (None, M32._replace(native=None), None, MASTER, "float32"),
        (None, M32._replace(native=FLOAT32), None, MASTER, "float32"),
        (W16, M32, BFLOAT16, WEIGHT, "bfloat16"),
        (W16, M32, FLOAT32, MASTER, "float32"),
        (W16, M32, FLOAT16, MASTER, "float16"),
        (W16, None, FLOAT32, WEIGHT, "float32"),
        (W16, None, FLOAT16, WEIGHT, "float16"),
        (None, M32, FLOAT32, MASTER, "float32"),
        (None, M32, BFLOAT16, MASTER, "bfloat16"),
        (FP8, None, BFLOAT16, WEIGHT, "float8_e4m3fn"),
        (FP8, M32, None, WEIGHT, "float8_e4m3fn"),
        (INT, None, FLOAT32, WEIGHT, "int32"),
    ],
)
def test_which_tensor_is_written_in_which_dtype(
    weight: Tensor | None, master: Tensor | None, asked: DType | None, role: str, dtype: str
) -> None:
    choice = choose(weight, master, asked)
    assert (choice.tensor.role, choice.dtype.name) == (role, dtype)


def engine_checkpoint(folder: Path, tensors: dict[tuple[str, str], torch.Tensor], **fields: Any) -> Checkpoint:
    """Return a checkpoint from an imaginary engine: every tensor by fqn and role, in one raw file."""
    folder.mkdir(exist_ok=True)
    path = folder / "engine.bin"
    described, data = {}, b""
    native = fields.pop("native", None)
    for (fqn, role), value in tensors.items():
        dtype = next(d for d in (FLOAT32, BFLOAT16, FLOAT16, *INT_TYPES) if d.name == str(value.dtype)[6:])
        extent = Extent.contiguous(str(path), len(data), dtype, tuple(value.shape))
        described[fqn, role] = Tensor(
            fqn, role, dtype, tuple(value.shape), Whole(extent), native if role == MASTER else None
        )
        data += bits(value)
    path.write_bytes(data)
    return Checkpoint(str(folder), "engine", described, (SourceFile.stat(str(path)),), **fields)


INT_TYPES = (INT64, BOOL)


@pytest.fixture
def engine(tmp_path: Path) -> Checkpoint:
    torch.manual_seed(1)
    master = torch.randn(5, 3)
    tensors = {
        ("layer.weight", MASTER): master,
        ("layer.weight", "exp_avg"): torch.randn(5, 3),
        ("layer.weight", "momentum_buffer"): torch.randn(5, 3),
        ("frozen", WEIGHT): torch.randn(4).bfloat16(),
        ("positions", BUFFER): torch.arange(4),
        ("scale", BUFFER): torch.randn(2),
    }
    state = TrainingState(step=7, scalars={"step": {"layer.weight": 7.0}}, lr_scheduler={}, loss_scaler={})
    return engine_checkpoint(tmp_path / "engine", tensors, native=BFLOAT16, state=state)


def test_masters_are_rounded_to_the_models_dtype(tmp_path: Path, engine: Checkpoint) -> None:
    target = HF.lay_out(engine, Layout())
    assert target.notes == (
        "1 parameter written in bfloat16, the model's dtype, rounded from the float32 masters; "
        "use dtype='fp32' for the unrounded masters",
    )
    assert target.loads is not None and target.loads.can is False and target.loads.why == "config.json is missing"
    written = load_file(convert(engine, tmp_path / "out") / "model.safetensors")
    raw = Path(engine.files[0].path).read_bytes()
    master = torch.frombuffer(bytearray(raw[:60]), dtype=torch.float32).reshape(5, 3)
    assert bits(written["layer.weight"]) == bits(master.bfloat16())
    assert {n: str(t.dtype) for n, t in written.items()} == {
        "frozen": "torch.bfloat16",
        "layer.weight": "torch.bfloat16",
        "positions": "torch.int64",
        "scale": "torch.float32",
    }


def test_fp32_writes_the_masters_and_upcasts_the_rest_but_never_buffers(tmp_path: Path, engine: Checkpoint) -> None:
    written = load_file(convert(engine, tmp_path / "out", dtype=FLOAT32) / "model.safetensors")
    raw = Path(engine.files[0].path).read_bytes()
    assert bits(written["layer.weight"]) == raw[:60]
    assert written["frozen"].dtype == torch.float32 and written["positions"].dtype == torch.int64
    low = load_file(convert(engine, tmp_path / "low", dtype=FLOAT16) / "model.safetensors")
    assert low["scale"].dtype == torch.float32 and low["layer.weight"].dtype == torch.float16


def test_what_is_left_out_is_listed(engine: Checkpoint) -> None:
    target = HF.lay_out(engine, Layout())
    assert not target.left_out
    assert target.not_written == (
        "optimizer states exp_avg, momentum_buffer, step (2 tensors, 120 B)",
        "training state step 7, loss_scaler, lr_scheduler",
    )


def test_weights_beside_masters(tmp_path: Path) -> None:
    tensors = {("w", WEIGHT): torch.ones(3).bfloat16(), ("w", MASTER): torch.full((3,), 1.001)}
    checkpoint = engine_checkpoint(tmp_path, tensors, native=BFLOAT16)
    target = HF.lay_out(checkpoint, Layout())
    assert {slot.key for file in target.files for slot in file.slots} == {("w", WEIGHT)}
    assert "written in bfloat16, the model's dtype; use dtype='fp32' for the fp32 masters" in target.notes[0]
    target = HF.lay_out(checkpoint, Layout(dtype=FLOAT32))
    assert {slot.key for file in target.files for slot in file.slots} == {("w", MASTER)}
    assert "written bit for bit from the float32 masters; dtype='keep' writes" in target.notes[0]


# -- ties -----------------------------------------------------------------------------------------------------
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
NEOX = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("config", "owner", "alias", "kept"),
    [
        (GPT2, "transformer.wte.weight", "lm_head.weight", "transformer.wte.weight"),
        (GPT2, "lm_head.weight", "transformer.wte.weight", "transformer.wte.weight"),
        (QWEN2, "model.embed_tokens.weight", "lm_head.weight", "model.embed_tokens.weight"),
        (QWEN2, "lm_head.weight", "model.embed_tokens.weight", "model.embed_tokens.weight"),
        (NEOX, "embed_out.weight", "gpt_neox.embed_in.weight", "gpt_neox.embed_in.weight"),
        ({"model_type": "x", "architectures": ["X"]}, "lm_head.weight", "wte.weight", "wte.weight"),
        (None, "head.weight", "wte.weight", "head.weight"),
        (None, "lm_head.weight", "wte.weight", "lm_head.weight"),
    ],
)
def test_a_tied_tensor_is_written_once_under_the_name_that_transformers_keeps(
    tmp_path: Path, config: dict[str, Any] | None, owner: str, alias: str, kept: str
) -> None:
    checkpoint = engine_checkpoint(
        tmp_path / "in", {(owner, WEIGHT): torch.ones(2)}, ties={alias: owner}, config=config
    )
    assert kept_names(checkpoint) == {owner: kept}
    out = convert(checkpoint, tmp_path / "out", names="own")
    assert list(load_file(out / "model.safetensors")) == [kept]
    other = owner if kept == alias else alias
    assert f"tied: written once as {kept}, not again as {other}" in HF.lay_out(checkpoint, Layout(names="own")).notes


def test_an_alias_that_is_stored_as_well_is_written_as_well(tmp_path: Path) -> None:
    tensors = {("lm_head.weight", WEIGHT): torch.ones(2), ("model.embed_tokens.weight", WEIGHT): torch.zeros(2)}
    ties = {"model.embed_tokens.weight": "lm_head.weight"}
    checkpoint = engine_checkpoint(tmp_path / "in", tensors, ties=ties, config=QWEN2)
    assert set(load_file(convert(checkpoint, tmp_path / "out", names="own") / "model.safetensors")) == {
        f for f, _ in tensors
    }


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_ties_of_a_model_that_transformers_saved(tmp_path: Path, name: str) -> None:
    """Config and class give the ties, as `save_pretrained` omits the alias."""
    from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config

    config = {
        "qwen2": Qwen2Config(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                             num_key_value_heads=1, vocab_size=20, tie_word_embeddings=True),
        "gpt2": GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20, n_positions=8),
    }[name]  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "in")
    if name == "gpt2":  # older configs leave it to the class
        path = tmp_path / "in" / "config.json"
        stated = json.loads(path.read_text())
        stated.pop("tie_word_embeddings", None)
        path.write_text(json.dumps(stated))
    checkpoint = read(tmp_path / "in")
    owner = {"qwen2": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}[name]
    assert checkpoint.namespace == HUB and dict(checkpoint.ties) == {"lm_head.weight": owner}
    out = convert(checkpoint, tmp_path / "out")
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "in" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["qwen2", "t5"])
@pytest.mark.parametrize("stage", [2, 3])
def test_weights_trained_apart_are_untied_in_the_config(tmp_path: Path, name: str, stage: int) -> None:
    """An engine with two parameters has broken the config's tie: others would load one of them for both."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, T5Config, T5ForConditionalGeneration

    if name == "qwen2":
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=1, vocab_size=20, tie_word_embeddings=False))
    else:
        model = T5ForConditionalGeneration(
            T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
        )
    state = {fqn: tensor.clone() for fqn, tensor in model.state_dict().items()}
    state["lm_head.weight"] += 1
    model.save_pretrained(tmp_path / "in")
    save_file(state, tmp_path / "in" / "model.safetensors", PT)
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    api.convert(tmp_path / "in", f"zero{stage}", tmp_path / "run", world_size=2)
    out = tmp_path / "out"
    said = ckpt("convert", f"zero{stage}", "hf", tmp_path / "run", "-o", out).err
    (told,) = (line for line in said.splitlines() if "trained these weights apart" in line)
    assert "lm_head.weight" in told and ("set tie_word_embeddings to false" in told) == (name == "qwen2")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] == (name == "t5")
    loaded = type(model).from_pretrained(out).state_dict()
    assert all(torch.equal(loaded[fqn], tensor) for fqn, tensor in state.items())


# -- other files ----------------------------------------------------------------------------------------------
def put(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_companions_are_carried_along_and_nothing_else(tmp_path: Path) -> None:
    config = {"model_type": "mine", "auto_map": {"AutoModel": "modeling_mine.Mine", "AutoConfig": "org/x--conf.C"}}
    kept = {
        "generation_config.json": "{}",
        "tokenizer.json": "{}",
        "tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["tok_mine.Tok", null]}}',
        "qwen.tiktoken": "x",
        "merges.txt": "x",
        "chat_template.jinja": "{{ x }}",
        "additional_chat_templates/tools.jinja": "{{ y }}",
        "preprocessor_config.json": "{}",
        "modeling_mine.py": "from .layers_mine import A\nfrom . import util_mine\nimport torch\nfrom .gone import B\n",
        "layers_mine.py": "    from .sub.deep import C\n",
        "util_mine.py": "",
        "sub/deep.py": "from .sibling import D",
        "sub/sibling.py": "",
        "tok_mine.py": "",
    }
    left = {
        "training_args.bin": "x",
        "optimizer.pt": "x",
        "rng_state.pth": "x",
        "scheduler.pt": "x",
        "trainer_state.json": "{}",
        "zero_to_fp32.py": "x",
        "train.py": "x",
        "conf.py": "x",
        "README.md": "x",
        "global_step1/mp_rank_00_model_states.pt": "x",
    }
    folder = put(tmp_path / "in", kept | left | {"config.json": json.dumps(config)})
    save_file({"a": torch.ones(1)}, folder / "model.safetensors", metadata=PT)
    out = content(convert(read(folder), tmp_path / "out", names="own"))
    assert set(out) == set(kept) | {"config.json", "model.safetensors"}
    assert all(out[name] == text.encode() for name, text in kept.items())


def test_the_nearest_folder_wins(tmp_path: Path) -> None:
    put(tmp_path / "a", {"tokenizer.json": '"near"'})
    put(tmp_path / "b", {"tokenizer.json": '"far"', "vocab.json": '"far"'})
    found = companions([tmp_path / "a", tmp_path / "b", tmp_path / "none"])
    assert found == {"tokenizer.json": b'"near"', "vocab.json": b'"far"'}


@pytest.mark.parametrize("name", ["tokenizer.json", "modeling_x.py", "additional_chat_templates"])
def test_a_companion_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    put(tmp_path, {"secret": "x", "outside/a.jinja": "x"})
    folder = put(tmp_path / "in", {"config.json": '{"auto_map": {"AutoModel": "modeling_x.X"}}'})
    (folder / name).symlink_to(tmp_path / ("outside" if "templates" in name else "secret"))
    with pytest.raises(UnsafeError):
        companions([folder])


@pytest.mark.parametrize("module", ["../secret.X", "..secret.X", "/etc/x.X", "a/b.X", ".X", "X", "", "a..b.X"])
def test_auto_map_cannot_name_files_elsewhere(tmp_path: Path, module: str) -> None:
    put(tmp_path, {"secret.py": "x"})
    folder = put(tmp_path / "in", {"config.json": json.dumps({"auto_map": {"AutoModel": module}})})
    assert companions([folder]) == {}


def with_config(folder: Path, config: dict[str, Any], **tensors: torch.Tensor) -> Path:
    put(folder, {"config.json": json.dumps(config, indent=2)})
    save_file(tensors or {"a": torch.ones(4)}, folder / "model.safetensors", metadata=PT)
    return folder


@pytest.mark.parametrize(
    ("config", "asked", "changes"),
    [
        ({"dtype": "float32"}, None, {}),
        ({"torch_dtype": "float32"}, None, {}),
        ({"torch_dtype": "bfloat16", "z": 1, "a": 2}, None, {"torch_dtype": "float32"}),
        ({"dtype": "float32"}, BFLOAT16, {"dtype": "bfloat16"}),
        ({"dtype": None}, BFLOAT16, {"dtype": "bfloat16"}),
        ({"dtype": "float32", "torch_dtype": "float32"}, FLOAT16, {"dtype": "float16", "torch_dtype": "float16"}),
        ({}, None, {"dtype": "float32"}),
        ({"architectures": ["FSDPLlamaForCausalLM", "FSDP"], "dtype": "float32"}, None,
         {"architectures": ["LlamaForCausalLM", "FSDP"]}),
        ({"dtype": "float32", "text_config": {"dtype": "float32", "x": {"dtype": None}}}, BFLOAT16,
         {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "x": {"dtype": None}}}),
    ],
)  # fmt: skip
def test_the_config_tells_the_dtype_that_is_written(
    tmp_path: Path, config: dict[str, Any], asked: DType | None, changes: dict[str, Any]
) -> None:
    config = {"model_type": "mine", **config}
    folder = with_config(tmp_path / "in", config)
    written = (convert(read(folder), tmp_path / "out", dtype=asked, names="own") / "config.json").read_bytes()
    assert json.loads(written) == config | changes
    assert list(json.loads(written)) == list(config | changes)
    if not changes:
        assert written == (folder / "config.json").read_bytes()


def test_a_sub_config_keeps_a_dtype_that_is_among_those_written(tmp_path: Path) -> None:
    config = {"model_type": "m", "dtype": "bfloat16", "vision_config": {"dtype": "float32"}, "x": {"dtype": "float16"}}
    folder = with_config(tmp_path / "in", config, a=torch.ones(9).bfloat16(), b=torch.ones(2))
    written = json.loads((convert(read(folder), tmp_path / "out", names="own") / "config.json").read_text())
    assert written == config | {"x": {"dtype": "bfloat16"}}


def test_a_config_that_is_not_a_models_is_carried_as_it_is(tmp_path: Path) -> None:
    folder = with_config(tmp_path / "in", {"train_batch_size": 3})
    checkpoint = read(folder)
    assert checkpoint.namespace == OWN
    assert (convert(checkpoint, tmp_path / "out") / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_quantization_config_stays_only_where_something_quantized_is_written(tmp_path: Path) -> None:
    config = {"model_type": "gpt_oss", "dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}
    plain = with_config(tmp_path / "plain", config, a=torch.ones(4).bfloat16())
    checkpoint = read(plain)
    assert any("quantization_config" in note for note in HF.lay_out(checkpoint, Layout(names="own")).notes)
    written = json.loads((convert(checkpoint, tmp_path / "out", names="own") / "config.json").read_text())
    assert written == {k: v for k, v in config.items() if k != "quantization_config"}
    packed = with_config(
        tmp_path / "packed", config, a=torch.ones(4).bfloat16(), a_blocks=torch.ones(4, dtype=torch.uint8)
    )
    assert json.loads((convert(read(packed), tmp_path / "out2", names="own") / "config.json").read_text()) == config


def test_config_comes_first_from_where_the_user_says(tmp_path: Path) -> None:
    folder = with_config(tmp_path / "in", {"model_type": "old"})
    put(tmp_path / "other", {"config.json": '{"model_type": "new", "dtype": "float32"}', "vocab.json": "{}"})
    for config in (tmp_path / "other", tmp_path / "other" / "config.json"):
        checkpoint = read(folder, config=config)
        assert checkpoint.config is not None and checkpoint.config["model_type"] == "new"
        out = convert(checkpoint, tmp_path / f"out-{config.name}", names="own")
        assert json.loads((out / "config.json").read_text())["model_type"] == "new"
        assert (out / "vocab.json").read_text() == "{}"


# -- properties -----------------------------------------------------------------------------------------------
def test_bytes_are_the_same_from_run_to_run_and_modes_follow_the_umask(tmp_path: Path, llama: Path) -> None:
    old = os.umask(0o027)
    try:
        a = convert(read(llama), tmp_path / "a", max_shard_size=2000)
        b = convert(read(llama), tmp_path / "b", max_shard_size=2000)
    finally:
        os.umask(old)
    assert content(a) == content(b)
    assert {p.stat().st_mode & 0o777 for p in a.iterdir()} == {0o640}


def test_a_llama_is_read_and_laid_out_without_torch(llama: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from converters.huggingface.hf import HF\n"
        "from converters.names.transformers.relation import relation\n"
        "from ckpt.plan.checkpoint import Layout, ReadRequest\n"
        f"c = HF.read(Path({str(llama)!r}), ReadRequest())\n"
        "HF.lay_out(c, Layout())\n"
        "shapes = {f: t.shape for (f, _), t in c.tensors.items()}\n"
        "assert relation(c.config, shapes, 'to_hub') is None and relation(c.config, shapes, 'to_memory') is None\n"
        "print(sorted({'torch', 'transformers', 'safetensors', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
