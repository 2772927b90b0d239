"""Renamed keys in a PyTorch distributed checkpoint, as another trainer would write them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path


def rename_keys(folder: Path, named: Callable[[str], str]) -> None:
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    keys = {key: named(key) for key in metadata.state_dict_metadata}
    metadata.state_dict_metadata = {keys[key]: one for key, one in metadata.state_dict_metadata.items()}
    metadata.storage_data = {replace(at, fqn=keys[at.fqn]): one for at, one in metadata.storage_data.items()}
    if metadata.planner_data:
        metadata.planner_data = {keys[key]: path for key, path in metadata.planner_data.items()}
    file.write_bytes(pickle.dumps(metadata))
