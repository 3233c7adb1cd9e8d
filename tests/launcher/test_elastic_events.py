"""What real jobs tell of experts and copies is what an independent witness has seen, after recoveries, too."""

from __future__ import annotations

import functools
import itertools
import json
from collections import defaultdict
from pathlib import Path

import pytest

from moe_ckpt.events import (
    ExpertPopularity,
    ExpertsChosen,
    ExpertsOrdered,
    Rejoined,
    SnapshotTaken,
    WindowChosen,
    WindowReplicated,
)
from moe_ckpt.types import Phase
from tests.elastic_job import Death, ElasticJob
from tests.scenarios import EIGHT, MOC
from tests.training import events_of
from tests.witness import note_tokens

TELLING = (0, 2)  # the first rank of each stage
OTHERS = (1, 3)
BACKWARD_6 = Death(rank=2, phase=Phase.BACKWARD, iteration=6)
Tokens = dict[int, dict[str, list[int]]]
"""By iteration, by layer: tokens that each expert was given."""


def tokens_noted(folder: Path) -> Tokens:
    """Return what `note_tokens` noted of the last time that each iteration ran, over all ranks."""
    tokens: Tokens = defaultdict(lambda: defaultdict(lambda: [0] * 8))
    for path in sorted(folder.glob("tokens*")):
        rows: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
        for iteration, layer, _, counts in map(json.loads, path.read_text().splitlines()):
            rows[iteration, layer].append(counts)
        num_passes = min(map(len, rows.values()))  # those that were cut off come first
        for (iteration, layer), passes in rows.items():
            total = tokens[iteration][f"layer {layer}"]
            tokens[iteration][f"layer {layer}"] = [sum(of) for of in zip(total, *passes[-num_passes:], strict=True)]
    return tokens


def told(run: Path, rank: int) -> dict[int, ExpertPopularity]:
    """Return the last that a rank told of each iteration."""
    return {event.iteration: event for event in events_of(run, ExpertPopularity, rank)}


def given(tokens: Tokens, layer: str, iterations: range) -> list[int]:
    return [sum(of) for of in zip(*(tokens[iteration][layer] for iteration in iterations), strict=True)]


def require_tokens(tokens: Tokens, event: ExpertPopularity, since: int) -> None:
    iterations = range(since + 1, event.iteration + 1)
    assert event.tokens == [given(tokens, layer, iterations) for layer in event.layers], event


@pytest.fixture(scope="module")
def windows_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a job with windows of two iterations, in which rank 2 dies."""
    folder = tmp_path_factory.mktemp("job")
    settings = ("train.iterations=14", *EIGHT, "ckpt.window=2")
    with ElasticJob(4, folder, *settings, setup=functools.partial(note_tokens, folder)) as job:
        BACKWARD_6.order(job)
        job.wait()
    return folder


def test_popularity_is_what_routers_did_in_the_window_before(windows_of_two: Path) -> None:
    run, tokens = windows_of_two / "run", tokens_noted(windows_of_two)
    (back_to,) = (event.iteration for event in events_of(run, Rejoined, 0))
    for rank in TELLING:
        starts = sorted({event.iteration for event in events_of(run, WindowChosen, rank)})
        events = told(run, rank)
        assert min(events) < back_to < max(events), "before the fault, and after it"
        assert back_to + 1 not in events, "what the dead rank had counted is lost"
        for event in events.values():
            require_tokens(tokens, event, since=starts[starts.index(event.iteration) - 1])
    assert {layer for rank in TELLING for event in told(run, rank).values() for layer in event.layers} == {
        "layer 0",
        "layer 1",
    }
    assert all(not told(run, rank) for rank in OTHERS)


def test_windows_take_the_unpopular_first(windows_of_two: Path) -> None:
    run, num_checked = windows_of_two / "run", 0
    for rank in TELLING:
        reordered = {event.iteration for event in events_of(run, WindowChosen, rank) if event.reordered}
        for event in events_of(run, ExpertsOrdered, rank):
            assert event.num_slots == 2
            if event.iteration in reordered:
                popularity = told(run, rank)[event.iteration]
                assert event.layers == popularity.layers
                for tokens, slots in zip(popularity.tokens, event.slots, strict=True):
                    for home in (slice(0, 4), slice(4, 8)):  # each rank fills its own slots
                        by_popularity = [slot for _, slot in sorted(zip(tokens[home], slots[home], strict=True))]
                        assert by_popularity == sorted(by_popularity), event
                        num_checked += 1
    assert num_checked > 4


def test_a_window_that_has_reached_peers_is_told_with_its_bytes(windows_of_two: Path) -> None:
    run = windows_of_two / "run"
    for rank in range(4):
        copied = events_of(run, WindowReplicated, rank)
        windows = {event.window_start for event in copied}
        assert len(windows) >= 5
        for window in copied:
            parts = [
                event for event in events_of(run, SnapshotTaken, rank) if event.window_start == window.window_start
            ]
            assert window.size_bytes == sum(event.size_bytes for event in parts[-parts[-1].num_slots :])
            assert window.num_peers == 1
            assert 0 < window.seconds <= window.span_s
            assert window.ago_s >= 0


def test_after_going_back_experts_are_counted_anew(tmp_path: Path) -> None:
    setup = functools.partial(note_tokens, tmp_path)
    with ElasticJob(4, tmp_path, "train.iterations=9", *EIGHT, *MOC, ckpt="moc", setup=setup) as job:
        BACKWARD_6.order(job)
        job.wait()
    tokens = tokens_noted(tmp_path)
    (back_to,) = (event.iteration for event in events_of(job.run, Rejoined, 0))
    for rank in TELLING:
        taken = sorted({event.iteration for event in events_of(job.run, ExpertsChosen, rank)})
        events = told(job.run, rank)
        assert [before for before in events if before <= back_to]
        assert set(range(back_to + 1, 10)) <= set(events)
        for before, iteration in itertools.pairwise(taken):
            if iteration in events:
                require_tokens(tokens, events[iteration], since=before)
