"""Meaning of a DCP checkpoint's keys: parameters, optimizer states, param groups, the rest.

DCP saves a nested state dict without knowing its content (`containers.dcp.nested`). `understand` finds in it

* the model: under `model` (torch's recipes, Accelerate, Lightning) or another name in `MODEL_NAMES`, or else the
  tensors at the top (torchtitan, `dcp.save(model.state_dict())`);
* optimizers, recognized by their structure (`converters.optimizers.state_dicts`);
* everything else: training state.

Before torch 2.4, dicts and lists without tensors were single values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt.base.errors import CkptError, CorruptError, SeveralModelsError
from ckpt.base.text import pluralize
from ckpt.base.words import Message, Note, joined
from ckpt.containers.dcp.metadata import Path_
from ckpt.containers.dcp.tensors import Placed
from ckpt.containers.torchfile.values import Record, StoredTensor
from ckpt.plan.checkpoint import ParamGroup
from ckpt.plan.dtypes import DType
from ckpt.plan.tensors import Box, Extent, Shape, Source, Tensor, Whole
from ckpt.state.naming import stripper
from converters.optimizers.state_dicts import GROUPS, MEMBERS, STATE, is_flat, is_optimizer, take_apart

MODEL_NAMES = ("model", "module", "state_dict", "model_state_dict")
OPTIMIZER_NAMES = ("optimizer", "optim", "optimizers", "optimizer_state_dict", "optim_state_dict", "optimizer_states")
_MAX_DEPTH = 32
_TOP = "the tensors at the top"
_Optimizers = dict[Path_, Mapping[str, Any]]


@dataclass(slots=True)
class Leaf:
    """Stored tensor.

    `number` is its value if it is a single number. `same_as` is the key of a tensor stored in the same items. `wrapped`
    holds a tensor subclass's chunks, `placed` all other chunks.
    """

    key: str
    dtype: DType
    shape: Shape
    source: Source
    path: str
    replicas: tuple[Source, ...] = ()
    number: int | float | bool | None = None
    same_as: str | None = None
    wrapped: Mapping[Box, Record] = field(default_factory=dict)
    placed: Placed = field(default_factory=list)

    def tensor(self, fqn: str, role: str) -> Tensor:
        return Tensor(fqn, role, self.dtype, self.shape, self.source, None, self.replicas)

    def alone(self) -> StoredTensor | None:
        """Return a training state value, or None for several pieces."""
        if isinstance(self.source, Whole):
            return StoredTensor(self.source.extent)
        if 0 in self.shape:
            return StoredTensor(Extent.contiguous(self.path, 0, self.dtype, self.shape))
        return None


@dataclass
class Understood:
    """Sorted state dict, with parameter names without wrappers' prefixes.

    `states` are by fqn and name: tensors or plain values. `others` are models in `rest`.
    """

    weights: dict[str, Leaf] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    states: dict[tuple[str, str], Any] = field(default_factory=dict)
    groups: list[ParamGroup] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    model_at: Path_ = ("model",)
    optimizer_at: Path_ = ("optimizer",)
    is_flat: bool = False


def understand(root: Mapping[Any, Any], path: str, tag: str | None = None) -> Understood:
    """Sort a nested state dict. `tag` is the key of the model to use."""
    found = Understood()
    optimizers: _Optimizers = {}
    models: list[_Model] = []
    if is_optimizer(root):
        optimizers[()] = root
    else:
        found.rest = _sort(root, optimizers, models)
    trained = [fqn for node in optimizers.values() for fqn in _members(node)]
    tagged = None if tag is None else _tagged(tag, models, found.rest)
    if tagged is not None:
        model, found.model_at = tagged.node, tagged.path
        _leave_out_others(tagged, models, optimizers, found)
    elif models and not _is_at_the_top(models, found, trained, path):
        the_model = _the_model(models, found, path)
        model, found.model_at = the_model.node, the_model.path
    else:
        model = _model_without_name(found, trained, path)
        _keep(models, found, _TOP)
    if tagged is None:
        _name_others(found)
        _keep_model_optimizers(model, optimizers, found, path)
    if len(optimizers) == 1:
        (found.optimizer_at,) = optimizers
        found.is_flat = is_flat(optimizers[found.optimizer_at])
    weights, extra = _flat_model(model)
    strip = stripper(weights or trained)
    for fqn, leaf in weights.items():
        _add(found.weights, strip(fqn), leaf, fqn)
    for fqn, value in extra.items():
        _add(found.extra, strip(fqn), value, fqn)
    for number, node in enumerate(optimizers.values()):
        _read_optimizer(node, number, found, strip, weights, path)
    return found


def _members(node: Mapping[str, Any]) -> Iterator[str]:
    """Yield names, maybe repeated."""
    states, groups = node.get(STATE), node.get(GROUPS)
    if isinstance(states, Mapping):
        yield from map(str, states)
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, Mapping) and isinstance(members := group.get(MEMBERS), list):
            yield from (name for name in members if isinstance(name, str))
    for key in node:  # torch's flattened form
        section, _, rest = str(key).partition(".")
        if section in (STATE, GROUPS) and "." in rest:
            yield rest.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class _Model:
    within: str | None
    name: str
    node: Mapping[str, Any]
    is_trained: bool

    @property
    def path(self) -> Path_:
        return (self.name,) if self.within is None else (self.within, self.name)

    @property
    def called(self) -> str:
        return self.name if self.within is None else f"{self.within}.{self.name}"


def _sort(
    node: Mapping[Any, Any],
    optimizers: _Optimizers,
    models: list[_Model],
    within: str | None = None,
) -> dict[str, Any]:
    """Take models and optimizers out of `node` and of inner dicts with both (a user's `Stateful`)."""
    rest: dict[str, Any] = {}
    own: dict[str, Mapping[str, Any]] = {}
    before = len(optimizers)
    around: Path_ = () if within is None else (within,)
    for name, child in node.items():
        if _is_optimizer(name, child):
            optimizers[(*around, name)] = child
        elif name in OPTIMIZER_NAMES and (several := _several_optimizers(child)):
            optimizers.update({(*around, name, key): one for key, one in several.items()})
        elif _is_model(name, child):
            own[name] = child
        else:
            rest[name] = child
    is_trained = len(optimizers) > before
    models += [_Model(within, name, child, is_trained) for name, child in own.items()]
    for name, child in rest.copy().items() if within is None else ():
        if not isinstance(child, Mapping):
            continue
        is_alone = not (optimizers or models)  # an optimizer without its model
        if any(_is_model(*item) or (is_alone and _is_optimizer(*item)) for item in child.items()):
            inner_rest = _sort(child, optimizers, models, name)
            del rest[name]
            rest |= {name: inner_rest} if inner_rest else {}
    return rest


def _several_optimizers(node: Any) -> Mapping[Any, Any]:
    """Return the optimizers in a list, or by class name, as Composer saves them."""
    found = dict(enumerate(node)) if isinstance(node, list) else node if isinstance(node, Mapping) else {}
    return found if all(is_optimizer(one, is_called_so=True) for one in found.values()) else {}


def _the_model(models: list[_Model], found: Understood, path: str) -> _Model:
    """Return the only model, the only one with an optimizer, or the only one at the top."""
    likely = [model for model in models if model.is_trained]
    if not likely:
        likely = models if len(models) == 1 else [model for model in models if model.within is None]
    if len(likely) != 1:
        raise several_models([model.called for model in models], path)
    _keep((model for model in models if model is not likely[0]), found, repr(likely[0].called))
    return likely[0]


def _tagged(tag: str, models: Sequence[_Model], rest: Mapping[str, Any]) -> _Model | None:
    """Return the model named by its path, by its unique enclosing dict, or any dict of tensors."""
    found = [model for model in models if tag == model.called] or [model for model in models if tag == model.within]
    if found:
        return found[0] if len(found) == 1 else None
    within, _, name = tag.rpartition(".")
    node = rest.get(within) if within else rest
    value = node.get(name) if isinstance(node, Mapping) else None
    return _Model(within or None, name, value, False) if isinstance(value, Mapping) and _has_tensors(value) else None


def _unnamed_models(rest: Mapping[str, Any], within: str | None = None) -> Iterator[_Model]:
    """Yield dicts of tensors with dots in their names."""
    for name, value in rest.items():
        if _is_all_tensors(value) and any("." in one for one in value):
            yield _Model(within, name, value, False)
        elif within is None and isinstance(value, Mapping):
            yield from _unnamed_models(value, name)


def _leave_out_others(chosen: _Model, models: Sequence[_Model], optimizers: _Optimizers, found: Understood) -> None:
    """Keep only the `chosen` model and its optimizer, with notes.

    An optimizer that fits several models belongs to the one called `model`.
    """
    unnamed = list(_unnamed_models(found.rest))
    others = [model for model in (*models, *unnamed) if model.path != chosen.path]
    for model in (chosen, *unnamed):
        place = found.rest if model.within is None else found.rest.get(model.within, {})
        place.pop(model.name, None)
    rivals = [model.node for model in others if model.path[:-1] == chosen.path[:-1] and chosen.name not in MODEL_NAMES]
    beside = [at for at in optimizers if at[: len(chosen.path) - 1] == chosen.path[:-1]]
    fitting = [at for at in beside if _trains_only(optimizers[at], chosen.node)]
    own = [at for at in fitting if not any(_trains_only(optimizers[at], model) for model in rivals)]
    left = [*(model.called for model in others), *(".".join(map(str, at)) for at in optimizers if [at] != own)]
    for at in [at for at in optimizers if [at] != own]:
        del optimizers[at]
    if left:
        found.notes.append(f"the model is {chosen.called!r}; not carried: {', '.join(left)}")
    if fitting and len(own) != 1:
        found.notes.append(f"left out the optimizer: no record names the model for {_joined_names(fitting)}")


def _joined_names(optimizers: Iterable[Path_]) -> str:
    return ", ".join(".".join(map(str, at)) for at in optimizers)


def _trains_only(optimizer: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    members = [*_members(optimizer)]
    strip = stripper(members)
    return {strip(one) for one in members} <= {*map(stripper(model), model)}


def _name_others(found: Understood) -> None:
    for name in (model.called for model in _unnamed_models(found.rest)):
        if name in found.others:
            continue
        found.notes.append(other_model(name))


def other_model(name: str) -> str:
    return Note("{!r} looks like another model: kept as training state ({tag} takes it)", name, tag=name)


def _keep_model_optimizers(model: Mapping[str, Any], optimizers: _Optimizers, found: Understood, path: str) -> None:
    """Move other models' optimizers to training state."""
    others = list(_unnamed_models(found.rest))
    for at in [*optimizers] if len(optimizers) > 1 else ():
        trained = [*_members(optimizers[at])]
        if not _has_some(model, trained) and any(_has_some(other.node, trained) for other in others):
            found.rest[_joined_names([at])] = optimizers.pop(at)
            found.notes.append(f"{_joined_names([at])!r} belongs to another model: kept as training state")
    members = [name for node in optimizers.values() for name in {*_members(node)}]
    if others and len({*members}) < len(members):
        own = ".".join(map(str, found.model_at)) or _TOP
        raise several_models([own, *(other.called for other in others)], path)


def _keep(others: Iterable[_Model], found: Understood, meant: str) -> None:
    """Move models back to training state, with a note."""
    for other in others:
        found.notes.append(f"the model is {meant}: {other.called!r} is another model, kept as training state")
        found.others.append(other.called)
        place = found.rest if other.within is None else found.rest.setdefault(other.within, {})
        place[other.name] = other.node


def _at_the_top(rest: Mapping[str, Any]) -> dict[str, Leaf]:
    return {name: value for name, value in rest.items() if isinstance(value, Leaf)}


def _is_at_the_top(models: Sequence[_Model], found: Understood, trained: Sequence[str], path: str) -> bool:
    """Return True for tensors at the top, as in `{**model, "ema": {"model": ...}}`."""
    top = _at_the_top(found.rest)
    if any(model.within is None or model.is_trained for model in models):
        return False
    if _has_some(top, trained):
        return True
    if any("." in name for name in top) and not any(_has_some(model.node, trained) for model in models):
        raise several_models([_TOP, *(model.called for model in models)], path)
    return False


def _has_some(model: Mapping[str, Any], trained: Sequence[str]) -> bool:
    return not {*map(stripper(model), model)}.isdisjoint(map(stripper(trained), trained))


def without_tensors(found: Understood, path: str) -> CkptError:
    likely = [name for name, value in found.rest.items() if _is_all_tensors(value) and any("." in one for one in value)]
    if len(likely) > 1:
        return several_models(sorted(likely), path)
    return CorruptError("found no model or optimizer tensor", path=path)


def several_models(names: Sequence[str], path: str) -> SeveralModelsError:
    return SeveralModelsError(
        "found several models: choose one",
        path=path,
        tags=() if _TOP in names else names,
        found=", ".join(names),
        hint="use " + joined(" or ", (Message("{tag}", tag=name) for name in names if name != _TOP)),
    )


def _is_optimizer(name: Any, node: Any) -> bool:
    return is_optimizer(node, is_called_so=name in OPTIMIZER_NAMES)


def _is_model(name: Any, node: Any) -> bool:
    return name in MODEL_NAMES and isinstance(node, Mapping) and _has_tensors(node)


def _has_tensors(value: Any, depth: int = 0) -> bool:
    if isinstance(value, Leaf):
        return True
    if depth >= _MAX_DEPTH or not isinstance(value, Mapping | list):
        return False
    return any(_has_tensors(item, depth + 1) for item in (value.values() if isinstance(value, Mapping) else value))


def _model_without_name(found: Understood, trained: Sequence[str], path: str) -> Mapping[str, Any]:
    """Return the tensors at the top, or else the only dict of tensors.

    Among several dicts, use the one with `trained` parameters.
    """
    top = _at_the_top(found.rest)
    if top:
        extra = {name: value for name, value in found.rest.items() if name.endswith("_extra_state")}
        found.model_at = ()
        model = top | extra
        found.rest = {name: value for name, value in found.rest.items() if name not in model}
        return model
    named = {name: value for name, value in found.rest.items() if _is_all_tensors(value)}
    if len(named) > 1:
        named = {name: value for name, value in named.items() if _has_some(value, trained)}
    if len(named) > 1:
        raise several_models(sorted(named), path)
    if not named:
        return {}
    (name,) = named
    found.model_at = (name,)
    node: Mapping[str, Any] = found.rest.pop(name)
    found.notes.append(f"the tensors under {name!r} are used as the model: nothing is called 'model' here")
    return node


def _is_all_tensors(node: Any) -> bool:
    return isinstance(node, Mapping) and bool(node) and all(isinstance(value, Leaf) for value in node.values())


def _flat_model(model: Mapping[str, Any]) -> tuple[dict[str, Leaf], dict[str, Any]]:
    weights: dict[str, Leaf] = {}
    extra: dict[str, Any] = {}
    for fqn, value in _leaves(model):
        _add(weights if isinstance(value, Leaf) else extra, fqn, value, fqn)
    return weights, extra


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    items = node.items() if isinstance(node, Mapping) else enumerate(node)
    for name, value in items:
        fqn = f"{prefix}{name}"
        if isinstance(value, Mapping | list) and _has_tensors(value):
            yield from _leaves(value, f"{fqn}.")
        else:
            yield fqn, value


def _add(target: dict[str, Any], fqn: str, value: Any, was: str) -> None:
    if fqn in target:
        raise CorruptError("two tensors have the same name once the wrappers' prefixes are removed", fqn=was)
    target[fqn] = value


def _read_optimizer(
    node: Mapping[str, Any],
    number: int,
    found: Understood,
    strip: Callable[[str], str],
    weights: Mapping[str, Leaf],
    path: str,
) -> None:
    """Keep other entries as training state."""
    optimizer = take_apart(node, path, weights)
    names = optimizer.names()
    if names is None:
        found.notes.append(
            f"the optimizer's {pluralize(len(optimizer.states), 'state')} are left out: they are numbered, without "
            "parameter names (use torch's get_optimizer_state_dict to save names)"
        )
        return
    if optimizer.states.keys() - names:
        optimizer.check_members(path)
    clean = {key: strip(fqn) for key, fqn in names.items()}
    for key, values in optimizer.states.items():
        for name, value in values.items():
            if (clean[key], str(name)) in found.states:
                raise CorruptError(f"two optimizers have a state {name!r} of one parameter", path=path, fqn=names[key])
            found.states[clean[key], str(name)] = value
    found.groups += optimizer.named(clean).groups
    if optimizer.left:
        found.rest["optimizer" if number == 0 else f"optimizer_{number}"] = optimizer.left
