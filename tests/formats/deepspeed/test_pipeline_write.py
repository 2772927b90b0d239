"""`converters/deepspeed/pipeline/write.py`: every layout converts to every other.

The bytes don't depend on the source layout, and DeepSpeed's pipeline engine loads them.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import CkptError, CorruptError, LossError, UsageError
from ckpt.plan.checkpoint import WEIGHT, Layout
from converters.deepspeed.pipeline.write import balanced
from tests.support import commands, megatron_runs, sampling
from tests.support.describing import content
from tests.support.engines import Truth, raw
from tests.support.megatron_runs import without_padding
from tests.support.model_files import rewriting
from tests.support.pipeline_runs import (
    BASE,
    BY_NAME,
    LONG,
    TAG,
    Run,
    as_neox,
    copy_of,
    edit,
    load_all,
    loaded_truth,
    sample,
    truth,
)

FORMAT = "megatron-deepspeed"
MATRIX = "Megatron-DeepSpeed: (TP,PP,DP) to (TP,PP,DP), files and loaded engine against the truth"
OTHERS = "Megatron-DeepSpeed, written and loaded by DeepSpeed's engine"
RESUMED = "4 steps, resharded, 4 steps (fp32): loss of each, and of the unbroken run"
ALL_LAYOUTS = [(1, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)]
#: A sample has every pair of sizes.
LAYOUTS = sampling.sample(ALL_LAYOUTS, lambda sizes: combinations(enumerate(sizes), 2))
#: Another order of sums, over four steps in fp32.
BOUND = 1e-5


def layout_of(run: Run) -> Layout:
    return Layout(world_size=run.ranks, tp=run.tp, pp=run.pp)


def write(source: Path, target: Path, layout: Layout, to: str = FORMAT, **options: Any) -> Path:
    ckpt.plan(ckpt.open(source, **options), to, layout).run(target)
    return target


@dataclass(frozen=True)
class Load:
    """A source run, converted through the formats in `via` and loaded. `is_megatron` marks a megatron-core run."""

    source: str
    run: Run
    via: tuple[str, ...] = ()
    is_megatron: bool = False

    @property
    def title(self) -> str:
        known = megatron_runs.BY_NAME if self.is_megatron else BY_NAME
        of = "megatron " if self.is_megatron else ""
        return f"{of}{self.run.model} {known[self.source].layout} to {' via '.join([self.run.layout, *self.via])}"

    @property
    def folder(self) -> Path:
        return megatron_runs.sample(self.source) if self.is_megatron else sample(self.source)

    @property
    def truth(self) -> Truth:
        return megatron_runs.truth(self.folder) if self.is_megatron else truth(self.source)


def _to(source: str, tp: int = 1, pp: int = 1, via: tuple[str, ...] = (), **options: Any) -> Load:
    run = BY_NAME[source]
    return Load(source, Run(f"{source}-loaded", run.model, tp, pp, options={**run.options, **options}), via)


def _of_megatron(source: str, tp: int, pp: int) -> Load:
    run = Run(source, megatron_runs.BY_NAME[source].model + "_wide", tp, pp, options={"scheduler": "none"})
    return Load(source, run, is_megatron=True)


ALL_LOADS = [
    _to("llama", pp=4),
    _to("llama", tp=4),
    _to("llama-odd", pp=2),
    _to("llama-fp16", pp=4),
    _to("qwen2-tp"),
    _to("gpt_neox", pp=2),
    # Other formats pad the vocabulary again, to 128 rows.
    _to("qwen2-tp", tp=2, via=("zero3",), vocab_multiple=128),
    _to("llama", pp=2, via=("universal", "zero2"), vocab_multiple=128),
    _to("llama-fp16", pp=2, via=("dcp",), vocab_multiple=128, scheduler="none"),
    _to("gpt_neox", tp=2, pp=2, via=("megatron",)),
    _to("qwen2", tp=2, via=("hf",), vocab_multiple=128),
    _of_megatron("llama", tp=1, pp=2),
]


def facets(load: Load) -> Iterator[object]:
    """Yield a load's model and dtype, and the formats between.

    `tests/formats/megatron/test_matrix.py` shows that what ckpt writes for megatron-core equals its own runs.
    """
    yield load.run.model
    yield load.run.options.get("dtype")
    yield load.is_megatron
    yield from load.via


LOADS = sampling.sample(ALL_LOADS, facets)


@dataclass(frozen=True)
class Loaded:
    """All written folders and their results, by layout or number."""

    written: dict[tuple[int, int, int], Path] = field(default_factory=dict)
    matrix: dict[tuple[int, int, int], Path] = field(default_factory=dict)
    others: list[tuple[Path, Path]] = field(default_factory=list)
    resumed: dict[tuple[int, int, int], Path] = field(default_factory=dict)


#: On the layout of `LONG`, training goes on to the same bits.
RESUMES = sampling.sample([(1, 2, 2), (2, 2, 1), (2, 1, 2)], lambda sizes: [sizes == LONG.sizes])


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """Write everything, with one launch per number of ranks."""
    folder = Path(tempfile.mkdtemp(prefix="written-", dir=sample("base").parent))
    found, loads = Loaded(), []
    for sizes in LAYOUTS:
        tp, pp, dp = sizes
        run = replace(BASE, name="matrix", tp=tp, pp=pp, dp=dp)
        found.written[sizes] = write(sample("base"), folder / f"base-{tp}{pp}{dp}", layout_of(run))
        loads.append((run, found.written[sizes], 0))
    for number, load in enumerate(LOADS):
        source = load.folder
        for step, to in enumerate(load.via):
            source = write(source, folder / f"via-{number}-{step}", Layout(), to)
        loads.append((load.run, write(source, folder / f"other-{number}", layout_of(load.run)), 0))
    for sizes in RESUMES:
        run = replace(LONG, tp=sizes[0], pp=sizes[1], dp=sizes[2])
        loads.append((run, write(sample("long"), folder / f"long-{sizes}", layout_of(run), tag="global_step4"), 4))
    outputs = load_all(loads, folder)
    found.matrix.update(zip(LAYOUTS, outputs, strict=False))
    rest = outputs[len(LAYOUTS) :]
    written = [path for _, path, _ in loads[len(LAYOUTS) :]]
    found.others.extend(list(zip(written, rest, strict=True))[: len(LOADS)])
    found.resumed.update(zip(RESUMES, rest[len(LOADS) :], strict=True))
    return found


def digests(folder: Path) -> dict[str, str]:
    """Return digests of the step's files by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((folder / TAG).iterdir())}


@pytest.mark.slow
@pytest.mark.parametrize("target", LAYOUTS, ids=str)
@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_every_layout_to_every_layout(
    source: tuple[int, int, int], target: tuple[int, int, int], loaded: Loaded, tmp_path: Path, tables: Any
) -> None:
    expected, held = truth("base"), loaded_truth(loaded.matrix[target])
    assert held.tensors == expected.tensors
    assert (held.ties, held.metadata["step"]) == (expected.ties, expected.metadata["step"])
    assert held.metadata["adam_step"] == expected.metadata["adam_step"]
    tp, pp, dp = target
    output = write(loaded.matrix[source], tmp_path / "out", Layout(world_size=tp * pp * dp, tp=tp, pp=pp))
    checkpoint = ckpt.open(output)
    assert {key: content(tensor) for key, tensor in checkpoint.tensors.items()} == expected.tensors
    assert checkpoint.world_size == tp * pp * dp
    assert digests(output) == digests(loaded.written[target])
    tables[MATRIX][f"{source[0]},{source[1]},{source[2]}"][f"{tp},{pp},{dp}"] = f"{len(held.tensors)} equal"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LOADS)), ids=[one.title for one in LOADS])
def test_the_engine_loads_what_is_written(number: int, loaded: Loaded, tables: Any) -> None:
    load, (_, output) = LOADS[number], loaded.others[number]
    expected, held = load.truth, loaded_truth(output)
    ours, theirs = without_padding(held), without_padding(expected)
    weights_only = load.via == ("hf",)
    if weights_only:  # then the masters are upcast weights
        ours, theirs = ({key: one[key] for key in one if key[1] == WEIGHT} for one in (ours, theirs))
    assert ours == theirs
    assert held.ties == expected.ties
    for name in () if weights_only else ("step", "adam_step"):
        assert held.metadata[name] == expected.metadata[name]
    if not load.via and not load.is_megatron:
        assert held.metadata["param_groups"] == expected.metadata["param_groups"]
    tables[OTHERS][load.title]["written, loaded"] = f"{len(ours)} equal"


@pytest.mark.slow
@pytest.mark.parametrize("sizes", RESUMES, ids=str)
def test_training_goes_on(sizes: tuple[int, int, int], loaded: Loaded, tables: Any) -> None:
    whole, rest = losses(sample("long")), losses(loaded.resumed[sizes])
    assert sorted(rest) == [5, 6, 7, 8]
    apart = max(abs(rest[step] - whole[step]) / whole[step] for step in rest)
    cells = tables[RESUMED][f"{LONG.model} 2,2,1 to {','.join(map(str, sizes))}"]
    for step, loss in rest.items():
        cells[f"step {step}"] = f"{loss:.6f} {whole[step]:.6f}"
    cells["relative"] = f"{apart:.1e}" if apart else "equal"
    assert apart == 0 if sizes == LONG.sizes else apart < BOUND


def losses(run: Path) -> dict[int, float]:
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


# -- content of the files ------------------------------------------------------------------------------------
def plain(value: Any) -> Any:
    """Convert an object for comparison: tensors to bytes, objects to their contents."""
    if isinstance(value, torch.Tensor):
        return (*raw(value), value.requires_grad)
    if isinstance(value, Mapping):
        return {key: plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [plain(member) for member in value]
    return plain(vars(value)) if type(value).__module__.startswith(("argparse", "deepspeed.runtime.fp16")) else value


def of_file(path: Path) -> Any:
    return plain(torch.load(path, weights_only=False))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-fp16", "qwen2"])
def test_the_same_layout_is_written_as_it_was(name: str, tmp_path: Path) -> None:
    """Every entry of every file is equal. BF16_Optimizer's partitions also get ZeRO-1's entries."""
    conversion = ckpt.plan(ckpt.open(sample(name)), FORMAT)
    assert not conversion.plan.target.not_written
    conversion.run(tmp_path / "out")
    files = sorted(path.name for path in (sample(name) / TAG).iterdir())
    assert files == sorted(path.name for path in (tmp_path / "out" / TAG).iterdir())
    for file in files:
        original, written = (of_file(run / TAG / file) for run in (sample(name), tmp_path / "out"))
        if file.startswith("bf16_"):
            inner, ours = original["optimizer_state_dict"], written["optimizer_state_dict"]
            assert set(ours) - set(inner) == ZERO1
            written["optimizer_state_dict"] = {key: ours[key] for key in inner}
        assert written == original, file


ZERO1 = {"loss_scaler", "dynamic_loss_scale", "overflow", "zero_stage", "param_alignment_paddings"}


@pytest.mark.slow
def test_bf16_optimizer_deals_nothing(tmp_path: Path) -> None:
    """BF16_Optimizer (see the test above) ignores round_robin_gradients in the edited config."""
    run = copy_of("qwen2", tmp_path)
    for path in (run / TAG).glob("*_states.pt"):
        if not path.name.startswith("layer"):
            edit(path, lambda saved: saved["ds_config"]["zero_optimization"].update(round_robin_gradients=True))
    written = write(run, tmp_path / "out", Layout())
    assert ckpt.verify(ckpt.open(run), ckpt.open(written)).equal
    for path in (run / TAG).glob("*_optim_states.pt"):
        inner, ours = (of_file(one)["optimizer_state_dict"] for one in (path, written / TAG / path.name))
        assert ours["base_optimizer_state"] == inner["base_optimizer_state"]


@pytest.mark.slow
def test_random_states_stay_with_their_ranks(tmp_path: Path) -> None:
    """Files edited by hand: each slice's own random state, and patterns for universal checkpoints."""
    run = copy_of("llama", tmp_path)
    for path in (run / TAG).glob("mp_rank_*"):
        state = [{"random_rng_state": (3, (int(path.name[8:10]),), None), "torch_rng_state": torch.ones(4)}]
        edit(path, lambda saved, state=state: saved.update(rng_state=state, universal_checkpoint_info={"a": [".*"]}))
    conversion = ckpt.plan(ckpt.open(run), FORMAT)
    assert not conversion.plan.target.not_written
    conversion.run(tmp_path / "same")
    for path in (run / TAG).glob("mp_rank_*"):
        assert of_file(tmp_path / "same" / TAG / path.name) == of_file(path)
    other = ckpt.plan(ckpt.open(run), FORMAT, Layout(tp=1))
    assert [line for line in other.plan.target.not_written if "rng_state" in line and "--no-load-rng" in line]
    other.run(tmp_path / "other")
    saved = of_file(tmp_path / "other" / TAG / "mp_rank_01_model_states.pt")
    assert "rng_state" not in saved and saved["universal_checkpoint_info"] == {"a": [".*"]}
    assert (saved["args"]["tensor_model_parallel_size"], saved["args"]["data_parallel_size"]) == (1, 2)
    assert [line for line in ckpt.plan(ckpt.open(run), "zero1").plan.target.not_written if "rng_state" in line]


@pytest.mark.slow
def test_names_of_gpt_neox_are_kept(tmp_path: Path) -> None:
    """Files edited by hand, with the optimizer: layer numbers and names, and rotary frequencies."""
    run = write(sample("gpt_neox"), tmp_path / "run", Layout(tp=1, pp=2))
    expected = {key: content(tensor) for key, tensor in ckpt.open(run).tensors.items()}
    hub = write(run, tmp_path / "hub", Layout(), "hf")
    as_neox(run / TAG)
    source = ckpt.open(run)
    assert {key: content(tensor) for key, tensor in source.tensors.items()} == expected
    again = write(run, tmp_path / "neox-hub", Layout(), "hf")
    assert (again / "model.safetensors").read_bytes() == (hub / "model.safetensors").read_bytes()
    written = write(run, tmp_path / "out", Layout(pp=4))
    assert {key: content(tensor) for key, tensor in ckpt.open(written).tensors.items()} == expected
    for path in (run / TAG).glob("mp_rank_*"):
        edit(path, lambda saved: saved["args"].update(gpt_j_residual=True))
    with pytest.raises(CorruptError, match="gpt_j_residual True, recorded by the run"):
        write(run, tmp_path / "another", Layout(), "hf")
    layer = torch.load(written / TAG / "layer_03-model_00-model_states.pt")
    original = torch.load(run / TAG / "layer_03-model_00-model_states.pt")
    assert list(layer) == list(original) and torch.equal(layer["attention.rotary_emb.inv_freq"], torch.ones(2))
    assert (written / TAG / "layer_08-model_00-model_states.pt").is_file()
    slices = [of_file(written / TAG / f"mp_rank_{number:02d}_model_states.pt") for number in (0, 3)]
    assert slices[0]["args"] == {"num_layers": 4, "model_parallel_size": 1}
    assert "7.norm.weight" in slices[1]["param_shapes"][1] and "8.final_linear.weight" in slices[1]["param_shapes"][0]
    with pytest.raises(LossError, match="adds up the ranks' biases"):
        ckpt.plan(source, FORMAT, Layout(tp=2))


# -- mismatches ----------------------------------------------------------------------------------------------
#: Layouts of llama_wide: 4 layers, 8 heads in 4 groups.
MISFITS: dict[str, tuple[Layout, type[CkptError], str]] = {
    "ranks": (Layout(tp=2, pp=1, world_size=3), UsageError, "do not divide into this layout"),
    "ranks of the source": (Layout(tp=1, pp=3), UsageError, "do not divide into this layout"),
    "heads": (Layout(tp=8, pp=1, world_size=8), UsageError, "does not divide the attention"),
    "stages": (Layout(tp=1, pp=8, world_size=8), UsageError, "fewer layers than pipeline stages"),
    "chunks": (Layout(vpp=2), UsageError, "do not support this layout"),
    "experts": (Layout(ep=2), UsageError, "do not support this layout"),
    "stage": (Layout(pp=2, decoder_first_pipeline_num_layers=5), UsageError, "can't be split"),
}


@pytest.mark.slow
@pytest.mark.parametrize("misfit", MISFITS)
def test_a_layout_that_does_not_fit_is_refused(misfit: str) -> None:
    layout, kind, words = MISFITS[misfit]
    with pytest.raises(kind, match=words):
        ckpt.plan(ckpt.open(sample("llama")), FORMAT, layout)


@pytest.mark.slow
def test_stages_as_asked_for_and_as_they_were(tmp_path: Path) -> None:
    done = commands.ckpt(
        *("convert", FORMAT, FORMAT, sample("base"), "-o", tmp_path / "asked", "--pp", "2", "--tp", "1"),
        *("--world-size", "2", "--decoder-first-pipeline-num-layers", "1", "-v"),
    )
    assert done.code == 0, done.err
    assert "DeepSpeed's pipeline for TP 1, PP 2, DP 1, from 4 ranks" in done.err
    assert "transformer layers of the stages: 1, 4" in done.err
    kept = write(tmp_path / "asked", tmp_path / "kept", Layout(tp=2, world_size=4))
    for run in (tmp_path / "asked", kept):
        assert ckpt.open(run).state.entries()["pipeline"]["stages"] == [1, 4]
    assert ckpt.verify(ckpt.open(sample("base")), ckpt.open(kept)).equal


@pytest.mark.slow
def test_parameters_in_another_order_are_told_and_not_written(tmp_path: Path) -> None:
    """In the edited files, norms and matrices have swapped places in the optimizer."""
    run = copy_of("llama", tmp_path)

    def reverse(saved: dict[str, Any]) -> None:
        saved["param_shapes"] = [dict(reversed(group.items())) for group in saved["param_shapes"]]

    edit(run / TAG / "mp_rank_00_model_states.pt", reverse)
    with pytest.raises(CorruptError, match="contradicts the rank's own record"):
        ckpt.open(run)
    for path in (run / TAG).glob("*_optim_states.pt"):
        with rewriting(path) as saved:
            del saved["optimizer_state_dict"]["param_slice_mappings"]
    checkpoint = ckpt.open(run)
    assert any("parameter order differs" in note for note in checkpoint.notes)
    with pytest.raises(LossError, match="parameter order differs"):
        ckpt.plan(checkpoint, FORMAT)


@pytest.mark.slow
def test_weights_without_an_optimizer(tmp_path: Path) -> None:
    """A Hub source gives no partitions, and a note says how to load. A tensor without a place is an error."""
    hub = write(sample("llama"), tmp_path / "hub", Layout(), "hf")
    conversion = ckpt.plan(ckpt.open(hub), FORMAT, Layout(tp=2, pp=2))
    assert any("load_optimizer_states=False" in note for note in conversion.plan.target.notes)
    conversion.run(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*/*_optim_states.pt"))
    assert ckpt.verify(ckpt.open(sample("llama")), ckpt.open(tmp_path / "out"), only="weights").equal
    args = torch.load(tmp_path / "out/global_step0/mp_rank_00_model_states.pt", weights_only=False)["args"]
    assert (args.num_key_value_heads, args.normalization, args.padded_vocab_size) == (4, "rmsnorm", 512)


def test_models_without_a_place_in_the_pipeline(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(LossError, match="have no place") as caught:
        ckpt.plan(ckpt.open(tmp_path / "model"), FORMAT)
    assert "q_layernorm" in str(caught.value) or "k_layernorm" in str(caught.value)


def test_stages_are_balanced_as_deepspeed_does() -> None:
    """`partition_balanced` also counts the functions before and after the transformer layers."""
    from deepspeed.runtime.utils import partition_balanced

    for layers in range(1, 14):
        for stages in range(1, layers + 1):
            bounds = partition_balanced([0, 0, *[1] * layers, 0, 0, 0], stages)
            starts = [min(max(bound - 2, 0), layers) for bound in bounds]
            counts = [after - before for before, after in pairwise(starts)]
            assert counts == balanced(layers, stages), (layers, stages)
