"""Items of a DCP folder, one object each, sorted by name: `python -m benchmarks.bare_items FOLDER torch|plain`.

`torch` reads `.metadata` with torch's `FileSystemReader`. `plain` reads it with Python's pickle, and classes of its own
in place of torch's. Neither checks anything.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
from typing import Any


class Item:
    __slots__ = ("file", "length", "name", "start")

    def __init__(self, name: str, file: str, start: int, length: int) -> None:
        self.name, self.file, self.start, self.length = name, file, start, length


class _Plain:
    """An object of any class in the table. pickle fills its attributes."""

    def __new__(cls, *_: Any) -> _Plain:
        return object.__new__(cls)


class _Ignored(_Plain):
    def __setstate__(self, state: Any) -> None:
        pass


_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Plain,
    **{(_METADATA, name): _Plain for name in ("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata")},
    **{(_METADATA, name): _Plain for name in ("BytesStorageMetadata", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")},
    (_METADATA, "TensorProperties"): _Ignored,
    **{("torch", name): _Ignored for name in ("Size", "float32")},
    ("torch.serialization", "_get_layout"): _Ignored,
    ("pathlib", "PosixPath"): _Ignored,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _CLASSES[module, name]


def items(folder: str, kind: str) -> list[Item]:
    if kind == "torch":
        from torch.distributed.checkpoint import FileSystemReader

        metadata: Any = FileSystemReader(folder).read_metadata()
    else:
        with open(f"{folder}/.metadata", "rb") as file:
            metadata = _Unpickler(file).load()
    stored = metadata.storage_data.items()
    found = [Item(key.fqn, where.relative_path, where.offset, where.length) for key, where in stored]
    found.sort(key=lambda item: item.name)
    return found


if __name__ == "__main__":
    gc.disable()  # most objects stay
    print(len(items(*sys.argv[1:])), flush=True)
    os._exit(0)  # frees nothing
