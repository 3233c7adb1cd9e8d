"""A corrupt source that passes every check shows in the loss.

All ranks then go one step down, to another source.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launcher.config import Settings, compose_settings
from launcher.loop import StagePasses
from launcher.run import run
from moe_ckpt.durable.checkpoint_folder import MARKER
from moe_ckpt.engine.in_memory_tier import InMemoryTier
from moe_ckpt.engine.window_agreement import WindowAgreement
from moe_ckpt.events import CheckpointSaved, LossNotFinite, StateResumed
from moe_ckpt.loop import Losses
from moe_ckpt.megatron.durable import MegatronDurableState
from moe_ckpt.replication.local_disk import LocalDisk
from moe_ckpt.snapshot.capture import Piece, SnapshotEngine, SnapshotRequest
from moe_ckpt.types import Phase, ReadyGradients
from tests.harness.gloo.ranks import RankFailedError, rank_store, run_ranks
from tests.harness.jobs.campaign import (
    Point,
    all_go_back,
    call_is_a_point,
    lose_nodes,
    survive,
)
from tests.harness.jobs.references import uninterrupted
from tests.harness.jobs.training import Kill, KillingHooks, events_of, fast
from tests.scenarios import BIAS, THIRTY_SIX

GOES_ON = "training goes on as it is: nothing else leads elsewhere"


def spoil(windows: Collection[int]) -> None:
    """Let all bytes of rank 3's snapshots be 0xFF, so that numbers are NaN.

    The checksums match these bytes.

    Args:
        windows: Starts of the windows whose snapshots are damaged.
    """
    capture = SnapshotEngine.capture

    def capture_spoiled(
        self: SnapshotEngine,
        wanted: Sequence[SnapshotRequest],
        *,
        bubble_bytes: float = 0.0,
    ) -> None:
        requests = [
            _spoiled(each)
            if each.header.window_start in windows
            and each.header.shard.global_rank == 3
            else each
            for each in wanted
        ]
        capture(self, requests, bubble_bytes=bubble_bytes)

    SnapshotEngine.capture = capture_spoiled  # type: ignore[method-assign]


def _spoiled(request: SnapshotRequest) -> SnapshotRequest:
    return request._replace(
        pieces=lambda: [*map(_spoiled_piece, request.pieces())],
        changing=[*map(_spoiled_piece, request.changing)],
    )


def _spoiled_piece(piece: Piece) -> Piece:
    key, tensor, place = piece
    wrong = torch.full((tensor.nbytes,), 0xFF, dtype=torch.uint8)
    return key, wrong.view(tensor.dtype).view(tensor.shape), place


def not_a_number(losses: Losses) -> Losses:
    """Return these loss reports with losses that are NaN."""
    return [
        {name: loss * math.nan for name, loss in reported.items()}
        for reported in losses
    ]


def diverge(iterations: Collection[int]) -> None:
    """Let training itself lead to a NaN loss in these iterations."""
    train_on = StagePasses.train_on

    def train_on_nothing(self: StagePasses, iteration: int) -> Losses:
        losses = train_on(self, iteration)
        return not_a_number(losses) if iteration in iterations else losses

    StagePasses.train_on = train_on_nothing


def diverge_once(at_iteration: int, rank: int) -> None:
    """Let this rank report a NaN loss when its process first runs this iteration."""
    train_on, seen = StagePasses.train_on, set[int]()

    def train_on_nothing(self: StagePasses, iteration: int) -> Losses:
        losses = train_on(self, iteration)
        is_bad = (iteration, dist.get_rank()) == (
            at_iteration,
            rank,
        ) and iteration not in seen
        seen.add(iteration)
        return not_a_number(losses) if is_bad else losses

    StagePasses.train_on = train_on_nothing


def write_in_time() -> None:
    """Let each snapshot reach all of its peers and disks before the next update."""
    ready, decide = InMemoryTier.ready, WindowAgreement.decide

    def finish_and_be_ready(
        self: InMemoryTier, iteration: int, gradients: ReadyGradients
    ) -> None:
        self.finish_snapshot()
        ready(self, iteration, gradients)

    def decide_and_write(self: WindowAgreement, *, wait: bool) -> None:
        decide(self, wait=True)
        self.finish_persisting()

    InMemoryTier.ready = finish_and_be_ready  # type: ignore[method-assign]
    WindowAgreement.decide = decide_and_write  # type: ignore[method-assign]


def corrupt_and_diverge() -> None:
    write_in_time()
    spoil((5, 14))
    diverge((25, 31))


def test_corrupt_sources_are_left_one_by_one(tmp_path: Path) -> None:
    """Snapshots come every 5 iterations, in memory, on peers and on local disks.

    Whole checkpoints come every 4 iterations.
    """
    memory, disk = "host memory at iteration {}", "local disk at iteration {}"
    checkpoints = tmp_path / "run" / "checkpoints"
    down = [(6, memory.format(5)), (6, disk.format(5))]
    all_the_way = [
        (25, memory.format(21)),
        (25, disk.format(21)),
        (25, f"{checkpoints}/iter_0000020 at iteration 20"),
    ]
    lost: dict[str, Any] = {
        "kills": [1, 2, 3],
        "then": lose_nodes,
        "replaying": (),
        "resumed": "iter_0000004",
    }
    faults = [
        all_go_back(
            "a corrupt snapshot, on disks as well",
            5,
            Point(0, Phase.REDUCE, 8),
            steps_down=down,
        ),
        all_go_back(
            "replaced ranks do not trust it either",
            4,
            Point(0, Phase.REDUCE, 7, skip=0),
            **lost,
        ),
        all_go_back(
            "and a newer checkpoint",
            14,
            Point(0, Phase.REDUCE, 18),
            steps_down=[(15, memory.format(14))],
        ),
        all_go_back(
            "training diverges",
            21,
            Point(0, Phase.REDUCE, 24),
            steps_down=all_the_way,
            diverges=(25,),
        ),
        all_go_back(
            "long after a load", 25, Point(1, Phase.REDUCE, 29), diverges=(31,)
        ),
    ]
    settings = (
        "ckpt.every_iters=5",
        "ckpt.disk_every_iters=5",
        "ckpt.durable_every_iters=4",
        "ckpt.keep=9",
    )
    settings += ("ckpt.async_save=false", "runtime.suspect_iters=5")
    job = survive(
        tmp_path,
        faults,
        *THIRTY_SIX,
        ckpt="gemini",
        settings=settings,
        setup=corrupt_and_diverge,
    )
    for rank in (0, 1):
        told = events_of(job.run, LossNotFinite, rank)
        assert [event.loss for event in told] == ["nan"] * len(told)
        assert told[-1].action == GOES_ON
    resumed = events_of(job.run, StateResumed, 0)
    names = [
        "local disk",
        "iter_0000004",
        "iter_0000004",
        "iter_0000016",
        "local disk",
        "iter_0000020",
    ]
    assert [Path(event.source).name for event in resumed] == names
    assert f"{disk.format(5)}: loss nan in iteration 6" in resumed[1].passed_over
    assert f"{disk.format(5)}: in quarantine" in resumed[2].passed_over
    assert (
        f"all ranks go on from {checkpoints}/iter_0000016 at iteration 16; passed over"
        in job.said()
    )


def loading_from_disk_is_a_point(owner: type, name: str, marker: Path) -> None:
    """Let rank 2 enter RECOVERY at its first load from a disk.

    Until then, the loss of rank 3 is NaN when iteration 7 comes again. If the load is
    of a checkpoint, the checkpoint is torn at that moment.

    Args:
        owner: The class of the method that loads from a disk.
        name: The name of the method.
        marker: The file that exists once rank 2 has entered RECOVERY.
    """
    train_on, seen = StagePasses.train_on, set[int]()

    def is_first(_: Any, source: Any, *__: Any) -> bool:
        if dist.get_rank() != 2 or marker.exists():
            return False
        marker.touch()
        if owner is MegatronDurableState:
            (source / MARKER).unlink()
        return True

    def train_on_nothing(self: StagePasses, iteration: int) -> Losses:
        losses = train_on(self, iteration)
        is_bad = (
            (iteration, dist.get_rank()) == (7, 3)
            and iteration in seen
            and not marker.exists()
        )
        seen.add(iteration)
        return not_a_number(losses) if is_bad else losses

    call_is_a_point(owner, name, Phase.RECOVERY, when=is_first)
    StagePasses.train_on = train_on_nothing


@pytest.mark.parametrize(
    ("owner", "name", "settings", "serves"),
    [
        pytest.param(
            *(
                MegatronDurableState,
                "load",
                ("ckpt.durable_every_iters=4", "ckpt.replicas=0"),
                {},
            ),
            id="a checkpoint",
            marks=pytest.mark.full,
        ),
        pytest.param(
            *(
                LocalDisk,
                "restore",
                ("ckpt.disk_every_iters=3", "ckpt.replicas=0"),
                {"resumed": "local disk"},
            ),
            id="a local disk",
        ),
    ],
)
def test_a_rank_dies_while_all_step_down(
    owner: type,
    name: str,
    settings: tuple[str, ...],
    serves: dict[str, Any],
    tmp_path: Path,
) -> None:
    """A load of a checkpoint leaves memory as it was until the checkpoint is loaded.

    If the checkpoint is lost before that, memory serves. A load from a local disk goes
    through memory.
    """
    faults = [
        all_go_back("a process", 6, Point(0, Phase.REDUCE, 8)),
        all_go_back(
            "while all step down", (3, 6), Point(2, Phase.RECOVERY, skip=1), **serves
        ),
    ]
    setup = functools.partial(
        loading_from_disk_is_a_point, owner, name, tmp_path / "loads"
    )
    settings = ("ckpt.every_iters=3", "ckpt.async_save=false", *settings)
    survive(
        tmp_path,
        faults,
        "train.iterations=12",
        ckpt="gemini",
        settings=settings,
        setup=setup,
    )


def _save_a_bad_one_and_die(settings: Settings, folder: Path, by: float) -> None:
    """Save wrong weights after iteration 4, and die in the next iteration.

    Args:
        settings: Settings of the run.
        folder: Folder of the run.
        by: The number to add to all weights before the save.
    """
    start_save = MegatronDurableState.start_save

    def start_bad_save(
        self: MegatronDurableState, directory: Path, iteration: int
    ) -> None:
        if iteration == 4:
            for chunk in self._state.model:
                for parameter in chunk.parameters():
                    parameter.data.add_(by)
        start_save(self, directory, iteration)

    MegatronDurableState.start_save = start_bad_save
    kill = Kill(ranks=(0, 1), iteration=5, phase="start")
    run(
        settings,
        store=rank_store(),
        around_hooks=lambda hooks: KillingHooks(hooks, kill, folder),
    )


@pytest.mark.full
def test_states_saved_since_a_bad_load_are_not_used_without_supervisors(
    tmp_path: Path,
) -> None:
    training = ("train.iterations=8", *BIAS)
    dense = (
        "ckpt=dense",
        "ckpt.every_iters=2",
        "ckpt.keep=3",
        *training,
        f"run.dir={tmp_path}",
    )
    with pytest.raises(RankFailedError):
        run_ranks(
            2, _save_a_bad_one_and_die, compose_settings(fast(*dense)), tmp_path, 1e-3
        )

    again = compose_settings(
        fast(*dense, "runtime.suspect_iters=3", "ckpt.async_save=true")
    )
    result = run_ranks(2, _tell_in_seven, again)[0]

    assert [event.iteration for event in events_of(tmp_path, StateResumed)] == [4, 2]
    assert [event.iteration for event in events_of(tmp_path, CheckpointSaved)] == [
        2,
        4,
        6,
        4,
        6,
        8,
    ]
    assert result["digest_per_rank"] == uninterrupted(2, *training).digest_per_rank


def _tell_in_seven(settings: Settings) -> dict[str, Any]:
    diverge_once(7, rank=1)
    return run(settings, store=rank_store())
