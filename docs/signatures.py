"""Signatures of functions whose options travel in groups: griffe reads code, which names the groups alone."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

from griffe import Extension, Function, Parameter, ParameterKind, Parameters

#: Modules that types are shown without.
_MODULES = re.compile(r"\b(?:collections\.abc|os|typing|ckpt\.plan\.checkpoint)\.")


class Signatures(Extension):
    """An extension that shows each option as a keyword, with its type and default."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        known = {one.name: one for one in func.parameters}
        if not any(str(one.annotation).startswith("Unpack[") for one in known.values()):
            return
        signature = inspect.signature(getattr(import_module(func.module.path), func.name))
        written = {name: one for name, one in known.items() if one.kind is not ParameterKind.var_keyword}
        func.parameters = Parameters(*(written.get(name) or _option(one) for name, one in signature.parameters.items()))


def _option(one: inspect.Parameter) -> Parameter:
    if one.kind is one.VAR_KEYWORD:
        return Parameter(one.name, annotation="OptionValue", kind=ParameterKind.var_keyword)
    annotation = _MODULES.sub("", inspect.formatannotation(one.annotation))
    return Parameter(one.name, annotation=annotation, kind=ParameterKind.keyword_only, default=repr(one.default))
