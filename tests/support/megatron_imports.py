"""All that megatron-core imports on the way: for a process that ranks are forked from, each of which needs it."""

import queue

from megatron.core.dist_checkpointing.strategies import filesystem_async

# A save's results go through a process that megatron-core spawns, which imports torch once more; but they come from
# this very process where a save waits until it is done.
filesystem_async._get_write_results_queue = queue.Queue  # type: ignore[assignment]
