"""Packages whose names are loaded when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def names_of(package: str, where: Mapping[str, tuple[str, ...]]) -> tuple[Callable[[str], Any], list[str]]:
    """The `__getattr__` of a package and its names, in order. where: the names, by the module that defines them."""
    module_of = {name: module for module, names in where.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(importlib.import_module(module_of[name]), name)

    return get, sorted(module_of)
