"""What the keys of a DCP checkpoint mean: parameters, optimizer states, param groups, the rest.

DCP itself saves a nested state dict and knows nothing of its content (`containers.dcp.nested`).  `understand`
finds in it

* the model: what stands under `model` (torch's recipes, Accelerate, Lightning) or another name in `MODEL_NAMES`, or
  else the tensors at the top (torchtitan, `dcp.save(model.state_dict())`);
* optimizers, told by their structure (torch 2.13, `distributed/checkpoint/state_dict.py`, `_get_optim_state_dict`):

      nested      state -> fqn -> name, and param_groups, a list of dicts whose `params` are fqns
      flattened   state.<fqn>.<name> and param_groups.<fqn>.<option> in one dict (torchtitan, transformers 5)
      by number   as `optimizer.state_dict()` gives it; the names are known only where `param_names` is recorded
                  (torch 2.6 on, for optimizers that were made of named parameters)

* everything else: training state.

Before torch 2.4, dicts and lists that hold no tensor were single values; nested again, they look the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.plan.checkpoint import ParamGroup
from ckpt.state.wrapped import stripper
from converters.pytorch.state_dicts import names_of, take_apart

MODEL_NAMES = ("model", "module", "state_dict", "model_state_dict")
OPTIMIZER_NAMES = ("optimizer", "optim", "optimizers", "optimizer_state_dict", "optim_state_dict", "optimizer_states")
_STATE, _GROUPS = "state", "param_groups"

_MAX_DEPTH = 32


class Leaf:
    """A tensor in the nested state dict.  Subclassed by the reader, which knows where it is."""

    shape: tuple[int, ...]


@dataclass
class Understood:
    """A state dict, sorted.  Names of parameters are those of the model itself, without what wrappers add.

    `states` has the optimizer's states by fqn and name: tensors, or plain values.
    """

    weights: dict[str, Leaf] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    states: dict[tuple[str, str], Any] = field(default_factory=dict)
    groups: list[ParamGroup] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def understand(root: Mapping[Any, Any]) -> Understood:
    """Sort a nested state dict."""
    found = Understood()
    optimizers: list[Mapping[str, Any]] = []
    models: dict[str, Mapping[str, Any]] = {}
    if _is_optimizer("", root):
        optimizers.append(root)
    else:
        found.rest = _sort(root, optimizers, models, 0)
    if not models:
        models = _model_without_name(found)
    weights, extra = _flat_model(models)
    strip = stripper(weights or _state_names(optimizers))
    for fqn, leaf in weights.items():
        _add(found.weights, strip(fqn), leaf, fqn)
    for fqn, value in extra.items():
        _add(found.extra, strip(fqn), value, fqn)
    for number, node in enumerate(optimizers):
        _read_optimizer(node, number, found, strip, weights)
    return found


def _sort(
    node: Mapping[Any, Any], optimizers: list[Mapping[str, Any]], models: dict[str, Mapping[str, Any]], depth: int
) -> dict[str, Any]:
    """Take models and optimizers out of `node`, and of a dict in it that holds both (a `Stateful` of the user's)."""
    rest: dict[str, Any] = {}
    for name, child in node.items():
        if isinstance(child, Mapping) and _is_optimizer(name, child):
            optimizers.append(child)
        elif name in OPTIMIZER_NAMES and isinstance(child, list) and all(_is_optimizer(name, c) for c in child):
            optimizers += child
        elif _is_model(name, child):
            models.setdefault(name, child)
        elif depth == 0 and isinstance(child, Mapping) and any(_is_model(*item) for item in child.items()):
            inner_rest = _sort(child, optimizers, models, depth + 1)
            rest |= {name: inner_rest} if inner_rest else {}
        else:
            rest[name] = child
    return rest


def _is_optimizer(name: str, node: Any) -> bool:
    if not isinstance(node, Mapping):
        return False
    if isinstance(node.get(_GROUPS), list):
        return True
    flat = [key for key in node if isinstance(key, str) and key.startswith((f"{_STATE}.", f"{_GROUPS}."))]
    if any(key.startswith(f"{_GROUPS}.") for key in flat):
        return True
    return name in OPTIMIZER_NAMES and (bool(flat) or _STATE in node)


def _is_model(name: Any, node: Any) -> bool:
    return name in MODEL_NAMES and isinstance(node, Mapping) and _has_tensors(node)


def _has_tensors(value: Any, depth: int = 0) -> bool:
    if isinstance(value, Leaf):
        return True
    if depth >= _MAX_DEPTH or not isinstance(value, Mapping | list):
        return False
    return any(_has_tensors(item, depth + 1) for item in (value.values() if isinstance(value, Mapping) else value))


def _model_without_name(found: Understood) -> dict[str, Mapping[str, Any]]:
    """The tensors at the top; otherwise the one dict of tensors that there is, under whatever name."""
    top = {name: value for name, value in found.rest.items() if isinstance(value, Leaf)}
    if top:
        extra = {name: value for name, value in found.rest.items() if name.endswith("_extra_state")}
        model = top | extra
        found.rest = {name: value for name, value in found.rest.items() if name not in model}
        return {"": model}
    named = {name: value for name, value in found.rest.items() if _is_all_tensors(value)}
    if len(named) != 1:
        return {}
    ((name, node),) = named.items()
    del found.rest[name]
    found.notes.append(f"the tensors under {name!r} are taken for the model: nothing is called 'model' here")
    return {name: node}


def _is_all_tensors(node: Any) -> bool:
    return isinstance(node, Mapping) and bool(node) and all(isinstance(value, Leaf) for value in node.values())


def _flat_model(models: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Leaf], dict[str, Any]]:
    """Tensors and other values (`_extra_state`) of the model by fqn."""
    weights: dict[str, Leaf] = {}
    extra: dict[str, Any] = {}
    for node in models.values():
        for fqn, value in _leaves(node):
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


def _state_names(optimizers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of parameters as nested optimizer states spell them."""
    return [fqn for node in optimizers if isinstance(state := node.get(_STATE), Mapping) for fqn in state]


def _read_optimizer(
    node: Mapping[str, Any],
    number: int,
    found: Understood,
    strip: Callable[[str], str],
    weights: Mapping[str, Leaf],
) -> None:
    """Add one optimizer's states and groups; what else it holds stays training state under `optimizer`."""
    spelled = take_apart(node, weights)
    states = {(str(fqn), str(name)): v for fqn, values in spelled.states.items() for name, v in values.items()}
    groups = spelled.groups
    for group in groups:
        if not isinstance(group.get("params") or [], list | tuple):
            raise CorruptError("a param group's list of parameters is none", found=repr(group["params"])[:40])
    if _is_by_number(states, groups):
        names = {str(key): fqn for key, fqn in (names_of(groups) or {}).items()}
        if not names:
            found.notes.append(
                f"the optimizer's {len(states)} states are recorded by the parameters' numbers, not by their names: "
                "they are not carried (torch's get_optimizer_state_dict saves names)"
            )
            return
        states = {(names[fqn], name): value for (fqn, name), value in states.items()}
        groups = [group | {"params": [names[str(i)] for i in group.get("params") or []]} for group in groups]
    for (fqn, name), value in states.items():
        if (strip(fqn), name) in found.states:
            raise CorruptError(f"two optimizers have a state {name!r} of one parameter", fqn=fqn)
        found.states[strip(fqn), name] = value
    for group in groups:
        params = [strip(fqn) for fqn in group.get("params") or [] if isinstance(fqn, str)]
        options = {name: value for name, value in group.items() if name != "params"}
        found.groups.append(ParamGroup(tuple(params), options))
    if spelled.left:
        found.rest["optimizer" if number == 0 else f"optimizer_{number}"] = spelled.left


def _is_by_number(states: Mapping[tuple[str, str], Any], groups: list[dict[str, Any]]) -> bool:
    listed = [fqn for group in groups for fqn in group.get("params") or []]
    if any(type(fqn) is int for fqn in listed):
        return True
    return bool(states) and not listed and all(fqn.isdigit() for fqn, _ in states)
