"""The commands of `ckpt`: a folder for each, with its product and its declaration in `command.py`.

May import: `ckpt.adapters`, `ckpt.api`, `ckpt.base`, `ckpt.compare`, `ckpt.containers`, `ckpt.move`, `ckpt.options`,
`ckpt.pictures`, `ckpt.plan`, `ckpt.processes`, `ckpt.runs`, `ckpt.state`, `ckpt.stores`, `ckpt.training`,
`ckpt.views`.
"""
