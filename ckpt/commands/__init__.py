"""The commands of `ckpt`: a folder for each, none of which knows another.

May import: `ckpt.adapters`, `ckpt.api`, `ckpt.base`, `ckpt.compare`, `ckpt.containers`, `ckpt.move`, `ckpt.pictures`,
`ckpt.plan`, `ckpt.processes`, `ckpt.runs`, `ckpt.state`, `ckpt.stores`, `ckpt.views`.
"""
