"""Keys that torch's `dcp.load` requests.

torch's planner flattens the results of `get_model_state_dict` and `get_optimizer_state_dict` (2.13,
`distributed/checkpoint/default_planner.py` and `state_dict.py`):

    model.<fqn>                                a model's state dict alone has no outer name
    optimizer.state.<fqn>.<name>
    optimizer.param_groups.<number>.<option>   or, flattened, optimizer.param_groups.<fqn>.<option>
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt.base.errors import LossError
from ckpt.containers.dcp.write import Alias, SourceTensor
from ckpt.plan import services
from ckpt.plan.checkpoint import MODEL_ROLES, OWN, Checkpoint

Path = tuple[Any, ...]
_PARAMS = "params"


@dataclass(frozen=True)
class StateKeys:
    """Keys in one namespace.

    `leaves` maps each key to a `SourceTensor` or a plain value, and `paths` to its place in a nested state dict. `find`
    and `value` handle param groups, because the caller's groups may differ.
    """

    checkpoint: Checkpoint
    leaves: Mapping[str, Any]
    paths: Mapping[str, Path]
    groups_at: str
    groups: tuple[Mapping[str, Any], ...]
    group_of: Mapping[str, int]

    def __contains__(self, key: str) -> bool:
        group, option = self._option(key)
        if group is None or not self.groups:
            return self._untied(key) in self.leaves
        return option == _PARAMS or any(option in options for options in self.groups)

    def find(self, key: str) -> Any:
        """Return a tensor, or an example value."""
        group, option = self._option(key)
        if group is None:
            return self.leaves[self._untied(key)]
        return next(options.get(option) for options in self.groups if option == _PARAMS or option in options)

    def value(self, key: str, requested: Mapping[str, Any]) -> Any:
        """Return the value for `key`. `requested` is the flattened state dict of the request.

        A param group requested by number gets its parameters' options in the checkpoint. Raise LossError if the options
        differ, or if a parameter is in no param group.
        """
        group, option = self._option(key)
        if group is None:
            return self.leaves[key]
        if not group.isdigit() or group in self.group_of:
            return self._group_option(option, [group], key)
        members = requested.get(f"{self.groups_at}{group}.{_PARAMS}")
        if not isinstance(members, list):  # the caller is unknown
            return self.leaves[key]
        return members if option == _PARAMS else self._group_option(option, members, key)

    def _option(self, key: str) -> tuple[str | None, str]:
        """Return an option's group or parameter, and the option. The group is None for other keys."""
        if not key.startswith(self.groups_at):
            return None, ""
        rest = key.removeprefix(self.groups_at)
        fqn, _, option = rest.rpartition(".")
        if self._owner(fqn) in self.group_of:
            return fqn, option
        number, _, option = rest.partition(".")
        return (number, option) if number.isdigit() else (None, "")

    def _owner(self, fqn: str) -> str:
        return self.checkpoint.ties.get(fqn, fqn)

    def aliases_with_states(self, requested: Iterable[str]) -> list[str]:
        """Return tied parameters with requested states of their own."""
        keys = set(requested)
        states = self.groups_at.replace("param_groups.", "state.")
        return [fqn for fqn in self.checkpoint.ties if any(key.startswith(f"{states}{fqn}.") for key in keys)]

    def _untied(self, key: str) -> str:
        """Use the stored name for a tied parameter's state."""
        states = self.groups_at.replace("param_groups.", "state.")
        fqn, _, name = key.removeprefix(states).rpartition(".")
        return f"{states}{self._owner(fqn)}.{name}" if key.startswith(states) and key not in self.leaves else key

    def _group_option(self, option: str, fqns: Iterable[str], key: str) -> Any:
        found: dict[int, Any] = {}
        for fqn in fqns:
            number = self.group_of.get(self._owner(fqn))
            if number is None or option not in self.groups[number]:
                raise LossError(
                    "the checkpoint does not record a requested option for this parameter",
                    path=self.checkpoint.path,
                    fqn=fqn,
                    expected=key,
                    found="it is in no param group" if number is None else ", ".join(self.groups[number]),
                )
            found[number] = self.groups[number][option]
        values = list(found.values())
        if any(type(value) is not type(values[0]) or value != values[0] for value in values):
            raise LossError(
                "parameters requested in one param group have different options in the checkpoint",
                path=self.checkpoint.path,
                expected="separate param groups, like in the run",
                found=f"{option} of {key}: {', '.join(map(repr, values[:4]))}",
                hint="StateDictOptions(flatten_optimizer_state_dict=True) asks for each parameter by itself",
            )
        return values[0] if values else None

    def left(self, requested: Iterable[str]) -> str:
        requested = set(requested)
        taken = {
            leaf.key[0] for key in requested if isinstance(leaf := self.find(key), SourceTensor) and _is_parameter(leaf)
        }
        names: dict[str, int] = {}
        for key, leaf in self.leaves.items():
            path = self.paths[key]
            if key in requested or (isinstance(leaf, SourceTensor) and _is_parameter(leaf) and leaf.key[0] in taken):
                continue
            if key.startswith(self.groups_at):
                if not any(other.startswith(self.groups_at) for other in requested):
                    names["param groups"] = len(self.groups)
            elif isinstance(leaf, SourceTensor) and _is_parameter(leaf):
                names["parameters and buffers"] = names.get("parameters and buffers", 0) + 1
            else:
                name = f"states {path[-1]}" if "state" in path[:2] else str(path[0])
                names[name] = names.get(name, 0) + 1
        return ", ".join(f"{name} ({count})" if count > 1 else name for name, count in names.items())


def _is_parameter(leaf: SourceTensor) -> bool:
    return leaf.key[1] in MODEL_ROLES


def state_keys(checkpoint: Checkpoint, model: str, optimizer: str) -> StateKeys:
    """Return the keys. `model=""` means no outer name."""
    state = services.state_dicts.state_dict(replace(checkpoint, namespace=OWN), None)
    outer = {"model": (model,) if model else (), "optimizer": (optimizer,) if optimizer else ()}
    leaves: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    groups: dict[int, dict[str, Any]] = {}
    for path, leaf in (*state.model, *state.optimizer, *state.rest):
        place = (*outer[path[0]], *path[1:]) if path[0] in outer else path
        if isinstance(leaf, Alias):
            leaf = leaves[_key((*outer["model"], *leaf.path[1:]))]
        if _key(place) not in leaves:  # a model's key may collide with another
            leaves[_key(place)], paths[_key(place)] = leaf, place
        if path[:2] == ("optimizer", "param_groups"):
            groups.setdefault(path[2], {})[_key(path[3:])] = leaf
    listed = tuple(groups[number] for number in sorted(groups))
    group_of = {
        checkpoint.ties.get(fqn, fqn): number for number, group in enumerate(listed) for fqn in group.get(_PARAMS, ())
    }
    return StateKeys(checkpoint, leaves, paths, _key((*outer["optimizer"], "param_groups", "")), listed, group_of)


def _key(path: Path) -> str:
    return ".".join(map(str, path))
