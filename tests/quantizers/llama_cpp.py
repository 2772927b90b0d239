"""llama.cpp's own converter: `python -m tests.quantizers.llama_cpp FOLDER ...`.

It writes FOLDER-KIND.gguf for each model. The sources are in llama-cpp-python's sdist.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fixtures.make_gguf import SPLITS, write_by_llama_cpp

SOURCES = Path(sys.prefix, "llama-cpp-python/vendor/llama.cpp")
#: llama.cpp's file type for each `--quantize`.
KINDS = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}


def split_of(model_type: str) -> tuple[str, str]:
    """Return the expression that splits text, and llama.cpp's name for it."""
    return SPLITS.get(model_type, SPLITS["qwen3_moe"])


def main() -> None:
    sys.path[:0] = [str(SOURCES), str(SOURCES / "gguf-py")]
    import conversion  # type: ignore[import-not-found]

    conversion.load_all_models()
    for folder in map(Path, sys.argv[1:]):
        _, known_as = split_of(json.loads((folder / "config.json").read_text())["model_type"])
        for kind, file_type in KINDS.items():
            write_by_llama_cpp(folder, known_as, file_type, folder.with_name(f"{folder.name}-{kind}.gguf"))


if __name__ == "__main__":
    main()
