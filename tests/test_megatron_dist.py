"""Megatron's `torch_dist` format, against what megatron-core itself holds.

Read: files of real runs, bit for bit against the truth that the live engine gathered, with the optimizer's state in
every form that megatron-core writes (that of 0.14 in a committed fixture).  Written: files that an unmodified
megatron-core loads by `dist_checkpointing.load` at other sizes of its axes, and gathers the same truth from.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.checkpoint import BUFFER, WEIGHT, Checkpoint, Layout
from ckpt.dtypes import FLOAT32
from ckpt.errors import CorruptError, LossError, NotFoundError
from ckpt.planner import check_source
from ckpt.tensors import Box, Extent
from converters.megatron_dist_keys import KeyWriter, ObjectKey, TensorKey, canonical_names, state_key
from converters.megatron_dist_optimizer import bucket_places
from converters.megatron_model import LayerKind
from tests import commands
from tests.describing import content
from tests.engines import Truth, launch
from tests.megatron_runs import PLAIN, Run, load_all, truth, without_padding

FOLDER = "iter_0000002"
RANKS = 4
SEQUENCE = {"sequence_parallel": True}
DIST = {"save": "torch_dist"}
TABLE = "Megatron, torch_dist format: bit for bit against megatron-core (TP,PP,EP,VPP)"
FIXTURE = Path(__file__).parent.parent / "fixtures" / "megatron-dist-flattened"


def _run(name: str, model: str, tp: int = 1, pp: int = 1, ep: int = 1, vpp: int = 1, **options: Any) -> Run:
    return Run(name, model, tp, pp, ep, vpp, {**DIST, **options})


BUCKETS = {"optimizer_format": "dp_reshardable"}
RUNS = [
    _run("llama", "llama", tp=2, pp=2),
    _run("llama-vpp", "llama", pp=2, vpp=2),
    _run("llama-plain", "llama", tp=2, **PLAIN),
    _run("llama-fp32", "llama", tp=4, dtype="fp32"),
    _run("llama-buckets", "llama", tp=2, bucket_size=3000, **BUCKETS),
    _run("llama-shifted", "llama", tp=2, bucket_size=3000),
    _run("llama-gathered", "llama", pp=2, optimizer_format="dp_zero_gather_scatter"),
    _run("qwen2-buckets", "qwen2", pp=2, **BUCKETS),
    _run("gpt2", "gpt2", tp=4),
    _run("qwen3_moe", "qwen3_moe", tp=2, pp=2, ep=2, etp=1, **SEQUENCE),
    _run("qwen3_moe-buckets", "qwen3_moe", tp=2, ep=2, etp=1, **SEQUENCE, **BUCKETS),
    _run("mixtral", "mixtral", pp=2, ep=2),
    _run("deepseek_v3", "deepseek_v3", tp=2, pp=2, mtp_layers=1, **SEQUENCE),
]
BY_NAME = {run.name: run for run in RUNS}
#: What its optimizer's state has been shifted in.
SHIFTED = ("llama-shifted",)


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="megatron-dist-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def sample(name: str) -> Path:
    """The run folder of one of `RUNS`, with its truth; all are made at once, and one in the `torch` format."""
    folder = _folder() / "runs"
    if not folder.is_dir():
        jobs = [run.job(folder / run.name, steps=2) for run in RUNS]
        legacy = replace(BY_NAME["mixtral"], options={})
        jobs.append(legacy.job(folder / "legacy", steps=2))
        launch(jobs, RANKS, folder, "tests.megatron_worker")
    return folder / name


# -- real runs, read -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [run.name for run in RUNS if run.name not in SHIFTED])
def test_reads_what_the_engine_held(name: str, tables: Any) -> None:
    run, expected = BY_NAME[name], truth(sample(name))
    checkpoint = ckpt.open(sample(name))
    _check(checkpoint, expected)
    ckpt.verify(checkpoint, checkpoint)  # compares replicas
    tables[TABLE][f"{run.model} {run.layout}"]["read"] = f"{len(expected.tensors)} equal"


def test_reads_flattened_ranges() -> None:
    """What megatron-core 0.14 wrote of a distributed optimizer on three ranks, two of which begin within a row."""
    checkpoint = ckpt.open(FIXTURE)
    _check(checkpoint, Truth.load(FIXTURE / "truth" / f"{FOLDER}.safetensors"))
    states = list(checkpoint.with_role("exp_avg"))
    assert any(f.region.sizes[-1] < tensor.shape[-1] for tensor in states for f in tensor.fragments())  # within a row


def _check(checkpoint: Checkpoint, expected: Truth) -> None:
    assert checkpoint.format == "megatron-dist"
    for key, tensor in checkpoint.tensors.items():
        check_source(tensor)
        assert content(tensor) == expected.tensors[key], key
    assert checkpoint.tensors.keys() == expected.tensors.keys()
    assert dict(checkpoint.ties) == expected.ties
    assert checkpoint.state.step == expected.metadata["step"]
    assert set(checkpoint.state.scalars["step"].values()) == {expected.metadata["adam_step"]}
    groups = {frozenset(group["names"]) for group in expected.metadata["param_groups"]}
    assert {frozenset(group.fqns) for group in checkpoint.state.param_groups} == groups - {frozenset()}


@pytest.mark.slow
def test_shifted_states_are_not_taken_for_true_ones(tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM#5077: megatron-core's own file holds other states than the engine that wrote it."""
    checkpoint, expected = ckpt.open(sample("llama-shifted")), truth(sample("llama-shifted")).tensors
    assert checkpoint.tensors.keys() == {key for key in expected if key[1] == WEIGHT}
    for key, tensor in checkpoint.tensors.items():
        assert content(tensor) == expected[key], key
    assert not checkpoint.state.param_groups and not checkpoint.state.scalars
    assert any("#5077" in note for note in checkpoint.notes)
    stored = _load(sample("llama-shifted") / FOLDER, "optimizer.state.param.output_layer.weight", (264, 40))
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    moved = _load(
        sample("llama-shifted") / FOLDER, "optimizer.state.param.decoder.layers.mlp.linear_fc1.weight", (4, 120, 40)
    )
    assert stored.numpy().tobytes() == expected["output_layer.weight", "master"][2]
    assert moved[0].numpy().tobytes() != expected[name, "master"][2]


def _load(folder: Path, key: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch.distributed.checkpoint as dcp

    state = {key: torch.zeros(shape)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state[key]


# -- written, and loaded by megatron-core --------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """What is converted, and the run that loads it; `through` are formats on the way there."""

    source: str
    run: Run
    through: tuple[tuple[str, Layout], ...] = ()

    @property
    def title(self) -> str:
        return " to ".join([self.source, *(name for name, _ in self.through), self.run.layout])

    @property
    def asked(self) -> Layout:
        run = self.run
        sizes = Layout(tp=run.tp, pp=run.pp, ep=run.ep, vpp=run.vpp, etp=run.options.get("etp", run.tp))
        return replace(sizes, transformer_impl="local") if self.is_from_afar else sizes

    @property
    def is_from_afar(self) -> bool:
        """Whether it comes from names of the Hub, which say nothing of layers."""
        return any(not name.startswith("megatron") for name, _ in self.through)


def _to(source: str, *through: tuple[str, Layout], **options: Any) -> Load:
    model = "mixtral" if source == "legacy" else BY_NAME[source].model
    sizes = {name: options.pop(name) for name in ("tp", "pp", "ep", "vpp") if name in options}
    return Load(source, Run(f"{source}-loaded", model, **sizes, options=options), through)


HF, ZERO3 = ("hf", Layout()), ("zero3", Layout(world_size=3))
LEGACY = ("megatron", Layout(tp=2, pp=1, ep=1))
LOADS = [
    _to("llama", pp=4),
    _to("llama", tp=4),
    _to("llama", ZERO3, tp=2, pp=2),
    _to("llama", HF, tp=2),
    _to("llama-vpp", tp=2, pp=2),
    _to("llama-plain", pp=2, vpp=2, **PLAIN),
    _to("llama-fp32", pp=2, dtype="fp32"),
    _to("llama-buckets", tp=4),
    _to("llama-gathered", tp=2, pp=2),
    _to("qwen2-buckets", tp=4),
    _to("gpt2", tp=2, pp=2),
    _to("qwen3_moe", tp=2, ep=4, etp=1, **SEQUENCE),
    _to("qwen3_moe", HF, pp=2, ep=2),
    _to("qwen3_moe-buckets", ZERO3, pp=2, ep=2),
    _to("mixtral", tp=2, ep=2, **SEQUENCE),
    _to("mixtral", LEGACY, pp=4),
    _to("legacy", tp=2, pp=2, ep=2, etp=1, **SEQUENCE),
    _to("deepseek_v3", pp=2, ep=2, mtp_layers=1),
]


@pytest.fixture(scope="module")
def loaded() -> list[Truth]:
    """The truth of every one of `LOADS`, gathered by megatron-core after it has loaded what we wrote."""
    folder = _folder() / "loads"
    loads = []
    for number, load in enumerate(LOADS):
        path = sample(load.source)
        for step, (name, layout) in enumerate(load.through):
            ckpt.plan(ckpt.open(path), name, layout).run(folder / f"{number}-{step}")
            path = folder / f"{number}-{step}"
        output = folder / f"{number}-written"
        ckpt.plan(ckpt.open(path), "megatron-dist", load.asked).run(output)
        loads.append((load.run, next(one for one in output.iterdir() if one.is_dir())))
    return load_all(loads, folder / "loaded")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LOADS)), ids=[load.title for load in LOADS])
def test_megatron_core_loads_what_is_written(number: int, loaded: list[Truth], tables: Any) -> None:
    load, expected, found = LOADS[number], truth(sample(LOADS[number].source)), loaded[number]
    ours, theirs = without_padding(found), without_padding(expected)
    weights_only = HF in load.through
    if weights_only:  # the masters are then the weights, upcast
        ours, theirs = ({k: v for k, v in one.items() if k[1] in (WEIGHT, BUFFER)} for one in (ours, theirs))
    assert ours.keys() == theirs.keys()
    assert {key for key, value in ours.items() if value != theirs[key]} == set()
    assert found.ties == expected.ties
    for name in () if weights_only else ("step", "adam_step"):
        assert found.metadata[name] == expected.metadata[name]
    tables[TABLE][load.title]["written, loaded"] = f"{len(ours)} equal"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama-plain", "qwen3_moe", "mixtral"])
def test_the_same_layout_is_written_as_it_was(name: str, tmp_path: Path) -> None:
    """The same keys of the same shapes, the same common state, random state included."""
    conversion = ckpt.plan(ckpt.open(sample(name)), "megatron-dist")
    assert not conversion.plan.target.dropped
    conversion.run(tmp_path / "out")
    original, written = (_described(folder / FOLDER) for folder in (sample(name), tmp_path / "out"))
    assert written == original
    common, ours = (torch.load(f / FOLDER / "common.pt", weights_only=False) for f in (sample(name), tmp_path / "out"))
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


# -- forms that no CPU writes --------------------------------------------------------------------------------


def test_common_state_of_newer_versions(tmp_path: Path) -> None:
    """By hand, after megatron-core 0.19: `common.pt` has become an item of the data files."""
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
    """Append an item to a data file, and say so in the metadata."""
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
    """`singleton_local_shards`: a key for each expert, and for gate and up rows."""
    up = TensorKey.parse("decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight_v")
    assert up.name == "decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight"
    assert up.shape((6, 4)) == (12, 4)
    extent = Extent.contiguous("f", 0, FLOAT32, (2, 4))
    [(name, box, place)] = up.parts((6, 4), Box((3, 0), (2, 4)), extent)
    assert (name, box, place) == (up.name, Box((9, 0), (2, 4)), extent)


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
    """In front of experts the norm is nobody's, whatever the key says; in front of an MLP it is the linear layer's."""
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
    """From the last parameter on, each at a multiple of 64 elements; a shared embedding ends the bucket before it."""
    assert bucket_places([100, 70, 30], [30 + 34 + 70, 100]) == [(1, 0), (0, 64), (0, 0)]
    assert bucket_places([100, 70, 30], [192, 100]) == [(1, 0), (0, 64), (0, 0)]
    assert bucket_places([100, 70, 30], [192 + 100]) == [(0, 192), (0, 64), (0, 0)]
    assert bucket_places([100, 70, 30], [200]) is None


# -- faults --------------------------------------------------------------------------------------------------


def _copy(folder: Path) -> Path:
    shutil.copytree(FIXTURE, folder / "run", ignore=shutil.ignore_patterns("truth"))
    return folder / "run"


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def _without_chunk(folder: Path) -> None:
    """The metadata of a save that one rank took no part in."""
    import pickle

    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _other_sharding(folder: Path) -> None:
    common = torch.load(folder / "common.pt", weights_only=False)
    common["optimizer"]["param_state_sharding_type"] = "fully_sharded_bucket_space"
    torch.save(common, folder / "common.pt")


ZARR = json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1})
FAULTS = {
    "no common state": (_remove("common.pt"), 4, "common.pt"),
    "no data file": (_remove("__1_0.distcp"), 4, "a data file is missing"),
    "no metadata": (_remove(".metadata"), 4, "the metadata is missing"),
    "a hole": (_without_chunk, 4, "part of a tensor is stored nowhere"),
    "another backend": (_write("metadata.json", ZARR), 3, "zarr"),
    "no backends": (_write("metadata.json", "{"), 4, "backends"),
    "another way of storing": (_other_sharding, 3, "fully_sharded_bucket_space"),
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
    """Its files are DCP's, and its keys are not."""
    run = _copy(tmp_path)
    with pytest.raises(NotFoundError):
        ckpt.open(run, "dcp")
    assert ckpt.open(run / FOLDER).format == ckpt.open(run).format == "megatron-dist"


@pytest.mark.slow
def test_buckets_without_arguments_are_refused(tmp_path: Path) -> None:
    """Nothing else says which ranks there were."""
    shutil.copytree(sample("llama-buckets"), tmp_path / "run")
    path = tmp_path / "run" / FOLDER / "common.pt"
    common = torch.load(path, weights_only=False)
    args = common.pop("args")
    torch.save(common, path)
    with pytest.raises(LossError, match="buffers of each rank"):
        ckpt.open(tmp_path / "run")
    args.tensor_model_parallel_size = 1
    torch.save({**common, "args": args}, path)
    with pytest.raises(CorruptError, match="recorded arguments: expert and tensor parallel ranks do not fit"):
        ckpt.open(tmp_path / "run")
    args.expert_tensor_parallel_size = 1
    torch.save({**common, "args": args}, path)
    with pytest.raises(CorruptError, match="not those of this model"):
        ckpt.open(tmp_path / "run")
