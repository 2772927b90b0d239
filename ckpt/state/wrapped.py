"""Names that wrappers of a model put into the names of its tensors, in state dicts and in adapters' files."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

from ckpt.base.errors import CorruptError

#: Names that wrappers put into the middle of a name: torch.compile, FSDP1, activation checkpointing.
_INNER = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
#: DistributedDataParallel and DataParallel put it before every name.
_OUTER = "module."


def stripper(names: Iterable[str]) -> Callable[[str], str]:
    """A function that removes from an fqn what wrappers add: DDP's prefix only where all of `names` begin with it."""
    inner = [_INNER.sub("", name) for name in names]
    outer = _OUTER if inner and all(name.startswith(_OUTER) for name in inner) else ""
    return lambda name: _INNER.sub("", name).removeprefix(outer)


def clean_names(names: Collection[str], path: str) -> dict[str, str]:
    """Each name without the wrappers of DDP, FSDP1, torch.compile and activation checkpointing."""
    strip = stripper(names)
    inner = {name: strip(name) for name in names}
    seen: dict[str, str] = {}
    for name, clean in inner.items():
        other = seen.setdefault(clean, name)
        if other != name:
            raise CorruptError(
                "two tensors have the same name without their wrappers", path=path, fqn=clean, found=f"{other}, {name}"
            )
    return inner
