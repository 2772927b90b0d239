"""All megatron-core imports for the parent of forked ranks; threads write the files, and groups stay open."""

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

# megatron-core spawns a process for a save's results, and that process imports torch again. A synchronous save needs no
# such process.
filesystem_async._get_write_results_queue = queue.Queue  # type: ignore[assignment]
# megatron-core forks a process for each file. Threads do the same.
filesystem_async.mp = SimpleNamespace(get_context=lambda _: multiprocessing.dummy)

_groups: dict[tuple[Any, ...], Any] = {}


def _group(ranks: list[int], **options: Any) -> Any:
    """Return the process group for these ranks and this purpose, from an earlier run if possible."""
    key = (*ranks, *sorted((name, repr(option)) for name, option in options.items()))
    if key not in _groups:
        _groups[key] = dist.new_group(ranks, **options)
    return _groups[key]


def _forget(forget: Callable[[], None] = parallel_state.destroy_model_parallel) -> None:
    """Forget a run's groups without ending them."""
    for name in [name for name in vars(parallel_state) if name.endswith("_GLOO")]:
        setattr(parallel_state, name, None)
    forget()


parallel_state.create_group = _group  # a run's end does not destroy it
parallel_state.destroy_model_parallel = _forget
