"""Where the repository and its fixtures lie.  Imports nothing, so that tests of the base package can use it."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FIXTURES = REPOSITORY / "fixtures"
