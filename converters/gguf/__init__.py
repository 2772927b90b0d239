"""GGUF files of llama.cpp: `gguf`.

Reading needs no other package. Writing needs the `gguf` package (`pip install ckpt-toolkit[gguf]`) for the tokenizer's
and the model's metadata and for quantization.

May import: `ckpt.base`, `ckpt.containers`, `ckpt.move`, `ckpt.plan`, `ckpt.runs`, `converters.names`.
"""
