"""`converters/names/families/module_tree.py`, `converters/names/transformers/order.py`: an architecture in one file.

`tests/example_architecture/example_moe.py` declares it. The live class is Qwen3 MoE's, whose modules it has in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt import api
from ckpt.errors import LossError
from ckpt.plan.checkpoint import HUB, MEGATRON, Layout
from ckpt.state.naming import to_namespace
from converters.names.families import tables as families
from converters.names.families.tables import FAMILIES
from converters.names.hub.proof import prove
from converters.names.megatron import architectures as modules
from converters.names.megatron.relation import architectures, table_of
from converters.names.parameters import in_memory
from converters.names.transformers import order
from converters.names.transformers.order import as_registered
from converters.names.transformers.relation import relation
from tests.support.tiny_sizes import tiny_sizes

transformers = pytest.importorskip("transformers", minversion="5")

NAME, FOLDER = "example_moe", Path(__file__).parents[1] / "example_architecture"
RENAMED = {".mlp.gate.": ".moe.router.", ".mlp.": ".moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@pytest.fixture(autouse=True, scope="module")
def declared() -> Iterator[None]:
    modules.__path__.append(str(FOLDER))
    architectures.cache_clear()
    table_of(NAME)
    yield
    del FAMILIES[NAME]
    modules.__path__.remove(str(FOLDER))
    architectures.cache_clear()


def live() -> Any:
    config = transformers.CONFIG_MAPPING["qwen3_moe"](**{**tiny_sizes("qwen3_moe"), "mlp_only_layers": []})
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config)


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Return a live model's files under the new architecture's names."""
    live().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for old, new in RENAMED.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": NAME, "architectures": ["ExampleMoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_declaration_in_one_file_is_all_that_is_needed(hub: Path) -> None:
    model, source = live(), api.open(hub)
    assert NAME in architectures() and source.config is not None
    prove(source.config, source.shapes, hub)
    memory = relation(source.config, source.shapes, "to_memory")
    assert memory is not None
    assert memory.b_shapes == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert memory.check().inverse().check().b_shapes == source.shapes
    names = [name for name, _ in model.named_parameters()]
    assert as_registered(sorted(names), NAME) == names
    assert sum(one.numel for one in in_memory(source.config).parameters) == model.num_parameters()
    there = to_namespace(source, MEGATRON, Layout(tp=2))
    assert api.verify(source, to_namespace(there, HUB)).equal
    experts = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"
    gate, up = model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"][1].chunk(2)
    assert torch.equal(there[experts][...], torch.cat([gate, up]))


def test_missing_or_misplaced_row_is_seen(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, family = api.open(hub), FAMILIES[NAME]
    names = [name for name, _ in live().named_parameters()]
    monkeypatch.setitem(FAMILIES, NAME, replace(family, layer=families.NORMS + family.layer))
    order._modules.cache_clear()
    assert as_registered(sorted(names), NAME) != names
    monkeypatch.setitem(FAMILIES, NAME, replace(family, layer=family.layer.replace("moe.router.weight e h", "")))
    order._modules.cache_clear()
    with pytest.raises(LossError, match=r"names or shapes don't match|other tensors"):
        prove(source.config or {}, source.shapes, hub)
