"""Two checkpoints compared bit by bit, digests of one, and the manifest of what was written.

Imports `plan`, `move`, `containers`, `state`, `run_folder`; transformers only to try whether a folder loads.
"""
