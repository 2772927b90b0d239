"""A rank's part of a tensor: DTensor (FSDP2), ShardedTensor (FSDP1), or a plain tensor.

Format facts: torch 2.13 (distributed/tensor/_utils.py, placement_types.py, device_mesh.py, _mesh_layout.py;
distributed/_shard/sharded_tensor/api.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from ckpt.base.errors import NotFoundError
from ckpt.base.text import pluralize
from ckpt.containers.sources import RankFile, structure
from ckpt.containers.torchfile.values import Record, StoredTensor
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Box, Extent, Fragment, Region, Shape, whole

#: The part, with the whole tensor's shape.
Part = tuple[Shape, Fragment]


def part(shape: Shape, region: Region, extent: Extent, file: RankFile) -> Part:
    return shape, Fragment(region, extent, file.rank)


def parts_of(value: Any, file: RankFile, fqn: str) -> list[Part]:
    what = f"this {getattr(value, 'name', 'value')} matches no known version of torch"
    try:
        with structure(what, file.path, rank=file.rank, fqn=fqn):
            if isinstance(value, StoredTensor):
                return [part(value.shape, whole(value.shape), value.extent, file)]
            if value.name == "ShardedTensor":
                return list(_sharded(value, file))
            shape, box, local = placed(value)
            return [part(shape, box, local_extent(local, box), file)]
    except NotFoundError as error:
        error.path, error.rank, error.fqn = file.path, file.rank, fqn
        raise


def _sharded(value: Record, file: RankFile) -> Iterator[Part]:
    """Yield the parts of FSDP1's `(local shards, metadata, process group, spec, ...)`.

    Ranks without elements have no shard.
    """
    shards, metadata = value.state[0], value.state[1]
    shape = tuple(metadata.attributes["size"])
    for shard in shards:
        place = shard.attributes["metadata"].attributes
        box = Box(tuple(place["shard_offsets"]), tuple(place["shard_sizes"]))
        yield part(shape, box, local_extent(shard.attributes["tensor"], box), file)
    if not shards:
        empty = Box((0,) * len(shape), (0,) * len(shape))
        dtype: DType = metadata.attributes["tensor_properties"].attributes["dtype"]
        yield part(shape, empty, Extent.contiguous(file.path, 0, dtype, empty.sizes), file)


def placed(value: Record) -> tuple[Shape, Box, Any]:
    """Return FSDP2's whole shape, the rank's box, and its local tensor."""
    content = value.attributes
    spec = content["_spec"].attributes
    shape = tuple(spec["tensor_meta"].attributes["shape"])
    sizes, coordinate = _mesh(spec["mesh"])
    for entry in spec.get("shard_order") or ():  # since torch 2.10
        if list(entry.attributes["mesh_dims"]) != sorted(entry.attributes["mesh_dims"]):
            raise NotFoundError("unsupported: a tensor is cut in another order than the mesh's axes")
    box = local_box(shape, sizes, coordinate, spec["placements"])
    return shape, box, content["_local_tensor"]


def local_extent(local: Any, box: Box) -> Extent:
    if not isinstance(local, StoredTensor):
        raise TypeError("its local tensor is not a tensor")
    if local.shape != box.sizes and (local.extent.numel or box.numel):
        raise ValueError(f"its local tensor has the shape {list(local.shape)} instead of {list(box.sizes)}")
    return local.extent


def _mesh(mesh: Record) -> tuple[Shape, Shape]:
    content = mesh.attributes
    coordinate = tuple(content["_coordinate_on_dim"])
    if isinstance(content.get("mesh"), StoredTensor):  # up to torch 2.8
        sizes = content["mesh"].shape
    elif "_layout" in content:
        layout = content["_layout"].attributes
        axes = layout["axes"] if "axes" in layout else layout["shape"]
        sizes = tuple(prod(_flat(axis.attributes["shape"] if isinstance(axis, Record) else axis)) for axis in axes)
    else:
        raise KeyError("mesh")
    if len(sizes) != len(coordinate) or any(not 0 <= c < n for c, n in zip(coordinate, sizes, strict=True)):
        raise ValueError(f"coordinate {coordinate} in a mesh of {sizes}")
    return tuple(sizes), coordinate


def _flat(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    else:
        for item in value:
            yield from _flat(item)


def local_box(shape: Shape, mesh: Shape, coordinate: Shape, placements: Sequence[Record]) -> Box:
    """Cut axis by axis, like `torch.chunk`.

    With FSDP2 over tensor parallelism, FSDP's axis comes first in the mesh but is cut last. It is marked
    `_StridedShard`, with the number of earlier cuts.
    """
    if len(placements) != len(mesh):
        raise ValueError(f"{pluralize(len(placements), 'placement')} on a mesh of {len(mesh)} axes")
    offsets, sizes = [0] * len(shape), list(shape)
    late: list[tuple[int, int]] = []
    for axis, placement in enumerate(placements):
        if placement.name == "Replicate":
            continue
        if placement.name not in ("Shard", "_StridedShard"):
            raise NotFoundError(f"a tensor placed as {placement.name} is part of a sum, not of a tensor")
        dim = int(placement.attributes["dim"])
        if placement.name == "_StridedShard" and int(placement.attributes["split_factor"]) > 1:
            _check_split_factor(placement, placements[axis + 1 :], mesh[axis + 1 :])
            late.insert(0, (axis, dim))
        else:
            _cut(offsets, sizes, dim, mesh[axis], coordinate[axis])
    for axis, dim in late:
        _cut(offsets, sizes, dim, mesh[axis], coordinate[axis])
    return Box(tuple(offsets), tuple(sizes))


def _check_split_factor(placement: Record, inner: Sequence[Record], sizes: Sequence[int]) -> None:
    dim, factor = placement.attributes["dim"], placement.attributes["split_factor"]
    cuts = prod(n for p, n in zip(inner, sizes, strict=True) if p.name != "Replicate" and p.attributes["dim"] == dim)
    if factor != cuts:
        raise NotFoundError(
            f"unsupported: a tensor is cut in an unknown order (split factor {factor} after {pluralize(cuts, 'cut')})"
        )


def _cut(offsets: list[int], sizes: list[int], dim: int, count: int, index: int) -> None:
    step = -(-sizes[dim] // count)
    start = min(index * step, sizes[dim])
    offsets[dim] += start
    sizes[dim] = min(step, sizes[dim] - start)
