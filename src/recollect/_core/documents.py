"""Frozen records as JSON documents and back: a kind and a version first, defaults left out. No torch here."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
import reprlib
import types
import typing
from typing import Any, TypeVar

R = TypeVar("R")

_KIND = "recollect"
_VERSION = "version"


def write_document(record: Any, *, kind: str, version: int) -> str:
    """The record as JSON text. Equal records give equal text.

    >>> from recollect._core.decisions import Site
    >>> write_document(Site(region="block", op="aten.mm.default", call=1), kind="site", version=1)
    '{"recollect": "site", "version": 1, "region": "block", "op": "aten.mm.default", "call": 1}'
    """
    return json.dumps({_KIND: kind, _VERSION: version, **_plain(record)})


def read_document(text: str, record: type[R], *, kind: str, version: int) -> R:
    """The record that `write_document` wrote.

    Raises:
        ValueError: the text is not such a document, has a later version, or a field is missing, unknown or of another
            type.

    >>> from recollect._core.decisions import Site
    >>> read_document('{"recollect": "site", "version": 9}', Site, kind="site", version=1)
    Traceback (most recent call last):
    ...
    ValueError: this site has version 9, but this recollect reads versions up to 1: upgrade recollect, or make the site
    again
    """
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError, TypeError) as error:
        message = f"expected a recollect {kind} as JSON: {error}"
        if isinstance(text, (str, os.PathLike)) and str(text).endswith(".json"):
            message = (
                f"expected a recollect {kind} as JSON, not the name of a file: pass Path({str(text)!r}).read_text()"
            )
        raise ValueError(message) from None
    found = data.pop(_KIND, None) if isinstance(data, dict) else None
    if found != kind:
        what = f"a recollect {found}" if found else "something else"
        message = f"expected a recollect {kind}, found {what}"
        raise ValueError(message)
    written = data.pop(_VERSION, None)
    if not isinstance(written, int) or written > version:
        message = (
            f"this {kind} has version {written}, but this recollect reads versions up to {version}: upgrade "
            f"recollect, or make the {kind} again"
        )
        raise ValueError(message)
    made: R = _record(data, record, kind)
    return made


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        fields = [field for field in dataclasses.fields(value) if field.init]
        return {
            field.name: _plain(getattr(value, field.name))
            for field in fields
            if getattr(value, field.name) != field.default
        }
    if isinstance(value, enum.Enum):
        return value.value
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


@functools.lru_cache(maxsize=64)  # of records of ours: to evaluate hints for each took three quarters of the reading
def _fields_of(record: type) -> tuple[dict[str, dataclasses.Field[Any]], dict[str, Any]]:
    """The fields that a record is made with, and their types, by name."""
    fields = {field.name: field for field in dataclasses.fields(record) if field.init}
    return fields, typing.get_type_hints(record)


def _record(data: Any, record: type, where: str) -> Any:
    fields, hints = _fields_of(record)
    if not isinstance(data, dict) or not set(data) <= set(fields):
        strange = sorted(set(data) - set(fields)) if isinstance(data, dict) else data
        message = f"{where}: expected the fields {', '.join(fields)}; not {reprlib.repr(strange)}"
        raise ValueError(message)
    missing = [name for name, field in fields.items() if name not in data and field.default is dataclasses.MISSING]
    if missing:
        message = f"{where}: {', '.join(missing)} missing"
        raise ValueError(message)
    return record(**{name: _typed(item, hints[name], f"{where}.{name}") for name, item in data.items()})


def _typed(data: Any, hint: Any, where: str) -> Any:
    """The value of a field, of the type that it is declared with."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
        if data is None:
            return None
    if typing.get_origin(hint) is tuple and isinstance(data, list):
        inner = typing.get_args(hint)[0]
        return tuple(_typed(item, inner, f"{where}[{number}]") for number, item in enumerate(data))
    if dataclasses.is_dataclass(hint):
        return _record(data, typing.cast("type", hint), where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum) and data in [member.value for member in hint]:
        return hint(data)
    if hint is float and type(data) is int:
        return float(data)
    if type(data) is not hint:
        message = f"{where}: expected {getattr(hint, '__name__', hint)}, not {reprlib.repr(data)}"
        raise ValueError(message)
    return data
