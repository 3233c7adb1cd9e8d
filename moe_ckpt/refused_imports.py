"""Imports that raise errors: of training loops that would run without protection."""

from __future__ import annotations

import importlib.abc
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from moe_ckpt.errors import ConfigError


class RefusedImports(importlib.abc.MetaPathFinder):
    """Raises ConfigError instead of importing these modules.

    Args:
        messages: The message of the error, by the name of the module.
    """

    def __init__(self, messages: Mapping[str, str]) -> None:
        self._messages = messages

    def find_spec(
        self,
        fullname: str,
        # the importer's protocol has these arguments
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname in self._messages:
            raise ConfigError(self._messages[fullname])
        return None
