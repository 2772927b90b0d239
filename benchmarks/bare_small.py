"""Copy of a safetensors file with a digest of each tensor: `python -m benchmarks.bare_small SOURCE OUTPUT`.

It has no check, plan or proof. The tensors keep their order. Digests go to `OUTPUT/digests.json`, sorted by name.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from xxhash import xxh3_128

from benchmarks.copying import PART, read, run, write

#: Name, start and end in the data.
Tensor = tuple[str, int, int]


def main(source: str, output: str) -> None:
    os.mkdir(output)
    files, jobs = [], []
    digests: dict[str, str] = {}
    for name in os.listdir(source):
        if not name.endswith(".safetensors"):
            continue
        from_file = os.open(f"{source}/{name}", os.O_RDONLY)
        length = int.from_bytes(os.pread(from_file, 8, 0), "little")
        header = json.loads(os.pread(from_file, length, 8))
        metadata = header.pop("__metadata__", None)
        tensors = sorted(((one, *entry["data_offsets"]) for one, entry in header.items()), key=lambda one: one[1:])
        text = _header(({} if metadata is None else {"__metadata__": metadata}) | header)
        to_file = os.open(f"{output}/{name}", os.O_WRONLY | os.O_CREAT)
        files.append(to_file)
        write(to_file, memoryview(text), 0)
        jobs += [
            partial(_copy, group, digests, from_file, 8 + length, to_file, len(text)) for group in _groups(tensors)
        ]
    run(jobs, files, "meanwhile")
    with open(f"{output}/digests.json", "w") as file:
        json.dump(dict(sorted(digests.items())), file)
        file.flush()
        os.fsync(file.fileno())


def _header(entries: dict[str, Any]) -> bytes:
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _groups(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield neighbours that fit a buffer together, or one large tensor."""
    group: list[Tensor] = []
    for one in tensors:
        if group and one[2] - group[0][1] > PART:
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _copy(
    group: list[Tensor],
    digests: dict[str, str],
    from_file: int,
    start: int,
    to_file: int,
    output: int,
    buffer: memoryview,
) -> None:
    first, end = group[0][1], group[-1][2]
    if end - first <= PART:
        read(from_file, buffer[: end - first], start + first)
        for name, low, high in group:
            digests[name] = xxh3_128(buffer[low - first : high - first]).hexdigest()
        write(to_file, buffer[: end - first], output + first)
        return
    hasher = xxh3_128()
    for at in range(first, end, PART):
        part = buffer[: min(PART, end - at)]
        read(from_file, part, start + at)
        hasher.update(part)
        write(to_file, part, output + at)
    digests[group[0][0]] = hasher.hexdigest()


if __name__ == "__main__":
    main(*sys.argv[1:])
