"""Plain tensors that transformers saved under the name of a quantized part."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt.base.text import pluralize
from ckpt.plan.checkpoint import Key
from ckpt.plan.precision import CAST_SOURCES
from ckpt.plan.tensors import Tensor

_PART, _SCALES = "_blocks", "_scales"


def with_plain_names(tensors: Mapping[Key, Tensor]) -> tuple[dict[Key, Tensor], list[str]]:
    """Return the tensors with plain `NAME_blocks` called `NAME`, and notes.

    transformers 5.23 saves so after `Mxfp4Config(dequantize=True)`, and then doesn't load these weights itself.
    """
    names = {
        fqn: fqn.removesuffix(_PART)
        for (fqn, _), tensor in tensors.items()
        if fqn.endswith(_PART) and ".experts." in fqn and tensor.dtype in CAST_SOURCES
    }
    taken = {fqn for fqn, _ in tensors}
    names = {fqn: name for fqn, name in names.items() if not {name, name + _SCALES} & taken}
    if not names:
        return dict(tensors), []
    note = (
        f"{pluralize(len(names), 'plain weight')} renamed from NAME{_PART} to NAME, for example {next(iter(names))}: "
        "transformers saved dequantized weights under their packed names"
    )
    found = {
        (names.get(fqn, fqn), role): tensor.renamed(names[fqn]) if fqn in names else tensor
        for (fqn, role), tensor in tensors.items()
    }
    return found, [note]
