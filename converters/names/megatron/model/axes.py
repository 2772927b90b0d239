"""Megatron's parallel axes, ranks and pipeline stages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ckpt.base.errors import CorruptError, LossError, UsageError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.plan.checkpoint import AXES

# -- axes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rank:
    """Coordinates. `number` counts `Grid.ranks`, `in_stage` the pipeline stage's ranks."""

    tp: int
    pp: int
    ep: int
    etp: int
    in_stage: int
    number: int


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes of axes. `vpp` is the number of chunks per pipeline rank, `etp` the experts' `tp`."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    etp: int = 1

    @classmethod
    def of_args(cls, args: Mapping[str, Any]) -> Grid:
        sizes = {axis: _size(args, AXES[axis], 1) for axis in ("tp", "pp", "ep", "vpp")}
        return cls(**sizes, etp=_size(args, AXES["etp"], sizes["tp"]))

    @classmethod
    def recorded(cls, args: Mapping[str, Any], path: Path) -> Grid:
        """Raise CorruptError if Megatron has no ranks for the grid."""
        grid = cls.of_args(args)
        try:
            grid.check()
        except UsageError as error:
            raise CorruptError(f"the recorded arguments: {error.what}", path=path, found=error.found) from None
        return grid

    @property
    def args(self) -> dict[str, Any]:
        sizes = asdict(self) | {"vpp": self.vpp if self.vpp > 1 else None}
        return {AXES[axis]: size for axis, size in sizes.items()}

    def check(self) -> None:
        """Raise UsageError for a combination without ranks in Megatron."""
        if self.vpp > 1 and self.pp == 1:
            raise UsageError(
                "a virtual pipeline needs a pipeline",
                expected=Message("{pp} above 1"),
                found=Message("{vpp} with {pp=1}", vpp=self.vpp),
                hint=Message("give {pp}, or leave {vpp} out"),
            )
        if self.tp % self.etp or self.ranks_in_stage % self.tp or self.ranks_in_stage % (self.etp * self.ep):
            raise UsageError(
                "expert and tensor parallel ranks do not fit each other",
                expected=Message("an {etp} dividing {tp}, and tp dividing etp * ep or the reverse"),
                found=f"tp {self.tp}, ep {self.ep}, etp {self.etp}",
                hint=Message("another {etp}") if self.tp % self.etp else Message("another {ep} or {etp}"),
            )

    @property
    def ranks_in_stage(self) -> int:
        """Number of ranks that together hold a stage's tensors and experts."""
        return max(self.tp, self.etp * self.ep)

    def ranks(self) -> Iterator[Rank]:
        """Yield one rank for each part of the model, by pipeline stage.

        A stage's ranks are numbered tp first (parallel_state.py, order "tp-cp-ep-dp-pp"). The experts' grid numbers the
        same ranks etp first, then ep.
        """
        for pp in range(self.pp):
            for number in range(self.ranks_in_stage):
                expert = number // self.etp % self.ep
                yield Rank(number % self.tp, pp, expert, number % self.etp, number, pp * self.ranks_in_stage + number)


def _size(args: Mapping[str, Any], name: str, default: int) -> int:
    value = args.get(name)
    if value is None:
        return default
    if type(value) is not int or not 1 <= value <= 1 << 20:
        raise CorruptError(f"the argument {name} is not a valid size", expected="a positive integer", found=repr(value))
    return value


def expert_range(ep: int, grid: Grid, num_experts: int) -> range:
    if num_experts % grid.ep:
        what = f"{pluralize(num_experts, 'expert')} do not divide among {grid.ep} expert parallel ranks"
        raise UsageError(what, hint=Message("another {ep}"))
    count = num_experts // grid.ep
    return range(ep * count, (ep + 1) * count)


# -- stages --------------------------------------------------------------------------------------------------

_LAYER_TYPES = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
_MAX_LAYERS = 1 << 16

#: Arguments for dividing layers. megatron-core's config renames the first two.
STAGE_ARGS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)


@dataclass(frozen=True, slots=True)
class Stages:
    """Division of `num_layers` decoder layers and `num_mtp` layers into pipeline ranks' chunks.

    `first` and `last` are the first and the last rank's layers if they differ. `embedding` and `loss` count these as
    layers. `layout` lists the elements of every chunk, with pipeline ranks first, then chunks.
    """

    num_layers: int
    pp: int = 1
    vpp: int = 1
    first: int | None = None
    last: int | None = None
    embedding: bool = False
    loss: bool = False
    layout: tuple[tuple[str, ...], ...] | None = None
    num_mtp: int = 0

    @classmethod
    def of_args(cls, args: Mapping[str, Any]) -> Stages:
        """Raise LossError if megatron-core refuses the stages."""
        grid = Grid.of_args(args)
        even = cls(_size(args, "num_layers", 0), grid.pp, grid.vpp, num_mtp=args.get("mtp_num_layers") or 0)
        old_names = {
            f"decoder_{end}_pipeline_num_layers": args.get(f"num_layers_in_{end}_pipeline_stage")
            for end in ("first", "last")
        }
        stages = even.with_args({**old_names, **args})
        try:
            return stages.check()
        except UsageError as error:
            raise LossError(
                f"megatron-core rejects the recorded pipeline, so each rank's layers are unknown: {error.what}",
                expected=error.expected,
                found=error.found,
                hint="correct the pipeline settings in the run's arguments",
            ) from None

    def with_args(self, args: Mapping[str, Any]) -> Stages:
        """Apply `STAGE_ARGS` in `args`."""
        layout = args.get("pipeline_model_parallel_layout")
        return replace(
            self,
            first=args.get("decoder_first_pipeline_num_layers"),
            last=args.get("decoder_last_pipeline_num_layers"),
            embedding=bool(args.get("account_for_embedding_in_pipeline_split")),
            loss=bool(args.get("account_for_loss_in_pipeline_split")),
            layout=parse_layout(layout) if layout else None,
        )

    def check(self) -> Stages:
        """Raise UsageError if layers and stages do not fit."""
        chunks = [(p, v) for v in range(self.vpp) for p in range(self.pp)]
        if self.layout is not None and len(self.layout) != len(chunks):
            raise UsageError(
                "the pipeline layout has the wrong number of stages",
                expected=len(chunks),
                found=len(self.layout),
                hint=Message("{pp} times {vpp} must equal the stage count"),
            )
        if self.layout is not None and not _is_in_order([kind for stage in self.layout for kind in stage]):
            raise UsageError(
                "the pipeline layout does not follow the model's order",
                expected="one E first, then each t, then each m, and one L last",
                found=self.layout,
            )
        reached, shares = 0, self._shares()
        for p, v in chunks:
            layers = self.layers(p, v)
            if layers.start != reached or len(layers) < 0:
                shares = None
            reached = layers.stop
        if shares is None or reached != self.num_layers:
            stages = f"{pluralize(self.pp, 'pipeline stage')} with {pluralize(self.vpp, 'chunk')}"
            raise UsageError(
                f"{pluralize(self.num_layers, 'layer')} can't be split into {stages}",
                expected="a layer count (with embedding and loss if requested) divisible evenly",
                found=self._uneven_options(),
                hint=Message(
                    "use another {pp}, or set {decoder_first_pipeline_num_layers} and "
                    "{decoder_last_pipeline_num_layers}"
                ),
            )
        return self

    def _uneven_options(self) -> str | None:
        counts = [f"{count} in the {which}" for which, count in (("first", self.first), ("last", self.last)) if count]
        others = [what for what in ("embedding", "loss") if getattr(self, what)]
        return ", ".join(counts + [f"the {what} counted" for what in others]) or None

    def _shares(self) -> bool | None:
        """Return None if a division has a remainder, else True."""
        if self.layout is not None or self.pp == 1:
            return True
        if self.first is not None or self.last is not None:
            uneven = [count for count in (self.first, self.last) if count is not None]
            rest, ranks = self.num_layers - sum(uneven), self.pp - len(uneven)
            whole_chunks = all(count % self.vpp == 0 for count in uneven)
            if not ranks and self.vpp > 1:
                return None  # megatron-core divides by the number of ranks between them
            if rest < 0 or not whole_chunks or (rest % (ranks * self.vpp) if ranks else rest):
                return None
            return None if self.embedding or self.loss else True
        return None if (self.num_layers + self.embedding + self.loss) % (self.pp * self.vpp) else True

    def layers(self, pp: int, vp: int = 0) -> range:
        if self.layout is not None:
            start = sum(row.count("decoder") for row in self.layout[: vp * self.pp + pp])
            return range(start, start + self.layout[vp * self.pp + pp].count("decoder"))
        if self.pp == 1:
            return range(self.num_layers)
        if self.first is not None or self.last is not None:
            return self._uneven(pp, vp)
        per_chunk = (self.num_layers + self.embedding + self.loss) // (self.pp * self.vpp)
        start = (vp * self.pp + pp) * per_chunk
        stop = start + per_chunk
        # If counted, the embedding is layer 0 and the loss the last layer.
        start, stop = max(0, start - self.embedding), stop - self.embedding
        return range(start, min(stop, self.num_layers))

    def _uneven(self, pp: int, vp: int) -> range:
        first, last = self.first or 0, self.last or 0
        ranks = self.pp - (self.first is not None) - (self.last is not None)
        middle = (self.num_layers - first - last) // ranks if ranks else 0
        counts = [middle] * self.pp
        if self.first is not None:
            counts[0] = first
        if self.last is not None:
            counts[-1] = last
        per_chunk = [count // self.vpp for count in counts]
        start = vp * sum(per_chunk) + sum(per_chunk[:pp])
        return range(start, start + per_chunk[pp])

    def is_first(self, pp: int, vp: int) -> bool:
        return pp == vp == 0

    def is_last(self, pp: int, vp: int) -> bool:
        return (pp, vp) == (self.pp - 1, self.vpp - 1)

    def has_mtp(self, pp: int, vp: int) -> bool:
        """Return True for multi-token prediction layers. They need a copy of the embedding."""
        if self.layout is not None:
            return "mtp" in self.layout[vp * self.pp + pp]
        return self.num_mtp > 0 and self.is_last(pp, vp)

    def has_final_norm(self, pp: int, vp: int) -> bool:
        """Return True for the final norm. With MTP layers it follows the last decoder layer."""
        return self.num_layers - 1 in self.layers(pp, vp) if self.num_mtp else self.is_last(pp, vp)

    def place(self, layer: int) -> tuple[int, int, int]:
        """Return (pipeline rank, chunk, number in the chunk)."""
        for vp in range(self.vpp):
            for pp in range(self.pp):
                layers = self.layers(pp, vp)
                if layer in layers:
                    return pp, vp, layer - layers.start
        raise ValueError(f"layer {layer} of {self.num_layers}")


def _is_in_order(kinds: Sequence[str]) -> bool:
    """Follow `PipelineParallelLayerLayout.validate_layer_layout`."""
    order = list(_LAYER_TYPES.values())
    is_sorted = list(kinds) == sorted(kinds, key=lambda kind: order.index(kind) if kind in order else len(order))
    return is_sorted and kinds.count(order[0]) == kinds.count(order[-1]) == 1


def parse_layout(layout: Any) -> tuple[tuple[str, ...], ...]:
    """Parse `"Et*3|(tt|)*4m|L"`, or a list of stages, to layer types per stage.

    megatron-core's grammar: `|` ends a stage, `x*n` and `(...)*n` repeat, commas are ignored. A
    `PipelineParallelLayerLayout` record has its input as `input_data`.
    """
    data = getattr(layout, "attributes", {}).get("input_data") if not isinstance(layout, str | list | tuple) else layout
    if isinstance(data, list | tuple):
        return tuple(tuple(str(getattr(item, "value", item)).lower() for item in stage) for stage in data)
    if not isinstance(data, str):
        raise CorruptError("the pipeline layout is neither text nor a list", found=type(layout).__name__)
    text = data.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        length = sum(len(m[1]) * int(m[2][:9]) for m in re.finditer(pattern, text))
        if length > _MAX_LAYERS:
            raise UsageError(
                "the pipeline layout is too long", expected=f"at most {pluralize(_MAX_LAYERS, 'element')}", found=data
            )
        text = re.sub(pattern, lambda m: m[1] * int(m[2]), text)
    unknown = set(text) - set(_LAYER_TYPES) - {"|"}
    if unknown:
        raise UsageError("the pipeline layout has unknown elements", expected="E, t, m, L", found=data)
    return tuple(tuple(_LAYER_TYPES[letter] for letter in stage) for stage in text.split("|"))
