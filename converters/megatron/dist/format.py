"""Megatron's `torch_dist` format: PyTorch's distributed checkpoint with megatron-core's keys.

    <run>/latest_checkpointed_iteration.txt    "100", or "release"
    <run>/iter_0000100/.metadata, __0_0.distcp, ...    as `ckpt.containers.dcp.metadata` and `dcp_items` describe them
    <run>/iter_0000100/metadata.json           which backends wrote it
    <run>/iter_0000100/common.pt               arguments, param groups, and what else all ranks have in common;
                                               since 0.19 an item `common_state/shard_0_1` of the data files

Tensors are whole in it, cut among ranks as it came: nothing depends on tensor, pipeline or expert parallel sizes.  Keys
are in `converters.megatron.dist.keys`, the optimizer is in `converters.megatron.dist.optimizer`.

`fsdp_dtensor`, which is DCP without these files, is read as well: see `converters.megatron.dist.fsdp`.

Format facts: megatron-core 0.16.1, dist_checkpointing/ (serialization.py, strategies/torch.py, strategies/common.py,
core.py); Megatron-LM of August 2026, training/checkpointing.py.
"""

from __future__ import annotations

from pathlib import Path

from ckpt.base.errors import NotFoundError
from ckpt.move.files import confined
from ckpt.move.listing import folders_in
from ckpt.plan.checkpoint import MEGATRON as NAMESPACE
from ckpt.plan.checkpoint import Checkpoint, Format, Layout, ReadRequest, Target
from converters.megatron.dist.folder import BACKENDS, COMMON, is_fsdp_iteration, is_iteration
from converters.megatron.folder import find_iteration, is_iterations_name

#: What NeMo 2 puts beside the weights of an adapter.
_NEMO_ADAPTER = "adapter_metadata.json"


class MegatronDist(Format):
    """The format `megatron-dist`."""

    name = "megatron-dist"
    title = "Megatron-core, torch_dist format"
    namespace = NAMESPACE
    loads_from = "run"
    fits_other_axes = True
    takes = ("world_size",)
    records_ranks = True
    ranks_on_axes = "all"

    def find(self, path: Path, tag: str | None) -> Path | None:
        _refuse_nemo(path if tag is None else confined(path, tag))
        found = find_iteration(path, tag, _is_read)
        if found is None:
            other = find_iteration(path, tag, lambda folder: (folder / ".metadata").is_file())
            if other is not None and other != path and is_iterations_name(other.name):
                raise NotFoundError(
                    "PyTorch's distributed checkpoint without megatron-core's files: Megatron-LM writes such with "
                    "--ckpt-format torch_dcp, whose names in Megatron are not read",
                    path=other,
                    expected=f"{COMMON} or {BACKENDS}, or names of Megatron-FSDP's in the metadata",
                    hint="load and save it with Megatron-LM, --ckpt-format torch_dist; the folder itself is read as "
                    "dcp, under the names that it has",
                )
        return found

    def read(self, path: Path, request: ReadRequest) -> Checkpoint:
        """Describe the checkpoint of one iteration."""
        from converters.megatron.dist.checkpoint import read_iteration

        return read_iteration(path, request)

    def lay_out(self, checkpoint: Checkpoint, layout: Layout) -> Target:
        """The files of a run folder; see `converters.megatron.dist.write`, and `adapter_write` for an adapter."""
        from converters.megatron.dist import adapter_write, write

        return adapter_write.lay_out(checkpoint, layout) if checkpoint.is_adapter else write.lay_out(checkpoint, layout)


MEGATRON_DIST = MegatronDist()


def _refuse_nemo(path: Path) -> None:
    """NotFoundError for a checkpoint of NeMo 2: a torch_dist folder `weights` beside `context`, its names NeMo's."""
    for folder in (path, path.parent, *folders_in(path / "checkpoints")):
        if (folder / "context").is_dir() and (folder / "weights" / ".metadata").is_file():
            is_adapter = (folder / "weights" / _NEMO_ADAPTER).is_file()
            what = "an adapter" if is_adapter else "a checkpoint"
            target, made = ("hf-peft", "PEFT") if is_adapter else ("hf", "Hugging Face")
            raise NotFoundError(
                f"this is {what} of NeMo 2, whose names and optimizer in torch_dist files are not read",
                path=folder,
                found="weights/.metadata beside context/",
                hint=f"NeMo's own llm.export_ckpt(path, target='{target}') makes a {made} folder of it",
            )


def _is_read(folder: Path) -> bool:
    return is_iteration(folder) or is_fsdp_iteration(folder)
