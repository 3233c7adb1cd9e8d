"""Megatron-LM's unmodified `pretrain` under moe_ckpt.run: whatever dies, every digest is the plain run's."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_ckpt.faults.schedule import Kill
from scripts.fetch_megatron_lm import FOLDER
from tests.integrations.attached_jobs import NUM_ITERS, NUM_RANKS, Ended, Job, run_jobs

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="get it by: .venv/bin/python scripts/fetch_megatron_lm.py")

PLAIN = Job(name="plain", options=("--ckpt", "none"))
OPTIONS = {
    "moevement": ("--ckpt", "moevement", "--set", "window=2"),
    "gemini": ("--ckpt", "gemini", "--set", "every_iters=2"),
    "moc": ("--ckpt", "moc", "--set", "k_snapshot=4", "--set", "k_persist=4"),
}
PATIENT = ("--set", "runtime.heartbeat_s=30", "--set", "runtime.progress_s=60")
KILLS = (
    Kill(rank=2, iteration=2, phase="forward"),
    Kill(rank=1, iteration=3, phase="backward"),
    Kill(rank=3, iteration=5, phase="step"),
)
HANG = Kill(rank=2, iteration=5, phase="forward", signal="STOP")
NODE = Kill(rank=0, iteration=3, phase="backward", scope="node")


def require_equal(ended: Ended, plain: Ended) -> None:
    """Require that a job ended well and that its state was the plain run's after every iteration, on every rank."""
    assert ended.status == 0, ended.log
    wanted = plain.digests
    assert sorted(wanted) == [(rank, done) for rank in range(NUM_RANKS) for done in range(1, NUM_ITERS + 1)]
    assert ended.digests == wanted


def test_kills_in_each_phase_leave_the_plain_runs_state(tmp_path: Path) -> None:
    killed = Job(name="killed", options=(*OPTIONS["moevement"], *PATIENT), kills=KILLS)
    ended = run_jobs(tmp_path, PLAIN, killed)
    require_equal(ended["killed"], ended["plain"])
    assert ended["killed"].num_processes == [1, 2, 2, 2], "rank 0 has kept its process"


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", OPTIONS)
def test_each_policy_is_exact_under_all_faults(tmp_path: Path, policy: str) -> None:
    options = OPTIONS[policy]
    lost = (HANG,) if policy == "moc" else (NODE, HANG)  # moc keeps no copies on other nodes: storage has them
    jobs = (
        Job(name="attached", options=(*options, *PATIENT)),
        Job(name="killed", options=(*options, *PATIENT), kills=KILLS),
        Job(name="lost", options=(*options, "--set", "runtime.heartbeat_s=8"), kills=lost),
    )
    ended = run_jobs(tmp_path, PLAIN, *jobs, timeout_s=550.0)
    for job in jobs:
        require_equal(ended[job.name], ended["plain"])
    assert ended["attached"].num_processes == [1] * NUM_RANKS
    assert ended["killed"].num_processes == [1, 2, 2, 2]
