"""GGUF files: a model's weights, hyperparameters and tokenizer for llama.cpp in one file, or cut into several.

Format facts: `docs/gguf.md` in ggml, and llama.cpp's converter (November 2026).
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt.base.errors import CkptError, CorruptError, IncompleteError, LossError
from ckpt.base.text import pluralize
from ckpt.containers.sources import Sources
from ckpt.move.listing import names_in
from ckpt.move.source import read_file
from ckpt.plan.checkpoint import WEIGHT, Checkpoint, Format, Key, Layout, ReadRequest, StoredBlocks, Target
from ckpt.plan.tensors import Extent, Tensor, Whole
from ckpt.runs.finding import Steps, find_step
from ckpt.runs.model_files import read_config
from ckpt.runs.steps import run_at
from converters.gguf.blocks import CHUNKS, plain_tensor, stored_blocks, unknown_tensor
from converters.gguf.facts import GgufFacts
from converters.gguf.header import MAGIC, GgufHeader, read_header
from converters.gguf.names import NAME, check_tensors
from converters.gguf.types import TYPES

_SUFFIX = ".gguf"
#: Names of weights in other formats.
_WEIGHTS = re.compile(r".*model.*\.(?:safetensors|bin|pt)(?:\.index\.json)?|adapter_config\.json")
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class Gguf(Format):
    name, title = NAME, "GGUF (llama.cpp)"
    namespace = NAME
    carries_optimizer = False
    quantizes = TYPES

    def find(self, path: Path, tag: str | None) -> Path | None:
        """Find a GGUF file, or a folder with one model in GGUF and no other."""
        if path.is_file():
            return path if tag is None and (path.name.endswith(_SUFFIX) or _is_gguf(path)) else None
        return find_step(path, tag, Steps(_holds_one_model))

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        """Describe the tensors under llama.cpp's names. Quantized tensors have their values in float32."""
        files = _split_files(path)
        folders = tuple(one for one in (request.config, files[0].parent) if one is not None)
        sources, recorded = Sources(), dict[str, Any]()
        tensors: dict[Key, Tensor] = {}
        computed: dict[str, Callable[[], memoryview]] = {}
        blocks: dict[str, StoredBlocks] = {}
        unreadable: CkptError | None = None
        for number, file in enumerate(files):
            sources.add(file)
            header = read_header(file)
            _check_split(file, header.metadata, number, len(files))
            error = _unknown_types(file, header)
            unreadable = unreadable or error
            recorded = {**header.metadata, **recorded}
            for one in header.entries:
                if (one.name, WEIGHT) in tensors:
                    raise CorruptError("the tensor is in two files", path=file, fqn=one.name)
                if one.type.dtype is None:
                    blocks[one.name], functions = stored_blocks(one, str(file))
                    computed |= functions
                    if error is not None and one.type not in CHUNKS:
                        tensor, functions = unknown_tensor(one, str(file), error)
                    else:
                        tensor, functions = plain_tensor(one, str(file))
                    computed |= functions
                else:
                    extent = Extent.contiguous(str(file), one.start, one.type.dtype, one.shape)
                    tensor = Tensor(one.name, WEIGHT, one.type.dtype, one.shape, Whole(extent))
                tensors[one.name, WEIGHT] = tensor
        check_tensors(recorded, {name: tensor.shape for (name, _), tensor in tensors.items()}, str(path))
        numbers = {key: value for key, value in recorded.items() if type(value) in (int, float)}
        counts = Counter((one.type, one.scales is not None) for one in blocks.values())
        notes = [
            f"{pluralize(count, 'tensor')} stored in {kind}, "
            + ("and read as their values in float32" if is_known else "with unknown values")
            for (kind, is_known), count in sorted(counts.items())
        ]
        return Checkpoint(
            path=str(path),
            format=self.name,
            tensors=tensors,
            files=sources.files,
            framework="llama.cpp",
            namespace=NAME,
            config=read_config(folders),
            folders=tuple(map(str, folders)),
            notes=tuple(notes),
            computed=computed,
            blocks=blocks,
            unreadable=unreadable,
            facts=GgufFacts(recorded.get("general.architecture"), numbers),
        )

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        """Lay out `model.gguf`."""
        from converters.gguf.write import target

        return target(checkpoint, layout)


GGUF = Gguf()


def _is_gguf(path: Path) -> bool:
    """Return True for GGUF under another name: Ollama names files by digest."""
    return read_file(path, len(MAGIC)) == MAGIC


def _holds_one_model(folder: Path) -> bool:
    """Return True for one model, except next to other weights or a run's steps, where it is an export."""
    names = [name for name in names_in(folder) if name.endswith(_SUFFIX)]
    if any(map(_WEIGHTS.fullmatch, names_in(folder))):
        return False
    models = {(found["stem"], found["count"]) if (found := _SPLIT.fullmatch(name)) else name for name in names}
    return len(models) == 1 and not run_at(folder).steps


def _split_files(path: Path) -> list[Path]:
    folder = path if path.is_dir() else path.parent
    names = sorted(name for name in names_in(folder) if name.endswith(_SUFFIX)) if path.is_dir() else [path.name]
    if (found := _SPLIT.fullmatch(names[0])) is None:
        return [folder / names[0]]
    count = int(found["count"])
    files = [folder / f"{found['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise IncompleteError(
            "a part of the GGUF model is missing",
            path=folder,
            expected=pluralize(count, "file"),
            found=f"no {missing[0]}",
        )
    return files


def _check_split(file: Path, metadata: object, number: int, count: int) -> None:
    assert isinstance(metadata, dict)
    recorded = metadata.get("split.count", 0) or 1, metadata.get("split.no", 0)
    if recorded != (count, number):
        raise CorruptError(
            "the file is not the part that its name says",
            path=file,
            expected=f"part {number + 1} of {count}",
            found=f"part {recorded[1]!r} + 1 of {recorded[0]!r}",
        )


def _unknown_types(file: Path, header: GgufHeader) -> CkptError | None:
    others = [one for one in header.entries if one.type.dtype is None and one.type not in CHUNKS]
    if not others:
        return None
    counts = Counter(one.type.name for one in others)
    return LossError(
        "ckpt does not read these types of GGUF tensors",
        path=file,
        fqn=others[0].name,
        expected="f32, f16, bf16, " + " or ".join(one.name for one in CHUNKS),
        found=", ".join(f"{pluralize(count, 'tensor')} in {kind}" for kind, count in sorted(counts.items())),
        hint=f"`llama-quantize --allow-requantize {shlex.quote(file.name)} f32.gguf f32` writes their values",
    )
