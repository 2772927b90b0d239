"""`converters/megatron/dist/torch_dcp.py`: `torch_dcp` files written by Megatron-LM, and faults."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import CorruptError, LossError
from tests.frameworks.runs import held
from tests.support.describing import content
from tests.support.places import FIXTURES

FIXTURE = FIXTURES / "megatron-torch-dcp"
FOLDER = "iter_0000002"


def test_every_tensor_is_what_the_ranks_held() -> None:
    checkpoint, known = ckpt.open(FIXTURE), held(FIXTURE / "truth")
    assert (checkpoint.format, checkpoint.world_size, checkpoint.state.step) == ("megatron-dist", 2, 2)
    assert {role for _, role in known.tensors} == {"weight", "master", "exp_avg", "exp_avg_sq"}
    assert {key: content(tensor) for key, tensor in checkpoint.tensors.items()} == known.tensors
    assert set(checkpoint.state.scalars["step"].values()) == set(known.facts["steps"]) == {2}
    assert {frozenset(group.fqns) for group in checkpoint.state.param_groups} == {
        frozenset(members) for _, members in known.facts["groups"]
    }


LAYER = "decoder.layers.0."
MODEL = {f"{LAYER}self_attention.linear_proj.weight": torch.ones(3, 4), f"{LAYER}mlp.linear_fc2.weight": torch.ones(2)}


@pytest.mark.parametrize(
    ("model", "args", "error", "said"),
    [
        (MODEL, {"tensor_model_parallel_size": 2}, LossError, "only one tensor parallel rank's parts"),
        (MODEL, None, LossError, "no args"),
        (MODEL, {"num_layers": 2}, LossError, "model layers are missing"),
        ({**MODEL, "frozen": True}, {}, LossError, "frozen parameters are not recorded"),
        ({**MODEL, "vision.weight": torch.ones(2)}, {}, CorruptError, "unexpected entry in a Megatron-LM checkpoint"),
    ],
)
def test_faults(
    model: dict[str, Any], args: dict[str, Any] | None, error: type[Exception], said: str, tmp_path: Path
) -> None:
    import torch.distributed.checkpoint as dcp

    state: dict[str, Any] = {"iteration": 2, "model": {name: one for name, one in model.items() if name != "frozen"}}
    if "frozen" in model:  # Megatron-LM's optimizer has one of the two
        state["optimizer"] = {"optimizer": {"state": {}, "param_groups": [{"params": [0]}]}}
    if args is not None:
        state["args"] = Namespace(**{"num_layers": 1, "tensor_model_parallel_size": 1, **args})
    dcp.save(state, checkpoint_id=tmp_path / FOLDER, no_dist=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    with pytest.raises(error) as caught:
        ckpt.open(tmp_path)
    assert said in str(caught.value) + str(getattr(caught.value, "found", ""))
