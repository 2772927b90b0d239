"""Folders of sentence-transformers: a model in the root, and further modules in subfolders.

`modules.json` lists them (sentence-transformers 5, `SentenceTransformer.py`). In training, module N's tensor names
begin with `N.`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckpt.move.files import confined
from ckpt.move.listing import names_in
from ckpt.move.source import read_file

MODULES = "modules.json"
_SETTINGS = (MODULES, "config_sentence_transformers.json")
_MAX_JSON = 1 << 20
_CARRIED = (".json", ".txt", ".model", ".jinja")


def module_folders(folders: Iterable[str | Path]) -> dict[str, str]:
    """Return each module's folder, without the model itself, by tensor prefix."""
    home = next((folder for folder in map(Path, folders) if (folder / MODULES).is_file()), None)
    if home is None:
        return {}
    try:
        listed = json.loads(read_file(confined(home, MODULES), _MAX_JSON))
        found = {f"{one['idx']}.": one["path"] for one in listed}
    except (ValueError, TypeError, KeyError):
        return {}
    return {prefix: path for prefix, path in found.items() if type(path) is str and Path(path).name == path != ""}


def settings(folder: Path) -> Iterator[str]:
    if (folder / MODULES).is_file():
        yield from (name for name in names_in(folder) if name in _SETTINGS or name.startswith("sentence_"))
        for place in module_folders([folder]).values():
            if (folder / place).is_dir():
                confined(folder, place)
                names = names_in(folder / place)
                yield from (f"{place}/{name}" for name in names if name.endswith(_CARRIED))
