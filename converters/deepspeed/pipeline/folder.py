"""One step folder of a DeepSpeed pipeline: the layer, slice and partition of each file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt.base.errors import CorruptError, NotFoundError
from ckpt.containers.sources import check_all_there
from ckpt.move.listing import has_name, names_in
from converters.deepspeed.folder import MODEL, OPTIMIZER, PIPELINE_LAYER, put

_EXPERT = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_(?:model|optim)_states\.pt")


@dataclass(frozen=True)
class Folder:
    """Files in one step: layers by (number, tensor rank), slices, partitions by (data rank, slice).

    A slice is one tensor-parallel rank in one pipeline stage: number pp * TP + tp.
    """

    path: Path
    layers: Mapping[tuple[int, int], str]
    slices: Mapping[int, str]
    partitions: Mapping[tuple[int, int], str]

    @property
    def tp(self) -> int:
        return 1 + max((rank for _, rank in self.layers), default=0)

    @property
    def pp(self) -> int:
        return max(1, (1 + max(self.slices, default=0)) // self.tp)


def is_pipeline(path: Path) -> bool:
    return has_name(path, PIPELINE_LAYER)


def list_folder(path: Path) -> Folder:
    layers: dict[tuple[int, int], str] = {}
    slices: dict[int, str] = {}
    partitions: dict[tuple[int, int], str] = {}
    for name in names_in(path):
        if _EXPERT.fullmatch(name):
            raise NotFoundError(
                "experts spread over ranks by DeepSpeed-MoE are not supported",
                path=path / name,
            )
        if match := PIPELINE_LAYER.fullmatch(name):
            put(layers, (int(match[1]), int(match[2] or 0)), path, name)
        elif match := MODEL.fullmatch(name):
            put(slices, int(match[1]), path, name)
        elif match := OPTIMIZER.fullmatch(name):
            put(partitions, (int(match[1]), int(match[2])), path, name)
    folder = Folder(path, layers, slices, partitions)
    numbers = sorted({number for number, _ in layers})
    of_layers = [(number, rank) for number in numbers for rank in range(folder.tp)]
    check_all_there("a layer file is missing", layers, of_layers, path)
    check_all_there("a rank's model file is missing", slices, range(max(1, len(slices), folder.tp)), path)
    if len(slices) % folder.tp:
        raise CorruptError(
            "model rank files are missing: their number is not a multiple of the tensor parallel ranks",
            path=path,
            expected=f"a multiple of {folder.tp}",
            found=len(slices),
        )
    return folder
