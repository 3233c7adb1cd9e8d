"""Fixture with new ranks for each test of copies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.replication.peers import Ranks, ranks_in


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with ranks_in(tmp_path) as ranks:
        yield ranks
