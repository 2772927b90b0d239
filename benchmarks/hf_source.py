"""Model in bf16 in the Hub's layout, with random values.

python -m benchmarks.hf_source FOLDER NUM_LAYERS
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.models import shapes, write_config


def write(folder: Path, num_layers: int) -> None:
    write_config(folder, num_layers, dtype="bfloat16")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)
        for name, shape in shapes(num_layers).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
