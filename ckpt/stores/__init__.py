"""Stores of objects: what is at a URL as a source, and a URL as the place of a target.

Files stand for the objects (`ckpt.stores.standins`), so that readers of all formats look at them as they look at local
ones; `objects` speaks with a store.  May import move.
"""

from ckpt.move import source
from ckpt.stores import standins

source.ask(standins)
