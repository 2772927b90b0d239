"""LoRA adapters: find, combine and merge them, with the same bits as PEFT.

torch is imported only when a merge computes.
"""
