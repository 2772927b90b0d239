"""Look into a checkpoint.

Names, shapes and dtypes cost nothing. Reading a slice reads only its bytes. Get an optimizer state with the pair
(parameter name, state name).

    python inspect_checkpoint.py RUN
"""

import sys

import ckpt

checkpoint = ckpt.open(sys.argv[1])
print(checkpoint)
for name, tensor in checkpoint.items():
    print(f"{name:<50} {tensor.dtype:<9} {list(tensor.shape)}")

name = next(iter(checkpoint))
first_rows = checkpoint[name].numpy((slice(0, 2), ...))  # reads only the bytes of two rows
print(f"{name}: the first rows reach from {first_rows.min():.6f} to {first_rows.max():.6f}")

for state in checkpoint.optimizer_states:
    if (name, state) in checkpoint:
        values = checkpoint[name, state].numpy()
        print(f"{name}: {state} has the mean {values.mean():.3e}")
