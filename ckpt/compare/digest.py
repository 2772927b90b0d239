"""Digests of a checkpoint's logical content: independent of format, sharding and file order.

A tensor's digest covers its name, role, dtype, shape, and its elements' little-endian bytes in row-major order. With a
dtype, weights are hashed as a conversion with `--dtype` would write them: known buffers and parts of quantized weights
are not cast. A parameter with only an optimizer master counts in the model's dtype, rounded like in the engine. A tied
parameter counts once.

A digest is 32 xxh3-128 hex digits (xxHash 0.8), over `name NUL role NUL dtype NUL d0,d1,... NUL` in UTF-8 and the 16
bytes of the elements' own xxh3-128. The digest for several tensors covers their sorted lines `digest role name`. It
does not protect against an attacker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from ckpt.base.errors import printable
from ckpt.base.results import Returned
from ckpt.base.text import pluralize
from ckpt.compare.compare import Reader, blocks, check_replicas, location, number_text
from ckpt.move.blocks import cast
from ckpt.move.casts import storage_dtype
from ckpt.move.reading import strided
from ckpt.move.source import DIRECT, GAP, is_standin
from ckpt.move.threads import in_threads
from ckpt.plan.checkpoint import BUFFER, MASTER, WEIGHT, Checkpoint, Key, OneElement
from ckpt.plan.dtypes import DType
from ckpt.plan.planner import check_source
from ckpt.plan.precision import choices
from ckpt.plan.tensors import Extent, FlatRange, Fragment, Tensor, overlay

ALGORITHM = "xxh3-128"
#: In display order.
WEIGHTS, MASTERS, OPTIMIZER = "weights", "masters", "optimizer"
KINDS = (WEIGHTS, MASTERS, OPTIMIZER)

#: Path, offset and length in bytes.
Span = tuple[str, int, int]

#: With a common range if they are fetched from a store in one request.
_Portion = tuple[list[Key], Span | None]

#: Called by one thread at a time.
Progress = Callable[[int], None]

_CHUNK = 1 << 20  # fits the processor's cache
_REQUEST = 8 << 20  # bytes per request to a store
_SLAB = 16 << 20  # bytes reordered at a time, per tensor
_NUMBER = "number"  # for one number per parameter


@dataclass(frozen=True, slots=True)
class TensorDigest:
    kind: str
    fqn: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    digest: str

    def to_json(self) -> dict[str, Any]:
        names = ("kind", "fqn", "role", "dtype")
        return {name: getattr(self, name) for name in names} | {"shape": list(self.shape), "digest": self.digest}


@dataclass(frozen=True, slots=True, repr=False)
class Digests(Returned):
    """Digests by kind, name and role. `not_hashed` lists content without a digest."""

    tensors: tuple[TensorDigest, ...]
    not_hashed: tuple[str, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        return f"<{', '.join(f'{kind} {digest}' for kind, digest in self.whole.items())}>"

    def lines(self, tensors: bool = False) -> Iterator[str]:
        """Yield each kind's digest, and each tensor's digest if `tensors`."""
        for kind, digest in self.whole.items():
            yield f"{ALGORITHM}:{digest}  {kind}  ({pluralize(len(self.of_kind(kind)), 'tensor')})"
        for one in self.tensors if tensors else ():
            yield printable(f"{one.digest}  {one.role}  {one.fqn}  {one.dtype} {list(one.shape)}")

    def to_json(self) -> dict[str, Any]:
        content = {"algorithm": ALGORITHM, "digests": self.whole, "tensors": [one.to_json() for one in self.tensors]}
        return content | {"not_hashed": list(self.not_hashed)}

    def of_kind(self, kind: str) -> list[TensorDigest]:
        return [tensor for tensor in self.tensors if tensor.kind == kind]

    @property
    def whole(self) -> dict[str, str]:
        """One digest for each kind."""
        return {kind: together(tensors) for kind in KINDS if (tensors := self.of_kind(kind))}


def together(tensors: Iterable[TensorDigest]) -> str:
    lines = sorted(f"{tensor.digest} {tensor.role} {tensor.fqn}\n" for tensor in tensors)
    return xxh3_128("".join(lines).encode(errors="surrogatepass")).hexdigest()


def digests(
    checkpoint: Checkpoint,
    *,
    dtype: DType | None = None,
    names: Mapping[str, str] | None = None,
    known: Mapping[Span, bytes] | None = None,
    workers: int = 0,
    progress: Progress | None = None,
) -> Digests:
    """Return digests for all tensors in `checkpoint`.

    `dtype` is the dtype for hashing weights (None: the model's own). `names` maps tensors to the names to hash. If
    `known` gives hashes for file ranges, nothing is read, and kinds are skipped unless each tensor is in one such
    range. Each of `workers` threads takes less than 40 MiB (0: one per processor, up to 8).

    Raise CorruptError if parts of a tensor are missing, ranks disagree, or a file has been replaced.
    """
    entries = list(_entries(checkpoint, dtype))
    left_out: set[str] = set()
    if known is None:
        forms: dict[Key, dict[DType, None]] = {}  # dtypes for hashing each tensor
        for entry in entries:
            forms.setdefault(entry.tensor.key, {})[entry.dtype] = None
        contents = _hash_contents(checkpoint, forms, workers, progress)
    else:
        contents = {}
        for entry in entries:
            content = None if entry.kind in left_out else _known_hash(entry, known)
            if content is None:
                left_out.add(entry.kind)
            else:
                contents[entry.tensor.key] = {entry.dtype: content}
    names = names or {}
    found = [
        _named_digest(OPTIMIZER, names.get(fqn, fqn), role, _NUMBER, (), content)
        for fqn, role, content in _numbers(checkpoint)
        if OPTIMIZER not in left_out
    ]
    for entry in entries:
        if entry.kind not in left_out:
            tensor, fqn = entry.tensor, names.get(entry.tensor.fqn, entry.tensor.fqn)
            content = contents[tensor.key][entry.dtype]
            found.append(_named_digest(entry.kind, fqn, entry.role, entry.dtype.name, tensor.shape, content))
    for file in checkpoint.files if known is None else ():
        file.check_unchanged()
    return Digests(tuple(sorted(found, key=lambda t: (KINDS.index(t.kind), t.fqn, t.role))))


class _Entry(NamedTuple):
    kind: str
    role: str
    tensor: Tensor
    dtype: DType


def _entries(checkpoint: Checkpoint, dtype: DType | None) -> Iterator[_Entry]:
    for choice in choices(checkpoint, dtype).values():
        yield _Entry(WEIGHTS, WEIGHT, choice.tensor, choice.dtype)
    for (_, role), tensor in checkpoint.tensors.items():
        if role not in (WEIGHT, BUFFER):
            yield _Entry(MASTERS if role == MASTER else OPTIMIZER, role, tensor, tensor.dtype)


def _numbers(checkpoint: Checkpoint) -> Iterator[tuple[str, str, bytes]]:
    """Yield one-number optimizer states by value: formats store 4 or 4.0."""
    stored = {fqn for fqn, _ in checkpoint.tensors}
    for role, values in checkpoint.state.scalars.items():
        for fqn, value in values.items():
            value = value.value if isinstance(value, OneElement) else value
            if isinstance(value, int | float) and (fqn in stored or fqn not in checkpoint.ties):
                yield fqn, role, xxh3_128(number_text(value).encode()).digest()


def _named_digest(kind: str, fqn: str, role: str, dtype: str, shape: Sequence[int], content: bytes) -> TensorDigest:
    head = "\0".join((fqn, role, dtype, ",".join(map(str, shape)), ""))
    digest = xxh3_128(head.encode(errors="surrogatepass") + content).hexdigest()
    return TensorDigest(kind, fqn, role, dtype, tuple(shape), digest)


def _hash_contents(
    checkpoint: Checkpoint, forms: Mapping[Key, Iterable[DType]], workers: int, progress: Progress | None
) -> dict[Key, dict[DType, bytes]]:
    found: dict[Key, dict[DType, bytes]] = {}
    advance = progress or (lambda _: None)
    lock = threading.Lock()

    def hash_all(portions: Iterator[_Portion]) -> None:
        computed = checkpoint.computed
        with Reader(computed=computed) as reader, Reader(computed=computed) as other_ranks:
            for key, whole in ((key, whole) for keys, whole in portions for key in keys):
                reader.hold(whole)
                tensor = checkpoint.tensors[key]
                check_source(tensor)
                check_replicas(tensor, other_ranks)
                hashers = {dtype: xxh3_128() for dtype in forms[key]}
                for bits in row_major(tensor, reader):
                    for dtype, hasher in hashers.items():
                        as_form = cast(bits, tensor.dtype, dtype, path=checkpoint.path, fqn=tensor.fqn)
                        hasher.update(as_form.view(np.uint8).data)
                    num_bytes = bits.nbytes
                    del bits, as_form  # release a store's answer
                    with lock:
                        advance(num_bytes)
                found[key] = {dtype: hasher.digest() for dtype, hasher in hashers.items()}

    in_order = sorted(forms, key=lambda key: location(checkpoint.tensors[key]))
    in_threads(hash_all, _portions((key, checkpoint.tensors[key]) for key in in_order), workers)
    return found


def _portions(tensors: Iterable[tuple[Key, Tensor]]) -> Iterator[_Portion]:
    """Share a request between tensors close together in a store."""
    keys: list[Key] = []
    whole: Span | None = None
    for key, tensor in tensors:
        span = _remote_span(tensor)
        longer = None if whole is None or span is None else _together(whole, span)
        if keys and longer is None:
            yield _portion(keys, whole)
            keys = []
        keys.append(key)
        whole = longer or span
    if keys:
        yield _portion(keys, whole)


def _portion(keys: list[Key], whole: Span | None) -> _Portion:
    is_together = whole is not None and len(keys) > 1 and _is_fetched(whole[0], whole[2])
    return keys, whole if is_together else None


def _remote_span(tensor: Tensor) -> Span | None:
    first, *others = islice(tensor.fragments(), 2) if tensor.numel else [None]
    if first is None or others or not first.extent.is_contiguous or not is_standin(first.extent.path):
        return None
    return first.extent.path, first.extent.offset, first.extent.nbytes


def _together(a: Span, b: Span) -> Span | None:
    """Return the common range, if one request fetches it."""
    gap, size = b[1] - (a[1] + a[2]), b[1] + b[2] - a[1]
    return (*a[:2], size) if a[0] == b[0] and 0 <= gap <= GAP and size <= _REQUEST else None


def _known_hash(entry: _Entry, known: Mapping[Span, bytes]) -> bytes | None:
    tensor = entry.tensor
    if tensor.dtype != entry.dtype:
        return None
    if not tensor.numel:
        return xxh3_128().digest()
    fragment, *others = islice(tensor.fragments(), 2)
    extent = fragment.extent
    return known.get((extent.path, extent.offset, extent.nbytes)) if extent.is_contiguous and not others else None


def row_major(tensor: Tensor, reader: Reader) -> Iterator[NDArray]:
    """Yield 1-d arrays with the elements' raw bits in row-major order. Each array overwrites the last."""
    if not tensor.numel:
        return
    in_order = FlatRange(0, tensor.numel)
    parts = list(overlay(tensor.fragments(), [_digest_fragment(tensor, in_order)], tensor.shape))
    if all(isinstance(part.region, FlatRange) for part in parts):
        for part in parts:
            yield from _contiguous(part.a, reader)
        return
    row = tensor.numel // tensor.shape[0]
    step = max(1, _SLAB // tensor.dtype.itemsize)
    if row < step:
        step -= step % row  # one box instead of three
    slab = np.empty(min(step, tensor.numel), storage_dtype(tensor.dtype))
    for start in range(0, tensor.numel, step):
        wanted = FlatRange(start, min(start + step, tensor.numel))
        for part in overlay(tensor.fragments(), [_digest_fragment(tensor, wanted)], tensor.shape):
            for _, _, source, place in blocks(part):
                rest = slab[place.offset // slab.itemsize :]
                strided(rest, place.shape, place.strides)[...] = reader.gather(0, source)
        yield slab[: wanted.numel]


def _digest_fragment(tensor: Tensor, region: FlatRange) -> Fragment:
    return Fragment(region, Extent.contiguous("", 0, tensor.dtype, (region.numel,)))


def _contiguous(extent: Extent, reader: Reader) -> Iterator[NDArray]:
    is_fetched = _is_fetched(extent.path, extent.nbytes)
    step = (_REQUEST if is_fetched else _CHUNK) // extent.dtype.itemsize
    for start in range(0, extent.numel, step):
        part = extent.flat(start, min(start + step, extent.numel))
        content = reader.fetched_bytes(part.path, part.offset, part.nbytes)
        if content is None and is_fetched:
            content = reader.fetch(part.path, part.offset, part.nbytes)
        if content is not None:  # hashed without a copy
            yield np.frombuffer(content, storage_dtype(part.dtype))
        else:
            reader.fill(0, part.path, part.offset, part.nbytes)
            yield reader.bits(0, part.numel, part.dtype)


def _is_fetched(path: str, size: int) -> bool:
    """Return True if the bytes are in a store and too many to cache."""
    return size >= DIRECT and is_standin(path)
