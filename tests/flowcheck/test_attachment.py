"""Checkpoint servers are attached to supervised ranks only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_ckpt.attach import attach
from moe_ckpt.errors import ConfigError
from tests.policies.profiles import config


def test_a_rank_without_a_supervisor_has_no_servers(tmp_path: Path) -> None:
    """The refusal comes before anything of the training is read."""
    training: dict[str, Any] = dict.fromkeys(("identity", "state", "loop", "events"))
    with pytest.raises(ConfigError, match=r"^attach\(elastic\): got None, wanted"):
        attach(ckpt=config("flowcheck"), folder=tmp_path, last_iteration=1, **training)
