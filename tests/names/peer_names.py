"""Names in published peers' mapping tables.

`python -m tests.names.peer_names FOLDER` reads unpacked wheels and writes `peer_names.json`: pairs of a Megatron name
and Hub names. `*` stands for a number and `**` for the rest.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

#: Bridge file for each architecture, with the class if the file has several.
MEGATRON_BRIDGE = {
    "llama": "llama/llama_bridge.py",
    "mistral": "mistral/mistral_bridge.py",
    "qwen2": "qwen/qwen2_bridge.py",
    "qwen3": "qwen/qwen3_bridge.py",
    "qwen3_moe": "qwen/qwen3_moe_bridge.py",
    "deepseek_v2": "deepseek/common.py",
    "deepseek_v3": "deepseek/common.py",
    "glm4_moe": "glm/glm45_bridge.py",
    "nemotron": "nemotron/nemotron_bridge.py",
    "nemotron_h": "nemotronh/nemotron_h_bridge.py",
    "qwen3_next": "qwen/qwen3_next_bridge.py",
    "qwen2_5_vl": "qwen_vl/qwen25_vl_bridge.py",
    "qwen3_vl": "qwen_vl/qwen3_vl_bridge.py:Qwen3VLBridge",
    "qwen3_vl_moe": "qwen_vl/qwen3_vl_bridge.py:Qwen3VLMoEBridge",
    "glm4v_moe": "glm_vl/glm_45v_bridge.py",
    "mistral3": "ministral3/ministral3_bridge.py",
}
#: Bridges added in a later version.
LATER = {
    "bailing_moe_v2": "bailing/bailing_moe2_bridge.py",
    "exaone_moe": "exaone/exaone_moe/exaone_moe_bridge.py",
    "gpt_oss": "gpt_oss/gpt_oss_bridge.py",
    "hy_v3": "hy_v3/hy_v3_bridge.py",
    "mimo": "mimo/mimo_bridge.py",
    "qwen3_5_text": "qwen/qwen35_bridge.py:Qwen35Bridge",
    "qwen3_5_moe_text": "qwen/qwen35_bridge.py:Qwen35MoEBridge",
}
MBRIDGE = {
    "llama": "llama.py",
    "qwen2": "qwen2.py",
    "qwen2_moe": "qwen2moe.py",
    "mixtral": "mixtral.py",
    "deepseek_v3": "deepseek_v3.py",
    "glm4_moe": "glm4moe.py",
    "mimo": "mimo.py",
    "qwen2_5_vl": "qwen2_5_vl/__init__.py",
    "glm4v_moe": "glm4_vl/__init__.py:Glm4VLBridgeMoe",
}
#: Classes for modules around the language model. Names inside the language model are built in code.
MCORE_BRIDGE = {
    "qwen2_vl": "qwen.py:Qwen2_5VL_Vit",
    "qwen2_5_vl": "qwen.py:Qwen2_5VL_Vit",
    "qwen3_vl": "qwen3_vl.py:Qwen3VL_Vit",
    "qwen3_vl_moe": "qwen3_vl.py:Qwen3VL_Vit",
    "glm4v_moe": "glm.py:Glm4vVit",
    "internvl": "internvl.py:InternvlHfVit",
}
RECORD = Path(__file__).parents[1] / "names" / "peer_names.json"

#: First parts of Megatron's names.
_MEGATRONS = ("embedding.", "decoder.", "output_layer.")

Pair = tuple[str, tuple[str, ...]]


def main() -> None:
    folder = Path(sys.argv[1])
    found: dict[str, dict[str, list[Pair]]] = {}
    for peer, inside, files in (
        ("megatron-bridge 0.3.1", "megatron/bridge/models", MEGATRON_BRIDGE),
        ("megatron-bridge 0.6.2", "megatron/bridge/models", LATER),
        ("mbridge 0.15.1", "mbridge/models", MBRIDGE),
        ("mcore-bridge 1.6.5", "mcore_bridge/model/mm_gpts", MCORE_BRIDGE),
    ):
        root = folder / peer.replace("-", "_").replace(" ", "-") / inside
        found[peer] = {name: sorted(set(_pairs_of(root, file))) for name, file in files.items()}
    RECORD.write_text(json.dumps(found, indent=1) + "\n")


def _pairs_of(root: Path, place: str) -> Iterator[Pair]:
    file, _, cls = place.partition(":")
    source = ast.parse((root / file).read_text())
    classes = (one for one in source.body if isinstance(one, ast.ClassDef))
    yield from pairs(next(one for one in classes if one.name == cls) if cls else source)


def pairs(source: ast.AST) -> Iterator[Pair]:
    """Yield related names in a source: dictionary entries, mappings with a `megatron_param`, and modules."""
    for node in ast.walk(source):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "module_mapping":
            for hub, own in ast.literal_eval(node.value).items():
                yield f"visual.{own}.**", (f"{hub}.**",)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                names = value.elts if isinstance(value, ast.List) else [value]
                yield from _pair(key, names)
        elif isinstance(node, ast.Call):
            words = {keyword.arg: keyword.value for keyword in node.keywords}
            if "megatron_param" in words:
                yield from _pair(words.pop("megatron_param"), list(words.values()))


def _pair(key: ast.expr | None, names: list[ast.expr]) -> Iterator[Pair]:
    megatron, hubs = _text(key), [_text(name) for name in names]
    if megatron and "." in megatron and all(hub and "." in hub for hub in hubs):
        if len(hubs) == 1 and hubs[0] and hubs[0].startswith(_MEGATRONS):  # a table in the other direction
            megatron, hubs = hubs[0], [megatron]
        yield megatron, tuple(hub for hub in hubs if hub)


def _text(node: ast.expr | None) -> str | None:
    """Return a string in the source with `*` for interpolated parts, or None if `node` is no string."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "*" for part in node.values]
        return "".join(map(str, parts))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"\{\w+\}", "*", node.value)
    return None


if __name__ == "__main__":
    main()
