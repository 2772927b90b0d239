"""DTensors in torch's pickle form: an FSDP rank's part of a tensor, sharded on dim 0 over all ranks.

Every torch version pickles device meshes and placements in its own form, and can't read other forms. So the source's
form is kept if it has one. Otherwise the form is torch 2.13's (distributed/device_mesh.py, distributed/_mesh_layout.py,
distributed/tensor/_dtensor_spec.py, placement_types.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from ckpt.base.errors import LossError
from ckpt.containers.torchfile.pickler import Size
from ckpt.containers.torchfile.scalars import scalar_to_bytes
from ckpt.containers.torchfile.subclass import wrapper
from ckpt.containers.torchfile.values import Record, StoredTensor
from ckpt.containers.torchfile.write import Bytes, FromSource, NewTensor
from ckpt.plan.checkpoint import Key
from ckpt.plan.dtypes import BY_NAME, DType
from ckpt.plan.tensors import Box, Shape, contiguous_strides

_TENSOR, _MESH = "torch.distributed.tensor", "torch.distributed.device_mesh"
_SPEC, _LAYOUT = f"{_TENSOR}._dtensor_spec", "torch.distributed._mesh_layout"
_WORLD = "0"
_AXIS = "fsdp"


def shard(shape: Shape, num_ranks: int, rank: int) -> Box:
    """Return the rank's shard, cut like `torch.chunk` on dim 0. The last ranks may be empty."""
    step = -(-shape[0] // num_ranks)
    start = min(rank * step, shape[0])
    return Box((start, *(0 for _ in shape[1:])), (min(step, shape[0] - start), *shape[1:]))


class DTensors:
    """Factory for one rank's DTensors, all on one mesh with `num_ranks` devices.

    `like` is a DTensor from the source's files. `device` None means its device type.
    """

    def __init__(self, like: Record | None, device: str | None, num_ranks: int, rank: int) -> None:
        spec = None if like is None else like.attributes.get("_spec")
        self._module = _TENSOR if like is None else like.module
        self._spec = spec if isinstance(spec, Record) else None
        mesh = None if self._spec is None else self._spec.get("mesh")
        old = mesh if isinstance(mesh, Record) else None
        self._num_ranks, self._rank = num_ranks, rank
        self.device, self.axes = _kind(old, device), _axes(old)
        self._mesh = _mesh(old, self.device, self.axes, num_ranks, rank)

    def part_of(self, key: Key, dtype: DType, shape: Shape) -> Record:
        """Return the rank's part of a source tensor."""
        box = shard(shape, self._num_ranks, self._rank)
        fill = (FromSource(key, box),) if box.numel or not prod(shape) else ()
        return self.make(dtype, shape, NewTensor(dtype, box.sizes, fill))

    def make(self, dtype: DType, shape: Shape, local: NewTensor | Record) -> Record:
        state = {"_local_tensor": local, "_spec": self._placed(dtype, Size(shape), contiguous_strides(shape))}
        return wrapper(self._module, "DTensor", dtype, shape, (None, state))

    def _placed(self, dtype: DType, size: Size, strides: Shape) -> Record:
        old = self._spec
        module = _SPEC if old is None else old.module
        placements = () if old is None else old.get("placements", ())
        placed = placements[-1].module if placements else f"{_TENSOR}.placement_types"
        known: dict[str, Callable[[], Any]] = {
            "mesh": lambda: self._mesh,
            "placements": lambda: (Record(placed, "Shard", state={"dim": 0}),),
            "tensor_meta": lambda: Record(module, "TensorMeta", (size, strides, dtype)),
            "shard_order": lambda: (Record(module, "ShardOrderEntry", (0, (0,))),),
            "use_strided_shard_as_shard_order": lambda: False,
            "_hash": lambda: None,
        }
        return Record(module, "DTensorSpec", state=_filled(known, old, "placement"))


def _kind(old: Record | None, device: str | None) -> str:
    return device or (old and (old.get("_device_type") or old.get("device_type"))) or "cuda"


def _axes(old: Record | None) -> tuple[str, ...] | None:
    if old is None:
        return (_AXIS,)
    names = old.get("_mesh_dim_names") or old.get("mesh_dim_names")
    return (names[-1],) if names else None


def _mesh(old: Record | None, kind: str, axes: tuple[str, ...] | None, num_ranks: int, rank: int) -> Record:
    ranks = tuple(range(num_ranks))
    known: dict[str, Callable[[], Any]] = {
        **dict.fromkeys(("_device_type", "device_type"), lambda: kind),
        "_layout": lambda: _layout(None if old is None else old.get("_layout"), num_ranks),
        **dict.fromkeys(("_rank_map", "mesh"), lambda: _numbers(old, ranks)),
        **dict.fromkeys(("_mesh_dim_names", "mesh_dim_names"), lambda: axes),
        "_root_mesh": lambda: None,
        "_flatten_rank_map": lambda: ranks,
        "_flatten_mesh_list": lambda: ranks,
        "_thread_id": lambda: None,
        "_flatten_mapping": dict,
        "_dim_group_names": lambda: [_WORLD],
        "_dim_group_infos": lambda: [("", list(ranks), _WORLD)],
        "_rank": lambda: rank,
        "_coordinate_on_dim": lambda: type(old.get("_coordinate_on_dim"))([rank]) if old is not None else (rank,),
        "_hash": lambda: None,
    }
    if old is None:
        known = {name: make for name, make in known.items() if name not in _EARLIER}
    return Record(_MESH, "DeviceMesh", state=_filled(known, old, "mesh"))


#: Mesh attributes in earlier versions.
_EARLIER = frozenset({"device_type", "mesh", "mesh_dim_names", "_flatten_mesh_list", "_dim_group_infos"})


def form_note(like: Record | None) -> str | None:
    """Return a note if the files need a newer torch than the source."""
    return "device meshes use torch 2.13's pickle format: older versions can't load them" if like is None else None


def _filled(known: Mapping[str, Callable[[], Any]], old: Record | None, what: str) -> dict[str, Any]:
    names = list(known) if old is None else list(old.attributes)
    for name in names:
        if name not in known:
            raise LossError(
                f"the source's {what} has an unknown form, so ckpt can't write it for other ranks",
                found=f"an attribute {name}",
                hint="the format dcp holds weights and optimizer for any number of ranks",
            )
    return {name: known[name]() for name in names}


def _layout(old: Any, num_ranks: int) -> Record:
    """Return a one-axis layout. Since 2.13 torch omits axes of size 1."""
    if not isinstance(old, Record) or "axes" in old:
        sizes = ((num_ranks,), (1,)) if num_ranks > 1 else ((), ())
        axis = Record(_LAYOUT, "_FlatLayout", state=dict(zip(("shape", "stride"), sizes, strict=True)))
        return Record(_LAYOUT, "_MeshLayout", state={"axes": (axis,)})
    return Record(old.module, old.name, state={"shape": (num_ranks,), "stride": (1,)})


def _numbers(old: Record | None, ranks: tuple[int, ...]) -> NewTensor:
    stored = None if old is None else old.get("_rank_map", old.get("mesh"))
    dtype = stored.dtype if isinstance(stored, StoredTensor) else BY_NAME["int32"]
    return NewTensor(dtype, (len(ranks),), (Bytes(b"".join(scalar_to_bytes(rank, dtype) for rank in ranks)),))
