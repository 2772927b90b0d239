"""Files and param groups for experts in DeepSpeed MoE layers, loaded by a ZeRO-1 or 2 engine.

All layers need the same `ep_size`. With several, the order of the optimizer's groups differs in each process, because
DeepSpeed orders them by a set of strings (deepspeed 0.19.8, moe/utils.py,
`split_params_into_different_moe_groups_for_optimizer`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt.base.errors import LossError, UsageError
from ckpt.base.text import pluralize
from ckpt.base.words import Message
from ckpt.containers.torchfile.values import StoredDict
from ckpt.plan.checkpoint import ParamGroup
from converters.deepspeed.experts import is_in_rows
from converters.deepspeed.facts import DeepSpeedFacts
from converters.deepspeed.keys import EXPERT
from converters.deepspeed.model import DeepSpeedModel, refuse_experts
from converters.deepspeed.sharing import Sharing

#: Maximum elements in an expert group before it is split (moe/utils.py).
MAX_GROUP_SIZE = 178956971
_PREFIX = "ep_size_"


def notes(sharing: Sharing) -> Iterator[str]:
    if sharing.counts:
        layers, size = len(sharing.counts), sharing.num_ranks
        yield f"the experts in {layers} MoE layers are for ep_size {size}: build the model with it"


def groups(model: DeepSpeedModel, sharing: Sharing, rank: int) -> Iterator[ParamGroup]:
    is_kept = _recorded_sizes(model) <= {sharing.num_ranks}  # the source has the same groups
    for group in model.groups if is_kept else _whole_groups(model, sharing):
        if not sharing.is_shared(group.fqns[0]):
            yield group
            continue
        own = [fqn for fqn in group.fqns if sharing.rank_of(fqn) == rank]
        options = {**group.options, "name": f"{_PREFIX}{sharing.num_ranks}"}
        yield from (ParamGroup(tuple(fqns), options) for fqns in ([own] if is_kept else _split_large_group(model, own)))


def files(sharing: Sharing, module: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for layer, (begin, count) in enumerate(sharing.counts.items()):
        for number in range(count):
            own = {fqn: tensor for fqn, tensor in module.items() if fqn.startswith(f"{begin}{number}.")}
            yield f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt", own


def without(sharing: Sharing, root: dict[str, Any]) -> dict[str, Any]:
    """Return the model file's content without experts. Rank 0's experts stay in the lists."""
    if not sharing.counts:
        return root

    def is_on_first_rank(fqn: str) -> bool:
        return sharing.rank_of(fqn) in (None, 0)

    kept = {"module": lambda fqn: not sharing.is_shared(fqn), "buffer_names": is_on_first_rank}
    kept |= dict.fromkeys(("frozen_param_shapes", "frozen_param_fragments"), is_on_first_rank)
    found = dict(root)
    for entry, is_kept in kept.items():
        value = root.get(entry)
        if isinstance(value, Mapping):
            found[entry] = StoredDict("OrderedDict", (item for item in value.items() if is_kept(item[0])))
        elif value is not None:
            found[entry] = [fqn for fqn in value if is_kept(fqn)]
    return found | {"num_experts": list(sharing.counts.values()), "ds_autoep_layers": None}


def _whole_groups(model: DeepSpeedModel, sharing: Sharing) -> list[ParamGroup]:
    found: list[ParamGroup] = []
    seen: dict[str, int] = {}
    for group in model.groups:
        others = _other_options(group)
        if not sharing.is_shared(group.fqns[0]):
            found.append(group)
        elif others in seen:
            known = found[seen[others]]
            found[seen[others]] = ParamGroup(sharing.in_order(known.fqns + group.fqns), known.options)
        else:
            seen[others] = len(found)
            found.append(group)
    return found


def _split_large_group(model: DeepSpeedModel, fqns: Sequence[str]) -> Iterator[list[str]]:
    own: list[str] = []
    size = 0
    for fqn in fqns:
        numel = model.masters[fqn].numel
        if own and size + numel > MAX_GROUP_SIZE:
            yield own
            own, size = [], 0
        own.append(fqn)
        size += numel
    yield own


def sharing_of(model: DeepSpeedModel, config: Mapping[str, Any], num_ranks: int, ep_size: int | None) -> Sharing:
    """Return how `ep_size` ranks share the model's experts. None keeps the source's `ep_size`."""
    names = (*model.weights, *model.buffers)
    counts = _counts(names)
    if not counts:
        if ep_size is not None:
            what, hint = "the model has no experts of `deepspeed.moe` layers", Message("leave {ep_size} out")
            raise UsageError(what, found=Message("{ep_size}", ep_size=ep_size), hint=hint)
        return Sharing(model.checkpoint.path)
    if not model.is_deepspeed or not model.resumable or model.checkpoint.facts_of(DeepSpeedFacts).own_module_order:
        refuse_experts(names, config)
    sizes = _recorded_sizes(model)
    if ep_size is None and len(sizes) != 1:
        raise UsageError(
            "the source's MoE layers record several ep_size, or none; pass one for all",
            path=model.checkpoint.path,
            found=", ".join(map(str, sorted(sizes))) or "none",
            hint=Message("pass {ep_size=N}; with several, DeepSpeed orders groups differently on each rank"),
        )
    size = ep_size or sizes.pop()
    if uneven := [count for count in (num_ranks, *counts.values()) if count % size]:
        raise UsageError(
            f"ep_size {size} does not divide the experts",
            expected="an ep_size dividing the ranks and every layer's experts",
            found=f"{pluralize(num_ranks, 'rank')}; {', '.join(map(str, counts.values()))} experts",
            hint=Message("{ep_size=N}, a divisor of {}", uneven[0]),
        )
    if sizes - {size}:
        _refuse_split_groups(model)
    return Sharing(model.checkpoint.path, size, counts=counts, is_in_rows=is_in_rows(config))


def _counts(names: Sequence[str]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for fqn in names:
        if match := EXPERT.fullmatch(fqn):
            numbers[match[1]] = max(numbers.get(match[1], 0), int(match[2]) + 1)
    return numbers


def _recorded_sizes(model: DeepSpeedModel) -> set[int]:
    """Raise LossError for groups that mix experts with other parameters."""
    sizes = set()
    for group in model.groups:
        experts = [fqn for fqn in group.fqns if EXPERT.fullmatch(fqn)]
        name = str(group.options.get("name", ""))
        if not experts:
            continue
        if len(experts) < len(group.fqns) or not group.options.get("moe") or not name.startswith(_PREFIX):
            raise LossError(
                "a param group mixes experts with other parameters; DeepSpeed groups experts alone", fqn=experts[0]
            )
        sizes.add(int(name.removeprefix(_PREFIX)))
    return sizes


def _other_options(group: ParamGroup) -> str:
    return repr(sorted((key, value) for key, value in group.options.items() if key != "name"))


def _refuse_split_groups(model: DeepSpeedModel) -> None:
    """Raise LossError if expert groups are equal in every option: another `ep_size` may split them elsewhere."""
    seen = set()
    for group in model.groups:
        key = (group.options.get("name"), _other_options(group))
        if group.options.get("moe") and key in seen:
            raise LossError(
                "experts with one ep_size are in several param groups with the same options: DeepSpeed may split "
                "them differently for another ep_size",
                fqn=group.fqns[0],
                hint=f"keep the ep_size of the source, {str(key[0]).removeprefix(_PREFIX)}",
            )
        seen.add(key)
