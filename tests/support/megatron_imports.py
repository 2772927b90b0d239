"""All that megatron-core imports on the way: for a process that ranks are forked from, each of which needs it."""

import importlib
import queue

from megatron.core.dist_checkpointing.strategies import filesystem_async

from tests.support.engines import MEGATRON

for name in (*MEGATRON, "train.megatron.files", "train.megatron.fsdp"):
    importlib.import_module(name)

# A save's results go through a process that megatron-core spawns, which imports torch once more; but they come from
# this very process where a save waits until it is done.
filesystem_async._get_write_results_queue = queue.Queue  # type: ignore[assignment]
