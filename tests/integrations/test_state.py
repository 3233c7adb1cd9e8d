"""Attached loops keep the promise `run.exactness=state`.

After each death every rank has a state that the rank had logged before. The tests need
real jobs, as in `tests/launcher/test_elastic_state.py`: after each death a loop of
another project is entered again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.prove.compare import Digests, first_changed, read_digests
from moe_ckpt.faults.schedule import Kill
from scripts.fetch_megatron_lm import BRIDGE_TAG, FOLDER, SWIFT_TAG, sources_of
from tests.harness.jobs.attached_jobs import BRIDGE, EXAMPLE, SWIFT, Job, run_jobs
from tests.harness.jobs.exact_attached_jobs import PATIENT

HERE = Path(__file__).parent
POLICIES = {
    # by logged gradients, which ckpt.recovery=auto means under this promise
    "moevement": ("window=3",),
    "gemini": ("every_iters=1",),
    "checkfreq": ("every_iters=1",),
    "moc": ("every_iters=1", "k_snapshot=4", "k_persist=4"),
    "moetion": ("every_iters=1", "boost=0", "experts=4", "remote_experts=4"),
    "flowcheck": ("max_lag_iters=0",),
}
LOOPS: dict[str, dict[str, Any]] = {
    "megatron-lm": {"script": EXAMPLE},
    BRIDGE_TAG: {"script": HERE / "bridge_recipe.py", "loop": BRIDGE},
    SWIFT_TAG: {"script": HERE / "swift_recipe.py", "loop": SWIFT},
}
KILLS = (
    Kill(rank=2, iteration=2, phase="forward"),
    Kill(rank=1, iteration=3, phase="backward"),
    Kill(rank=3, iteration=4, phase="step"),
    Kill(rank=0, iteration=5, phase="snapshot"),
)


def killed(folder: Path, loop: str, policy: str, *settings: str) -> Digests:
    """Run a noisy job of a loop through all kills, and return the job's digests."""
    if not FOLDER.exists() or (
        loop in (BRIDGE_TAG, SWIFT_TAG) and not sources_of(loop).exists()
    ):
        pytest.skip(f"get it by: .venv/bin/python scripts/fetch_megatron_lm.py {loop}")
    words = [f"--set={each}" for each in (*settings, "run.digest_tensors=true")]
    job = Job(
        name="killed",
        options=(*LOOPS[loop].get("loop", ()), "--ckpt", policy, *PATIENT, *words),
        kills=KILLS,
        script=str(LOOPS[loop]["script"]),
        is_noisy=True,
    )
    ended = run_jobs(folder, job)["killed"]
    assert ended.status == 0, ended.log
    assert ended.num_processes == [2, 2, 2, 2]
    return read_digests(ended.run)


@pytest.mark.full
@pytest.mark.parametrize("loop", LOOPS)
def test_no_state_of_a_loop_is_reached_twice_by_training(
    tmp_path: Path,
    loop: str,
) -> None:
    """Noise keeps replays from states that ranks had before.

    Without noise, the tests below would also pass with replays.
    """
    digests = killed(tmp_path, loop, "moevement", "window=2", "run.exactness=bitwise")
    assert first_changed(digests, may_be_older=False) is not None, "moevement replays"


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("loop", LOOPS)
def test_all_ranks_of_a_loop_have_a_state_from_before(
    tmp_path: Path,
    loop: str,
    policy: str,
) -> None:
    digests = killed(tmp_path, loop, policy, *POLICIES[policy], "run.exactness=state")
    assert digests.exactness == "state"
    # not each death leads back: one in the update may end in a state that is new
    assert len(digests.returns) >= (len(KILLS) - 1) * 3
    assert first_changed(digests, may_be_older=False) is None
