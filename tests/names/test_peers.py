"""`converters/names/megatron/table.py`, `rows.py`, `vision.py`: peers' tables have the same names.

Peers are megatron-bridge 0.3.1 and 0.6.2, mbridge 0.15.1 and mcore-bridge 1.6.5 (`peer_names.py`).
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
#: Modules around the language model in mcore-bridge. One module in `mbridge` has another name.
AROUND = PEERS["mcore-bridge 1.6.5"]
CASES = [(peer, name) for peer, found in PEERS.items() if found is not AROUND for name in found]

#: Other names in peers. Each is wrong, or belongs to no released file.
DIFFERENCES = {
    # GLM-4.5 has no gate for its shared experts, in transformers or in its files.
    ("megatron-bridge 0.3.1", "glm4_moe", "mlp.shared_experts.router.weight"),
    # A dense MLP in the multi-token prediction layer, with Megatron's names on the Hub. No release has it.
    ("megatron-bridge 0.3.1", "glm4_moe", "mlp.linear_fc1.weight"),
    ("megatron-bridge 0.3.1", "glm4v_moe", "mlp.shared_experts.router.weight"),
    # A tower made from megatron-core's layers and split over ranks. ckpt refuses such checkpoints.
    ("mbridge 0.15.1", "qwen2_5_vl", "vision_model.**"),
    # transformers' tower under another name. ckpt reads both names and writes Megatron-Bridge's.
    ("mbridge 0.15.1", "glm4v_moe", "vision_model.**"),
    # K-EXAONE's multi-token prediction. ckpt drops it with a note, because transformers' class lacks it.
    *(
        ("megatron-bridge 0.6.2", "exaone_moe", f"{name}.weight")
        for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")
    ),
    # Stacked experts, as released. ckpt reads them, but writes the names from save_pretrained.
    *(
        ("megatron-bridge 0.6.2", "qwen3_5_moe_text", f"mlp.experts.local_experts.{{e}}.linear_fc{number}.weight")
        for number in (1, 2)
    ),
}
#: Norms that are separate in megatron-core's own layers.
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
#: One name that stands for all names in a vision tower.
_TOWER = re.compile(r"^vision_model\..*")


def ours(architecture: str) -> dict[str, set[tuple[str, ...]]]:
    """Return Hub names by Megatron's names within a layer, without the layer's path prefix."""
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
            continue  # the source interpolates several names there
        name = _LAYER.sub("", megatron)
        name = f"mlp.{name}" if name.startswith("shared_experts.") else _TOWER.sub("vision_model.**", name)
        if match := _EXPERTS.fullmatch(name):
            name = f"mlp.experts.local_experts.{{e}}.linear_fc{match[1]}.{match[2] or 'weight'}"
        own = tuple(_ON_HUB.sub("", hub).replace("experts.*.", "experts.{e}.") for hub in hubs)
        own = tuple(hub.replace("*", "model.", 1) if hub.startswith("*") else hub for hub in own)
        yield name, own


@pytest.mark.parametrize(("peer", "architecture"), CASES)
def test_names_are_the_peers(peer: str, architecture: str) -> None:
    """MiMo's names agree too. mbridge keeps the halves of `eh_proj` in place, so it trains other weights."""
    known, compared = ours(architecture), 0
    different = set()
    for name, hubs in theirs(PEERS[peer][architecture]):
        places = {name, _BY_THEMSELVES.get(name, name)}
        # A second copy of the embedding or output layer has its own row here.
        if any(hubs in known.get(place, ()) or {(hub,) for hub in hubs} <= known.get(place, set()) for place in places):
            compared += 1
        else:
            different.add((peer, architecture, name))
    assert different == {difference for difference in DIFFERENCES if difference[:2] == (peer, architecture)}
    assert compared >= 4


@pytest.mark.parametrize("architecture", [*AROUND, "glm4v_moe of mbridge"])
def test_modules_under_the_peers_names_are_read(architecture: str) -> None:
    """mcore-bridge nests modules in `visual`. Megatron-Bridge has them next to the language model."""
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
