"""Modules of a model in registration order, from its rows.

torch yields a module's own parameters first, then its children's. A module's place is its first row's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModuleTree:
    """Children by name, in registration order. `#` stands for any number. A parameter has no children."""

    children: dict[str, ModuleTree] = field(default_factory=dict)

    @classmethod
    def of(cls, names: Iterable[str]) -> ModuleTree:
        root = cls()
        for name in names:
            module = root
            for part in name.split("."):
                module = module.children.setdefault(part, cls())
        return root

    def has(self, name: str) -> bool:
        return self._walk(name)[1] == ""

    def key(self, name: str) -> tuple[object, ...]:
        """Return a parameter's sort key. Unknown names follow their module's known ones, biases last."""
        places, unknown = self._walk(name)
        return (*places, (2, unknown.endswith("bias"), unknown)) if unknown else places

    def _walk(self, name: str) -> tuple[tuple[tuple[int, int, int], ...], str]:
        """Return the places of known modules on the way to a parameter, and the unknown rest of its name."""
        module, places, rest = self, [], name
        while rest:
            part, _, after = rest.partition(".")
            known = "#" if part.isdecimal() and part not in module.children else part
            child = module.children.get(known)
            if child is None or (not after and child.children) or (after and not child.children):
                break
            places.append((int(bool(after)), list(module.children).index(known), int(part) if known == "#" else 0))
            module, rest = child, after
        return tuple(places), rest
