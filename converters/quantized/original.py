"""`--like`: a quantized model to imitate, and its bytes for rows that training did not change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckpt.base.errors import LossError, UsageError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.move.casts import cast_bits, storage_dtype
from ckpt.plan.checkpoint import HUB, WEIGHT, Checkpoint
from ckpt.plan.dtypes import FLOAT32, DType
from ckpt.plan.precision import Choice
from ckpt.plan.tensors import Box
from ckpt.runs.model_files import CONFIG, QUANTIZATION_ENTRY
from converters.quantized._packed_weight import PackedBlock, PackedParts, PlainWeight, StoredParts
from converters.quantized._weight import StoredWeights, Weight, model_dtype
from converters.quantized.dequantize import check_parts_known, plain_weight
from converters.quantized.methods import schemes_of
from converters.quantized.parts import QuantizedWeights, quantized_weights
from converters.quantized.scheme import Quantizer


@dataclass(frozen=True)
class Original:
    checkpoint: Checkpoint
    weights: QuantizedWeights
    method: str
    quantizer: Quantizer
    _stored: dict[DType, StoredWeights] = field(default_factory=dict)

    @classmethod
    def of(cls, like: Checkpoint, method: str, quantizer: Quantizer) -> Original:
        found = cls(like, quantized_weights(like), method, quantizer)
        if not found.weights.owners or found.weights.quantization is None or like.namespace != HUB:
            raise found.refused(Message("the model given with {like} has no quantized weights"))
        if QUANTIZATION_ENTRY not in (like.config or {}):
            where = found.weights.quantization.file
            raise found.refused(
                Message("{like} needs {} in {}", QUANTIZATION_ENTRY, CONFIG), found=f"settings in {where}"
            )
        check_parts_known(like, found.weights)
        return found

    def refused(self, why: str, fqn: str | None = None, **what: Any) -> UsageError:
        return UsageError(why, path=self.checkpoint.path, fqn=fqn, **what)

    @property
    def entry(self) -> object:
        return (self.checkpoint.config or {})[QUANTIZATION_ENTRY]

    def chosen(self, weights: Mapping[str, PlainWeight], checkpoint: Checkpoint) -> dict[str, PlainWeight]:
        """Return the weights to quantize. Raise LossError if the original has other tensors or shapes."""
        plain = self.weights.in_place(self.checkpoint.shapes)
        shapes = checkpoint.shapes
        ties = {**checkpoint.ties, **self.checkpoint.ties}
        tied = {*ties, *ties.values()}
        for fqn in sorted({fqn for fqn in plain.keys() | shapes.keys() if plain.get(fqn) != shapes.get(fqn)}):
            if fqn in tied and None in (plain.get(fqn), shapes.get(fqn)):
                continue
            expected, found = (list(of[fqn]) if fqn in of else "no such tensor" for of in (shapes, plain))
            what = Message("the model given with {like} has other tensors")
            raise LossError(what, path=self.checkpoint.path, fqn=fqn, expected=expected, found=found)
        return {fqn: weights[fqn] for fqn in self.weights.owners if fqn in weights}

    def added_to(self, checkpoint: Checkpoint, chosen: Mapping[str, Choice]) -> Checkpoint:
        """Add the original's scales for attention, and note plain dtypes that differ from the original's."""
        stored, scales = self.checkpoint.tensors, sorted(self.weights.attention_scales)
        plain = [fqn for fqn in chosen.keys() - self.weights.parts if (fqn, WEIGHT) in stored]
        pairs = ((chosen[fqn].dtype, stored[fqn, WEIGHT].dtype) for fqn in plain)
        counts = Counter(pair for pair in pairs if pair[0] != pair[1])
        notes = [
            f"{pluralize(count, 'plain tensor')} in {ours}, and in {theirs} in {self.checkpoint.path}"
            for (ours, theirs), count in counts.items()
        ]
        if scales:
            count = pluralize(len(scales), "scale")
            notes.append(f"{count} for attention copied from {self.checkpoint.path}, for example {scales[0]}")
        places = dict.fromkeys((*checkpoint.given.places, self.checkpoint.path, *self.checkpoint.given.places))
        return replace(
            checkpoint,
            tensors={**checkpoint.tensors, **{(name, WEIGHT): stored[name, WEIGHT] for name in scales}},
            files=tuple({file.path: file for file in (*checkpoint.files, *self.checkpoint.files)}.values()),
            given=replace(checkpoint.given, places=tuple(places)),
            notes=(*checkpoint.notes, *notes),
        )

    def pack(self, weight: PlainWeight) -> list[PackedParts]:
        """Return the parts, with the original's bytes for rows with the original's values.

        Raise UsageError if the original's parts differ in names, dtypes, shapes or meaning.
        """
        owner, parts = weight.fqn, self.weights.owners[weight.fqn]
        settings = self.quantizer.settings(())
        own = {scheme.dequantize for scheme in schemes_of(settings["quant_method"], settings) or ()}
        stored = StoredParts(self._of(weight.choice.dtype), parts)
        packed = self.quantizer.pack(replace(weight, stored=stored))
        wanted = {template: part for one in packed for template, part in one.parts.items()}
        tensors = {template: self.checkpoint.tensors[name, WEIGHT] for template, name in parts.items()}
        found = {template: (tensor.dtype, tensor.shape) for template, tensor in tensors.items()}
        if found != wanted or not own & {scheme.dequantize for scheme in self.weights.schemes[owner]}:
            expected, seen = (
                ", ".join(f"{name.format(w=owner, m='')} {dtype} {list(shape)}" for name, (dtype, shape) in of.items())
                for of in (wanted, found)
            )
            what = Message("{quantize} writes other parts than the model given with {like}", quantize=self.method)
            raise self.refused(what, owner, expected=expected, found=seen if found != wanted else self.weights.title)
        dtypes = dict.fromkeys((weight.choice.dtype, model_dtype(self.checkpoint.config)))
        originals = [plain_weight(self._of(dtype), self.weights, owner) for dtype in dtypes]
        scalars = tuple((one, block) for one in packed for block in one.blocks if block.plain is None)
        kept = _KeptRows(weight, stored, originals, scalars)
        return [replace(one, blocks=tuple(kept.replaced(one, block) for block in one.blocks)) for one in packed]

    def _of(self, dtype: DType) -> StoredWeights:
        if dtype not in self._stored:
            tensors = {fqn: tensor for (fqn, role), tensor in self.checkpoint.tensors.items() if role == WEIGHT}
            self._stored[dtype] = StoredWeights(self.checkpoint, tensors, dtype)
        return self._stored[dtype]


@dataclass(frozen=True)
class _KeptRows:
    """Original's bytes for rows with the original's values. `scalars` are shared by all rows."""

    weight: PlainWeight
    stored: StoredParts
    originals: Sequence[Weight]
    scalars: Sequence[tuple[PackedParts, PackedBlock]]

    def replaced(self, parts: PackedParts, block: PackedBlock) -> PackedBlock:
        return block if block.plain is None else replace(block, content=partial(self._content, parts, block))

    def _content(self, parts: PackedParts, block: PackedBlock) -> memoryview:
        if any(one.content() != self.stored.content(of, one) for of, one in self.scalars):
            return block.content()
        is_kept = self._is_kept(block)
        if is_kept.all():
            return self.stored.content(parts, block)
        if not is_kept.any():
            return block.content()
        old, mixed, offset = self.stored.content(parts, block), np.array(block.content(), np.uint8), 0
        for box, (dtype, _) in zip(block.boxes, parts.parts.values(), strict=True):
            place = slice(offset, offset := offset + box.numel * dtype.itemsize)
            rows, kept = mixed[place].reshape(len(is_kept), -1), np.frombuffer(old[place], np.uint8)
            rows[is_kept] = kept.reshape(len(is_kept), -1)[is_kept]
        return mixed.data

    def _is_kept(self, block: PackedBlock) -> NDArray:
        assert block.plain is not None
        ours = self.weight.read(block.plain).view(np.uint32)
        same: NDArray = np.any([ours == _bits(one, block.plain) for one in self.originals], axis=0)
        lead = len(block.plain.sizes) - 2
        matrix = np.reshape(same, same.shape[lead:])
        matrix = matrix.T if block.is_transposed else matrix
        # With a partial block at the end, all rows are kept or none.
        num_rows = len(matrix) // block.step if len(matrix) % block.step == 0 else 1
        kept: NDArray = np.all(matrix.reshape(num_rows, -1), axis=1)
        return kept


def _bits(original: Weight, box: Box) -> NDArray:
    assert original.rows is not None
    bits = np.frombuffer(original.rows(box), storage_dtype(original.dtype))
    return (bits if original.dtype == FLOAT32 else cast_bits(bits, original.dtype, FLOAT32)).reshape(box.sizes)
