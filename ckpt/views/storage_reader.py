"""`ckpt.StorageReader`: torch's `dcp.load` from a checkpoint in any format, without writing a file.

    dcp.load({"model": model, "optimizer": optimizer}, storage_reader=ckpt.StorageReader("outputs"))

It offers the content that `ckpt convert auto dcp` would write, with the names of torch's own functions, nested or
flattened (2.13, `distributed/checkpoint/state_dict.py`). Each rank reads its own shards, and a sample of everything to
check that all ranks opened the same checkpoint.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from ckpt.base.errors import CkptError, CorruptError, LossError, NotFoundError, StorageError, UsageError, shown
from ckpt.base.text import pluralize
from ckpt.compare.compare import Reader, check_replicas
from ckpt.compare.sample import sample_digest
from ckpt.containers.dcp.write import SourceTensor
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.containers.torchfile.write import NewTensor, torch_item
from ckpt.move.blocks import cast
from ckpt.move.casts import FLOATS, storage_dtype
from ckpt.move.files import OpenFiles
from ckpt.move.reading import read_box_into
from ckpt.plan.checkpoint import HUB, MODEL_ROLES, TRANSFORMERS, Checkpoint, Key
from ckpt.plan.dtypes import BY_NAME, FLOAT32, DType
from ckpt.plan.namespace import TORCHTITAN
from ckpt.plan.planner import check_source
from ckpt.plan.tensors import Box, Tensor
from ckpt.runs.opening import AUTO, open_checkpoint
from ckpt.state.naming import to_namespace
from ckpt.views.loading import stored_for
from ckpt.views.state_keys import StateKeys, state_keys


class StorageReader(dcp.StorageReader):  # type: ignore[misc]
    """Read a checkpoint in any format for `torch.distributed.checkpoint.load`.

    The state dict is a model's alone, or has the keys `model` and `optimizer`. A tensor takes the stored content in its
    own dtype: the master for a float32 parameter, the weight for bfloat16. Param groups are matched by their
    parameters, not by number. `bytes_read` counts tensor bytes since the last load began.

    Raise the errors of `ckpt.open`. For a missing key, torch raises its own error and a warning names the checkpoint.
    If every requested tensor is missing, that is an error even with `allow_partial_load`. The first rank warns about
    content that was not requested.

    Args:
        path: The checkpoint or run folder, or its URL; None for the `checkpoint_id` in `load`.
        format: The format to read; `auto` finds it.
        tag: The step's folder or number; None for the latest.
        config: The model's config: a folder, a config.json or a Hub id.
        replica: Rank to read replicas from.
        model: The model's key in the state dict.
        optimizer: The optimizer's key in the state dict.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        format: str = AUTO,
        *,
        tag: str | None = None,
        config: str | None = None,
        replica: int | None = None,
        model: str = "model",
        optimizer: str = "optimizer",
    ) -> None:
        super().__init__()
        self._format, self._tag, self._config, self._replica = format, tag, config, replica
        self._outer = model, optimizer
        self._contents: _Contents | None = None
        self._keys: StateKeys | None = None
        self.bytes_read = 0
        if path is not None:
            self.reset(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return Path(checkpoint_id).exists()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            options: dict[str, Any] = {"tag": self._tag, "config": self._config, "replica": self._replica}
            checkpoint = open_checkpoint(os.fspath(checkpoint_id), self._format, **options)
            self._contents = _Contents(checkpoint, *self._outer)
        self.bytes_read = 0

    def read_metadata(self) -> Any:
        self._opened().missing.clear()
        return described.Metadata(_Described(self._opened()), self._opened().first.paths)

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool) -> None:
        self._opened().speaks = is_coordinator

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Find a namespace that has every requested key."""
        opened = self._opened()
        self._keys = opened.keys_of([item.dest_index.fqn for item in plan.items])
        found = frozenset(item.type for item in plan.items)
        return replace(plan, storage_data=_Share(*_identity(opened.checkpoint), found, tuple(opened.missing)))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise StorageError if a rank has opened different contents, LossError if no requested tensor exists."""
        first, *others = shares = [plan.storage_data for plan in plans]
        for rank, other in enumerate(others, 1):
            if (other.name, other.contents) != (first.name, first.contents):
                raise StorageError(
                    "the ranks have opened different checkpoints",
                    rank=rank,
                    expected=f"{first.name}, of rank 0",
                    found=other.name if other.name != first.name else f"{other.name}, with other contents",
                    hint="is a run still saving there? give the path of one step, on storage that all ranks see alike",
                )
        missing = list(dict.fromkeys(name for share in shares for name in share.missing))
        self._opened().check_presence(frozenset().union(*(share.found for share in shares)), missing)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        assert self._keys is not None
        with _RankReading(self._keys, planner) as reading:
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(_torch_bytes(reading.value(item.dest_index.fqn))))
                else:
                    target = planner.resolve_tensor(item).detach()
                    reading.fill(item, target)
                    planner.commit_tensor(item, target)
            self.bytes_read += reading.bytes_read
        self._opened().say(*reading.casts())
        if untied := self._keys.aliases_with_states(item.dest_index.fqn for item in plan.items):
            what = "tied in the checkpoint, and not in the model: weight and optimizer states are copies"
            self._opened().say(f"{', '.join(untied)}: {what}")
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _opened(self) -> _Contents:
        if self._contents is None:
            raise UsageError(
                "no checkpoint to read",
                hint='give the path of a run or a checkpoint: ckpt.StorageReader("outputs")',
            )
        return self._contents


class _Contents:
    def __init__(self, checkpoint: Checkpoint, model: str, optimizer: str) -> None:
        self.checkpoint = checkpoint
        self.speaks = False  # only one rank warns
        self.missing: dict[str, None] = {}  # requested keys that do not exist
        self._outer = model, optimizer
        self._known: list[StateKeys] = []
        self._unknown = self._make()

    @property
    def first(self) -> StateKeys:
        """Keys in memory's namespace, with an outer name for the model."""
        return next(self.all())

    def all(self) -> Iterator[StateKeys]:
        yield from self._known
        for one in self._unknown:
            self._known.append(one)
            yield one

    def _make(self) -> Iterator[StateKeys]:
        seen: list[Checkpoint] = []
        for namespace in (TRANSFORMERS, None, HUB, TORCHTITAN):
            try:
                named = to_namespace(self.checkpoint, namespace)
            except (LossError, NotFoundError, UsageError):  # this namespace is not available
                continue
            if any(named.tensors is one.tensors for one in seen):
                continue
            seen.append(named)
            for model in dict.fromkeys((self._outer[0], "")):
                yield state_keys(named, model, self._outer[1])

    def find(self, key: str) -> StateKeys | None:
        return next((keys for keys in self.all() if key in keys), None)

    def keys_of(self, requested: list[str]) -> StateKeys:
        """Return the keys that have all of `requested`, or raise LossError. Warn about unrequested content."""
        for keys in self.all():
            if all(key in keys for key in requested):
                left = keys.left(requested)
                notes = self.checkpoint.with_plain_states().notes if self.checkpoint.quantized.methods else ()
                self.say(*self.checkpoint.passed_over, *notes, *([f"there and not asked for: {left}"] if left else ()))
                if len(self.missing) > 1:  # the first was already named
                    self.say(f"missing from the checkpoint, left unchanged: {', '.join(self.missing)}")
                return keys
        raise LossError(
            "the requested names mix several naming schemes",
            path=self.checkpoint.path,
            found=", ".join(requested[:4]),
        )

    def say(self, *lines: str) -> None:
        for line in lines if self.speaks else ():
            warnings.warn(f"{shown(self.checkpoint.path)} ({self.checkpoint.format}): {line}", stacklevel=3)

    def check_presence(self, kinds: frozenset[LoadItemType], missing: list[str]) -> None:
        """Raise LossError if all requested tensors are missing. A name's last component shows if it is a tensor."""
        endings = {key.rpartition(".")[2] for key, leaf in self.first.leaves.items() if isinstance(leaf, SourceTensor)}
        lost = [name for name in missing if name.rpartition(".")[2] in endings] if kinds else missing
        if not lost or LoadItemType.TENSOR in kinds:
            return
        raise LossError(
            "the requested tensors are not in the checkpoint",
            path=self.checkpoint.path,
            expected=f"{', '.join(self._names()[:3])}, ...",
            found=", ".join(lost[:3]),
            hint="give the checkpoint's names; load a model before PEFT wraps it",
        )

    def _names(self) -> list[str]:
        return [name for name in self.first.leaves if ".param_groups." not in name]

    def report_missing(self, key: str) -> None:
        if not self.missing:  # reported together if torch continues
            names = self._names()
            self.say(f"{key!r} is requested, but the checkpoint only has {', '.join(names[:3])}, ... ({len(names)})")
        self.missing[key] = None


class _Described(dict[str, Any]):
    """`Metadata.state_dict_metadata` with the first namespace's keys. Lookup also accepts others."""

    def __init__(self, contents: _Contents) -> None:
        super().__init__((key, _description(leaf)) for key, leaf in contents.first.leaves.items())
        self._contents = contents

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key) or self._contents.find(str(key)) is not None:
            return True
        self._contents.report_missing(str(key))
        return False

    def __missing__(self, key: str) -> Any:
        keys = self._contents.find(key)
        if keys is None:
            raise KeyError(key)
        return _description(keys.find(key))


@dataclass(frozen=True, slots=True)
class _Share:
    """Message to the first rank."""

    name: str
    contents: str
    found: frozenset[LoadItemType]
    missing: tuple[str, ...]


def _identity(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return a label and a digest, equal for copies on several nodes."""
    name = f"{Path(checkpoint.path).name} ({checkpoint.format}), step {checkpoint.state.step}"
    has_others = torch.distributed.is_available() and torch.distributed.is_initialized()
    return name, sample_digest(checkpoint) if has_others else ""


def _description(leaf: Any) -> Any:
    if not isinstance(leaf, SourceTensor | NewTensor | StoredTensor):
        return described.BytesStorageMetadata()
    shape = torch.Size(leaf.shape)
    chunk = described.ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
    properties = described.TensorProperties(dtype=getattr(torch, leaf.dtype.name))
    return described.TensorStorageMetadata(properties, shape, [chunk])


def _torch_bytes(value: Any) -> bytes:
    item = torch_item(value)
    content = bytearray(item.size)
    for offset, data in item.literals:
        content[offset : offset + len(data)] = data
    return bytes(content)


class _Sources(OpenFiles):
    def __init__(self) -> None:
        super().__init__()
        self.used: set[str] = set()

    def descriptor(self, path: str) -> int:
        self.used.add(path)
        return super().descriptor(path)


class _RankReading:
    """One rank's part of a load."""

    def __init__(self, keys: StateKeys, planner: LoadPlanner) -> None:
        self.bytes_read = 0
        self._keys = keys
        self._asked = getattr(planner, "state_dict", {})
        self._sources = _Sources()
        self._checked: set[Key] = set()
        self._casts: dict[tuple[str, DType, DType], set[Key]] = {}

    def __enter__(self) -> _RankReading:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self._sources.close()
        if kind is None or (isinstance(kind, type) and issubclass(kind, CkptError)):
            for file in self._keys.checkpoint.files:
                if file.path in self._sources.used:
                    file.check_unchanged()

    def value(self, key: str) -> Any:
        return self._keys.value(key, self._asked)

    def fill(self, item: ReadItem, target: torch.Tensor) -> None:
        leaf = self._keys.find(item.dest_index.fqn)
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        if tuple(target.shape) != box.sizes:
            found = f"{list(target.shape)} instead of {list(box.sizes)}"
            raise LossError("a tensor's shape differs from the requested part's shape", fqn=leaf.key[0], found=found)
        if not isinstance(leaf, SourceTensor):
            part = torch.load(io.BytesIO(_torch_bytes(leaf)), weights_only=True)
            target.copy_(part[tuple(map(slice, box.offsets, box.ends))])
            return
        requested = BY_NAME.get(str(target.dtype).removeprefix("torch."))
        tensor = self._stored(leaf.key, requested)
        if requested != tensor.dtype and not (requested in FLOATS and tensor.dtype in FLOATS):
            raise LossError(
                "a tensor cannot be cast to the requested dtype",
                path=self._keys.checkpoint.path,
                fqn=tensor.fqn,
                expected=tensor.dtype,
                found=str(target.dtype),
            )
        if tensor.numel and box.numel:
            self._read(tensor, box, target, requested or tensor.dtype)

    def _stored(self, key: Key, requested: DType | None) -> Tensor:
        fqn, role = key
        is_parameter = role in MODEL_ROLES
        found = (
            stored_for(self._keys.checkpoint, fqn, requested if requested in FLOATS else None) if is_parameter else None
        )
        found = found or self._keys.checkpoint.tensors[key]
        if found.key not in self._checked:
            check_source(found)
            self._checked.add(found.key)
            if requested in FLOATS and requested != found.dtype and requested.itemsize <= found.dtype.itemsize:
                kind = "parameter" if is_parameter else f"{role} state"
                if not is_parameter or found.dtype != FLOAT32:  # the weight equals its rounded float32 master
                    self._casts.setdefault((kind, found.dtype, requested), set()).add(key)
        return found

    def casts(self) -> Iterator[str]:
        """Yield roundings that no framework does by itself."""
        for (kind, stored, requested), keys in self._casts.items():
            yield f"{pluralize(len(keys), kind)} rounded: stored in {stored}, and asked for in {requested}"

    def _read(self, tensor: Tensor, box: Box, target: torch.Tensor, requested: DType) -> None:
        is_direct = target.device.type == "cpu" and target.is_contiguous() and requested == tensor.dtype
        if is_direct:
            raw = target.reshape(-1).view(torch.uint8).numpy()
        else:
            raw = np.empty(box.numel * tensor.dtype.itemsize, np.uint8)
        computed = self._keys.checkpoint.computed
        self.bytes_read += read_box_into(tensor, box, computed, self._sources, raw.data)
        for replica in tensor.replicas:
            other = np.empty_like(raw)
            again = tensor._replace(source=replica)
            self.bytes_read += read_box_into(again, box, computed, self._sources, other.data)
            if not np.array_equal(raw, other):
                with Reader(computed=computed) as reader:
                    check_replicas(tensor, reader)
                raise CorruptError("a file was changed while it was read", path=self._keys.checkpoint.path)
        if not is_direct:
            bits, place = raw.view(storage_dtype(tensor.dtype)), {"path": self._keys.checkpoint.path, "fqn": tensor.fqn}
            bits = cast(bits, tensor.dtype, requested, "load it into a wider dtype of torch", **place)
            target.copy_(torch.from_numpy(bits.view(np.uint8)).view(target.dtype).reshape(box.sizes))
