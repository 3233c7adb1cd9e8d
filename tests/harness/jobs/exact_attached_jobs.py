"""Checks that attached jobs have the states of a plain run.

The attached jobs live through all faults, and through the checkpoints of their loop.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from moe_ckpt.faults.schedule import Kill
from tests.harness.jobs.attached_jobs import (
    EXAMPLE,
    NUM_ITERS,
    NUM_RANKS,
    Ended,
    Job,
    run_jobs,
)

PLAIN = Job(name="plain", options=("--ckpt", "none"))
OPTIONS = {
    "moevement": ("--ckpt", "moevement", "--set", "window=2"),
    "gemini": ("--ckpt", "gemini", "--set", "every_iters=2"),
    "moc": ("--ckpt", "moc", "--set", "k_snapshot=4", "--set", "k_persist=4"),
    "checkfreq": ("--ckpt", "checkfreq", "--set", "every_iters=2"),
    "moetion": (
        "--ckpt",
        "moetion",
        "--set",
        "boost=0",
        "--set",
        "experts=4",
        "--set",
        "remote_experts=4",
    ),
    "flowcheck": ("--ckpt", "flowcheck"),
}
BY_GRADIENTS = (
    *OPTIONS["moevement"],
    *("--set", "recovery=gradients", "--set", "audit_every_iters=2"),
)
PATIENT = ("--set", "runtime.heartbeat_s=30", "--set", "runtime.progress_s=60")
CHECKED = ("--set", "run.check_determinism=true")
KILLS = (
    Kill(rank=2, iteration=2, phase="forward"),
    Kill(rank=1, iteration=3, phase="backward"),
    Kill(rank=3, iteration=5, phase="step"),
)
HANG = Kill(rank=2, iteration=5, phase="forward", signal="STOP")
NODE = Kill(rank=0, iteration=3, phase="backward", scope="node")


def require_equal(ended: Ended, plain: Ended) -> None:
    """Require that a job ended well, with the states of a plain run.

    The states are compared after every iteration, on every rank.
    """
    assert ended.status == 0, ended.log
    wanted = plain.digests
    assert sorted(wanted) == [
        (rank, done) for rank in range(NUM_RANKS) for done in range(1, NUM_ITERS + 1)
    ]
    assert ended.digests == wanted


def require_exact_under_all_faults(
    folder: Path,
    policy: str,
    *,
    script: Path = EXAMPLE,
    sources: Path | None = None,
    loop: tuple[str, ...] = (),
) -> None:
    """Require a policy to be exact without faults and under all faults.

    The faults are kills in one job, and the loss of a node and a hang in another job.

    Args:
        folder: Folder for the files of the jobs.
        policy: The policy, a key of `OPTIONS`.
        script: Path of the training script.
        sources: Sources that replace those of the wheel.
        loop: Options that choose the training loop.
    """
    options = (*OPTIONS[policy], *loop)
    # no lost node for checkfreq, whose disk would be lost with the node
    lost = (HANG,) if policy == "checkfreq" else (NODE, HANG)
    jobs = (
        Job(
            name="attached", options=(*options, *PATIENT, *CHECKED), script=str(script)
        ),
        Job(
            name="killed", options=(*options, *PATIENT), kills=KILLS, script=str(script)
        ),
        Job(
            name="lost",
            options=(*options, "--set", "runtime.heartbeat_s=8"),
            kills=lost,
            script=str(script),
        ),
    )
    plain = Job(name="plain", options=(*PLAIN.options, *loop), script=str(script))
    ended = run_jobs(folder, plain, *jobs, sources=sources)
    for job in jobs:
        require_equal(ended[job.name], ended["plain"])
    assert ended["attached"].num_processes == [1] * NUM_RANKS
    assert ended["killed"].num_processes == [1, 2, 2, 2]


def require_exact_through_checkpoints(
    folder: Path,
    *,
    script: Path = EXAMPLE,
    sources: Path | None = None,
    loop: tuple[str, ...] = (),
) -> None:
    """Require a killed run to equal a plain run through the loop's own checkpoints.

    Each run writes checkpoints, and another run of each kind loads one. The runs load
    no optimizer: Megatron-Core cannot load the state of torch's Adam, which is the Adam
    on a CPU. The arguments are those of `require_exact_under_all_faults`.
    """
    plain = Job(name="plain", options=(*PLAIN.options, *loop), script=str(script))
    killed = replace(plain, options=(*OPTIONS["moevement"], *PATIENT, *loop))
    on = Kill(rank=2, iteration=NUM_ITERS + 2, phase="backward")
    ended = run_jobs(
        folder,
        replace(plain, arguments=_saving(folder / "of-plain")),
        replace(
            killed, name="killed", kills=KILLS, arguments=_saving(folder / "of-killed")
        ),
        replace(plain, name="on", arguments=_loading(folder / "of-plain")),
        replace(
            killed,
            name="killed on",
            kills=(on,),
            arguments=_loading(folder / "of-killed"),
        ),
        sources=sources,
    )
    require_equal(ended["killed"], ended["plain"])
    after, wanted = ended["killed on"], ended["on"].digests
    assert after.status == 0, after.log
    assert sorted(wanted) == [
        (rank, NUM_ITERS + done) for rank in range(NUM_RANKS) for done in range(1, 5)
    ]
    assert {
        key: digest for key, digest in after.digests.items() if key in wanted
    } == wanted
    assert after.num_processes == [1, 1, 2, 1]


def _saving(folder: Path) -> tuple[str, ...]:
    """Return the arguments of a job that saves checkpoints in a folder."""
    return (
        "--save",
        str(folder),
        "--save-interval",
        "2",
        "--ckpt-format",
        "torch_dist",
    )


def _loading(folder: Path) -> tuple[str, ...]:
    """Return the arguments of a job that loads a checkpoint and trains on."""
    without = ("--no-load-optim", "--no-load-rng", "--override-opt-param-scheduler")
    return ("--load", str(folder), "--train-iters", str(NUM_ITERS + 4), *without)
