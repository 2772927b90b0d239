"""`ckpt resume`: the folder to go on from, on the processes and the engine that there are now.

May import: `ckpt.api`, `ckpt.base`, `ckpt.move`, `ckpt.plan`, `ckpt.processes`, `ckpt.run_folder`,
`ckpt.verify`.
"""
