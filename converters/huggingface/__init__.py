"""Hugging Face folders (`hf`) and PEFT adapters (`peft`), both safetensors."""
