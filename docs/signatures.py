"""Signatures of functions whose options travel in groups: griffe reads code, which names the groups alone."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from griffe import Extension, Function, Parameter, ParameterKind, Parameters

from ckpt.plan import keywords

#: Modules that types are shown without.
_MODULES = re.compile(r"\b(?:collections\.abc|os|typing|ckpt\.plan\.checkpoint)\.")


class Signatures(Extension):
    """An extension that shows each option as a keyword, with its type and default."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        known = {one.name: one for one in func.parameters}
        if not any(str(one.annotation).startswith("Unpack[") for one in known.values()):
            return
        signature = inspect.signature(getattr(import_module(func.module.path), func.name))
        for overload in func.overloads or ():
            overload.parameters = Parameters(*_expanded(overload))
        written = {name: one for name, one in known.items() if one.kind is not ParameterKind.var_keyword}
        func.parameters = Parameters(*(written.get(name) or _option(one) for name, one in signature.parameters.items()))


def _expanded(overload: Function) -> Iterator[Parameter]:
    """Yield the parameters of an overload, and each key of its options."""
    for one in overload.parameters:
        if not (group := re.fullmatch(r"Unpack\[(\w+)\]", str(one.annotation))):
            yield one
            continue
        for name, hint in getattr(keywords, group[1]).__annotations__.items():
            kind = ParameterKind.keyword_only
            yield Parameter(name, annotation=hint.__forward_arg__, kind=kind, default="...")


def _option(one: inspect.Parameter) -> Parameter:
    if one.kind is one.VAR_KEYWORD:
        return Parameter(one.name, annotation="OptionValue", kind=ParameterKind.var_keyword)
    annotation = _MODULES.sub("", inspect.formatannotation(one.annotation))
    return Parameter(one.name, annotation=annotation, kind=ParameterKind.keyword_only, default=repr(one.default))
