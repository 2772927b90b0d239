"""Speed and memory against `cp` and the peers, in one run on one machine: `python -m benchmarks`."""
