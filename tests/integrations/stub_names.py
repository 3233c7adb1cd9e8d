"""Stand-ins for names of packages that a CPU cannot have, or that a test does not need."""

from __future__ import annotations

from typing import Any


class Stub(type):
    """A name of a stubbed package: a class, all of whose attributes are classes, and which a call makes None of."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(name, (), {"_is_stub": True})

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        return None if "_is_stub" in vars(cls) else super().__call__(*arguments, **options)

    def __getitem__(cls, item: Any) -> Any:
        return cls
