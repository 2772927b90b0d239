"""Verify two runs against each other.

Two checkpoints of any formats, bit for bit: what differs, where first and by how much. The exit code is that of
`ckpt verify`: 0 equal, 1 different.

    python verify_two_runs.py A B
"""

import sys

import ckpt

a, b = sys.argv[1:3]
report = ckpt.verify(a, b)

for result in report.results:
    if result.status != "=":
        print(f"{result.fqn} ({result.role}): {result.kind}, {result.difference or f'{result.a} and {result.b}'}")
for left_out in report.not_compared:  # what one side as a whole has no place for is never taken for equal
    print(left_out)
print(report.outcome)
sys.exit(report.exit_code)
