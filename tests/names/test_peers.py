"""`converters/names/megatron/table.py`, `rows.py`: names of the tables against those in the mapping tables of
megatron-bridge 0.3.1 and mbridge 0.15.1, which `tests/support/peer_names.py` read from their sources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

import pytest

from converters.names.megatron.relation import table_of
from converters.names.megatron.rows import MegatronRow, parse
from tests.support.peer_names import RECORD

PEERS: Mapping[str, Mapping[str, list[tuple[str, list[str]]]]] = json.loads(RECORD.read_text())
CASES = [(peer, architecture) for peer, found in PEERS.items() for architecture in found]

#: What peers name otherwise.  In each case they are wrong, or name what no released file has.
DIFFERENCES = {
    # GLM-4.5 has no gate of its shared experts, in transformers or in its files.
    ("megatron-bridge 0.3.1", "glm4_moe", "mlp.shared_experts.router.weight"),
    # A dense MLP in the layer of multi-token prediction, whose Hub names are Megatron's: no release has one.
    ("megatron-bridge 0.3.1", "glm4_moe", "mlp.linear_fc1.weight"),
}
#: Norms that megatron-core's own layers have by themselves.
_BY_THEMSELVES = {
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "norm.weight": "mixer.in_proj.layer_norm_weight",
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
_EXPERTS = re.compile(r"mlp\.experts\.(?:local_experts\.\*\.)?linear_fc(\d)(?:\.weight)?\*?")
_LAYER = re.compile(r"^(decoder|mtp)\.layers\.[*\d]+\.(transformer_layer\.)?")
_ON_HUB = re.compile(r"^(?:(?:model|backbone)\.(?:mtp_)?layers\.[*\d]+\.|mtp\.(?:layers\.[*\d]+\.)?)")


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
        name = f"mlp.{name}" if name.startswith("shared_experts.") else name
        if match := _EXPERTS.fullmatch(name):
            name = f"mlp.experts.local_experts.{{e}}.linear_fc{match[1]}.weight"
        own = tuple(_ON_HUB.sub("", hub).replace("experts.*.", "experts.{e}.") for hub in hubs)
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
