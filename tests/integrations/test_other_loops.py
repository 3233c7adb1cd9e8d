"""Loops of Megatron-Bridge and ms-swift under moe_ckpt.run are exact after all faults.

The loops are unmodified. Every digest equals the digest of a plain run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.fetch_megatron_lm import BRIDGE_TAG, FOLDER, SWIFT_TAG, sources_of
from tests.harness.jobs.attached_jobs import BRIDGE, SWIFT
from tests.harness.jobs.exact_attached_jobs import (
    require_exact_through_checkpoints,
    require_exact_under_all_faults,
)

pytestmark = pytest.mark.full
HERE = Path(__file__).parent
OF_BRIDGE: dict[str, Any] = {
    "script": HERE / "bridge_recipe.py",
    "sources": sources_of(BRIDGE_TAG) / "src",
    "loop": BRIDGE,
}
LOOPS = {
    BRIDGE_TAG: OF_BRIDGE,
    SWIFT_TAG: {"script": HERE / "swift_recipe.py", "loop": SWIFT},
}


def require_sources(tag: str) -> None:
    if not FOLDER.exists() or not sources_of(tag).exists():
        pytest.skip(f"get it by: .venv/bin/python scripts/fetch_megatron_lm.py {tag}")


@pytest.mark.parametrize("policy", ["moevement", "gemini", "moc"])
@pytest.mark.parametrize("tag", LOOPS)
def test_a_loop_is_exact_under_all_faults(
    tmp_path: Path, tag: str, policy: str
) -> None:
    require_sources(tag)
    require_exact_under_all_faults(tmp_path, policy, **LOOPS[tag])


def test_bridges_own_checkpoints_are_written_and_loaded(tmp_path: Path) -> None:
    require_sources(BRIDGE_TAG)
    require_exact_through_checkpoints(tmp_path, **OF_BRIDGE)
