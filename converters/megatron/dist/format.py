"""Megatron's `torch_dist` format: PyTorch's distributed checkpoint with megatron-core's keys.

    <run>/latest_checkpointed_iteration.txt    "100", or "release"
    <run>/iter_0000100/.metadata, __0_0.distcp, ...    described in `ckpt.containers.dcp`
    <run>/iter_0000100/metadata.json           the backends that wrote it
    <run>/iter_0000100/common.pt               arguments, param groups, and other common state of all ranks;
                                               since 0.19 an item `common_state/shard_0_1` in the data files

Tensors are stored whole, cut arbitrarily among ranks, so nothing depends on tensor, pipeline or expert parallel sizes.

NeMo 2 has such a folder as `weights` beside `context`, with `module.` before the model's keys and without Megatron-LM's
arguments. Only the model is read; `converters.megatron.dist.nemo` writes it.

`fsdp_dtensor` and `torch_dcp` are plain DCP without these files: see `converters.megatron.dist.fsdp` and `torch_dcp`.

Format facts: megatron-core 0.16.1, dist_checkpointing/ (serialization.py, strategies/torch.py, strategies/common.py,
core.py); Megatron-LM, August 2026, training/checkpointing.py.
"""

from __future__ import annotations

from pathlib import Path

from ckpt.base.errors import NotFoundError, UsageError
from ckpt.base.words import Message
from ckpt.move.files import confined
from ckpt.move.listing import folders_in
from ckpt.plan.checkpoint import MEGATRON as NAMESPACE
from ckpt.plan.checkpoint import Checkpoint, Format, Layout, ReadRequest, Target
from ckpt.runs.steps import has_megatrons_keys
from converters.megatron.dist.folder import (
    BACKENDS,
    COMMON,
    WEIGHTS,
    WEIGHTS_1,
    is_fsdp_iteration,
    is_iteration,
    is_nemo,
    is_nemo_1,
    is_torch_dcp_iteration,
)
from converters.megatron.folder import find_iteration, is_iterations_name
from converters.names.megatron.options import NEMO, TORCH_DIST, DistOptions


class MegatronDist(Format):
    name = "megatron-dist"
    title = "Megatron-core, torch_dist format"
    namespace = NAMESPACE
    loads_from = "run"
    fits_other_axes = True
    takes = ("world_size",)
    records_ranks = True
    ranks_on_axes = "all"

    def find(self, path: Path, tag: str | None) -> Path | None:
        if (weights := _nemos(path if tag is None else confined(path, tag))) is not None:
            return weights
        found = find_iteration(path, tag, _is_read)
        if found is None:
            other = find_iteration(path, tag, has_megatrons_keys)
            if other is not None and other != path and is_iterations_name(other.name):
                raise NotFoundError(
                    "this PyTorch distributed checkpoint has no megatron-core files, and no names from "
                    "Megatron-LM's --ckpt-format torch_dcp or fsdp_dtensor",
                    path=other,
                    expected=f"{COMMON} or {BACKENDS}, or model.decoder.layers. in the metadata",
                    hint=f"{BACKENDS} is written last: did the save or copy finish? Otherwise load and save it "
                    "with Megatron-LM, --ckpt-format torch_dist; or use the format dcp to read the folder "
                    "with its own names",
                )
        return found

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        from converters.megatron.dist.checkpoint import read_iteration

        return read_iteration(path, request)

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        from converters.megatron.dist import adapter_write, nemo, plain_write, write

        form = layout.read(DistOptions).ckpt_format or TORCH_DIST
        if form == TORCH_DIST and checkpoint.is_adapter:
            return adapter_write.lay_out(checkpoint, layout)
        if form == TORCH_DIST:
            return write.lay_out(checkpoint, layout)
        if checkpoint.is_adapter:
            raise UsageError(
                f"{form} can't hold an adapter",
                path=checkpoint.path,
                hint=Message("{ckpt_format}", ckpt_format=TORCH_DIST),
            )
        if form == NEMO:
            return nemo.lay_out(checkpoint, layout)
        return plain_write.lay_out(checkpoint, layout, form)


MEGATRON_DIST = MegatronDist()


def _nemos(path: Path) -> Path | None:
    known = [folder for folder in (path, path / WEIGHTS) if is_nemo(folder)]
    known += [folder for folder in (path, path / WEIGHTS_1) if is_nemo_1(folder)]
    found = known or [folder / WEIGHTS for folder in folders_in(path / "checkpoints") if is_nemo(folder / WEIGHTS)]
    if not known and len(found) > 1:
        raise NotFoundError(
            "this folder holds several NeMo 2 checkpoints",
            path=path,
            expected="one of them",
            found=", ".join(sorted(folder.parent.name for folder in found)),
            hint=f"give one: {max(found).parent}",
        )
    return found[0] if found else None


def _is_read(folder: Path) -> bool:
    return is_iteration(folder) or is_fsdp_iteration(folder) or is_torch_dcp_iteration(folder)
