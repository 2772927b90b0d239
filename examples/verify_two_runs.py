"""Compare two runs bit for bit.

The checkpoints may have different formats. The script prints every difference, where it starts and how large it is. It
exits like `ckpt verify`: 0 if equal, 1 if different.

    python verify_two_runs.py A B
"""

import sys

import ckpt

a, b = sys.argv[1:3]
report = ckpt.verify(a, b)

for result in report.results:
    if result.status != "=":
        print(f"{result.fqn} ({result.role}): {result.kind}, {result.difference or f'{result.a} and {result.b}'}")
for left_out in report.not_compared:  # parts that one side can't hold are never reported as equal
    print(left_out)
print(report.outcome)
sys.exit(report.exit_code)
