"""Paths of the repository and its fixtures. Imports nothing, so tests of the base package can use it."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FIXTURES = REPOSITORY / "fixtures"
