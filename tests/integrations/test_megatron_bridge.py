"""Megatron-Bridge's unmodified training loop under moe_ckpt.run: whatever dies, every digest is the plain run's."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.fetch_megatron_lm import BRIDGE_TAG, FOLDER, sources_of
from tests.integrations.attached_jobs import BRIDGE
from tests.integrations.exact_jobs import require_exact_through_checkpoints, require_exact_under_all_faults

RECIPE = Path(__file__).with_name("bridge_recipe.py")
SOURCES = sources_of(BRIDGE_TAG)


pytestmark = pytest.mark.skipif(
    not FOLDER.exists() or not SOURCES.exists(),
    reason=f"get it by: .venv/bin/python scripts/fetch_megatron_lm.py {BRIDGE_TAG}",
)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", ["moevement", "gemini", "moc"])
def test_the_loop_of_bridge_is_exact_under_all_faults(tmp_path: Path, policy: str) -> None:
    require_exact_under_all_faults(tmp_path, policy, script=RECIPE, sources=SOURCES / "src", loop=BRIDGE)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_bridges_own_checkpoints_are_written_and_loaded(tmp_path: Path) -> None:
    require_exact_through_checkpoints(tmp_path, script=RECIPE, sources=SOURCES / "src", loop=BRIDGE)
