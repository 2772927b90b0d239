"""`converters/deepspeed/pipeline/read.py`, `layers.py`, `format.py`: Megatron-DeepSpeed's pipelines.

They must match DeepSpeed's PipelineEngine and transformers' logits. GPT-NeoX does not run on a CPU, so its tests edit
files by hand.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckpt
from ckpt.errors import CorruptError, LossError, NotFoundError
from ckpt.plan.checkpoint import MASTER, WEIGHT
from ckpt.plan.planner import check_source
from converters.deepspeed.pipeline.layers import Kind, Layers, kind_of
from tests.support import commands
from tests.support.damage import Fault, copied, edited, removed
from tests.support.describing import content
from tests.support.pipeline_runs import BY_NAME, RANKS, RUNS, TAG, as_neox, copy_of, edit, sample, truth

TABLE = "Megatron-DeepSpeed pipelines: bit for bit against DeepSpeed's engine (TP,PP,DP)"
NAMES = [run.name for run in RUNS]


# -- real runs -----------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_reads_what_the_engine_held(name: str, tables: Any) -> None:
    run, expected = BY_NAME[name], truth(name)
    checkpoint = ckpt.open(sample(name))
    assert (checkpoint.format, checkpoint.world_size) == ("megatron-deepspeed", RANKS)
    for key, tensor in checkpoint.tensors.items():
        check_source(tensor)
        assert content(tensor) == expected.tensors[key], key
    assert checkpoint.tensors.keys() == expected.tensors.keys()
    assert dict(checkpoint.ties) == expected.ties
    assert checkpoint.state.step == expected.metadata["step"]
    assert set(checkpoint.state.scalars["step"].values()) == {expected.metadata["adam_step"]}
    groups = {(frozenset(group["names"]), group["lr"]) for group in expected.metadata["param_groups"]}
    assert {(frozenset(group.fqns), group.options["lr"]) for group in checkpoint.state.param_groups} == groups
    assert (checkpoint.state.args or {})["padded_vocab_size"] % run.tp == 0
    assert ckpt.verify(checkpoint, checkpoint).equal  # compares replicas
    tables[TABLE][f"{run.model} {run.layout}"]["read"] = f"{len(expected.tensors)} equal"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_fragments_have_the_ranks_that_deepspeed_gives_them(name: str) -> None:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    run, checkpoint = BY_NAME[name], ckpt.open(sample(name))
    ranks = checkpoint.world_size
    assert ranks is not None
    topology = PipeModelDataParallelTopology(num_pp=run.pp, num_mp=run.tp, num_dp=ranks // (run.pp * run.tp))
    seen = set()
    for tensor in checkpoint.tensors.values():
        for source in (tensor.source, *tensor.replicas):
            for fragment in source.fragments(tensor.shape):
                file = Path(fragment.extent.path).name
                seen.add(fragment.rank)
                if match := re.search(r"zero_pp_rank_(\d+)_mp_rank_(\d+)", file):
                    data, number = map(int, match.groups())
                    stage, model = divmod(number, run.tp)
                    assert fragment.rank == topology.get_rank(pipe=stage, data=data, model=model), (tensor.fqn, file)
                else:
                    found = topology.get_coord(fragment.rank)
                    assert (found.data, found.model) == (0, int(file.split("model_")[1][:2])), (tensor.fqn, file)
    assert seen == set(range(ranks))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path, tables: Any) -> None:
    """Logits agree within rounding: tensor parallel ranks round each half before they add."""
    from transformers import AutoModelForCausalLM

    done = commands.ckpt("convert", "megatron-deepspeed", "hf", str(sample(name)), "-o", str(tmp_path / "hf"))
    assert done.code == 0, done.err
    live = load_file(sample(name) / "truth" / f"{TAG}-logits.safetensors")
    dtype = live["logits"].dtype
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        logits = model(live["input_ids"]).logits
    difference = (logits.float() - live["logits"].float()).abs().max().item()
    assert difference <= 0.03 * live["logits"].float().abs().max().item()
    run = BY_NAME[name]
    tables[TABLE][f"{run.model} {run.layout}"]["logits of transformers"] = f"within {difference:.1e}"


@pytest.mark.slow
def test_ranks_that_hold_the_same_are_compared(tmp_path: Path) -> None:
    def change(layer: dict[str, Any]) -> None:
        layer["input_layernorm.weight"][3] += 1

    run = copy_of("llama", tmp_path)
    edit(run / TAG / "layer_03-model_01-model_states.pt", change)
    checkpoint = ckpt.open(run)
    fqn = "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight"
    assert len(checkpoint.tensors[fqn, WEIGHT].replicas) == 1
    done = commands.ckpt("verify", str(run), str(run))
    assert done.code == 4, done.out  # a value with contradicting replicas can't be compared
    assert fqn in done.out and "could not be read" in done.out
    tied = ckpt.open(sample("qwen2-tp")).tensors
    assert len(tied["embedding.word_embeddings.weight", MASTER].replicas) == 1
    assert not tied["embedding.word_embeddings.weight", WEIGHT].replicas


@pytest.mark.slow
def test_find_takes_what_latest_records(tmp_path: Path) -> None:
    run = copy_of("llama-odd", tmp_path)
    shutil.copytree(run / TAG, run / "global_step9")
    assert ckpt.open(run).path == str(run / TAG)
    assert ckpt.open(run, tag="global_step9").path == str(run / "global_step9")
    (run / "latest").unlink()
    with pytest.raises(CorruptError, match="does not name a step") as caught:
        ckpt.open(run)
    assert "global_step9" in str(caught.value.hint)
    assert ckpt.open(run / TAG).format == "megatron-deepspeed"


# -- faults --------------------------------------------------------------------------------------------------
MODEL, PARTITION = "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_03_optim_states.pt"
LAYER = "layer_{:02d}-model_{:02d}-model_states.pt"


def layer(number: int) -> str:
    return f"layer_{number:02d}-model_0[01]-model_states.pt"


def unknown_layer(step: Path) -> None:
    for rank in (0, 1):
        torch.save({"conv.weight": torch.ones(2)}, step / LAYER.format(8, rank))


COUNT, NORM = {"partition_count": [2, 2]}, {"input_layernorm.weight": torch.ones(41)}
FAULTS = {
    "layer of one rank": Fault(removed(LAYER.format(3, 1)), CorruptError, "a layer file is missing"),
    "layer": Fault(removed(layer(3)), CorruptError, "missing for a transformer layer"),
    "last layer": Fault(removed(layer(5)), CorruptError, "missing, or left"),
    "output": Fault(removed(layer(7)), CorruptError, "a layer file is missing"),
    "norm": Fault(removed(layer(6)), CorruptError, "do not form a model"),
    "model file": Fault(removed("mp_rank_02_model_states.pt"), CorruptError, "a rank's model file is missing"),
    "last model files": Fault(
        removed("mp_rank_0[23]_model_states.pt"), CorruptError, "the rank files do not match the run"
    ),
    "partition": Fault(removed(PARTITION), CorruptError, "an optimizer partition"),
    "left over partition": Fault(
        copied(PARTITION, PARTITION.replace("rank_0_", "rank_1_")), CorruptError, "more ranks than the run had"
    ),
    "step": Fault(edited(MODEL, lambda saved: saved.update(global_steps=1)), CorruptError, "different steps"),
    "version": Fault(edited(MODEL, lambda s: s.update(checkpoint_version=1.0)), NotFoundError, "unsupported order"),
    "rows in blocks": Fault(
        edited(MODEL, lambda saved: setattr(saved["args"], "ds_sequence_parallel_fpdt", False)),
        NotFoundError,
        "row order: Megatron-DeepSpeed since",
    ),
    "stage 0": Fault(edited(MODEL, lambda saved: saved.update(optimizer={})), NotFoundError, "no ZeRO"),
    "unknown entry": Fault(
        edited(LAYER.format(2, 0), lambda saved: saved.update({"mlp.gate.weight": torch.ones(2)})),
        LossError,
        "this layer entry is unknown",
    ),
    "unknown layer": Fault(unknown_layer, LossError, "neither Megatron-DeepSpeed"),
    "experts": Fault(lambda step: torch.save({}, step / f"expert_0_{MODEL}"), NotFoundError, "experts"),
    "shape": Fault(edited(LAYER.format(4, 1), lambda s: s.update(NORM)), CorruptError, "ranks store different tensors"),
    "partition of another layout": Fault(
        edited(PARTITION, lambda s: s["optimizer_state_dict"].update(COUNT)), CorruptError, "different runs"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(fault: str, tmp_path: Path) -> None:
    run = copy_of("llama", tmp_path)
    FAULTS[fault].check(run / TAG, lambda: ckpt.open(run))


@pytest.mark.slow
def test_weights_alone_are_read(tmp_path: Path) -> None:
    run = copy_of("llama", tmp_path)
    removed("*_optim_states.pt")(run / TAG)
    checkpoint = ckpt.open(run)
    assert {role for _, role in checkpoint.tensors} == {WEIGHT}
    assert any("weights only" in note for note in checkpoint.notes)


# -- GPT-NeoX, by hand ---------------------------------------------------------------------------------------
@pytest.mark.slow
def test_names_of_gpt_neox(tmp_path: Path) -> None:
    run = copy_of("llama", tmp_path)
    expected = {key: content(tensor) for key, tensor in ckpt.open(run).tensors.items() if key[1] == WEIGHT}
    as_neox(run / TAG)
    with pytest.raises(LossError, match="grouped queries"):
        ckpt.open(run)
    run = copy_of("gpt_neox", tmp_path)
    as_neox(run / TAG)
    with pytest.raises(LossError, match="adds up the ranks' biases"):
        ckpt.open(run)
    for path in (run / TAG).glob("*_optim_states.pt"):
        path.unlink()
    for path in (run / TAG).glob("layer_*"):
        edit(path, lambda s: [s.pop(n, None) for n in ("attention.dense.bias", "mlp.dense_4h_to_h.bias")] and None)
    found = {key: content(tensor) for key, tensor in ckpt.open(run).tensors.items()}
    plain = {key: content(tensor) for key, tensor in ckpt.open(sample("gpt_neox")).tensors.items() if key[1] == WEIGHT}
    missing = (".linear_proj.bias", ".linear_fc2.bias")
    assert found == {key: value for key, value in plain.items() if not key[0].endswith(missing)}
    assert expected.keys() != found.keys()


def test_kinds_of_layers() -> None:
    assert kind_of(["word_embeddings.weight", "position_embeddings.weight"]) is Kind.EMBEDDING
    assert kind_of(["attention.dense.weight"]) is kind_of(["self_attention.dense.bias"]) is Kind.TRANSFORMER
    assert kind_of(["norm.weight", "norm.bias"]) is kind_of(["weight"]) is Kind.NORM
    assert kind_of(["final_linear.weight"]) is Kind.OUTPUT
    assert kind_of(["conv.weight"]) is None
    # BLOOM has another function before the transformer layers. Its embedding norm is unsupported.
    layers = Layers.of_names(
        {
            1: ["word_embeddings.weight"],
            3: ["self_attention.dense.weight"],
            4: ["mlp.x", "self_attention.y"],
            6: ["bias"],
        },
        "here",
    )
    assert layers.tied
    assert layers.canonical(4, "mlp.dense_h_to_4h.bias") == "decoder.layers.1.mlp.linear_fc1.bias"
    assert layers.of_parameter("tied_modules.embed.word_embeddings.weight") == "embedding.word_embeddings.weight"
    assert layers.of_parameter("6.bias") == "decoder.final_layernorm.bias"
    assert layers.of_parameter("5.bias") is None
