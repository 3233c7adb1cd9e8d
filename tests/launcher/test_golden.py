"""The tiny preset learns as it did when its losses were recorded.

The comparison has a tolerance, because another processor may round differently.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.write_golden import (
    GOLDEN,
    NUM_ITERATIONS,
    RELEASE,
    TOLERANCE,
    losses_of_tiny,
)


def test_tiny_learns_as_written_down(tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text())
    if RELEASE not in golden:
        pytest.skip(
            f"no losses of torch {RELEASE}: scripts/write_golden.py writes them"
        )
    for name, losses in losses_of_tiny(tmp_path, NUM_ITERATIONS).items():
        assert losses == pytest.approx(golden[RELEASE][name], abs=TOLERANCE), name
