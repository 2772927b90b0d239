"""Stores of objects: reading a source from a URL, and writing a target to one.

Files stand for the objects (`ckpt.stores.standins`), so that readers of all formats look at them as they look at local
files; `ckpt.stores.objects` speaks with a store.  Importing this package makes `ckpt.move.source` ask about such files.

May import: `ckpt.base`, `ckpt.move`, `ckpt.plan`.
"""

from ckpt.move import source
from ckpt.stores import standins

source.ask(standins)
