"""Benchmarks of speed and memory against `cp` and peers, all on one machine: `python -m benchmarks`."""
