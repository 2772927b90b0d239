"""A sample of combinations, from tests.support.sampling."""

import itertools

import pytest

from tests.support.sampling import VARIABLE, sample

PAIRS = list(itertools.product("abc", (1, 2, 3)))


def test_each_facet_is_in_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert sample(PAIRS, lambda pair: pair) == [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("c", 1)]
    assert sample(PAIRS, lambda pair: [pair]) == PAIRS
    monkeypatch.setenv(VARIABLE, "1")
    assert sample(PAIRS, lambda _: []) == PAIRS
