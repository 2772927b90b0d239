"""The names in the mapping tables of published peers: `python -m tests.support.peer_names FOLDER`.

FOLDER holds the unpacked wheels of megatron-bridge and mbridge, whose sources are read and never run.  Writes
`tests/names/peer_names.json`: for each peer and architecture, pairs of Megatron's name and the Hub's names, with `*`
for a number.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

#: The class of each architecture's bridge, and the file that it is in.
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
}
MBRIDGE = {
    "qwen2": "qwen2.py",
    "qwen2_moe": "qwen2moe.py",
    "mixtral": "mixtral.py",
    "deepseek_v3": "deepseek_v3.py",
    "glm4_moe": "glm4moe.py",
    "mimo": "mimo.py",
}
RECORD = Path(__file__).parents[1] / "names" / "peer_names.json"

Pair = tuple[str, tuple[str, ...]]


def main() -> None:
    folder = Path(sys.argv[1])
    found: dict[str, dict[str, list[Pair]]] = {}
    for peer, inside, files in (
        ("megatron-bridge 0.3.1", "megatron/bridge/models", MEGATRON_BRIDGE),
        ("mbridge 0.15.1", "mbridge/models", MBRIDGE),
    ):
        (root,) = folder.glob(f"*/{inside}")
        found[peer] = {name: sorted(set(pairs((root / file).read_text()))) for name, file in files.items()}
    RECORD.write_text(json.dumps(found, indent=1) + "\n")


def pairs(source: str) -> Iterator[Pair]:
    """Names that a source relates: entries of dictionaries, and mappings with a `megatron_param`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                names = value.elts if isinstance(value, ast.List) else [value]
                yield from _pair(key, names)
        elif isinstance(node, ast.Call):
            words = {keyword.arg: keyword.value for keyword in node.keywords}
            if "megatron_param" in words:
                yield from _pair(words.pop("megatron_param"), list(words.values()))


def _pair(key: ast.expr | None, names: list[ast.expr]) -> Iterator[Pair]:
    megatron, hubs = _text(key), [_text(name) for name in names]
    if megatron and all(hubs) and "." in megatron:
        yield megatron, tuple(hub for hub in hubs if hub)


def _text(node: ast.expr | None) -> str | None:
    """A string of the source with `*` for what is filled in; None for what is none."""
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "*" for part in node.values]
        return "".join(map(str, parts))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"\{\w+\}", "*", node.value)
    return None


if __name__ == "__main__":
    main()
