"""`converters/megatron/dist/plain_write.py`, `fsdp.py`: Megatron-LM loads the output under FSDP2 and Megatron-FSDP."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import ckpt
from ckpt.errors import LossError
from tests.frameworks.runs import Held, Job, held, run
from tests.support.describing import content
from tests.support.places import FIXTURES

SMALL = """
    --hidden-size 16 --num-attention-heads 4 --num-experts 4 --moe-ffn-hidden-size 8 --vocab-size 32
    --ffn-hidden-size 32 --num-layers 2
"""
FORMS = {
    "torch_dcp": f"{SMALL} --use-torch-fsdp2 --ckpt-format torch_dcp",
    "fsdp_dtensor": f"{SMALL} --use-megatron-fsdp --ckpt-format fsdp_dtensor --use-distributed-optimizer "
    "--data-parallel-sharding-strategy optim_grads_params --no-load-rng",
}
#: Distributed optimizer on 4 ranks with separate experts, and FSDP2 on 2 ranks without random states.
CASES = [("megatron-lm", "torch_dcp"), ("megatron-lm", "fsdp_dtensor"), ("megatron-torch-dcp", "fsdp_dtensor")]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], Held]:
    folder = tmp_path_factory.mktemp("plain")
    jobs = {}
    for source, form in CASES:
        written = folder / f"{source}-{form}"
        ckpt.convert(FIXTURES / source, "megatron-dist", written, ckpt_format=form)
        jobs[source, form] = Job(f"{source}.{form}", 2, FORMS[form], load=written)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
        found = run(list(jobs.values()), folder / "held")
    return {case: found[job.name] for case, job in jobs.items()}


@pytest.mark.parametrize(("source", "form"), CASES)
def test_every_weight_master_and_moment_is_the_ranks_own(
    source: str, form: str, loaded: Mapping[tuple[str, str], Held]
) -> None:
    theirs, known = loaded[source, form], held(FIXTURES / source / "truth")
    assert {role for _, role in known.tensors} == {"weight", "master", "exp_avg", "exp_avg_sq"}
    assert theirs.tensors == known.tensors
    assert theirs.facts["steps"] == known.facts["steps"] == [2]
    assert theirs.facts["scheduler"] == known.facts["scheduler"]
    assert theirs.facts["iteration"] == 2
    assert theirs.facts["consumed"] == known.facts["consumed"] > 0


def test_frozen_parameters_are_read_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-FSDP saves only weights for frozen parameters, and masters and moments for the others."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    frozen = r"word_embeddings|layers\.0\.self_attention\.linear_proj|router"
    arguments = FORMS["fsdp_dtensor"].replace("--no-load-rng", "")
    job = Job("frozen", 2, arguments, steps=2, save=tmp_path / "run", frozen=frozen)
    known = run([job], tmp_path)[job.name].tensors
    untrained = {
        "embedding.word_embeddings.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.mlp.router.weight",
        "decoder.layers.1.mlp.router.weight",
    }
    trained = {fqn for fqn, _ in known} - untrained
    assert {key for key in known if key[0] in untrained} == {(fqn, "weight") for fqn in untrained}
    checkpoint = ckpt.open(tmp_path / "run")
    found = {key: content(tensor) for key, tensor in checkpoint.tensors.items()}
    assert found == {key: held for key, held in known.items() if key not in {(fqn, "weight") for fqn in trained}}
    assert any("4 parameters were frozen" in note for note in checkpoint.notes)
    assert ckpt.check(tmp_path / "run").whole
    with pytest.raises(LossError) as refused:
        ckpt.convert(tmp_path / "run", "megatron-dist", tmp_path / "out", ckpt_format="fsdp_dtensor")
    assert "exp_avg" in str(refused.value.expected) and not (tmp_path / "out").exists()
