"""`converters/names/megatron/table.py`, `rows.py`, `vision.py`: names against the tables of megatron-bridge 0.3.1 and
0.6.2, mbridge 0.15.1 and mcore-bridge 1.6.5 (`peer_names.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

import pytest

from ckpt.plan.checkpoint import HUB, MEGATRON, Layout
from ckpt.state.naming import to_namespace
from converters.names.megatron.relation import table_of
from converters.names.megatron.rows import EVERY, MegatronRow, parse
from tests.names.peer_names import RECORD
from tests.names.test_megatron import config_of, described, hub_of

PEERS: Mapping[str, Mapping[str, list[tuple[str, list[str]]]]] = json.loads(RECORD.read_text())
#: What is around the language model in mcore-bridge's models; `mbridge` has one such module under a name of its own.
AROUND = PEERS["mcore-bridge 1.6.5"]
CASES = [(peer, name) for peer, found in PEERS.items() if found is not AROUND for name in found]

#: What peers name otherwise.  In each case they are wrong, or name what no released file has.
DIFFERENCES = {
    # GLM-4.5 has no gate of its shared experts, in transformers or in its files.
    ("megatron-bridge 0.3.1", "glm4_moe", "mlp.shared_experts.router.weight"),
    # A dense MLP in the layer of multi-token prediction, whose Hub names are Megatron's: no release has one.
    ("megatron-bridge 0.3.1", "glm4_moe", "mlp.linear_fc1.weight"),
    ("megatron-bridge 0.3.1", "glm4v_moe", "mlp.shared_experts.router.weight"),
    # A tower of megatron-core's own layers, which other ranks share: its checkpoints are refused.
    ("mbridge 0.15.1", "qwen2_5_vl", "vision_model.**"),
    # transformers' tower under another name than Megatron-Bridge's, which is the one that is written; both are read.
    ("mbridge 0.15.1", "glm4v_moe", "vision_model.**"),
    # K-EXAONE's multi-token prediction, which is left out here, as a note says: transformers' class has none.
    *(
        ("megatron-bridge 0.6.2", "exaone_moe", f"{name}.weight")
        for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")
    ),
    # Stacks, as released: they are read, and what save_pretrained writes is written.
    *(
        ("megatron-bridge 0.6.2", "qwen3_5_moe_text", f"mlp.experts.local_experts.{{e}}.linear_fc{number}.weight")
        for number in (1, 2)
    ),
}
#: Norms that megatron-core's own layers have by themselves.
_BY_THEMSELVES = {
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "norm.weight": "mixer.in_proj.layer_norm_weight",
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
_EXPERTS = re.compile(r"mlp\.experts\.(?:local_experts\.\*\.)?linear_fc(\d)(?:\.(weight|bias))?\*?")
_LAYER = re.compile(
    r"^(?:language_model\.|(?:\*\.?)*)((decoder|mtp)\.layers\.[*\d]+\.)?(?:(?:transformer_layer|mtp_model_layer|\*)\.)?"
)
_ON_HUB = re.compile(
    r"^(?:language_model\.|\*\.?)?(?:(?:model\.(?:language_model\.)?|backbone\.)?(?:mtp_)?layers\.[*\d]+\."
    r"|mtp\.(?:layers\.[*\d]+\.)?)"
)
#: Where a vision tower has many names of its own, one stands for all.
_TOWER = re.compile(r"^vision_model\..*")


def ours(architecture: str) -> dict[str, set[tuple[str, ...]]]:
    """The Hub's names by Megatron's, in a layer without what the names of the layer begin with."""
    table = table_of(architecture)
    found: dict[str, set[tuple[str, ...]]] = {}
    rows: Iterator[MegatronRow] = iter(
        (
            *parse(table.top),
            *parse("".join((table.layer, table.dense, table.sparse, *table.beside.values()))),
            *parse(table.prediction),
        )
    )
    for row in rows:
        found.setdefault(re.sub(r"^mtp\.layers\.\{n\}\.", "", row.megatron), set()).add(row.hubs)
    return found


def theirs(pairs: list[tuple[str, list[str]]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for megatron, hubs in pairs:
        if megatron.endswith("*") and not _EXPERTS.search(megatron):
            continue  # the source fills in several names there
        name = _LAYER.sub("", megatron)
        name = f"mlp.{name}" if name.startswith("shared_experts.") else _TOWER.sub("vision_model.**", name)
        if match := _EXPERTS.fullmatch(name):
            name = f"mlp.experts.local_experts.{{e}}.linear_fc{match[1]}.{match[2] or 'weight'}"
        own = tuple(_ON_HUB.sub("", hub).replace("experts.*.", "experts.{e}.") for hub in hubs)
        own = tuple(hub.replace("*", "model.", 1) if hub.startswith("*") else hub for hub in own)
        yield name, own


@pytest.mark.parametrize(("peer", "architecture"), CASES)
def test_names_are_the_peers(peer: str, architecture: str) -> None:
    """MiMo's are the same too, though mbridge leaves the halves of `eh_proj` as they are: it trains other weights."""
    known, compared = ours(architecture), 0
    different = set()
    for name, hubs in theirs(PEERS[peer][architecture]):
        places = {name, _BY_THEMSELVES.get(name, name)}
        # A second copy of the embedding or the output layer is a row of its own here.
        if any(hubs in known.get(place, ()) or {(hub,) for hub in hubs} <= known.get(place, set()) for place in places):
            compared += 1
        else:
            different.add((peer, architecture, name))
    assert different == {difference for difference in DIFFERENCES if difference[:2] == (peer, architecture)}
    assert compared >= 4


@pytest.mark.parametrize("architecture", [*AROUND, "glm4v_moe of mbridge"])
def test_modules_under_the_peers_names_are_read(architecture: str) -> None:
    """mcore-bridge has in one more, `visual`, what is side by side with the language model in Megatron-Bridge's."""
    name, _, other = architecture.partition(" ")
    pairs = [("vision_model.**", ["model.visual.**"])] if other else AROUND[name]
    hub = hub_of(config_of(name))
    there = to_namespace(hub, MEGATRON, Layout())
    modules = {hubs[0].split(".")[-2]: megatron.removesuffix(EVERY) for megatron, hubs in pairs}
    own = {row.megatron.removesuffix(EVERY): row.hubs[0].split(".")[-2] for row in table_of(name).kept}
    assert modules.keys() == set(own.values())
    renamed = {}
    for fqn in there.shapes:
        start = next((start for start in own if fqn.startswith(start)), None)
        renamed[fqn] = modules[own[start]] + fqn.removeprefix(start) if start else fqn
    assert set(renamed.values()) != set(renamed)
    theirs = described({new: there.shapes[fqn] for fqn, new in renamed.items()}, hub.config, MEGATRON)
    assert {fqn for fqn, _ in to_namespace(theirs, HUB).tensors} == {fqn for fqn, _ in hub.tensors}
