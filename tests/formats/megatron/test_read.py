"""`converters/megatron/read.py`, `optimizer_read.py`, `optimizer.py`, `chunks.py`: Megatron-LM's `torch` format."""

from __future__ import annotations

import io
import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import ckpt
from ckpt.errors import CkptError, LossError, NotFoundError, UsageError
from ckpt.plan.checkpoint import WEIGHT, Layout
from ckpt.plan.tiling import check_tiling
from converters.megatron.buffers import find_buffer, stored_buffer
from converters.megatron.optimizer_read import read_optimizers
from converters.megatron.read import OTHER_ORDER, MegatronReading, RankContent
from converters.names.megatron.facts import MegatronFacts
from converters.names.megatron.model.axes import Grid, Rank, Stages, expert_range, parse_layout
from converters.names.megatron.model.spelling import LayerKind, Spelling, in_order, layer_kinds, split_layer
from converters.names.megatron.model.splits import (
    COLUMNS,
    GATED,
    ROWS,
    WHOLE,
    Split,
    full_shape,
    rank_boxes,
    rank_shape,
)
from tests.support import commands
from tests.support.damage import Damage, removed
from tests.support.describing import content
from tests.support.megatron_runs import RUNS, sample, truth
from tests.support.model_files import rewriting

FOLDER, MODEL, DISTRIBUTED = "iter_0000002", "model_optim_rng.pt", "distrib_optim.pt"


# -- real runs -----------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("name", [run.name for run in RUNS if "megatron" in run.forms])
def test_modules_are_in_the_order_that_writing_assumes(name: str) -> None:
    for file in sorted((sample(name) / FOLDER).glob(f"*/{MODEL}")):
        state = torch.load(file, weights_only=False)
        for key in (key for key in state if key.startswith("model")):
            names = [n for n, value in state[key].items() if isinstance(value, torch.Tensor)]
            assert names == in_order(names)


# -- written files -------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_same_layout_is_written_as_it_was(tmp_path: Path) -> None:
    """Every entry of every file is equal, including random state."""
    for name in ("llama", "qwen3_moe", "mixtral-plain", "llama-uneven-vpp", "deepseek_v3"):
        conversion = ckpt.plan(ckpt.open(sample(name)), "megatron")
        assert not conversion.plan.target.not_written
        conversion.run(tmp_path / name)
        for file in sorted((sample(name) / FOLDER).glob("*/*.pt")):
            written = torch.load(tmp_path / name / file.relative_to(sample(name)), weights_only=False)
            original = torch.load(file, weights_only=False)
            if isinstance(original, dict) and "args" in original:
                args, ours = (vars(state.pop("args")) for state in (original, written))
                assert {k: v for k, v in args.items() if ours.get(k) != v} == {}
            _same(original, written, file.name)


def _same(a: Any, b: Any, where: str) -> None:
    """Check equal values and tensor bytes, with keys in any order."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, where
        assert torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            _same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            _same(x, y, f"{where}/{index}")
    else:
        assert type(a) is type(b) and (a is b or bool((a == b) if not hasattr(a, "all") else (a == b).all())), where


# -- the way to the Hub --------------------------------------------------------------------------------------
@pytest.mark.slow
def test_every_expert_comes_from_the_rank_that_has_it(tmp_path: Path) -> None:
    """Experts on four ranks keep their numbers in the whole model (NVIDIA-NeMo/Megatron-Bridge#1716)."""
    ckpt.plan(ckpt.open(sample("qwen3_moe-ep4")), "hf").run(tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    held = load_file(sample("qwen3_moe-ep4") / "truth" / "truth.safetensors")
    experts = 0
    for name, tensor in held.items():
        if name.startswith("weight/") and ".local_experts." in name:
            layer, expert = (int(part) for part in name.split(".") if part.isdigit())
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            if "linear_fc2" in name:
                assert torch.equal(weights[f"{prefix}.down_proj.weight"], tensor)
            else:
                gate, up = tensor.chunk(2)
                assert torch.equal(weights[f"{prefix}.gate_proj.weight"], gate)
                assert torch.equal(weights[f"{prefix}.up_proj.weight"], up)
            experts += 1
    assert experts == 2 * 8 * 3


@pytest.mark.slow
def test_shards_with_equal_bytes_are_parts_all_the_same(tmp_path: Path) -> None:
    """Shards of a norm are parts even if their bytes are equal (lmms-engine#160)."""
    run = _copy("qwen2", tmp_path)
    for file in run.glob(f"*/*/{MODEL}"):
        with rewriting(file) as state:
            for name, tensor in state["model"].items():
                if name.endswith(("linear_qkv.bias", "layernorm.weight")):
                    tensor.fill_(1)
    checkpoint = ckpt.open(run)
    bias = checkpoint.tensors["decoder.layers.1.self_attention.linear_qkv.bias", WEIGHT]
    norm = checkpoint.tensors["decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", WEIGHT]
    assert bias.shape == truth(sample("qwen2")).tensors[bias.fqn, WEIGHT][1] and not bias.replicas
    assert len(norm.replicas) == 1


# -- other layer specs, by hand ------------------------------------------------------------------------------
def _copy(name: str, folder: Path) -> Path:
    """Copy a run without its truth, for editing."""
    run = folder / name
    shutil.copytree(sample(name), run, ignore=shutil.ignore_patterns("truth"))
    return run


def _edit(run: Path, change: Callable[[dict[str, Any], Path], None], pattern: str = f"*/*/{MODEL}") -> None:
    """Rewrite files. `change(content, path)` works in place."""
    for file in sorted(run.glob(pattern)):
        with rewriting(file) as state:
            change(state, file)


@pytest.mark.slow
def test_transformer_engine_layers_and_grouped_experts(tmp_path: Path) -> None:
    """Edited names: TENorm-fused linear layers and TEGroupedMLP, with extra states from several versions."""
    run = _copy("qwen3_moe-ep4", tmp_path)

    def engine(state: dict[str, Any], file: Path) -> None:
        state["args"].transformer_impl, state["args"].moe_grouped_gemm = "transformer_engine", True
        del state["optimizer"]
        renamed: dict[str, Any] = {}
        for name, value in state["model"].items():
            prefix, rest = split_layer(name)
            if rest.startswith("input_layernorm.") or (prefix == "decoder.layers.0." and "pre_mlp" in rest):
                rest = rest.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
                rest = rest.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
            if ".local_experts." in rest:
                _, expert, linear, kind = rest.rsplit(".", 3)
                rest = f"mlp.experts.{linear}.{kind}" + ("" if kind == "_extra_state" else expert)
            renamed[prefix + rest] = value
        none = io.BytesIO()
        torch.save(None, none)
        for name in [n for n in renamed if n.endswith("_extra_state")]:
            renamed[name] = none if "qkv" in name else torch.empty(0, dtype=torch.uint8) if "fc1" in name else None
        state["model"] = renamed

    _edit(run, engine)
    for file in run.glob(f"*/*/{DISTRIBUTED}"):
        file.unlink()
    checkpoint, expected = ckpt.open(run), truth(sample("qwen3_moe-ep4")).tensors
    weights = {key for key in expected if key[1] == WEIGHT}
    assert checkpoint.tensors.keys() == weights and not any("FP8" in note for note in checkpoint.notes)
    for key, tensor in checkpoint.tensors.items():
        assert content(tensor) == expected[key], key
    ckpt.plan(checkpoint, "megatron", Layout(tp=1, ep=2, etp=1)).run(tmp_path / "out")
    assert ckpt.verify(checkpoint, ckpt.open(tmp_path / "out")).equal
    written = torch.load(tmp_path / "out" / FOLDER / "mp_rank_00_001" / MODEL, weights_only=False)["model"]
    assert "decoder.layers.1.mlp.experts.linear_fc1.weight3" in written
    assert "decoder.layers.1.mlp.experts.linear_fc1.weight4" not in written
    assert written["decoder.layers.1.mlp.experts.linear_fc1._extra_state"] is None
    assert "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight" in written
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in written


@pytest.mark.slow
def test_legacy_grouped_gemm(tmp_path: Path) -> None:
    """Edited files: GroupedMLP has two matrices, [in, out], for all experts on a rank, with optimizer states."""
    run = _copy("mixtral-plain", tmp_path)

    def group(state: dict[str, Any], file: Path) -> None:
        model, args = state["model"], state["args"]
        args.moe_grouped_gemm = True
        experts = args.num_experts // args.expert_model_parallel_size
        for layer in range(args.num_layers // args.pipeline_model_parallel_size):
            prefix = f"decoder.layers.{layer}.mlp.experts."
            names = [f"{prefix}local_experts.{{}}.linear_fc{number}.weight" for number in (1, 2)]
            first, second = (torch.stack([model[name.format(e)].T for e in range(experts)]) for name in names)
            for name in [n for n in model if n.startswith(prefix)]:
                del model[name]
            model[f"{prefix}weight1"] = first.contiguous().view(args.hidden_size, -1)
            model[f"{prefix}weight2"] = second.contiguous().view(-1, args.hidden_size)
        del state["optimizer"]

    _edit(run, group)
    checkpoint, expected = ckpt.open(run), truth(sample("mixtral-plain")).tensors
    assert checkpoint.tensors.keys() == {key for key in expected if key[1] == WEIGHT}
    for key, tensor in checkpoint.tensors.items():
        assert content(tensor) == expected[key], key
    with pytest.raises(LossError, match="legacy grouped GEMM"):
        ckpt.plan(checkpoint, "megatron", Layout(tp=1))


@pytest.mark.slow
def test_a_model_of_transformer_engine_keeps_its_optimizer(tmp_path: Path) -> None:
    """The recorded layer spec is changed before writing and reading. Norms become part of the linear layers."""
    source = ckpt.open(sample("llama"))
    args = {**(source.state.args or {}), "transformer_impl": "transformer_engine"}
    changed = replace(source, state=replace(source.state, args=args))
    ckpt.plan(changed, "megatron", Layout(tp=1, pp=2)).run(tmp_path / "engine")
    assert ckpt.verify(source, ckpt.open(tmp_path / "engine")).equal
    names = list(torch.load(tmp_path / "engine" / FOLDER / "mp_rank_00_000" / MODEL, weights_only=False)["model"])
    assert names[1:5] == [
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    ]


def _legacy(state: dict[str, Any], file: Path) -> None:
    """Convert a chunk to the form of Megatron-LM's legacy GPTModel: nested, with its modules' names."""
    nested: dict[str, Any] = {"embedding": {"word_embeddings": {}}, "encoder": {}, "output_layer": {}}
    head: dict[str, Any] = {}
    old = {
        "self_attention.linear_qkv.": "self_attention.query_key_value.",
        "self_attention.linear_proj.": "self_attention.dense.",
        "pre_mlp_layernorm.": "post_attention_layernorm.",
        "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
        "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
    }
    for name, value in state["model"].items():
        if not isinstance(value, torch.Tensor):
            continue
        if name.startswith("embedding."):
            nested["embedding"]["word_embeddings"]["weight"] = value
        elif name == "output_layer.weight":
            tied = not state["args"].untie_embeddings_and_output_weights
            (head if tied else nested["output_layer"])["weight"] = value
        else:
            rest = name.removeprefix("decoder.")
            for new, module in old.items():
                rest = rest.replace(new, module)
            nested["encoder"][rest] = value
    state["model"] = {"language_model": nested} | ({"word_embeddings_for_head": head} if head else {})
    del state["optimizer"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt_neox"])
def test_legacy_models(name: str, tmp_path: Path) -> None:
    """Before megatron-core, Megatron-LM saved nested dicts. The test builds them by hand."""
    run = _copy(name, tmp_path)
    _edit(run, _legacy)
    checkpoint, expected = ckpt.open(run), truth(sample(name)).tensors
    assert checkpoint.tensors.keys() == {key for key in expected if key[1] == WEIGHT}
    for key, tensor in checkpoint.tensors.items():
        assert content(tensor) == expected[key], key
    ckpt.plan(checkpoint, "megatron", Layout(tp=1, pp=1)).run(tmp_path / "out")
    assert ckpt.verify(checkpoint, ckpt.open(tmp_path / "out")).equal
    _edit(run, lambda state, file: setattr(state["args"], "ds_sequence_parallel_fpdt", False))
    with pytest.raises(NotFoundError, match="Megatron-DeepSpeed checkpoints since"):
        ckpt.open(run)
    _edit(run, lambda state, file: state.update(checkpoint_version=1.0))
    with pytest.raises(NotFoundError, match="orders query, key and value differently"):
        ckpt.open(run)


@pytest.mark.slow
def test_modules_in_another_order(tmp_path: Path) -> None:
    """Weights are read in the stored order. An optimizer would get other parameters' states, so none is written."""
    run = _copy("llama", tmp_path)
    with pytest.raises(LossError, match="identifies parameters only by their order"):
        ckpt.plan(replace(ckpt.open(run), facts=MegatronFacts(own_module_order=True)), "megatron", Layout(tp=1))

    def turn(state: dict[str, Any], file: Path) -> None:
        del state["optimizer"]
        state["model"] = dict(reversed(state["model"].items()))

    _edit(run, turn)
    checkpoint = ckpt.open(run)
    assert OTHER_ORDER in checkpoint.notes and checkpoint.facts == MegatronFacts(own_module_order=True)
    assert ckpt.verify(ckpt.open(sample("llama")), checkpoint, only="weights").equal
    assert ckpt.plan(checkpoint, "megatron", Layout(tp=1)).files


@pytest.mark.slow
def test_state_of_fp8_is_listed(tmp_path: Path) -> None:
    run = _copy("llama", tmp_path)

    def scale(state: dict[str, Any], file: Path) -> None:
        state["model"]["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.ones(8, dtype=torch.uint8)

    _edit(run, scale)
    assert any("FP8 state is left out" in note for note in ckpt.open(run).notes)


# -- faults --------------------------------------------------------------------------------------------------
def _args(name: str, value: Any) -> Callable[[dict[str, Any], Path], None]:
    return lambda state, file: setattr(state["args"], name, value)


def _without(run: Path, name: str) -> None:
    shutil.rmtree(run / FOLDER / name)


def _other_iteration(run: Path) -> None:
    _edit(run, lambda state, file: state.update(iteration=3), f"*/mp_rank_01_000/{MODEL}")


def _other_norm(run: Path) -> None:
    def change(state: dict[str, Any], file: Path) -> None:
        state["model"]["decoder.layers.0.input_layernorm.weight"][3] += 1

    _edit(run, change, f"*/mp_rank_01_000/{MODEL}")


def _one_layer_less(run: Path) -> None:
    def change(state: dict[str, Any], file: Path) -> None:
        for name in [name for name in state["model"] if name.startswith("decoder.layers.1.")]:
            del state["model"][name]

    _edit(run, change, f"*/mp_rank_01_001/{MODEL}")


def _shorter_buffer(run: Path) -> None:
    def change(state: dict[str, Any], file: Path) -> None:
        for by_dtype in (value for key, value in state.items() if key != "buckets_coalesced"):
            for tensors in by_dtype.values():
                tensors.update({name: tensors[name][:-64].clone() for name in ("param", "exp_avg", "exp_avg_sq")})

    _edit(run, change, f"*/mp_rank_00_001/{DISTRIBUTED}")


def _old_optimizer(run: Path) -> None:
    _edit(run, lambda state, file: state.pop("buckets_coalesced"), f"*/*/{DISTRIBUTED}")


def _no_final_norm(run: Path) -> None:
    """Remove the norm on all ranks of the last stage, and the optimizer, because its buffers include the norm."""

    def change(state: dict[str, Any], file: Path) -> None:
        state.pop("optimizer")
        state["model"].pop("decoder.final_layernorm.weight", None)

    _edit(run, change)
    for path in run.glob(f"*/*/{DISTRIBUTED}"):
        path.unlink()


def _unknown_tensor(run: Path) -> None:
    _edit(run, lambda state, file: state["model"].update({"decoder.layers.0.adapter.weight": torch.ones(2)}))


def _stale_tracker(run: Path) -> None:
    (run / "latest_checkpointed_iteration.txt").write_text("9")


def _extra_rank(run: Path) -> None:
    shutil.copytree(run / FOLDER / "mp_rank_00_001", run / FOLDER / "mp_rank_02_001")


def _hostile(run: Path) -> None:
    class Canary:
        def __reduce__(self) -> Any:
            return print, ("never",)

    _edit(run, lambda state, file: state.update(canary=Canary()), f"*/mp_rank_01_001/{MODEL}")


def test_an_optimizer_that_no_file_of_a_model_records_is_said_to_be_left(tmp_path: Path) -> None:
    """Without the param groups in the model file, nothing assigns the buffers' states to parameters."""
    reading = MegatronReading(tmp_path)
    file = RankContent(Rank(0, 0, 0, 0, 0, 0), str(tmp_path / MODEL), {}, ())
    assert not read_optimizers(reading, [file]).groups and reading.notes == []
    (tmp_path / DISTRIBUTED).touch()
    assert not read_optimizers(reading, [file]).groups
    assert len(reading.notes) == 1 and "distrib_optim.pt is ignored" in reading.notes[0]


LAST = f"{FOLDER}/mp_rank_01_001"
#: Fault in a run with TP 2 and PP 2, exit code, and required words in the message.
FAULTS: dict[str, tuple[Damage, int, tuple[str, ...]]] = {
    "a rank's folder missing": (lambda run: _without(run, "mp_rank_01_000"), 4, ("mp_rank_01_000", "4 folders")),
    "the first rank's folder missing": (lambda run: _without(run, "mp_rank_00_000"), 4, ("mp_rank_00_000",)),
    "a rank's file missing": (removed(f"{LAST}/{MODEL}"), 4, ("mp_rank_01_001", MODEL)),
    "distrib_optim.pt missing": (removed(f"{LAST}/{DISTRIBUTED}"), 4, ("mp_rank_01_001", DISTRIBUTED)),
    "a rank too many": (_extra_rank, 4, ("mp_rank_02_001", "4 folders")),
    "ranks from different iterations": (_other_iteration, 4, ("different iterations", "mp_rank_01_000: 3")),
    "ranks from different runs": (
        lambda run: _edit(run, _args("hidden_size", 41), f"*/mp_rank_01_001/{MODEL}"),
        4,
        ("different runs", "hidden_size", "41"),
    ),
    "ranks from runs with other rotary positions": (
        lambda run: _edit(run, _args("rotary_base", 77), f"*/mp_rank_01_001/{MODEL}"),
        4,
        ("different runs", "rotary_base", "77"),
    ),
    "arguments of another width": (
        lambda run: _edit(run, _args("ffn_hidden_size", 97)),
        4,
        ("shape doesn't match the run's argument record", "mlp.linear_fc1.weight", "194"),
    ),
    "a tensor missing": (_no_final_norm, 4, ("lacks tensors", "decoder.final_layernorm.weight")),
    "another layout recorded": (
        lambda run: _edit(run, _args("pipeline_model_parallel_size", 1)),
        4,
        ("rank folders", "PP 1"),
    ),
    "norms that differ between ranks": (_other_norm, 4, ("linear_qkv.layer_norm_weight", "[3]")),
    "a layer missing": (_one_layer_less, 4, ("2 layers (2 to 3 in the model)", "1 layer")),
    "a buffer too short": (_shorter_buffer, 4, ("mp_rank_00_001/distrib_optim.pt", "elements")),
    "an optimizer before May 2024": (_old_optimizer, 3, ("before May 2024",)),
    "a tensor without a rule": (_unknown_tensor, 6, ("adapter.weight",)),
    "a stale tracker": (_stale_tracker, 4, ("iter_0000009", "iter_0000002")),
    "a hostile pickle": (_hostile, 5, ("print",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str, tmp_path: Path) -> None:
    break_it, code, words = FAULTS[fault]
    run = _copy("llama", tmp_path)
    break_it(run)
    done = commands.ckpt("convert", "megatron", "megatron", run, "-o", tmp_path / "out", "--tp", "1")
    said = done.out + done.err
    assert done.code == code, said
    for word in words:
        assert word in said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "asked", "error", "words"),
    [
        ("llama", {"tp": 3}, UsageError, "does not divide the attention"),
        ("llama", {"pp": 3}, UsageError, "can't be split"),
        ("llama", {"pp": 1, "vpp": 2}, UsageError, "needs a pipeline"),
        ("llama", {"world_size": 6}, UsageError, "do not divide"),
        ("qwen3_moe", {"ep": 3}, UsageError, "do not"),
        ("qwen3_moe", {"etp": 4}, UsageError, "do not fit"),
        ("llama-plain", {"pipeline_model_parallel_layout": "Et*2|t|tL"}, UsageError, "number of stages"),
    ],
)
def test_layouts_that_are_refused(name: str, asked: dict[str, Any], error: type[CkptError], words: str) -> None:
    with pytest.raises(error, match=words):
        ckpt.plan(ckpt.open(sample(name)), "megatron", Layout(**asked))


@pytest.mark.parametrize("layout", ["Et|t", "t|tL", "tE|tL", "Et|EtL", "EtL|t", "Em|ttL", "EtL|tL"])
def test_a_layout_that_megatron_core_does_not_take_is_refused(layout: str) -> None:
    stages = Stages(num_layers=2, pp=2, layout=parse_layout(layout))
    with pytest.raises(UsageError, match="not follow the model's order"):
        stages.check()
    assert Stages(num_layers=2, pp=2, layout=parse_layout("Et|tmL")).check()


@pytest.mark.slow
def test_a_written_layout_of_stages(tmp_path: Path) -> None:
    layout = "Et|tt|t|L"
    ckpt.plan(ckpt.open(sample("llama")), "megatron", Layout(tp=1, pp=4, pipeline_model_parallel_layout=layout)).run(
        tmp_path / "out"
    )
    back = ckpt.open(tmp_path / "out")
    assert (back.state.args or {})["pipeline_model_parallel_layout"] == layout
    assert ckpt.verify(ckpt.open(sample("llama")), back).equal


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        {"pp": 4, "vpp": 2, "first": 4, "last": 2},
        {"pp": 3, "vpp": 2, "first": 2, "last": 4},
        {"pp": 3, "first": 2},
        {"pp": 2, "vpp": 5},
    ],
)
def test_layers_keep_their_numbers_in_chunks_of_uneven_stages(asked: dict[str, int], tmp_path: Path) -> None:
    """Layers in chunks of uneven stages have megatron-core's numbers (ltp-megatron-lm#35)."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    uneven = Layout(pp=2, vpp=1, decoder_first_pipeline_num_layers=7)
    ckpt.plan(ckpt.open(sample("llama-uneven-vpp")), "megatron", uneven).run(tmp_path / "uneven")
    pp, vpp, first, last = (asked.get(name) for name in ("pp", "vpp", "first", "last"))
    stages = {"decoder_first_pipeline_num_layers": first, "decoder_last_pipeline_num_layers": last}
    ckpt.plan(ckpt.open(tmp_path / "uneven"), "megatron", Layout(pp=pp, vpp=vpp, **stages)).run(tmp_path / "out")
    config: Any = SimpleNamespace(
        num_layers=10,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        pipeline_model_parallel_layout=None,
    )
    expected, seen = load_file(sample("llama-uneven-vpp") / "truth" / "truth.safetensors"), set()
    for stage, chunk in itertools.product(range(pp or 1), range(vpp or 1)):
        state = torch.load(tmp_path / "out" / FOLDER / f"mp_rank_00_{stage:03d}" / MODEL, weights_only=False)
        model = state[f"model{chunk}" if vpp else "model"]
        virtual = chunk if vpp else None
        start = get_transformer_layer_offset(config, virtual, stage)
        for local in range(get_num_layers_to_build(config, virtual, stage)):
            name = "decoder.layers.{}.mlp.linear_fc1.weight"
            assert torch.equal(model[name.format(local)], expected[f"weight/{name.format(start + local)}"])
            seen.add(start + local)
    assert seen == set(range(10))


@pytest.mark.slow
def test_weights_alone_are_a_release(tmp_path: Path) -> None:
    ckpt.plan(ckpt.open(sample("llama")), "hf").run(tmp_path / "hf")
    ckpt.plan(ckpt.open(tmp_path / "hf"), "megatron", Layout(tp=2, pp=2)).run(tmp_path / "out")
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    back = ckpt.open(tmp_path / "out")
    assert ckpt.verify(ckpt.open(tmp_path / "hf"), back).equal
    assert back.state.step == 0 and not back.state.param_groups


# -- pure functions ------------------------------------------------------------------------------------------
def test_stages_are_those_of_megatron_core() -> None:
    """All small combinations match get_num_layers_to_build and get_transformer_layer_offset."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    accepted = 0
    for layers, pp, vpp, first, last, embedding, loss in itertools.product(
        range(1, 13), (2, 3, 4), (1, 2, 3), (None, 1, 2, 4), (None, 1, 3), (False, True), (False, True)
    ):
        config: Any = SimpleNamespace(
            num_layers=layers,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
            account_for_embedding_in_pipeline_split=embedding,
            account_for_loss_in_pipeline_split=loss,
            pipeline_model_parallel_layout=None,
        )
        stages = Stages(layers, pp, vpp, first, last, embedding, loss)
        chunks = [(p, v) for v in range(vpp) for p in range(pp)]
        try:
            theirs = []
            for p, v in chunks:
                virtual = v if vpp > 1 else None
                start = get_transformer_layer_offset(config, virtual, p)
                theirs.append(list(range(start, start + get_num_layers_to_build(config, virtual, p))))
        except (AssertionError, ZeroDivisionError):
            theirs = []
        if sorted(itertools.chain(*theirs)) != list(range(layers)):
            with pytest.raises(UsageError):
                stages.check()
            continue
        stages.check()
        accepted += 1
        assert [list(stages.layers(p, v)) for p, v in chunks] == theirs
        for layer in range(layers):
            p, v, local = stages.place(layer)
            assert stages.layers(p, v)[local] == layer
    assert accepted > 200


def test_layouts_are_those_of_megatron_core() -> None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    for text in ("Ettt|(tt|)*3tm|L", "E,t*3|t*2|(t|)*2,L", "E|t*4|t|tL"):
        theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
        assert parse_layout(text) == tuple(tuple(item.name for item in stage) for stage in theirs)
    for text in ("Etx|L", "(t*99999999)*99999999"):
        with pytest.raises(UsageError):
            parse_layout(text)


@given(
    st.sampled_from((WHOLE, ROWS, Split(0, GATED), Split(0, (3, 1, 2)), COLUMNS)),
    st.integers(1, 6),
    st.lists(st.integers(1, 4), min_size=2, max_size=3),
)
def test_ranks_tile_a_tensor(split: Split, size: int, part: list[int]) -> None:
    local = (part[0] * sum(split.sections), *part[1:])
    shape = full_shape(split, local, size)
    assert rank_shape(split, shape, size) == local
    boxes = [box for rank in range(size) for box in rank_boxes(split, shape, size, rank)]
    assert check_tiling(boxes, shape, overlaps=split == WHOLE) is None


@given(st.integers(1, 8), st.integers(1, 4), st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 4)))
def test_every_part_of_the_model_is_on_a_rank_of_its_own_folder(tp: int, pp: int, ep: int, etp: int) -> None:
    grid = Grid(tp, pp, ep, 1, etp)
    try:
        grid.check()
    except UsageError:
        return
    ranks = list(grid.ranks())
    assert len({(rank.tp, rank.pp, rank.ep) for rank in ranks}) == len(ranks)
    assert {(rank.tp, rank.pp) for rank in ranks} == set(itertools.product(range(tp), range(pp)))
    held = {(rank.etp, rank.pp, expert) for rank in ranks for expert in expert_range(rank.ep, grid, 8)}
    assert held == set(itertools.product(range(etp), range(pp), range(8)))


@given(st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 3), st.integers(0, 3))
def test_names_are_spelled_and_read_again(
    local_spec: bool, grouped: bool, moe: bool, latent: bool, first_layer: int, first_expert: int
) -> None:
    attention = ["linear_q_up_proj", "linear_kv_up_proj"] if latent else ["linear_qkv"]
    rest = [f"self_attention.{one}.{kind}" for one in attention for kind in ("layer_norm_weight", "weight")]
    rest += ["input_layernorm.weight"] if latent else ["self_attention.q_layernorm.weight"]
    if moe:
        rest += ["pre_mlp_layernorm.weight", "mlp.router.weight"]
        rest += [f"mlp.experts.local_experts.{first_expert + e}.linear_fc{n}.weight" for e in (0, 1) for n in (1, 2)]
    else:
        rest += ["mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
    names = [f"decoder.layers.{first_layer + 1}.{one}" for one in rest]
    kind = LayerKind.of(rest)
    spelling = Spelling(local_spec, grouped and moe)
    own = [spelling.spelled(name, kind, first_layer, first_expert) for name in names]
    assert len(set(own)) == len(names)
    kinds = layer_kinds(own)
    seen = Spelling.of_names(own)
    assert seen == spelling
    assert [seen.canonical(n, kinds[split_layer(n)[0]], first_layer, first_expert) for n in own] == names


def test_buffers_of_several_buckets_and_of_older_versions() -> None:
    numels, shared = [100, 64, 30, 200], [True, False, False, False]
    one = stored_buffer(numels, shared, None)
    assert one.starts == (384, 320, 256, 0) and one.numel == 484
    # A separate bucket begins after the previous, padded bucket. A full bucket ends at its last parameter's end.
    two = stored_buffer(numels, shared, 150)
    assert two.starts == (328, 264, 200, 0) and two.numel == 428
    packed = stored_buffer(numels, shared, None, alignment=1)
    assert packed.starts == (294, 230, 200, 0)
    for buffer in (one, two, packed):
        assert find_buffer(numels, shared, [None, 150], buffer.numel) == buffer
    assert find_buffer(numels, shared, [None], 400) is None
