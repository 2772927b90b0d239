"""Paths to the repository and its fixtures. Imports nothing, so base package tests can use it."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FIXTURES = REPOSITORY / "fixtures"
