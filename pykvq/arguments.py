"""Checks of arguments whose type a caller may get wrong."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from pykvq.errors import InvalidArgumentError

_WHATS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bytes: "bytes",
    bool: "True or False",
    os.PathLike: "a path",
    Mapping: "a dict",
    Iterable: "a list",
}

# NumPy's numbers count too
_ABSTRACT: dict[type, type] = {int: Integral, float: Real}


def require_type(name: str, value: Any, *kinds: type, optional: bool = False) -> None:
    """Refuses a value of another type; a bool is no number, and ``optional`` allows None.

    Raises:
        InvalidArgumentError: names the argument, what it must be, and what it is.
    """
    if (optional and value is None) or (isinstance(value, bool) and bool in kinds):
        return
    if not isinstance(value, tuple(_ABSTRACT.get(kind, kind) for kind in kinds)) or isinstance(value, bool):
        what = " or ".join(_WHATS[kind] for kind in kinds)
        raise InvalidArgumentError(f"{name} must be {what}, got {value!r}")
