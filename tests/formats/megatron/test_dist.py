"""`converters/megatron/dist/read.py`, `keys.py`, `optimizer.py`, `format.py`: forms of `torch_dist` by version."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import CorruptError, LossError, NotFoundError
from ckpt.plan.checkpoint import WEIGHT
from ckpt.plan.dtypes import FLOAT32
from ckpt.plan.tensors import Box, Extent
from converters.megatron.dist.keys import KeyWriter, ObjectKey, TensorKey, canonical_names, state_key, with_rows
from converters.megatron.dist.optimizer import bucket_places
from converters.names.megatron.model.spelling import LayerKind
from tests.support import commands
from tests.support.damage import Damage, edited, removed
from tests.support.describing import content
from tests.support.engines import Truth
from tests.support.megatron_runs import check_read, sample, truth
from tests.support.model_files import rewriting
from tests.support.places import FIXTURES

FOLDER = "iter_0000002"
FIXTURE = FIXTURES / "megatron-dist-flattened"


def test_reads_flattened_ranges() -> None:
    """megatron-core 0.14 saved a distributed optimizer on three ranks. The ranges of two begin within a row."""
    checkpoint = ckpt.open(FIXTURE)
    check_read(checkpoint, Truth.load(FIXTURE / "truth" / f"{FOLDER}.safetensors"))
    states = list(checkpoint.with_role("exp_avg"))
    assert any(f.region.sizes[-1] < tensor.shape[-1] for tensor in states for f in tensor.fragments())  # within a row


@pytest.mark.slow
def test_shifted_states_are_not_taken_for_true_ones() -> None:
    """NVIDIA/Megatron-LM#5077: megatron-core's own file has other states than the engine that wrote it."""
    run = sample("llama-buckets", "shifted")
    checkpoint, expected = ckpt.open(run), truth(run).tensors
    assert checkpoint.tensors.keys() == {key for key in expected if key[1] == WEIGHT}
    for key, tensor in checkpoint.tensors.items():
        assert content(tensor) == expected[key], key
    assert not checkpoint.state.param_groups and not checkpoint.state.scalars
    assert any("#5077" in note for note in checkpoint.notes)
    stored = _load(run / FOLDER, "optimizer.state.param.output_layer.weight", (264, 40))
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    moved = _load(run / FOLDER, "optimizer.state.param.decoder.layers.mlp.linear_fc1.weight", (4, 120, 40))
    assert stored.numpy().tobytes() == expected["output_layer.weight", "master"][2]
    assert moved[0].numpy().tobytes() != expected[name, "master"][2]


def _load(folder: Path, key: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch.distributed.checkpoint as dcp

    state = {key: torch.zeros(shape)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state[key]


# -- written files -------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama-plain", "qwen3_moe", "mixtral"])
def test_the_same_layout_is_written_as_it_was(name: str, tmp_path: Path) -> None:
    """Keys, shapes and common state are equal, including random state."""
    run = sample(name, "megatron-dist")
    conversion = ckpt.plan(ckpt.open(run), "megatron-dist")
    assert not conversion.plan.target.not_written
    conversion.run(tmp_path / "out")
    original, written = (_described(folder / FOLDER) for folder in (run, tmp_path / "out"))
    assert written == original
    common, ours = (torch.load(f / FOLDER / "common.pt", weights_only=False) for f in (run, tmp_path / "out"))
    args, our_args = (vars(state.pop("args")) for state in (common, ours))
    assert {key: value for key, value in args.items() if our_args.get(key) != value} == {}
    assert ours.pop("content_metadata").items() >= common.pop("content_metadata").items()
    assert repr(ours) == repr({key: common[key] for key in ours}) and ours.keys() == common.keys()


def _described(folder: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        key: (tuple(one.size), one.properties.dtype) if hasattr(one, "size") else () for key, one in metadata.items()
    }


@pytest.mark.slow
def test_an_optimizer_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    """The checkpoint is intact and must not be called damaged: Muon's buffers have another layout."""
    run = tmp_path / "run"
    shutil.copytree(sample("llama-buckets", "buckets"), run)
    with rewriting(run / FOLDER / "common.pt") as common:
        common["args"].optimizer = "muon"
    for command in (("check", run), ("convert", "megatron-dist", "hf", run, "-o", tmp_path / "out")):
        done = commands.ckpt(*command)
        assert done.code == 3 and "Megatron's optimizer 'muon'" in done.out + done.err
        assert "damaged" not in done.out + done.err
    assert not (tmp_path / "out").exists()


# -- forms that can't be written on a CPU --------------------------------------------------------------------
def test_common_state_of_newer_versions(tmp_path: Path) -> None:
    """In megatron-core 0.19, `common.pt` is an item in the data files. The test edits files by hand."""
    run = _copy(tmp_path)
    checkpoint = ckpt.open(run)
    ckpt.plan(checkpoint, "megatron-dist").run(tmp_path / "old")
    folder = tmp_path / "old" / FOLDER
    common = torch.load(folder / "common.pt", weights_only=False)
    (folder / "common.pt").unlink()
    with pytest.raises(CorruptError, match=r"common\.pt|param groups is missing"):
        ckpt.open(tmp_path / "old")
    _add_item(folder, "common_state/shard_0_1", [common])
    again = ckpt.open(tmp_path / "old")
    assert ckpt.verify(checkpoint, again).equal and again.state.step == 2


def _add_item(folder: Path, key: str, value: Any) -> None:
    """Append an item to a data file and add it to the metadata."""
    import pickle

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    metadata = pickle.loads((folder / ".metadata").read_bytes())
    file = folder / "__0_0.distcp"
    start = file.stat().st_size
    with file.open("ab") as out:
        torch.save(value, out)
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex(key)] = _StorageInfo(file.name, start, file.stat().st_size - start)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_keys_of_single_experts_and_halves() -> None:
    """`singleton_local_shards` has one key per expert, and separate keys for gate and up rows."""
    up = TensorKey.parse("decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight_v")
    assert up.name == "decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight"
    assert up.shape((6, 4)) == (12, 4)
    extent = Extent.contiguous("f", 0, FLOAT32, (2, 4))
    [(name, box, place)] = up.parts((6, 4), Box((3, 0), (2, 4)), extent)
    assert (name, box, place) == (up.name, Box((9, 0), (2, 4)), extent)


def test_keys_of_sections_of_a_packed_layer() -> None:
    """A gated delta net's `in_proj` and `conv1d` are cut into such sections, and so are a Mamba mixer's."""
    names = {
        f"decoder.layers.0.mixer.conv1d.bias.{section}": (rows,) for section, rows in zip("xBC", (6, 2, 2), strict=True)
    }
    keys = with_rows({name: TensorKey.parse(name) for name in names}, names)
    key = keys["decoder.layers.0.mixer.conv1d.bias.C"]
    assert (key.name, key.shape((2,))) == ("decoder.layers.0.mixer.conv1d.bias", (10,))
    extent = Extent.contiguous("f", 0, FLOAT32, (1,))
    assert list(key.parts((2,), Box((1,), (1,)), extent)) == [(key.name, Box((9,), (1,)), extent)]
    del names["decoder.layers.0.mixer.conv1d.bias.B"]
    with pytest.raises(CorruptError, match="packed layer lacks a row section") as caught:
        with_rows({name: TensorKey.parse(name) for name in names}, names)
    assert "B" in str(caught.value.found)


def test_keys_of_all_layers_and_experts() -> None:
    key = TensorKey.parse("decoder.layers.mlp.experts.experts.linear_fc2.weight")
    assert key.shape((2, 3, 5, 7)) == (5, 7)
    assert len(list(key.names((2, 3, 5, 7)))) == 6
    extent = Extent.contiguous("f", 100, FLOAT32, (1, 2, 5, 7))
    parts = list(key.parts((2, 3, 5, 7), Box((1, 1, 0, 0), (1, 2, 5, 7)), extent))
    assert [name for name, _, _ in parts] == [
        f"decoder.layers.1.mlp.experts.local_experts.{expert}.linear_fc2.weight" for expert in (1, 2)
    ]
    assert [place.offset for _, _, place in parts] == [100, 100 + 4 * 35]


def test_names_of_norms() -> None:
    """Before experts, a norm is separate, whatever the key says. Before an MLP, it is part of the linear layer."""
    dense = ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.0.mlp.linear_fc1.weight")
    sparse = ("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", "decoder.layers.1.mlp.router.weight")
    found = canonical_names([*dense, *sparse])
    assert found[dense[0]] == dense[0]
    assert found[sparse[0]] == "decoder.layers.1.pre_mlp_layernorm.weight"
    kind = LayerKind(moe=True, latent=False)
    for local, name in ((True, "mlp.linear_fc1.layer_norm_weight"), (False, "pre_mlp_layernorm.weight")):
        key, index = KeyWriter(True, local).key("decoder.layers.1.pre_mlp_layernorm.weight", kind)
        assert (key, index) == (f"decoder.layers.{name}", (1,))


def test_keys_of_states_and_objects() -> None:
    assert state_key("chained_1.optimizer.state.fp32_param.decoder.x") == ("master", "decoder.x")
    assert state_key("optimizer.state.exp_avg.decoder.x") == ("exp_avg", "decoder.x")
    assert state_key("decoder.x") is None
    assert str(ObjectKey.parse("rng_state/shard_0.1_2.2")) == "rng_state/shard_0.1_2.2"


def test_places_in_buckets() -> None:
    """Parameters are placed last to first at multiples of 64 elements. A shared embedding ends the previous bucket."""
    assert bucket_places([100, 70, 30], [30 + 34 + 70, 100]) == [(1, 0), (0, 64), (0, 0)]
    assert bucket_places([100, 70, 30], [192, 100]) == [(1, 0), (0, 64), (0, 0)]
    assert bucket_places([100, 70, 30], [192 + 100]) == [(0, 192), (0, 64), (0, 0)]
    assert bucket_places([100, 70, 30], [200]) is None


# -- faults --------------------------------------------------------------------------------------------------
def _copy(folder: Path) -> Path:
    shutil.copytree(FIXTURE, folder / "run", ignore=shutil.ignore_patterns("truth"))
    return folder / "run"


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def _without_chunk(folder: Path) -> None:
    """Edit the metadata as if one rank had not taken part in the save."""
    import pickle

    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _without_tensor(folder: Path) -> None:
    """Edit the metadata as if the save had forgotten a norm, its master and moments."""
    import pickle

    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for key in [key for key in metadata.state_dict_metadata if key.endswith("decoder.final_layernorm.weight")]:
        del metadata.state_dict_metadata[key]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _other_args(**args: Any) -> Damage:
    return edited("common.pt", lambda common: vars(common["args"]).update(args))


SHARDING = {"param_state_sharding_type": "fully_sharded_bucket_space"}
ZARR = json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1})
FAULTS = {
    "not a Megatron common state": (removed("common.pt"), 4, "common.pt"),
    "no data file": (removed("__1_0.distcp"), 4, "a data file is missing"),
    "no metadata": (removed(".metadata"), 4, "the metadata is missing"),
    "a hole": (_without_chunk, 4, "part of a tensor is stored nowhere"),
    "another backend": (_write("metadata.json", ZARR), 3, "zarr"),
    "half of the backends": (_write("metadata.json", "{"), 4, "the JSON file ends too early"),
    "no backends": (_write("metadata.json", "{}"), 4, "this file doesn't name the checkpoint's backend"),
    "a tensor less": (_without_tensor, 4, "lacks tensors required by the run's argument record"),
    "arguments of a wider model": (_other_args(ffn_hidden_size=9), 4, "shape doesn't match the run's"),
    "arguments of more layers": (_other_args(num_layers=3), 4, "decoder.layers.2.self_attention.linear_qkv.layer_norm"),
    "arguments of experts": (_other_args(num_experts=2), 4, "decoder.layers.0.mlp.router.weight"),
    "another way of storing": (edited("common.pt", lambda c: c["optimizer"].update(SHARDING)), 3, *SHARDING.values()),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str, tmp_path: Path) -> None:
    damage, code, said = FAULTS[name]
    run = _copy(tmp_path)
    damage(run / FOLDER)
    done = commands.ckpt("convert", "megatron-dist", "megatron", run, "-o", tmp_path / "out")
    assert (done.code, said in done.err) == (code, True), done.err
    assert not (tmp_path / "out").exists()


def test_dcp_leaves_it_alone(tmp_path: Path) -> None:
    """The files are DCP's, but the keys are not."""
    run = _copy(tmp_path)
    with pytest.raises(NotFoundError):
        ckpt.open(run, "dcp")
    assert ckpt.open(run / FOLDER).format == ckpt.open(run).format == "megatron-dist"


def test_megatrons_plain_dcp_is_told_from_torch_dist(tmp_path: Path) -> None:
    """The test builds `torch_dcp` by hand: DCP's files in Megatron-LM's run folder. test_fsdp.py has `fsdp_dtensor`."""
    run = _copy(tmp_path)
    for name in ("common.pt", "metadata.json"):
        (run / FOLDER / name).unlink()
    for source in ("auto", "megatron-dist"):
        done = commands.ckpt("convert", source, "hf", run, "-o", tmp_path / "out")
        assert done.code == 3 and "torch_dcp" in done.err and "--ckpt-format torch_dist" in done.err
    assert ckpt.open(run / FOLDER).format == "dcp"


def test_resume_completes_a_step_that_megatron_core_would_not_load(fixtures: Path, tmp_path: Path) -> None:
    """All tensors exist, but the small file written last is missing."""
    run = Path(shutil.copytree(fixtures / "megatron-0.15-fully", tmp_path / "run"))
    assert commands.ckpt("resume", run).out.strip() == str(run)
    (run / FOLDER / "metadata.json").unlink()
    done = commands.ckpt("resume", run)
    assert done.code == 0 and "metadata.json is missing" in done.err, done.err
    found = Path(done.out.strip())
    assert found != run and (found / FOLDER / "metadata.json").is_file()
    assert commands.ckpt("verify", run, found).code == 0


@pytest.mark.slow
def test_buckets_without_arguments_are_refused(tmp_path: Path) -> None:
    """Only the arguments record the ranks."""
    shutil.copytree(sample("llama-buckets", "buckets"), tmp_path / "run")
    path = tmp_path / "run" / FOLDER / "common.pt"
    with rewriting(path) as common:
        args = common.pop("args")
    with pytest.raises(LossError, match="buffers by rank"):
        ckpt.open(tmp_path / "run")
    args.tensor_model_parallel_size = 1
    torch.save({**common, "args": args}, path)
    with pytest.raises(CorruptError, match="recorded arguments: expert and tensor parallel ranks do not fit"):
        ckpt.open(tmp_path / "run")
    args.expert_tensor_parallel_size = 1
    torch.save({**common, "args": args}, path)
    with pytest.raises(CorruptError, match="don't fit this model"):
        ckpt.open(tmp_path / "run")


def test_a_part_outside_its_tensor_is_refused(fixtures: Path, tmp_path: Path) -> None:
    """`.metadata` has fewer layers than its chunks imply."""
    run = Path(shutil.copytree(fixtures / "megatron-dist-flattened", tmp_path / "run"))
    metadata = run / "iter_0000002/.metadata"
    content = bytearray(metadata.read_bytes())
    assert content[7073:7075] == b"K\x02"
    content[7074] = 1
    metadata.write_bytes(content)
    with pytest.raises(CorruptError, match="lies outside it"):
        ckpt.open(run)
