"""`sglang_loading.py BASE ADAPTER OUTPUT`: sglang's own code reads and stacks the adapter, without an engine."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock


def main() -> None:
    from transformers import AutoConfig, AutoProcessor  # noqa: F401 (before a torchvision that it would believe in)

    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "gguf"):
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None), __path__=[])
    from safetensors.torch import load_file, save_file
    from sglang.srt.configs.load_config import LoadConfig  # type: ignore[import-not-found]
    from sglang.srt.lora.lora import LoRAAdapter  # type: ignore[import-not-found]
    from sglang.srt.lora.lora_config import LoRAConfig  # type: ignore[import-not-found]

    base, folder, output = sys.argv[1:]
    adapter = LoRAAdapter("0", LoRAConfig(folder), AutoConfig.from_pretrained(base), LoadConfig(), None)
    adapter.initialize_weights_from_tensors(load_file(f"{folder}/adapter_model.safetensors"))
    tensors = {name: tensor.contiguous() for layer in adapter.layers for name, tensor in layer.weights.items()}
    save_file(tensors, output, {"scaling": repr(adapter.scaling)})


if __name__ == "__main__":
    main()
