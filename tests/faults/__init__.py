"""The fault campaign: `python -m tests.faults` damages checkpoints; docs/reliability.md has its table."""
