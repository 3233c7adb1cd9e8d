"""The tiny preset learns as it did when its losses were written down; another processor may round differently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.write_golden import GOLDEN, losses_of_tiny


def test_tiny_learns_as_written_down(tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text())
    for name, losses in losses_of_tiny(tmp_path, len(golden["losses"])).items():
        assert losses == pytest.approx(golden[name], abs=golden["tolerance"]), name
