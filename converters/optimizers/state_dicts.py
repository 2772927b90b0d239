"""Parser for an optimizer's state dict in any spelling.

    nested    {"state": {fqn: {...}}, "param_groups": [{..., "params": [fqn]}]}      get_optimizer_state_dict, FSDP
    flat      {"state.<fqn>.exp_avg": ..., "param_groups.<fqn>.lr": ...}             flatten_optimizer_state_dict=True
    numbered  {"state": {0: {...}}, "param_groups": [{..., "params": [0]}]}          optimizer.state_dict()

Numbers get names from `param_names` (since torch 2.6, by optimizers with named parameters), from the format, or from a
proof by shapes.

torch 2.13: optim/optimizer.py (`state_dict`), distributed/fsdp/_optim_utils.py, and
distributed/checkpoint/state_dict.py (`_unflatten_optim_state_dict`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckpt.base.errors import CorruptError
from ckpt.containers.torchfile.values import StoredTensor
from ckpt.plan.checkpoint import ParamGroup
from ckpt.plan.tensors import Shape
from ckpt.state.naming import clean_names
from ckpt.state.numbered import names_by_shapes
from converters.optimizers.shapes import per_element, plain_shapes
from converters.quantized.states import Quantized, understood

STATE, GROUPS, MEMBERS, NAMES = "state", "param_groups", "params", "param_names"
#: In torch_checkpointing's state dict with names.
VERSION = "_optimizer_state_format_version"
#: More digits than any parameter's number.
_LONGEST = 20


@dataclass(frozen=True)
class Optimizer:
    states: Mapping[Any, Mapping[str, Any]]
    groups: tuple[ParamGroup, ...]
    left: Mapping[str, Any] = field(default_factory=dict)

    @property
    def members(self) -> list[Any]:
        return [key for group in self.groups for key in group.fqns]

    def without_names(self) -> tuple[ParamGroup, ...]:
        options = [{name: value for name, value in group.options.items() if name != NAMES} for group in self.groups]
        return tuple(ParamGroup(g.fqns, some) for g, some in zip(self.groups, options, strict=True))

    def check_members(self, path: str) -> None:
        if strangers := self.states.keys() - set(self.members):
            raise CorruptError(
                "an optimizer state's parameter is in no param group",
                path=path,
                fqn=min(map(str, strangers)),
            )

    def check_known(self, fqns: Collection[str], path: str) -> None:
        if strangers := {*self.members, *self.states}.difference(fqns):
            what = "the optimizer has a parameter missing from the model"
            raise CorruptError(what, path=path, fqn=min(strangers))

    def names(
        self, given: Sequence[str] | None = None, proof: Mapping[str, Shape] | None = None
    ) -> dict[Any, str] | None:
        """Return fqns, or None if they are unknown.

        `given` are the fqns by number, for a single param group. `proof` has the model's shapes in registration order.
        """
        members = self.members
        if all(isinstance(key, str) for key in (*members, *self.states)):
            return {key: key for key in (*members, *self.states)}
        recorded = [group.options.get(NAMES) for group in self.groups]
        found: Sequence[Sequence[str]] | None = None
        if recorded and all(isinstance(names, list) for names in recorded):
            found = [[str(name) for name in names] for names in recorded if names is not None]
        elif given is not None and len(self.groups) == 1 and members == list(range(len(given))):
            found = [given]
        elif proof is not None:
            shapes = [[_shape(self.states.get(key, {})) for key in group.fqns] for group in self.groups]
            found = self._single_parameters(shapes, proof) or names_by_shapes(proof, shapes)
            found = found or names_by_shapes(proof, self._without_misfits(shapes, proof))
        fqns = [fqn for names in found or () for fqn in names]
        return None if found is None or len(fqns) != len(members) else dict(zip(members, fqns, strict=True))

    def _without_misfits(
        self, shapes: Sequence[Sequence[Shape | None]], parameters: Mapping[str, Shape]
    ) -> list[list[Shape | None]]:
        """Replace damaged shapes with None, so an error can name their parameter."""
        known = set(parameters.values())
        odd = {
            key
            for key, values in self.states.items()
            if any(shape not in known for shape in per_element(values).values())
            or (plain_shapes(values) and _shape(values) not in known)
        }
        empty = {key for key in odd if all(prod(shape) == 0 for shape in per_element(self.states[key]).values())}
        dropped = odd if 2 * len(odd - empty) < len(self.members) else set[Any]()
        return [
            [None if key in dropped else shape for key, shape in zip(group.fqns, own, strict=True)]
            for group, own in zip(self.groups, shapes, strict=True)
        ]

    def _single_parameters(
        self, shapes: Sequence[Sequence[Shape | None]], parameters: Mapping[str, Shape]
    ) -> list[tuple[str, ...]] | None:
        """Return the names of one-parameter groups (Adam-mini's)."""
        names = [name for g in self.groups if isinstance(name := g.options.get("name"), str) and name in parameters]
        if len(set(names)) < len(self.groups) or any(len(held) != 1 for held in shapes):
            return None
        own = [parameters[name] for name in names]
        fit = all(prod(held or shape) == prod(shape) for shape, (held,) in zip(own, shapes, strict=True))
        return [(name,) for name in names] if fit else None

    def named(self, names: Mapping[Any, str]) -> Optimizer:
        groups = (replace(g, fqns=tuple(names[key] for key in g.fqns if key in names)) for g in self.groups)
        states = {names[key]: values for key, values in self.states.items() if key in names}
        return replace(self, states=states, groups=tuple(groups))


def is_optimizer(node: Any, *, is_called_so: bool = False) -> bool:
    """Accept states without groups if it `is_called_so`."""
    if not isinstance(node, Mapping):
        return False
    if isinstance(node.get(GROUPS), list) or GROUPS in _spelled(node):
        return True
    return is_called_so and (STATE in _spelled(node) or STATE in node)


def is_flat(node: Mapping[str, Any]) -> bool:
    return not _spelled(node).isdisjoint((STATE, GROUPS))


def _spelled(node: Mapping[str, Any]) -> set[str]:
    return {key.partition(".")[0] for key in node if isinstance(key, str) and "." in key}


def groups_of(node: Any, path: str) -> tuple[ParamGroup, ...]:
    listed = node.get(GROUPS) if isinstance(node, Mapping) else None
    found = []
    for group in listed if isinstance(listed, list | tuple) else ():
        members = (group.get(MEMBERS) or ()) if isinstance(group, Mapping) else None
        if not isinstance(members, list | tuple):
            raise CorruptError(f"a param group is not a dict with `{MEMBERS}`", path=path, found=repr(members)[:40])
        found.append(
            ParamGroup(tuple(map(_key, members)), {name: value for name, value in group.items() if name != MEMBERS})
        )
    return tuple(found)


def _key(key: Any) -> Any:
    """Return a name or a number. DCP turns numbers into text."""
    return int(key) if isinstance(key, str) and key.isdecimal() and len(key) < _LONGEST else key


def take_apart(node: Mapping[str, Any], path: str, fqns: Collection[str] = ()) -> Optimizer:
    """Parse any spelling. `fqns` resolve flat keys, because names may contain dots."""
    left = {name: value for name, value in node.items() if name not in (STATE, GROUPS)}
    states: dict[Any, dict[str, Any]] = {}
    for key, values in (node[STATE] if isinstance(node.get(STATE), Mapping) else {}).items():
        if isinstance(values, Mapping):
            states[_key(key)] = dict(values)
        else:
            left.setdefault(STATE, {})[key] = values
    options: dict[Any, dict[str, Any]] = {}
    for key in [key for key in left if isinstance(key, str)]:
        kind, _, rest = key.partition(".")
        if kind in (STATE, GROUPS) and "." in rest:
            fqn, name = _split(rest, fqns)
            (states if kind == STATE else options).setdefault(_key(fqn), {})[name] = left.pop(key)
    groups = (*groups_of(node, path), *with_same_options(options))
    if odd := [key for group in groups for key in group.fqns if not isinstance(key, str | int)]:
        raise CorruptError("a param group lists something other than parameters", path=path, found=repr(odd[0])[:40])
    return Optimizer(states, groups, left)


def with_same_options(options: Mapping[Any, Mapping[str, Any]]) -> tuple[ParamGroup, ...]:
    found: list[tuple[Mapping[str, Any], list[Any]]] = []
    for fqn, chosen in options.items():
        members = next((members for known, members in found if _same(known, chosen)), None)
        if members is None:
            found.append((chosen, members := []))
        members.append(fqn)
    return tuple(ParamGroup(tuple(members), chosen) for chosen, members in found)


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Compare options. Numbers of different types are not equal."""
    return a.keys() == b.keys() and all(a[k] is b[k] or (type(a[k]) is type(b[k]) and a[k] == b[k]) for k in a)


def _split(text: str, fqns: Collection[str]) -> tuple[str, str]:
    """Split `<fqn>.<name>`, using the model's names if known."""
    fqn, _, name = text.rpartition(".")
    shorter = fqn
    while fqns and shorter and shorter not in fqns:
        shorter = shorter.rpartition(".")[0]
    return (shorter, text[len(shorter) + 1 :]) if shorter else (fqn, name)


def _shape(states: Mapping[str, Any]) -> Shape | None:
    stored = {name: value for name, value in understood(states).items() if isinstance(value, Quantized | StoredTensor)}
    if stored.keys() >= {"exp_avg_sq_row", "exp_avg_sq_col"}:  # Adafactor's sums
        return (*stored["exp_avg_sq_row"].shape, *stored["exp_avg_sq_col"].shape[-1:])
    if stored.keys() >= {"row_var", "col_var"}:  # torch's own Adafactor
        return (*stored["row_var"].shape[:-1], *stored["col_var"].shape[-1:])
    shapes = [value.shape for name, value in stored.items() if name != "step"]
    return max(shapes, key=prod, default=None)


def read_optimizer(
    content: Any, path: str, given: Sequence[str] | None = None, proof: Mapping[str, Shape] | None = None
) -> Optimizer | None:
    """Read a file's optimizer by fqn. None if names are unknown."""
    node: Mapping[str, Any] = content if isinstance(content, Mapping) else {}
    is_nested = isinstance(node.get(STATE), Mapping) and isinstance(node.get(GROUPS), list)
    optimizer = take_apart(node, path)
    odd = optimizer.left.get(STATE) if is_nested else optimizer.left
    if odd or not (is_nested or optimizer.groups):
        found = ", ".join(map(str, list(odd or node)[:5])) if node else type(content).__name__
        raise CorruptError(
            "this is not an optimizer state", path=path, expected=f"`{STATE}` and `{GROUPS}`, by parameter", found=found
        )
    if is_nested:
        optimizer.check_members(path)
    names = optimizer.names(given, proof)
    if names is None:
        return None
    clean = clean_names(names.values(), path)
    named = optimizer.named({key: clean[fqn] for key, fqn in names.items()})
    return replace(named, groups=named.without_names())
