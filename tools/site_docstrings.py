# SPDX-License-Identifier: Apache-2.0
"""griffe extension: the docstrings of `rmq`, which are plain text, as the reference shows them.

* Signatures of compiled modules come from their .pyi.
* Names of the reference become links to it.
* A class that callers do not make themselves lists its attributes.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import griffe

import rmq

SHOWN_BY_SIGNATURE = {"Message", "StoreConfig"}  # each argument is an attribute
ALSO = ("message.OffsetMsgId", "message.UniqKey")  # what public functions return
INTERNAL = {"rmq.indexfile.IndexFile.view"}
NAMES = "|".join(sorted((name for name in rmq.__all__ if name[0].isupper()), key=len, reverse=True))
PIECE = re.compile(rf"`[^`\n]*`|\b(?P<name>{NAMES})\b|[\\*_\[\]<>&#]")


class Docstrings(griffe.Extension):
    """What runs when the whole package is loaded."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for parent in _objects(pkg):
            if parent.is_module and isinstance(parent.filepath, Path) and parent.filepath.suffix != ".py":
                stub = parent.filepath.with_name(f"{parent.name}.pyi")
                if stub.exists():  # not of the module that Cython makes for all others
                    code = stub.read_text(encoding="utf-8")
                    _take_signatures(parent, griffe.visit(parent.name, stub, code, parent=parent.parent))
            if parent.name == "__init__":
                parent.docstring = None  # a class says all in its own
            if parent.docstring is not None:
                parent.docstring.value = _as_markdown(parent.docstring.value, parent.name)
        for name in (*rmq.__all__, *ALSO):
            item = pkg[name].final_target if pkg[name].is_alias else pkg[name]
            if item.is_class and name not in SHOWN_BY_SIGNATURE:
                _list_attributes(item)
        _show_defaults(pkg["StoreConfig"].final_target)


def _objects(parent: griffe.Object) -> list[griffe.Object]:
    """The object and all below it."""
    below = [item for member in parent.members.values() if not member.is_alias for item in _objects(member)]
    return [parent, *below]


def _take_signatures(compiled: griffe.Object, stub: griffe.Object) -> None:
    for name, known in compiled.members.items():
        member = stub.members.get(name)
        if member is None or member.is_alias or known.is_alias:
            continue
        if known.is_class:
            _take_signatures(known, member)
        elif known.is_function:
            known.parameters, known.returns, known.labels = member.parameters, member.returns, member.labels
            for parameter in known.parameters:
                if isinstance(parameter.annotation, griffe.Expr):
                    for part in parameter.annotation.iterate():
                        if isinstance(part, griffe.ExprName):
                            part.name = part.name.lstrip("_")  # the stub's own names for kinds of buffers


def _show_defaults(config: griffe.Object) -> None:
    """Values in place of the names of constants."""
    for field in dataclasses.fields(rmq.StoreConfig):
        attribute = config.members[field.name]
        if re.match(r"[\w *]*[A-Z]{2}", str(attribute.value)):
            attribute.value = repr(field.default)


def _as_markdown(text: str, own: str) -> str:
    """Plain text, in which only `code` means something, as Markdown."""

    def replace(match: re.Match[str]) -> str:
        name, piece = match["name"], match[0]
        if name:
            return name if name == own else f"[{name}][rmq.{name}]"
        if piece.startswith("`"):
            return piece
        return {"<": "&lt;", ">": "&gt;", "&": "&amp;"}.get(piece, f"\\{piece}")

    return re.sub(r"\n(?=(?:Raises|Source:|Cost:) )", "\n\n", PIECE.sub(replace, text))


def _list_attributes(item: griffe.Object) -> None:
    """Put the public attributes, their types and docstrings below the docstring of a class."""
    init = item.members.get("__init__")
    kinds = {parameter.name: parameter.annotation for parameter in init.parameters} if init is not None else {}
    lines = []
    for name, member in {**item.members, **item.inherited_members}.items():
        if name.startswith("_") or not member.is_attribute or member.path in INTERNAL:
            continue
        value = str(member.value)
        made = re.match(r"([A-Z]\w+)\(", value)  # by calling a class
        kind = str(member.annotation or kinds.get(value) or (made[1] if made else ""))
        kind = f": `{re.sub(r'[a-z]+[.](?=[A-Za-z])', '', kind)}`" if kind else ""
        text = f". {member.docstring.value}" if member.docstring is not None else ""
        lines.append(f"* `{name}`{kind}{text}")
    if lines:
        text = item.docstring.value if item.docstring is not None else ""
        item.docstring = griffe.Docstring("\n".join([text, "", *lines]), parent=item)
