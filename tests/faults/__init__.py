"""The campaign of faults: `python -m tests.faults` damages checkpoints; docs/reliability.md has its table."""
