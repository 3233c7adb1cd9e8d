"""Stand-ins for packages that a CPU cannot have, or that a test does not need.

The module also makes the modules of a chosen package import the stand-ins.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class Stub(type):
    """Metaclass of the stand-ins for names of a package.

    A stand-in is a class. All attributes of a stand-in are stand-ins, and a call of a
    stand-in returns None. Classes that derive from a stand-in can be instantiated.
    """

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(name, (), {"_is_stub": True})

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        return (
            None if "_is_stub" in vars(cls) else super().__call__(*arguments, **options)
        )

    def __getitem__(cls, item: Any) -> Any:
        return cls


def stub_imports(stubbed: Sequence[str], importer: str) -> Mapping[str, Any]:
    """Let the modules of one package import stand-ins.

    Args:
        stubbed: Names of the packages and modules that stand-ins replace.
        importer: Package whose modules import the stand-ins. All other modules import
            as before.

    Returns:
        The stand-ins, by the names in `stubbed`.
    """
    stubs: dict[str, Any] = {
        name: Stub(name, (), {"_is_stub": True, "__version__": "0"}) for name in stubbed
    }
    real = builtins.__import__

    def load(
        name: str,
        scope: Any = None,
        local: Any = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        root = next((each for each in stubs if f"{name}.".startswith(f"{each}.")), None)
        if (
            level
            or root is None
            or not f"{(scope or {}).get('__name__')}.".startswith(f"{importer}.")
        ):
            return real(name, scope, local, fromlist, level)
        if not fromlist and "." in root:
            return real(name.partition(".")[0], scope, local, fromlist, level)
        found: Any = stubs[root]
        for part in name.removeprefix(root).split(".")[1:] if fromlist else ():
            found = getattr(found, part)
        return found

    builtins.__import__ = load
    return stubs


def enter(name: str, folder: Path) -> Any:
    """Register a package as imported, without running the package's `__init__`.

    Args:
        name: Name of the package. The parent package must be importable.
        folder: Folder of the package's modules.

    Returns:
        The package.
    """
    package: Any = ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(importlib.import_module(parent), child, package)
    return package
