"""Steps of `benchmarks.huge`.

python -m benchmarks.huge_run fill SOURCE              write random bits to the final norm and last router
python -m benchmarks.huge_run compare SOURCE OUTPUT    print the number of compared tensors in Megatron's files
python -m benchmarks.huge_run ARGUMENTS...             run `ckpt ARGUMENTS`, with holes for zeros in the output
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

LAST = 60  # the last layer before multi-token prediction
#: The Hub's name, and Megatron's name in the last stage (its layers count from 0).
FILLED = {
    "model.norm.weight": "decoder.final_layernorm.weight",
    f"model.layers.{LAST}.mlp.gate.weight": "mlp.router.weight",
}


def fill(source: Path) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    for name in FILLED:
        path, offset, size = _place(source, name)
        values = torch.randn(size // 2, generator=generator).to(torch.bfloat16)
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), values.view(torch.uint8).numpy().data, offset)


def compare(source: Path, output: Path) -> int:
    """Compare the norm in every last-stage file, and the router in the stage's last layer."""
    import torch

    expected = {}
    for name, ours in FILLED.items():
        path, offset, size = _place(source, name)
        with path.open("rb") as file:
            expected[ours] = torch.frombuffer(bytearray(os.pread(file.fileno(), size, offset)), dtype=torch.bfloat16)
    count = 0
    for path in sorted(output.rglob("mp_rank_*_015_*/*.pt")):
        model = torch.load(path, map_location="cpu", mmap=True, weights_only=False)["model"]
        for ours, tensor in expected.items():
            held = [value for key, value in model.items() if key.endswith(ours) and not key.startswith("mtp.")]
            if not any(torch.equal(value.reshape(-1), tensor) for value in held):
                raise SystemExit(f"{path}: {ours} differs")
            count += 1
    if not count:
        raise SystemExit("no file of the last stage was found")
    return count


def _place(source: Path, name: str) -> tuple[Path, int, int]:
    """Return a tensor's file, offset and size."""
    index = json.loads((source / "model.safetensors.index.json").read_text())
    path = source / index["weight_map"][name]
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        start, stop = json.loads(file.read(length))[name]["data_offsets"]
    return path, 8 + length + start, stop - start


def convert() -> None:
    """Run `ckpt` without writing zeros."""
    import numpy as np

    from ckpt.__main__ import main
    from ckpt.move import blocks, files

    write = blocks.write_all

    def write_all(descriptor: int, data: memoryview, offset: int) -> None:
        if np.frombuffer(data, np.uint8).any():
            write(descriptor, data, offset)

    blocks.write_all = write_all
    files.Staging._check_space = lambda self: None  # type: ignore[method-assign]
    sys.exit(main())


if __name__ == "__main__":
    if sys.argv[1:2] == ["fill"]:
        fill(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["compare"]:
        print(compare(Path(sys.argv[2]), Path(sys.argv[3])))
    else:
        convert()
