"""AdaMSS's groups of rows, which PEFT finds anew when it loads an adapter.

A factor is for the rows of one group.  No file says which: PEFT decomposes the base weight with seeded numbers, and
scikit-learn clusters the rows.  PEFT goes on where the groups are others than in training.  What tells is the frozen
projection in the adapter's file, which is of the same decomposition, and the sizes of the groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from ckpt.base.errors import LossError, UsageError
from ckpt.base.text import counted

if TYPE_CHECKING:
    import torch

ADAMSS = "ADAMSS"
#: The distribution of the package that clusters.
SCIKIT_LEARN = "scikit-learn"
_PROJECTION = ".adamss_newB"
#: How far a row of the projection may be from its own length away: processors round otherwise, and bf16 rounds; another
#: base or other random numbers leave nothing of it.
_TOLERANCE = 0.02


def require_sklearn() -> None:
    """UsageError where scikit-learn is not installed."""
    try:
        version(SCIKIT_LEARN)  # a folder of the package's name is no installed one
    except PackageNotFoundError:
        raise UsageError(
            "merging this kind of adapter needs scikit-learn, by which PEFT finds the rows that its factors are for",
            hint=f"pip install {SCIKIT_LEARN}",
        ) from None


def made_anew(num: int) -> str:
    """The note of a merge into `num` layers."""
    return (
        f"the rows that factors are for were found anew in {counted(num, 'layer')} by scikit-learn "
        f"{version(SCIKIT_LEARN)}, as PEFT does: no file has them; their numbers are the adapter's, and with another "
        "release of it, or a base that was in another dtype while it was trained, they may be other rows"
    )


def check_clusters(made: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], path: str) -> None:
    """LossError where the tensors that PEFT has `made` of the base are not of the groups that `state` was trained on.

    Both are by the names of the adapter's file.
    """
    for fqn, tensor in made.items():
        saved = state.get(fqn)
        if saved is None:
            continue
        why, found = None, f"shape {list(saved.shape)}"
        if saved.shape != tensor.shape:
            why = f"shape {list(tensor.shape)}, by the groups of rows that PEFT finds in this base"
        elif fqn.endswith(_PROJECTION) and not _are_near(tensor, saved):
            why, found = "the projection that PEFT makes of this base", "another one"
        if why is not None:
            raise LossError(
                "which rows this adapter's factors are for is not known: it was trained on another base, or on a "
                "device that draws other random numbers, as GPUs do",
                path=path,
                fqn=fqn,
                expected=why,
                found=found,
                hint="in Python, on a device of the kind that it was trained on: PeftModel.from_pretrained, "
                "merge_and_unload, save_pretrained",
            )


def _are_near(tensor: torch.Tensor, saved: torch.Tensor) -> bool:
    one, other = tensor.double(), saved.double()
    return bool(((one - other).norm(dim=1) <= _TOLERANCE * other.norm(dim=1)).all())
