"""A CPU process takes its share of the machine's cores, or the user's thread number."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from launcher.run import use_cpu

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="kernels of a GPU use no threads"
    ),
    # torch warns about kernels that the CPU stand-in replaces
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin with a number of threads that is the share of no process."""
    before = torch.get_num_threads()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(os.sched_getaffinity(0))))
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_a_process_takes_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    use_cpu()
    assert torch.get_num_threads() == 1


def test_the_number_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    use_cpu()
    assert torch.get_num_threads() == 3
