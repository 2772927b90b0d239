"""Order in which transformers' modules register their parameters, also the order of an optimizer's param groups.

Only this order identifies parameters in DeepSpeed's flat partitions. It follows from the rows of each architecture
under their in-memory names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache

from converters.names.families.composites import COMPOSITES
from converters.names.families.module_tree import ModuleTree
from converters.names.families.rows import Family
from converters.names.families.tables import FAMILIES
from converters.names.transformers.rules import Rules
from converters.names.transformers.tables import family_rules, rules_of


def as_registered(names: Iterable[str], model_type: str) -> list[str]:
    """Sort in-memory names in the architecture's module order, or Llama's if it is unknown."""
    if (composite := COMPOSITES.get(model_type)) is not None:
        spelled = {name: composite.current(name) for name in names}
        trees = [_composite_modules(model_type, tower) for tower in composite.towers]
        modules = next((one for one in trees if all(map(one.has, spelled.values()))), trees[0])
        return sorted(spelled, key=lambda name: modules.key(spelled[name]))
    modules = _modules(model_type if model_type in FAMILIES else "llama")
    base, inside = next(iter(modules.children.items()))

    def full(name: str) -> str:
        """Add the prefix missing from a model without a head, and replace the prefix of `...ForQuestionAnswering`."""
        first, _, rest = name.partition(".")
        if first in modules.children:
            return name
        if first in inside.children:
            return f"{base}.{name}"
        return f"{base}.{rest}" if rest.partition(".")[0] in inside.children else name

    return sorted(names, key=lambda name: modules.key(full(name)))


@cache
def _modules(model_type: str) -> ModuleTree:
    family = FAMILIES[model_type]
    rules = Rules(rules_of(model_type) or ())
    return ModuleTree.of(map(rules.in_memory, family.rows()))


@cache
def _composite_modules(model_type: str, tower: str) -> ModuleTree:
    """Return the modules under the Hub's names, with stacked experts."""
    composite = COMPOSITES[model_type]
    texts = (name for family in composite.texts.values() for name in _stacked(family))
    return ModuleTree.of((*composite.rows_around_text(tower), *map(composite.name, texts)))


def _stacked(family: Family) -> Iterator[str]:
    return map(Rules(family_rules(family)).in_memory, family.rows())
