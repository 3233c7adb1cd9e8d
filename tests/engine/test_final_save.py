"""The last save of a stopped job: the next start continues from it, bit for bit.

The save does not need the help of the job's workers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from moe_ckpt import run_elastic
from moe_ckpt.elastic import job_store
from moe_ckpt.elastic.torchrun_variables import Launch
from moe_ckpt.errors import CheckpointLoadError, CheckpointSaveError
from moe_ckpt.events import LastSaveDone, read_events
from moe_ckpt.replication.client import DaemonClient
from moe_ckpt.replication.final_save import (
    SaveTarget,
    save_last,
    save_while_missing,
    saved_iterations,
    windows_in,
    write_save_target,
)
from moe_ckpt.run_folder import RunFolder
from moe_ckpt.snapshot.blobs import BlobFolder, own_path
from moe_ckpt.supervised_rank import SupervisedRank
from moe_ckpt.types import RunIdentity
from tests.engine.damage import flip_a_bit_of, rewrite_headers
from tests.harness.threads.job import TICKET, Daemon, ThreadJob
from tests.harness.threads.model import PAIR, Shape
from tests.harness.threads.stops import At, StoppedError, started_again
from tests.policies.profiles import config
from tests.small_disk import small_disk
from tests.waits import WAIT_S


def stopped(
    folder: Path, policy: str, *, after: int = 5, shape: Shape = PAIR, **settings: Any
) -> ThreadJob:
    """Return a job that was stopped after an iteration. Memory of the ranks remains."""
    job = ThreadJob(folder, config(policy, **settings), shape, settles=True)
    At(job, after, ends=True)
    with pytest.raises(StoppedError):
        job.run()
    return job


def saved(memory: Path) -> list[int]:
    """Run a rank's last save; return the iterations to which the rank's disk leads."""
    save_last(memory)
    return saved_iterations(memory)


def limit_disk(job: ThreadJob, rank: int, limit_bytes: int) -> None:
    """Limit the bytes that a rank's last save may take on the rank's disk."""
    target = SaveTarget(
        path=str(job.disk(rank)),
        limit_bytes=limit_bytes,
        identity=job.identity,
        shard=job.in_memory(rank).parts.adapter.position.shard,
    )
    write_save_target(job.memory(rank), target)


@pytest.mark.parametrize(
    ("policy", "settings", "wanted"),
    [
        ("moevement", {"window": 2, "pause_iters": 1}, 5),
        ("moevement", {"window": 1, "pause_iters": 1}, 5),
        ("gemini", {"every_iters": 2}, 4),
        ("checkfreq", {"every_iters": 2}, 4),
        ("flowcheck", {}, 5),
    ],
    ids=["moevement-2", "moevement-1", "gemini", "checkfreq", "flowcheck"],
)
def test_a_stopped_job_goes_on_from_its_last_save(
    policy: str, settings: dict[str, Any], wanted: int, tmp_path: Path
) -> None:
    job = stopped(tmp_path, policy, **settings)
    assert [saved(job.memory(rank))[-1] for rank in job.ranks] == [wanted] * 2
    assert started_again(job) == [("local disk", wanted)] * 2


@pytest.mark.parametrize(
    ("policy", "settings", "wanted"),
    [
        ("moevement", {"window": 2, "pause_iters": 1}, 5),
        ("gemini", {"every_iters": 2}, 4),
    ],
    ids=["moevement", "gemini"],
)
def test_a_job_goes_on_from_the_save_of_a_rank_that_waited_for_another_one(
    policy: str, settings: dict[str, Any], wanted: int, tmp_path: Path, stack: ExitStack
) -> None:
    """Rank 1 waits for rank 0, whose node is lost with its memory and disk."""
    job = stopped(tmp_path, policy, **settings)
    shutil.rmtree(job.memory(0))
    shutil.rmtree(job.disk(0))
    daemon = Daemon(job.memory(1), 1, lambda: True, keeps_own=False)
    stack.callback(daemon.close)
    client = stack.enter_context(closing(DaemonClient(job.memory(1), timeout_s=WAIT_S)))
    save_while_missing(job.memory(1), client, WAIT_S, [0])
    assert saved_iterations(job.memory(1))[-1] == wanted
    assert started_again(job) == [("local disk", wanted)] * 2


def test_both_ranks_of_a_stage_and_tied_embeddings_go_on(tmp_path: Path) -> None:
    job = stopped(
        tmp_path, "moevement", shape=Shape(tied=True), window=2, pause_iters=1
    )
    assert [saved(job.memory(rank))[-1] for rank in job.ranks] == [5] * 4
    assert started_again(job) == [("local disk", 5)] * 4


def test_where_one_rank_was_too_late_all_go_on_from_the_save_before(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"window": 1, "pause_iters": 1}
    job = stopped(tmp_path, "moevement", **settings)
    for rank in job.ranks:
        save_last(job.memory(rank))
    shutil.rmtree(job.folder / "memory")
    again = stopped(tmp_path, "moevement", after=7, **settings)
    assert list(windows_in(BlobFolder(again.disk(1)))), (
        "a start keeps the window that it has loaded"
    )
    assert len(list(windows_in(BlobFolder(again.disk(1))))) == 1, (
        "and no other: saves would fill the disk"
    )
    assert saved(again.memory(0))[-1] > 5
    assert started_again(again) == [("local disk", 5)] * 2


@pytest.mark.parametrize("fails", [False, True], ids=["never began", "failed"])
def test_where_a_rank_never_saved_all_begin_anew(fails: bool, tmp_path: Path) -> None:
    """The disk of rank 1 proves that no state was ever on all disks."""
    job = stopped(tmp_path, "moevement", window=1, pause_iters=1)
    assert saved(job.memory(0))[-1] == 5
    if fails:
        limit_disk(job, 1, 1)
        with pytest.raises(
            CheckpointSaveError, match=r"wanted at most ckpt.disk_budget_bytes=1"
        ):
            save_last(job.memory(1))
    assert started_again(job) == []
    assert list(windows_in(BlobFolder(job.disk(0)))) == [], (
        "a later start would take it for a state of this one"
    )


@pytest.mark.parametrize(
    "lose",
    [shutil.rmtree, lambda path: BlobFolder(path).clear()],
    ids=["disk", "files"],
)
def test_where_a_ranks_saved_state_is_lost_none_begins_anew(
    lose: Callable[[Path], None], tmp_path: Path
) -> None:
    job = stopped(tmp_path, "moevement", window=1, pause_iters=1)
    for rank in job.ranks:
        save_last(job.memory(rank))
    lose(job.disk(1))
    with pytest.raises(
        CheckpointLoadError,
        match=r"snapshots up to iteration \(rank 0: 5, rank 1: None\)",
    ):
        started_again(job)
    assert windows_in(BlobFolder(job.disk(0)))


def test_a_rank_whose_memory_is_being_replaced_saves_what_is_whole(
    tmp_path: Path,
) -> None:
    job = stopped(tmp_path, "gemini", every_iters=2)
    folders = [BlobFolder(own_path(job.memory(rank))) for rank in job.ranks]
    for folder in folders:
        folder.incoming()
    folders[1].keep_incoming()  # keeps no blob, as before a load from disks
    assert saved(job.memory(0))[-1] == 4
    assert saved(job.memory(1)) == []


def test_a_window_without_its_steps_is_not_saved(tmp_path: Path) -> None:
    job = stopped(tmp_path, "moevement", window=2, pause_iters=1)
    own = BlobFolder(own_path(job.memory(0)))
    for key in own.keys():  # noqa: SIM118 - not a mapping
        if key.startswith("step-"):
            own.withdraw(key)
    assert 5 not in saved(job.memory(0))


def test_a_save_leaves_what_another_node_has_not_finished(tmp_path: Path) -> None:
    """The rank was cut off, and its successor on a spare node is writing."""
    job = stopped(tmp_path, "moevement", window=1, pause_iters=1)
    successor = BlobFolder(job.disk(0), synced=True)
    writing = successor.allocate(100)
    assert saved(job.memory(0))[-1] == 5
    successor.deposit("snapshot-9-0-1", b"header", writing, 100)
    assert successor.get("snapshot-9-0-1").payload_bytes == 100


def test_a_disk_that_a_dead_daemon_has_filled_has_room_for_the_last_save(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "snapshots" / "rank0000") as disk:
        job = stopped(tmp_path, "moevement", window=1, pause_iters=1)
        there = os.statvfs(disk.path)
        BlobFolder(job.disk(0), synced=True).allocate(there.f_bavail * there.f_frsize)
        assert saved(job.memory(0))[-1] == 5


def test_an_old_save_of_a_node_that_was_cut_off_is_not_chosen(tmp_path: Path) -> None:
    """The save comes last, after newer windows of the successor."""
    settings: dict[str, Any] = {"window": 1, "pause_iters": 1}
    job = stopped(tmp_path, "moevement", **settings)
    cut_off = job.memory(0).rename(tmp_path / "cut off")
    shutil.rmtree(job.folder / "memory")
    again = stopped(tmp_path, "moevement", after=7, **settings)
    newest = [saved(again.memory(rank))[-1] for rank in again.ranks]
    assert newest[0] > 5
    assert {5, newest[0]} <= set(saved(cut_off))
    assert started_again(again) == [("local disk", iteration) for iteration in newest]


def test_a_rank_without_a_worker_so_far_saves_nothing(tmp_path: Path) -> None:
    assert saved(tmp_path) == []


def flip_payload(folder: Path) -> None:
    flip_a_bit_of(folder, lambda header: header.iteration == 5)


def cut_payloads(folder: Path) -> None:
    for buffer in (folder / "buffers").iterdir():
        os.truncate(buffer, buffer.stat().st_size // 2)


def flip_entries(kind: str) -> Callable[[Path], None]:
    def flip(folder: Path) -> None:
        paths = list((folder / "index").glob(f"{kind}*.blob"))
        assert paths
        for path in paths:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)

    return flip


def name_another_run(folder: Path) -> None:
    identity = RunIdentity(run_id="another", model="model", layout=PAIR.layout)
    rewrite_headers(folder, lambda header: replace(header, identity=identity))


def name_another_model(folder: Path) -> None:
    identity = RunIdentity(run_id="run", model="another", layout=PAIR.layout)
    rewrite_headers(folder, lambda header: replace(header, identity=identity))


DAMAGES = pytest.mark.parametrize(
    "damage",
    [
        flip_payload,
        cut_payloads,
        flip_entries("snapshot"),
        flip_entries("step-"),
        name_another_run,
        name_another_model,
    ],
    ids=["bit", "cut", "entry", "step", "another run", "another model"],
)


@DAMAGES
def test_a_window_on_disk_that_a_start_refuses_is_not_saved(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    job = stopped(tmp_path, "moevement", window=2, pause_iters=1)
    assert saved(job.memory(1))[-1] == 5
    damage(job.disk(1))
    assert 5 not in saved_iterations(job.memory(1))
    assert saved(job.memory(0))[-1] == 5, "the disk of another rank is another"


def test_a_window_that_was_damaged_in_memory_is_not_saved(tmp_path: Path) -> None:
    job = stopped(tmp_path, "gemini", every_iters=2)
    flip_a_bit_of(own_path(job.memory(1)), lambda header: header.iteration == 4)
    assert 4 not in saved(job.memory(1))


def test_an_intact_window_beside_a_damaged_one_counts(tmp_path: Path) -> None:
    job = stopped(tmp_path, "moevement", window=1, pause_iters=1, keep_windows=2)
    *older, newest = saved(job.memory(1))
    assert older
    flip_a_bit_of(job.disk(1), lambda header: header.iteration == newest)
    assert saved_iterations(job.memory(1)) == older


def test_no_rank_says_that_it_is_safe_to_kill_at_a_damaged_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks are as after a start that has refused the windows on disk.

    No window in memory replaces the refused windows.
    """
    job = stopped(tmp_path, "moevement", window=1, pause_iters=1)
    save_last(job.memory(1))
    flip_a_bit_of(job.disk(1), lambda _: True)
    BlobFolder(own_path(job.memory(1))).clear()
    assert run_elastic.save_and_report(supervised_of(job, 1), WAIT_S) == 0
    assert capsys.readouterr().out == ""


def supervised_of(job: ThreadJob, rank: int) -> SupervisedRank:
    launch = Launch(
        global_rank=rank, world_size=2, local_rank=rank, local_world_size=2, attempt=0
    )
    facts: Any = {
        "ticket": TICKET,
        "ranks_per_node": 1,
        "replicas": 1,
        "has_daemon": True,
        "host": "127.0.0.1",
    }
    folder = RunFolder(path=job.memory(rank), run_id="run", clock_origin_unix_s=0.0)
    return SupervisedRank(
        launch=launch, memory=job.memory(rank), folder=folder, **facts
    )


def test_a_last_save_that_a_disk_ends_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = stopped(tmp_path, "moevement", window=1, pause_iters=1)
    limit_disk(job, 1, 1)
    assert run_elastic.save_and_report(supervised_of(job, 1), WAIT_S) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "error: rank 1: not saved, the next start uses an older state: local disk"
    )
    assert said.count("\n") == 1


def test_a_disk_with_room_for_the_older_window_alone_has_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks may have the older window.

    So rank 1 reports the older window, although the newest window is not saved.
    """
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    job = stopped(tmp_path, "moevement", window=1, pause_iters=1, keep_windows=2)
    *older, newest = saved(job.memory(0))
    assert older
    there = sum(
        file.stat().st_size for file in job.disk(0).rglob("*") if file.is_file()
    )
    limit_disk(job, 1, 5 * there // 6)
    assert run_elastic.save_and_report(supervised_of(job, 1), WAIT_S) == 1
    said = capsys.readouterr()
    assert said.err.startswith(
        "error: rank 1: not saved, the next start uses an older state: local disk"
    )
    assert said.out.startswith(f"rank 1: iteration {older[-1]} is on disk")
    assert saved_iterations(job.memory(1)) == older, newest
    logged = [
        each.event for each in read_events(supervised_of(job, 1).folder.events(1))
    ]
    assert logged == [LastSaveDone(iteration=iteration) for iteration in older]


def test_a_rank_that_is_cut_off_saves_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No store answers: only other ranks can report that the job is safe to kill."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    job = stopped(tmp_path, "moevement", window=1, pause_iters=1)
    assert run_elastic.save_and_report(supervised_of(job, 0), WAIT_S) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rank 0: iteration 5 is on disk",
        (
            "rank 0: the store of the job does not answer: whether all ranks have it is"
            " unknown"
        ),
    ]


class SlowRanks(dist.HashStore):
    """A job's store to which other ranks report once a rank waits for the reports."""

    def wait(
        self, keys: list[str], timeout: timedelta = timedelta(seconds=WAIT_S)
    ) -> None:
        for key in keys:
            self.set(key, "[5]")
        super().wait(keys, timeout)


@pytest.mark.parametrize(("rank", "hosts"), [(0, True), (0, False), (1, True)])
def test_the_rank_with_the_store_waits_for_the_others_reports(
    rank: int, hosts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store ends with the supervisor of the rank that hosts the store."""
    store, answers = SlowRanks(), list[int | None]()
    monkeypatch.setattr(run_elastic, "open_store", lambda part: store)
    if hosts:
        monkeypatch.setenv(job_store._HOSTED, "True")
    run_elastic.ask_if_safe(rank, 3, [5], answers)
    assert answers == [None]
    assert store.check(["2"]) == (hosts and rank == 0)
