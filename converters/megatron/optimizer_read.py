"""Reader for the optimizer's state in Megatron-LM's `torch` format, in the model's file or in `distrib_optim.pt`.

No file names a parameter. An optimizer orders parameters like the model's entries in the same file. Everything is
checked against shapes and lengths.

    plain        {"optimizer": {"state": {0: {...}}, "param_groups": [...]}, "fp32_from_fp16_params": [[...]]}
    fp32 model   {"state": ..., "param_groups": [...]}
    distributed  {"optimizer": {"param_groups": [...]}}, and in distrib_optim.pt
                 {"buckets_coalesced": True, 0: {(bfloat16, float32): {"param": ..., "exp_avg": ..., ...}}, 1: ...}

A list of these holds several optimizers: one for dense parameters, one for experts on other ranks.

Format facts: megatron-core 0.16.1, optimizer/__init__.py (`_get_param_groups`, `get_megatron_optimizer`),
optimizer/optimizer.py, optimizer/distrib_optimizer.py; see `converters.megatron.buffers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.base.text import pluralize
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.plan.checkpoint import MASTER
from ckpt.plan.tensors import Extent
from converters.megatron.buffers import bucket_sizes, by_buffer, find_buffer, gathered
from converters.megatron.chunks import are_experts_apart
from converters.megatron.folder import DISTRIBUTED, MODEL
from converters.megatron.optimizer import Optimizers, belongs, check_alike, check_kind, plain
from converters.megatron.read import LocalTensor, MegatronReading, RankContent
from converters.megatron.remainders import refuse_gathered

#: Masters' key in distrib_optim.pt; all others are optimizer states.
_PARAM = "param"
_MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")


@dataclass(frozen=True, slots=True)
class Trained:
    local: LocalTensor
    vp: int


def read_optimizers(reading: MegatronReading, files: Sequence[RankContent]) -> Optimizers:
    """Add all optimizer states to `reading`. Raise CorruptError if files do not fit the model."""
    found = Optimizers()
    if all(file.content.get("optimizer") is None for file in files):
        if any(Path(file.path).with_name(DISTRIBUTED).exists() for file in files):
            reading.notes.append(
                f"{DISTRIBUTED} is ignored: {MODEL} records no optimizer, and its param groups are needed to "
                "assign the states to parameters"
            )
        return found
    for file in files:
        content = file.content.get("optimizer")
        if content is None:
            raise CorruptError(
                "a rank's file has no optimizer, but other ranks have one", path=file.path, rank=file.rank.number
            )
        _RankOptimizers(reading, found, file, content if isinstance(content, list) else [content]).read()
    held = {key: (parts[0][0], reading.natives[key[0]]) for key, parts in reading.parts.items()}
    check_alike(held, found, reading.args, reading.folder)
    return found


@dataclass(frozen=True)
class _RankOptimizers:
    reading: MegatronReading
    found: Optimizers
    file: RankContent
    contents: Sequence[Any]

    def read(self) -> None:
        states: Any = None
        for number, (content, trained) in enumerate(zip(self.contents, self._members(), strict=True)):
            inner, outer = self._unwrap(content)
            by_group = self._by_group(inner["param_groups"], trained)
            for group, ones in zip(inner["param_groups"], by_group, strict=True):
                self.found.note_group(group, _fqns(ones), self.file.path)
            if self.found.grad_scaler is None:
                self.found.grad_scaler = outer.get("grad_scaler")
            if isinstance(inner.get("state"), Mapping):
                self._read_plain(by_group, inner, outer)
                continue
            if states is None:
                check_kind(self.reading.args, self.file.path)
                refuse_gathered(self.reading.args, self.file.path)
                states = self._distributed()
            self._read_distributed(trained, states[number], number)

    def _unwrap(self, content: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        outer = content if isinstance(content, Mapping) else {}
        inner = outer.get("optimizer", outer.get("optimizer_state_dict", outer))
        if not isinstance(inner, Mapping) or not isinstance(inner.get("param_groups"), list):
            raise CorruptError("this is not a Megatron optimizer", path=self.file.path, expected="param_groups")
        return inner, outer

    def _members(self) -> list[list[Trained]]:
        """Return each optimizer's parameters, in its order.

        Experts sharded over ranks have their own optimizer (a parameter's `allreduce`). With
        `overlap_param_gather_with_optimizer_step`, the first chunk has its own, too.
        """
        chunks = enumerate(self.file.chunks)
        everything = [Trained(local, vp) for vp, chunk in chunks for local in chunk if not local.is_buffer]
        apart = are_experts_apart(self.reading.grid, self.reading.args)
        dense = [one for one in everything if not (apart and one.local.is_expert)]
        groups = [dense]
        if self.reading.args.get("overlap_param_gather_with_optimizer_step"):
            groups = [[one for one in dense if one.vp == 0], [one for one in dense if one.vp > 0]]
        if apart and len(groups) < len(self.contents):
            groups.append([one for one in everything if one.local.is_expert])
        if len(groups) != len(self.contents):
            check_kind(self.reading.args, self.file.path)
            raise CorruptError(
                "the file's optimizer count doesn't fit the model",
                path=self.file.path,
                rank=self.file.rank.number,
                expected=len(groups),
                found=len(self.contents),
            )
        return groups

    def _by_group(self, groups: Sequence[Any], trained: Sequence[Trained]) -> list[list[Trained]]:
        if not all(isinstance(group, Mapping) for group in groups):
            raise CorruptError("a param group is not a dict", path=self.file.path)
        if len(groups) == 1:
            return [list(trained)]
        return [
            [one for one in trained if belongs(one.local.name, len(one.local.stored.shape), group, self.reading.args)]
            for group in groups
        ]

    def _note_tensor(self, one: Trained, role: str, value: Any) -> None:
        if not isinstance(value, StoredTensor) or value.shape != one.local.stored.shape:
            raise CorruptError(
                f"the optimizer's {role!r} doesn't fit its parameter",
                path=self.file.path,
                rank=self.file.rank.number,
                fqn=one.local.name,
                expected=list(one.local.stored.shape),
                found=list(value.shape) if isinstance(value, StoredTensor) else type(value).__name__,
            )
        self.reading.add(one.local, role, value.extent, self.file.path, self.file.rank)

    def _note_scalar(self, name: str, ones: Sequence[Trained], value: Any) -> None:
        self.found.states.agree(_fqns(ones), name, value, path=self.file.path, rank=self.file.rank.number)

    def _misfit(self, what: str, expected: Any, found: Any, path: str | None = None) -> CorruptError:
        return CorruptError(
            f"{what} in the optimizer does not fit the model's parameters",
            path=path or self.file.path,
            rank=self.file.rank.number,
            expected=expected,
            found=found,
            hint="frozen parameters are not known from the file; remove the `optimizer` entry to read the model alone",
        )

    def _read_plain(
        self, by_group: Sequence[Sequence[Trained]], inner: Mapping[str, Any], outer: Mapping[str, Any]
    ) -> None:
        for group, ones in zip(inner["param_groups"], by_group, strict=True):
            ids = group.get("params")
            if not isinstance(ids, list) or len(ids) != len(ones):
                raise self._misfit("a param group", len(ones), len(ids) if isinstance(ids, list) else ids)
            for identity, one in zip(ids, ones, strict=True):
                for name, value in inner["state"].get(identity, {}).items():
                    if isinstance(value, StoredTensor) and value.shape:
                        self._note_tensor(one, str(name), value)
                    else:
                        self._note_scalar(str(name), [one], plain(value))
        common = plain(inner["state"].get("common_step"))
        if common is not None:
            self._note_scalar("step", [one for ones in by_group for one in ones], common)
        masters = next((outer[name] for name in _MASTERS if name in outer), None)
        if masters is None:
            return
        for ones, values in zip(by_group, masters, strict=False):
            halves = [one for one in ones if one.local.stored.dtype.itemsize == 2]
            if len(values) != len(halves):
                raise self._misfit("a group with masters", len(halves), len(values))
            for one, value in zip(halves, values, strict=True):
                self._note_tensor(one, MASTER, value)

    def _distributed(self) -> list[Any]:
        """Return None for an optimizer gathered by another rank."""
        path = Path(self.file.path).with_name(DISTRIBUTED)
        if not path.is_file():
            raise CorruptError(
                "a rank's distributed optimizer file is missing: it has a part of every state",
                path=path,
                rank=self.file.rank.number,
                expected=DISTRIBUTED,
                found="no file",
            )
        content: Any = self.reading.load(path)
        states = content if isinstance(content, list) else [content]
        if len(states) != len(self.contents):
            raise CorruptError(
                f"{DISTRIBUTED} and {MODEL} hold different numbers of optimizers",
                path=path,
                rank=self.file.rank.number,
                expected=len(self.contents),
                found=len(states),
            )
        return states

    def _read_distributed(self, trained: Sequence[Trained], state: Any, number: int) -> None:
        path = str(Path(self.file.path).with_name(DISTRIBUTED))
        if state is None:
            if number == 0 and self.file.rank.in_stage < self.reading.grid.tp:
                raise CorruptError(
                    "a rank's file lacks its parameters' optimizer state",
                    path=path,
                    rank=self.file.rank.number,
                    found="None",
                )
            return
        buffers = by_buffer((one.vp, one.local.stored.dtype, one) for one in trained)
        stored = gathered(state, path=path)
        if list(stored) != list(range(len(buffers))):
            raise self._misfit(
                "the state", f"{pluralize(len(buffers), 'buffer')}", f"{pluralize(len(stored), 'buffer')}", path
            )
        for (vp, _, members), flat in zip(buffers, stored.values(), strict=True):
            self._read_buffer(path, vp, members, flat)

    def _read_buffer(self, path: str, vp: int, members: Sequence[Trained], flat: Mapping[str, Extent]) -> None:
        if _PARAM not in flat:
            raise CorruptError("a distributed optimizer buffer has no parameters", path=path, expected=_PARAM)
        numels = [one.local.stored.extent.numel for one in members]
        length = flat[_PARAM].numel
        everything = sum(local.stored.extent.numel for local in self.file.chunks[vp])
        sizes = list(bucket_sizes(self.reading.args, self.file.rank.pp, vp, everything))
        buffer = find_buffer(numels, [one.local.shared for one in members], sizes, length)
        if buffer is None:
            expected = f"{pluralize(sum(numels), 'element')} and gaps between parameters"
            raise self._misfit("a buffer", expected, f"{pluralize(length, 'element')}", path)
        for name, elements in flat.items():
            for one, start, numel in zip(members, buffer.starts, numels, strict=True):
                extent = elements.flat(start, start + numel)
                self.reading.add(one.local, MASTER if name == _PARAM else name, extent, path, self.file.rank)


def _fqns(ones: Sequence[Trained]) -> list[str]:
    return [fqn for one in ones for fqn in one.local.fqns]
