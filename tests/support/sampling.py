"""Combinations of cases: a sample in `make test`, all of them in `make test ALL=1`."""

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
VARIABLE = "CKPT_TEST_ALL"


def sample(cases: Iterable[T], facets: Callable[[T], Iterable[object]]) -> list[T]:
    """Return the cases with a facet that no earlier returned case has, or all if the variable is set.

    A sample has to run the same branches of the product as all cases.
    """
    if os.environ.get(VARIABLE):
        return list(cases)
    seen: set[object] = set()
    found = []
    for case in cases:
        if not (new := set(facets(case))) <= seen:
            seen |= new
            found.append(case)
    return found
