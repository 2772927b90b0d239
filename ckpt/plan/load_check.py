"""Answer to the question: can the target's library load the folder?"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ckpt.base.text import scheme_of


@dataclass(frozen=True, slots=True)
class LoadCheck:
    """A proved answer.

    `can` is None if it is unknown. `call` is the Python call that loads the folder. `lacks` lists optional files, such
    as a tokenizer, `packages` further libraries that it needs.
    """

    can: bool | None
    call: str = "AutoModel.from_pretrained"
    why: str = ""
    hint: str = ""
    lacks: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    def without(self, *lacks: str) -> LoadCheck:
        return replace(self, lacks=(*self.lacks, *lacks))

    def sentence(self, folder: str) -> str:
        name = self.call.rpartition(".")[2]
        if self.can:
            call = "" if scheme_of(folder) else f": {self.call}({folder!r})"
            lacks = f"; it has no {', no '.join(self.lacks)}" * bool(self.lacks)
            needs = f"; it needs the Python package {' and '.join(self.packages)}" * bool(self.packages)
            return f"{name} can load this folder{call}{lacks}{needs}"
        said = self.denial if self.can is False else f"not checked: if {name} can load this folder: {self.why}"
        return said + (f". {self.hint}" if self.hint else "")

    @property
    def denial(self) -> str:
        return f"{self.call.rpartition('.')[2]} cannot load this folder: {self.why}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "lacks": list(self.lacks), "packages": list(self.packages)}
