"""Everything that megatron-core imports, for a process that ranks are forked from; files are written by threads, and
groups stay open.
"""

import importlib
import multiprocessing.dummy
import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch import distributed as dist

from tests.support.engines import MEGATRON

for name in (*MEGATRON, "train.megatron.files", "train.megatron.fsdp"):
    importlib.import_module(name)

# A save's results go through a process that megatron-core spawns, which imports torch once more; but they come from
# this very process where a save waits until it is done.
filesystem_async._get_write_results_queue = queue.Queue  # type: ignore[assignment]
# Each of its files is written by a process that is forked for it: threads do the same.
filesystem_async.mp = SimpleNamespace(get_context=lambda _: multiprocessing.dummy)

_groups: dict[tuple[Any, ...], Any] = {}


def _group(ranks: list[int], **options: Any) -> Any:
    """A process group of these ranks and for this purpose: the one that a run before has had, if one has."""
    key = (*ranks, *sorted((name, repr(option)) for name, option in options.items()))
    if key not in _groups:
        _groups[key] = dist.new_group(ranks, **options)
    return _groups[key]


def _forget(forget: Callable[[], None] = parallel_state.destroy_model_parallel) -> None:
    """Forgets the groups of a run, and ends none of them."""
    for name in [name for name in vars(parallel_state) if name.endswith("_GLOO")]:
        setattr(parallel_state, name, None)
    forget()


parallel_state.create_group = _group  # not in the list of those that a run ends
parallel_state.destroy_model_parallel = _forget
