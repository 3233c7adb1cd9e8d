"""Imports that are errors: of training loops that would run without protection."""

from __future__ import annotations

import importlib.abc
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from moe_ckpt.errors import ConfigError


class RefusedImports(importlib.abc.MetaPathFinder):
    """Raises a ConfigError in place of an import of these modules, each with its own
    message.
    """

    def __init__(self, messages: Mapping[str, str]) -> None:
        self._messages = messages

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the importer's protocol
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname in self._messages:
            raise ConfigError(self._messages[fullname])
        return None
