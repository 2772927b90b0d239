"""Load ckpt's files with transformers 4 and record the names.

Run `python -m tests.names.transformers_4 write FOLDER`. Then `PYTHON tests/names/transformers_4.py load FOLDER`, with
transformers 4.51.3, prints `transformers_4.json`.
"""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path

from safetensors import safe_open


def names(folder: Path) -> list[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return sorted(file.keys())


def digest(folder: Path) -> str:
    return sha256("\n".join(names(folder)).encode()).hexdigest()[:16]


def write(place: Path) -> None:
    """Write a tiny model for each type that transformers 5 can build, both as in memory and as ckpt writes it."""
    from transformers import CONFIG_MAPPING

    from tests.names.test_transformers import Saved, convert, to_hub

    for model_type in sorted(CONFIG_MAPPING):
        folder = place / model_type
        folder.mkdir(parents=True)
        try:
            convert(to_hub(Saved(model_type, folder).in_memory()), folder / "ours")
        except Exception as error:  # no tiny model available
            print(model_type, type(error).__name__, file=sys.stderr)


def load(place: Path) -> dict[str, str]:
    """Return digests for the types that the installed transformers loads without differences."""
    import transformers

    found = {}
    for folder in sorted(place.iterdir()):
        if not (folder / "ours" / "config.json").is_file() or names(folder / "ours") == names(folder / "memory"):
            continue
        architectures = json.loads((folder / "ours" / "config.json").read_text()).get("architectures") or [""]
        cls = getattr(transformers, architectures[0], None)
        if cls is None or folder.name not in transformers.CONFIG_MAPPING:
            continue
        try:
            _, info = cls.from_pretrained(folder / "ours", output_loading_info=True)
        except Exception as error:
            print(folder.name, type(error).__name__, file=sys.stderr)
            continue
        if not any(info.values()):
            found[folder.name] = digest(folder / "ours")
    return found


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        print(json.dumps(load(Path(sys.argv[2])), indent=1))
