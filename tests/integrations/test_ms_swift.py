"""ms-swift's unmodified Megatron trainer under moe_ckpt.run: whatever dies, every digest is the plain run's."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.fetch_megatron_lm import FOLDER, SWIFT_TAG, sources_of
from tests.integrations.attached_jobs import SWIFT
from tests.integrations.exact_jobs import require_exact_under_all_faults

RECIPE = Path(__file__).with_name("swift_recipe.py")
SOURCES = sources_of(SWIFT_TAG)


pytestmark = pytest.mark.skipif(
    not FOLDER.exists() or not SOURCES.exists(),
    reason=f"get it by: .venv/bin/python scripts/fetch_megatron_lm.py {SWIFT_TAG}",
)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", ["moevement", "gemini", "moc"])
def test_the_trainer_of_ms_swift_is_exact_under_all_faults(tmp_path: Path, policy: str) -> None:
    require_exact_under_all_faults(tmp_path, policy, script=RECIPE, loop=SWIFT)
