"""States of torchdata's data loaders, for another number of data parallel ranks.

`StatefulDistributedSampler` deals one order of samples to the ranks in turn. After equal counts, the ranks have read a
prefix of it, so any number of ranks can continue there. Other states count in each rank's own order.

Format facts: torchdata 0.11 (stateful_dataloader.py, sampler.py), torchtitan 0.3 (components/dataloader.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckpt.base.errors import CkptError
from ckpt.base.text import Brief, pluralize
from ckpt.containers.torchfile.pickler import dumps
from ckpt.containers.torchfile.unpickle import loads
from ckpt.plan.checkpoint import Checkpoint

_ENGINE, _ENTRY, _SIZE = "torch", "dataloader", "world_size"
_RANK = re.compile(r"dp_rank_(\d+)")
_WORKERS, _MAIN, _STEP = "_snapshot", "_main_snapshot", "_snapshot_step"
_SAMPLER, _BATCHES, _YIELDED = "_sampler_iter_state", "_sampler_iter_yielded", "_num_yielded"
_SAMPLES, _SINCE = "samples_yielded", "_steps_since_snapshot"
_START_AGAIN = "the new run must start its data again, without loading `dataloader`"
_NUM_NAMED = 4


class LoaderStates(NamedTuple):
    """Each rank's state, unpickled. torchtitan pickles it and stores the number of ranks."""

    by_rank: tuple[Any, ...]
    is_pickled: bool
    has_size: bool

    def samples(self) -> int | None:
        counts = {_samples_of(state) for state in self.by_rank}
        count = counts.pop()
        return None if counts or count is None else count * len(self.by_rank)

    def on(self, ranks: int) -> dict[str, Any] | None:
        """Return the entry for `ranks` ranks, or None if the states don't prove one."""
        total = self.samples()
        if total is None or total % ranks:
            return None
        found: dict[str, Any] = {_SIZE: ranks} if self.has_size else {}
        for rank in range(ranks):
            state = _with_samples(self.by_rank[rank % len(self.by_rank)], total // ranks)
            found[f"dp_rank_{rank}"] = dumps(state, protocol=4) if self.is_pickled else state
        return found

    def note(self, ranks: int) -> str:
        before, total = len(self.by_rank), self.samples()
        if total is not None and total % ranks == 0:
            return f"data position: {total} samples, so {total // ranks} on each of {pluralize(ranks, 'rank')}"
        start = f"data position: not carried from {pluralize(before, 'rank')} to {ranks}: "
        if total is not None:
            return f"{start}{total} samples are no multiple, and {_START_AGAIN}"
        counts = [f"rank {rank} has read {_batches(state)}" for rank, state in enumerate(self.by_rank)]
        more = [f"and {before - _NUM_NAMED} more"] if before > _NUM_NAMED else []
        text = start + "each rank reads its own samples ({}), and " + _START_AGAIN
        return Brief(text.format(", ".join(counts)), text.format(", ".join([*counts[:_NUM_NAMED], *more])))


def loader_states(checkpoint: Checkpoint, ranks: int | None) -> LoaderStates | None:
    """Return the states of ranks 0 to N-1 if `ranks` differs from N.

    None with model parallelism: `ranks` doesn't give the number of data parallel ranks.
    """
    entry = checkpoint.state.private.get(_ENGINE, {}).get(_ENTRY)
    if ranks is None or not isinstance(entry, Mapping):
        return None
    found = {int(match[1]): value for name, value in entry.items() if (match := _RANK.fullmatch(str(name)))}
    before = len(found)
    if ranks == before or checkpoint.world_size != before or set(found) != {*range(before)}:
        return None
    if entry.get(_SIZE, before) != before:
        return None
    values = [found[rank] for rank in range(before)]
    is_pickled = all(type(value) is bytes for value in values)
    by_rank = tuple(_unpickled(value, checkpoint.path) if is_pickled else value for value in values)
    return LoaderStates(by_rank, is_pickled, _SIZE in entry)


def with_data_positions(checkpoint: Checkpoint, ranks: int | None) -> tuple[Checkpoint, tuple[str, ...]]:
    """Convert the loaders' states to `ranks` ranks, or drop them. Also return notes."""
    states = loader_states(checkpoint, ranks)
    if states is None or ranks is None:
        return checkpoint, ()
    own = {name: value for name, value in checkpoint.state.private[_ENGINE].items() if name != _ENTRY}
    entry = states.on(ranks)
    own |= {} if entry is None else {_ENTRY: entry}
    state = replace(checkpoint.state, private={**checkpoint.state.private, _ENGINE: own})
    return replace(checkpoint, state=state), (states.note(ranks),)


def batches_read(state: Any) -> int | None:
    if not isinstance(state, Mapping):
        return None
    snapshot = state.get(_WORKERS)
    if not isinstance(snapshot, Mapping):
        count, since = state.get(_YIELDED), 0
    else:
        count, since = snapshot.get(_STEP), state.get(_SINCE, 0)
    return count + since if type(count) is int and type(since) is int else None


def _batches(state: Any) -> str:
    count = batches_read(state)
    return "an unknown number" if count is None else f"{count} of its batches"


def _unpickled(value: bytes, path: str) -> Any:
    try:
        return loads(value, path=path, name=_ENTRY)
    except CkptError:
        return None


def _samples_of(state: Any) -> int | None:
    """Return a rank's count of samples from a `StatefulDistributedSampler`, or None for other states."""
    if not isinstance(state, Mapping) or state.get("_iterator_finished") is not False or state.get(_SINCE):
        return None
    main, workers = _main(state), _workers(state)
    sampler = main.get(_SAMPLER)
    is_plain = all(one.get(name) is None for one in (main, *workers) for name in ("dataset_state", "fetcher_state"))
    samples, batches = (sampler.get(_SAMPLES) if isinstance(sampler, Mapping) else None), main.get(_BATCHES)
    if type(samples) is not int or type(batches) is not int or batches < 1 or samples % batches:
        return None
    is_proved = sampler == _sampler_at(samples) and batches_read(state) == batches
    return samples if is_plain and is_proved else None


def _with_samples(state: Mapping[str, Any], samples: int) -> dict[str, Any]:
    main = _main(state)
    batches = samples * main[_BATCHES] // main[_SAMPLER][_SAMPLES]
    new = {**main, _SAMPLER: _sampler_at(samples), _BATCHES: batches}
    if isinstance(state.get(_WORKERS), Mapping):
        return {**state, _WORKERS: {**state[_WORKERS], _MAIN: new, _STEP: batches}}
    return new | {_YIELDED: batches}


def _main(state: Mapping[str, Any]) -> Mapping[str, Any]:
    snapshot = state.get(_WORKERS)
    main = snapshot.get(_MAIN) if isinstance(snapshot, Mapping) else state
    return main if isinstance(main, Mapping) else {}


def _workers(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    snapshot = state.get(_WORKERS)
    found = snapshot.get("_worker_snapshots") if isinstance(snapshot, Mapping) else {}
    return [one for one in found.values() if isinstance(one, Mapping)] if isinstance(found, Mapping) else []


def _sampler_at(samples: int) -> dict[str, Any]:
    return {_SAMPLES: samples, "sampler_state": {"yielded": samples}}
