"""Comparison of a merged model with its base and adapters: `ckpt verify BASE MERGED --adapter A`.

Every tensor is computed again and compared. If additions ran in another order, the difference is a small part of the
adapter's change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import sqrt
from os import PathLike, fspath
from typing import Any, ClassVar

from ckpt import api
from ckpt.base.errors import CkptError, LossError, UsageError, printable, shown
from ckpt.base.flags import check_types
from ckpt.base.results import Returned
from ckpt.base.text import one_line, pluralize, show_size
from ckpt.commands.merge_lora import tied
from ckpt.commands.merge_lora.effect import Effects, Merge
from ckpt.commands.merge_lora.find import Adapter, ExpertLayout, open_adapter, open_base
from ckpt.commands.merge_lora.merge import is_merged, plan
from ckpt.commands.merge_lora.unmerged_files import unread, without_ignored
from ckpt.plan import services
from ckpt.plan.checkpoint import MODEL_ROLES, Checkpoint, Layout
from ckpt.plan.dtypes import CASTABLE, DType
from ckpt.plan.groups import Progress
from ckpt.runs import unread_files
from ckpt.state.kept_dtypes import quantized_parts
from ckpt.state.naming import as_hub
from ckpt.state.same_model import stated_otherwise

#: Due to rounding, relative to the adapter's change.
_ROUNDING = 0.05
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Deviation:
    """A tensor that differs from the expected merge.

    `is_target`: an adapter changes the tensor. `is_base`: the tensor still has the base's bits. `off`: distance from
    the expected tensor, relative to the adapter's change.
    """

    fqn: str
    what: str
    is_target: bool
    is_base: bool = False
    off: float | None = None

    @property
    def is_rounded(self) -> bool:
        """True if another order of additions could explain the difference."""
        return self.is_target and self.off is not None and self.off < _ROUNDING

    def __str__(self) -> str:
        name = printable(self.fqn)
        if self.is_base:
            return f"{name}: the adapter changes it, but it equals the base"
        if not self.is_target:
            return f"{name}: the adapter doesn't change it, but it differs from the base: {self.what}"
        off = "" if self.off is None else f"; off by {self.off:.2g} of the adapter's change"
        return f"{name}: differs from the adapter's result: {self.what}{off}"


@dataclass(frozen=True, repr=False)
class MergeReport(Returned):
    verdict: ClassVar[str] = ".equal"

    base: str
    merged: str
    num_targets: int
    num_others: int
    num_bytes: int
    deviations: tuple[Deviation, ...]
    effects: Effects
    notes: tuple[str, ...] = ()
    code: int = 0

    def __repr__(self) -> str:
        outcome = "as the adapter says" if self.equal else "different"
        return f"<{shown(self.merged)}: {outcome}, {pluralize(self.num_targets + self.num_others, 'tensor')} compared>"

    @property
    def equal(self) -> bool:
        return not self.code

    @property
    def exit_code(self) -> int:
        """0 if equal, 1 if different, or the first reading error's code."""
        return self.code

    def to_json(self) -> dict[str, Any]:
        return {
            "equal": self.equal,
            "base": shown(self.base),
            "merged": shown(self.merged),
            "tensors": {"targets": self.num_targets, "others": self.num_others},
            "bytes_compared": self.num_bytes,
            "targets": self.effects.to_json(),
            "deviations": [
                {
                    "fqn": printable(one.fqn),
                    "what": printable(one.what),
                    "target": one.is_target,
                    "has_bits_of_base": one.is_base,
                    "off": one.off,
                }
                for one in self.deviations
            ],
            "notes": [one_line(note) for note in self.notes],
        }

    def lines(self, verbose: bool = False) -> Iterator[str]:
        named = self.deviations if verbose else self.deviations[:_SHOWN]
        yield from (f"* {one}" for one in named)
        if len(named) < len(self.deviations):
            yield f"... and {len(self.deviations) - len(named)} more; -v lists them all"
        yield from (f"note: {one_line(note)}" for note in self.notes)
        if self.deviations and all(one.is_rounded for one in self.deviations):
            yield "note: such small differences come from another order of additions or rounding (a GPU, another dtype)"
        yield from self.effects.lines()
        yield self.outcome

    @property
    def outcome(self) -> str:
        if self.equal:
            rest = pluralize(self.num_others, "other tensor")
            size = show_size(self.num_bytes)
            return (
                f"as the adapter says: {pluralize(self.num_targets, 'tensor')} that it targets, {rest} equal ({size}), "
                + ("every bit compared")
            )
        targets = [one for one in self.deviations if one.is_target]
        same = sum(one.is_base for one in targets)
        of_base = f" ({same} equal to the base)" if same else ""
        others = pluralize(len(self.deviations) - len(targets), "other tensor")
        changed = f"{len(targets)} of {pluralize(self.num_targets, 'target')}{of_base}"
        return f"different: {changed}, {others} of {self.num_others}"


@check_types
def verify_merge(
    base: str | PathLike[str],
    merged: str | PathLike[str],
    adapters: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    expert_layout: ExpertLayout | None = None,
    peft_version: str | None = None,
    accept_settings: Sequence[str] | None = None,
    ignore_files: Sequence[str] = (),
    format: str = "auto",
    tag: str | None = None,
    config: str | PathLike[str] | None = None,
    progress: Progress | None = None,
    expected: Progress | None = None,
) -> MergeReport:
    """Compare `merged` with the merge of `adapters` into `base`, bit by bit, unchanged tensors included.

    Notes report an unexpected base and differing configs. Raises LossError if an adapter does not fit the base, or if
    the merge would leave out trained weights in its folder.

    Args:
        base: The base model, in any format.
        merged: The merged model, in any format.
        adapters: Folders, checkpoints or cached Hub ids.
        expert_layout: Who packed stacked experts: `peft` or `unsloth`.
        peft_version: PEFT release that trained the adapter, if none is recorded.
        accept_settings: Recorded settings to ignore.
        ignore_files: Files next to the adapter to leave out.
        format: Format of `merged`.
        tag: Step of `merged`.
        config: Config for `merged`, and for a `base` without one: a folder, a config.json or a Hub id.
        progress: Called with the number of new bytes.
        expected: Called first with the total number of bytes.
    """
    several = [adapters] if isinstance(adapters, str | PathLike) else adapters
    place = None if config is None else fspath(config)
    requested: dict[str, Any] = {"expert_layout": expert_layout, "peft_version": peft_version}
    requested |= {"base": fspath(base), "base_config": place, "accept_settings": accept_settings}
    found = [open_adapter(fspath(one), **requested) for one in several]
    if not found:
        raise UsageError("no adapter given", expected="a path, or several", found=repr(adapters))
    model, notes = _base(found[0], fspath(base), place)
    other = api.open(merged, format, tag=tag, config=config)
    found = without_ignored(found, model, ignore_files)
    dtype, notes = _dtype(model, other), [*notes, *(note for one in found for note in one.notes)]
    if quantized_parts(model) and not quantized_parts(other):
        model = api.dequantized(model, dtype)
        notes.append("quantized base weights are compared by their dequantized values")
    if dtype is not None:
        notes.append(f"the base is read in {dtype.name}, the merged model's dtype")
    notes += unread_files.lines([one.to_json() for adapter in found for one in unread(adapter.checkpoint)])
    for entry, a, b in stated_otherwise(model.config, other.config):
        notes.append(f"config.json has {entry} {b!r} in the merged model, and {a!r} in the base")
    layout = Layout(dtype, names="own")
    merge, as_peft = _planned(found, model, layout)
    made = merge.as_written()
    report = api.verify(made, other, only="weights", measured=True, progress=progress, expected=expected)
    if report.exit_code == 1 and not as_peft and (model.ties or merge.noted.divided):
        # perhaps PEFT's own merge, with tied weights
        second = plan(found, model, layout, as_peft=True)
        peft = api.verify(second.as_written(), other, only="weights", measured=True) if second.noted.divided else report
        if not peft.exit_code:
            merge, made, report, as_peft = second, second.as_written(), peft, True
    notes += tied.notes(merge.noted.divided, merge.noted.shared, as_peft=as_peft)
    targets = {fqn for (fqn, role), tensor in made.tensors.items() if role in MODEL_ROLES and is_merged(tensor)}
    wrong = [one for one in report.results if one.status != "="]
    apart = _from_base(model, other, [one.fqn for one in wrong if one.kind == "values" and one.fqn in targets])
    deviations = []
    for one in wrong:
        between = apart.get(one.fqn)
        away = one.change.squares[2] if one.change is not None else None
        deviations.append(
            Deviation(
                one.fqn,
                _difference_words(one),
                one.fqn in targets,
                between == 0.0,
                sqrt(away / between) if away is not None and between else None,
            )
        )
    deviations += _ties_otherwise(made, other, merge.noted.untied)
    num_compared = len([one for one in report.results if one.fqn in targets])
    return MergeReport(
        model.path,
        other.path,
        num_compared,
        len(report.results) - num_compared,
        report.num_bytes,
        tuple(deviations),
        merge.noted.effects,
        (*notes, *merge.noted.made_anew),
        report.exit_code or int(bool(deviations)),
    )


def _planned(adapters: Sequence[Adapter], base: Checkpoint, layout: Layout) -> tuple[Merge, bool]:
    """Plan the merge as trained, or PEFT's (True) if no model can have the trained ties."""
    try:
        return plan(adapters, base, layout), False
    except LossError:
        with suppress(CkptError):
            merge = plan(adapters, base, layout, as_peft=True)
            if merge.noted.divided:
                return merge, True
        raise


def _ties_otherwise(made: Checkpoint, merged: Checkpoint, untied: Collection[str]) -> Iterator[Deviation]:
    if merged.config is None:
        return
    declared = services.ties.declared_ties(merged.config)
    named = tied.in_memory(merged)
    stored = {fqn for fqn, _ in named.tensors} | named.ties.keys()
    for alias in sorted(declared.keys() & untied):
        yield Deviation(alias, f"config.json ties it to {declared[alias]}, and the two differ", True)
    for alias, owner in tied.in_memory(made).ties.items():
        if alias not in declared and alias not in stored:
            yield Deviation(alias, f"it is missing, and config.json does not tie it to {owner}", True)


def _base(adapter: Adapter, where: str, config: str | None) -> tuple[Checkpoint, list[str]]:
    try:
        model = open_base(adapter, where, config=config)
    except UsageError as error:
        model = open_base(adapter, where, accept=True, config=config)
        return model, [f"{error.what}: it names {error.expected}, and this is {error.found}", *model.notes]
    return model, list(model.notes)


def _dtype(base: Checkpoint, merged: Checkpoint) -> DType | None:
    """Return the merged weights' only dtype, or None if there are several or it is the base's."""
    plain = set(CASTABLE.values())
    one, other = (
        {tensor.dtype for (_, role), tensor in of.tensors.items() if role in MODEL_ROLES} & plain
        for of in (base, merged)
    )
    return next(iter(other)) if len(other) == 1 and one != other else None


def _from_base(base: Checkpoint, merged: Checkpoint, fqns: Sequence[str]) -> dict[str, float]:
    """Return squared distances. Equal bits give 0.0."""
    a, b = as_hub(base), as_hub(replace(merged, config=merged.config or base.config))
    wanted = {fqn for fqn, _ in a.tensors} & {fqn for fqn, _ in b.tensors} & set(fqns)
    if not wanted:
        return {}
    one, other = (
        replace(of, tensors={key: t for key, t in of.tensors.items() if key[0] in wanted}, ties={}) for of in (a, b)
    )
    found = {}
    for result in api.verify(one, other, only="weights", cast=True, measured=True).results:
        if result.kind == "equal":
            found[result.fqn] = 0.0
        elif result.change is not None:
            found[result.fqn] = result.change.squares[2]
    return found


def _difference_words(result: Any) -> str:
    if result.difference is not None:
        return str(result.difference)
    if result.kind in ("shape", "dtype"):
        return f"{result.kind} {result.b} instead of {result.a}"
    if result.error is not None:
        return str(result.error)
    return "it is missing" if result.kind == "missing" else "the base and the adapter have none of this name"
