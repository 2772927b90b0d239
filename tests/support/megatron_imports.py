"""All that megatron-core imports on the way: for a process that ranks are forked from, each of which needs it."""

import importlib
import queue

from megatron.core.dist_checkpointing.strategies import filesystem_async

for name in (
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.dist_checkpointing.serialization",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "train.megatron.files",
    "train.megatron.open",
):
    importlib.import_module(name)

# A save's results go through a process that megatron-core spawns, which imports torch once more; but they come from
# this very process where a save waits until it is done.
filesystem_async._get_write_results_queue = queue.Queue  # type: ignore[assignment]
