"""Error messages of refused settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moe_ckpt.errors import ConfigError


def error_of(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """Make a call that is refused, and return the message of its ConfigError."""
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **named)
    return str(caught.value)
