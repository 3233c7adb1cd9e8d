"""What all ranks agree on where some know more than others: a rank that was replaced has seen nothing of it."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from moe_ckpt.collectives import TorchRanks
from moe_ckpt.events import EventLog
from moe_ckpt.runtime.ladder import HOST_MEMORY, Found, Ladder, Source, Suspects
from moe_ckpt.store.disk import CheckpointFolder
from tests.ranks import run_ranks
from tests.runtime.durable_files import OneFileEach, open_tier


def _open(folder: Path) -> Ladder:
    """Return a ladder over checkpoints of iterations 1, 2 and 3."""
    tier = open_tier(folder, OneFileEach(), keep=3)
    for iteration in (1, 2, 3):
        tier.save(iteration)
    events = EventLog(folder / "events" / f"ladder{dist.get_rank()}.jsonl", global_rank=0, clock_origin_unix_s=0.0)
    return Ladder(tier, TorchRanks(), events)


def _source(folder: Path, iteration: int) -> Source:
    return Source(place=str(CheckpointFolder(folder).directory(iteration)), iteration=iteration)


def _look_where_only_rank_one_distrusts(folder: Path) -> tuple[Found, Found]:
    ladder = _open(folder)
    if dist.get_rank() == 1:
        ladder.distrust(_source(folder, 3))
    return ladder.look(None), ladder.look(None)


def test_what_one_rank_does_not_trust_nobody_does(tmp_path: Path) -> None:
    sources = [_source(tmp_path, iteration) for iteration in (3, 2, 1)]
    expected = Found(sources=sources[1:], passed_over=[f"{sources[0]}: not trusted"])
    assert run_ranks(2, _look_where_only_rank_one_distrusts, tmp_path) == [(expected, expected)] * 2


def _look_past(folder: Path, tainted: range) -> Found:
    return _open(folder).look(None, tainted=tainted)


def test_what_was_saved_since_a_bad_load_is_passed_over_and_named(tmp_path: Path) -> None:
    sources = [_source(tmp_path, iteration) for iteration in (3, 2, 1)]
    reasons = [f"{source}: not trusted" for source in sources[:2]]
    assert run_ranks(1, _look_past, tmp_path, range(2, 4)) == [Found(sources=sources[2:], passed_over=reasons)]


def _blame_in_turn(folder: Path) -> list[bool]:
    """Blame twice for the loss of iteration 9; rank 0 is replaced in between."""
    open_tier(folder, OneFileEach())
    six, four = (Source(place=HOST_MEMORY, iteration=iteration) for iteration in (6, 4))
    suspects = Suspects(TorchRanks(), 2)
    is_first = [suspects.is_first_at(9, six)]
    if dist.get_rank() == 0:
        suspects = Suspects(TorchRanks(), 2)
    return [*is_first, suspects.is_first_at(9, four), suspects.is_first_at(8, four)]


def test_ranks_agree_on_what_led_to_a_loss_before(tmp_path: Path) -> None:
    assert run_ranks(2, _blame_in_turn, tmp_path) == [[True, False, True]] * 2
