"""Object stores: read a source from a URL, write a target to one.

Stand-in files represent the objects, so every format's reader sees local files. Importing this package connects
`ckpt.move.source` to the stand-ins.

May import: `ckpt.base`, `ckpt.move`, `ckpt.plan`.
"""

from ckpt.move import source
from ckpt.stores import placeholder_files

source.ask(placeholder_files)
