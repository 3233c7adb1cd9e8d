"""moc and moetion under faults: with all experts nothing is lost, with some exactly what is accounted for."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from launcher.config import compose_settings
from launcher.loop import StageRunner
from launcher.parameters import count_parameters
from moe_ckpt.events import (
    CapacityBoosted,
    ExpertsChosen,
    IterationCommitted,
    Rejoined,
    SnapshotTaken,
    StateResumed,
    TokensLost,
)
from moe_ckpt.store import copy_server
from moe_ckpt.store.blobs import BlobFolder
from moe_ckpt.store.codec import Snapshot
from moe_ckpt.store.journal import Journal, read_units
from moe_ckpt.store.unit_memory import name_of
from moe_ckpt.store.updates import Gradients, update_from_bytes
from moe_ckpt.types import CORE, Phase
from tests.elastic import Death, ElasticJob
from tests.references import outcome_of, uninterrupted
from tests.scenarios import BIAS, FP16_SKIPPING, PP4
from tests.training import events_of, fast

EIGHT = ("model.num_experts=8",)
MOC, MOETION = ("ckpt.k_snapshot=2", "ckpt.k_persist=1"), ("ckpt.experts=3", "ckpt.remote_experts=2")
ALL_EXPERTS = {
    "moc": ("ckpt.k_snapshot=8", "ckpt.k_persist=8"),
    "moetion": ("ckpt.experts=8", "ckpt.remote_experts=8"),
}
Tokens = dict[int, dict[int, list[int]]]
"""By iteration, by layer: tokens that each expert was given."""


def note_tokens(folder: Path) -> None:
    """Let every trainer write down what its routers do, without any of what is tested here."""
    now = {"iteration": 0}
    train_on, routing = StageRunner.train_on, cast("Any", TopKRouter.routing)

    def noted_train_on(self: StageRunner, iteration: int) -> Any:
        now["iteration"] = iteration
        try:
            return train_on(self, iteration)
        finally:
            now["iteration"] = 0

    def noted_routing(self: TopKRouter, *arguments: Any, **options: Any) -> Any:
        probabilities, routing_map = routing(self, *arguments, **options)
        if now["iteration"]:
            counts = routing_map.sum(dim=0, dtype=torch.int64).tolist()
            row = [now["iteration"], cast("Any", self).layer_number - 1, os.getpid(), counts]
            with (folder / f"tokens{os.environ['RANK']}").open("a") as file:
                file.write(json.dumps(row) + "\n")
        return probabilities, routing_map

    StageRunner.train_on = noted_train_on  # type: ignore[method-assign]
    TopKRouter.routing = noted_routing  # type: ignore[method-assign]


def noted_tokens(folder: Path, up_to: int) -> Tokens:
    """Return what was noted of the first time that each iteration up to this ran, over all ranks."""
    tokens: Tokens = defaultdict(lambda: defaultdict(lambda: [0] * 8))
    for path in sorted(folder.glob("tokens*")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        first_pid = rows[0][2]
        seen: dict[tuple[int, int], int] = defaultdict(int)
        for iteration, layer, pid, counts in rows:
            if pid == first_pid and iteration <= up_to and seen[iteration, layer] < _passes(rows, layer):
                seen[iteration, layer] += 1
                before = tokens[iteration][layer]
                tokens[iteration][layer] = [old + new for old, new in zip(before, counts, strict=True)]
    return tokens


def _passes(rows: list[Any], layer: int) -> int:
    """Return how many micro-batches an iteration has: as often as the first one comes."""
    return sum(1 for row in rows if row[0] == 1 and row[1] == layer)


def lost_by_hand(tokens: Tokens, saved_at: Callable[[int, int], int], back_to: int, layers: list[int]) -> list[Any]:
    """Return what experts lose, by layer: what came after each was saved, up to the iteration gone back to."""
    return [
        [
            sum(tokens[iteration][layer][expert] for iteration in range(saved_at(layer, expert) + 1, back_to + 1))
            for expert in range(8)
        ]
        for layer in layers
    ]


def chosen_before_the_fault(run: Path, rank: int, back_to: int) -> list[ExpertsChosen]:
    """Return what was chosen up to the iteration gone back to; all that is chosen there again is of the next line."""
    chosen: list[ExpertsChosen] = []
    for event in events_of(run, ExpertsChosen, rank):
        if chosen and event.iteration <= chosen[-1].iteration:
            break
        chosen.append(event)
    return [event for event in chosen if event.iteration <= back_to]


def saved_at(chosen: list[ExpertsChosen], place: str, index: int, expert: int, back_to: int) -> int:
    """Return when an expert was last saved in a place, no later than the iteration gone back to."""
    return max(
        event.iteration for event in chosen if event.iteration <= back_to and expert in getattr(event, place)[index]
    )


@pytest.mark.parametrize("policy", ["moc", "moetion"])
def test_training_without_a_fault_is_as_without_checkpoints(policy: str, tmp_path: Path) -> None:
    training = ("train.iterations=8", *EIGHT)
    with ElasticJob(4, tmp_path, *training, *(MOC if policy == "moc" else MOETION), ckpt=policy) as job:
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(4, *training)
    sizes = [event.size_bytes for event in events_of(job.run, SnapshotTaken, 0)]
    assert max(sizes[1:]) < sizes[0], "partial"


BACKWARD_6 = Death(rank=2, phase=Phase.BACKWARD, iteration=6)
CASES: dict[str, tuple[tuple[str, ...], int, tuple[Death, ...]]] = {
    "in backward": ((), 4, (BACKWARD_6,)),
    "between update and gather": ((), 4, (Death(rank=0, phase=Phase.STEP, iteration=6, skip=1),)),
    "in the first iteration": ((), 4, (Death(rank=1, phase=Phase.BACKWARD, iteration=1),)),
    "again while all go back": (
        (),
        4,
        (BACKWARD_6, Death(rank=2, phase=Phase.RECOVERY, iteration=-1, life=1)),
    ),
    "one after the other": ((), 4, (BACKWARD_6, Death(rank=1, phase=Phase.FORWARD, iteration=8))),
    "PP 4": (PP4, 4, (BACKWARD_6,)),
    "experts on two ranks": (("train.global_batch_size=16",), 8, (BACKWARD_6,)),
    "fp16 with skipped steps": (FP16_SKIPPING, 4, (BACKWARD_6,)),
    "tied embeddings, optimizer not sharded": (
        ("model.tied_embeddings=true", "train.distributed_optimizer=false"),
        4,
        (BACKWARD_6,),
    ),
    "aux-loss-free bias": ((*BIAS, "train.eval_every_iters=2"), 4, (BACKWARD_6,)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("policy", ["moc", "moetion"])
def test_with_all_experts_nothing_is_lost(policy: str, name: str, tmp_path: Path) -> None:
    overrides, world, deaths = CASES[name]
    training = ("train.iterations=9", *EIGHT, *overrides)
    with ElasticJob(world, tmp_path, *training, *ALL_EXPERTS[policy], ckpt=policy) as job:
        for death in deaths:
            death.order(job)
        result = job.wait()
    assert result["faults_survived"] == len(deaths)
    assert outcome_of(job.run, result) == uninterrupted(world, *training)
    assert all(event.plt == 0.0 for event in events_of(job.run, TokensLost, 0))


@pytest.mark.parametrize("policy", ["moc", "moetion"])
def test_what_was_torn_while_it_was_published_is_of_no_use(policy: str, tmp_path: Path) -> None:
    training = ("train.iterations=9", *EIGHT)
    setup = functools.partial(_die_between_units, tmp_path / "died")
    with ElasticJob(4, tmp_path, *training, *ALL_EXPERTS[policy], ckpt=policy, setup=setup) as job:
        result = job.wait()
    assert result["faults_survived"] == 1
    assert outcome_of(job.run, result) == uninterrupted(4, *training)


def _die_between_units(died: Path) -> None:
    """Let rank 1 die once, as soon as the core of iteration 6 is there and no expert of it."""
    add_snapshot = Journal.add_snapshot

    def then_die(self: Journal, snapshot: Snapshot, gradients: Gradients | None = None) -> None:
        add_snapshot(self, snapshot, gradients)
        if os.environ["RANK"] == "1" and snapshot.header.iteration == 6 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    Journal.add_snapshot = then_die  # type: ignore[method-assign]


@pytest.mark.parametrize("part", ["weights", "moments"])
def test_with_all_experts_in_part_nothing_is_lost(part: str, tmp_path: Path) -> None:
    training = ("train.iterations=8", *EIGHT)
    with ElasticJob(4, tmp_path, *training, *ALL_EXPERTS["moc"], f"ckpt.partial={part}", ckpt="moc") as job:
        BACKWARD_6.order(job)
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(4, *training)


@pytest.mark.parametrize("policy", ["moc", "moetion"])
def test_a_node_is_lost_and_with_all_experts_nothing_is_lost(policy: str, tmp_path: Path) -> None:
    training = ("train.iterations=9", *EIGHT)
    with ElasticJob(4, tmp_path, *training, *ALL_EXPERTS[policy], ckpt=policy) as job:
        job.wait_until(3, 6, Phase.FORWARD)
        job.lose_nodes(3)
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(4, *training)
    assert [event.iteration for event in events_of(job.run, TokensLost, 0)]


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        pytest.param("moc", MOC, id="moc, in turns"),
        pytest.param("moc", (*MOC, "ckpt.selection=load"), id="moc, by load"),
        pytest.param("moetion", MOETION, id="moetion"),
    ],
)
def test_what_is_lost_is_what_came_since_an_expert_was_saved(
    policy: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    setup = functools.partial(note_tokens, tmp_path)
    with ElasticJob(4, tmp_path, "train.iterations=9", *EIGHT, *settings, ckpt=policy, setup=setup) as job:
        BACKWARD_6.order(job)
        job.wait()
    (back_to,) = (event.iteration for event in events_of(job.run, Rejoined, 0))
    tokens = noted_tokens(tmp_path, back_to)
    by_layer: dict[int, int] = {}
    for rank in (0, 3):  # one of each stage
        (lost,) = events_of(job.run, TokensLost, rank)
        chosen = chosen_before_the_fault(job.run, rank, back_to)
        first = lost.layers[0]

        def last_saved(layer: int, expert: int, chosen: Any = chosen, first: int = first) -> int:
            return saved_at(chosen, "memory", layer - first, expert, back_to)

        by_hand = lost_by_hand(tokens, last_saved, back_to, lost.layers)
        assert lost.lost_by_expert == by_hand
        assert any(any(row) for row in by_hand)
        by_layer |= {layer: sum(row) for layer, row in zip(lost.layers, by_hand, strict=True)}
    (lost,) = events_of(job.run, TokensLost, 0)
    given = {layer: sum(sum(tokens[i][layer]) for i in range(1, back_to + 1)) for layer in by_layer}
    shares = [by_layer[layer] / given[layer] for layer in sorted(by_layer)]
    assert lost.plt == pytest.approx(sum(shares) / len(shares), rel=1e-12), (
        "dropless: all that routers may send arrives"
    )
    assert lost.mlt == pytest.approx(sum(shares), rel=1e-12)


def test_who_has_lost_memory_brings_older_experts_and_others_keep_theirs(tmp_path: Path) -> None:
    """Two levels of MoC: rank 3 has experts 4 to 7 of the second stage from storage, all others from memory."""
    setup = functools.partial(note_tokens, tmp_path)
    with ElasticJob(4, tmp_path, "train.iterations=10", *EIGHT, *MOC, ckpt="moc", setup=setup) as job:
        job.wait_until(3, 7, Phase.FORWARD)
        job.lose_nodes(3)
        job.wait()
    (back_to,) = (event.iteration for event in events_of(job.run, Rejoined, 0))
    tokens = noted_tokens(tmp_path, back_to)
    for rank in (0, 3):
        (lost,) = events_of(job.run, TokensLost, rank)
        chosen = chosen_before_the_fault(job.run, 0 if rank == 0 else 2, back_to)
        first = lost.layers[0]

        def last_saved(layer: int, expert: int, rank: int = rank, chosen: Any = chosen, first: int = first) -> int:
            place = "on_disk" if rank == 3 and expert >= 4 else "memory"
            return saved_at(chosen, place, layer - first, expert, back_to)

        assert lost.lost_by_expert == lost_by_hand(tokens, last_saved, back_to, lost.layers)


def test_peers_bring_back_what_a_node_had_sent_them(tmp_path: Path) -> None:
    setup = functools.partial(note_tokens, tmp_path)
    with ElasticJob(4, tmp_path, "train.iterations=10", *EIGHT, *MOETION, ckpt="moetion", setup=setup) as job:
        job.wait_until(3, 7, Phase.FORWARD)
        job.lose_nodes(3)
        job.wait()
    (rejoined,) = events_of(job.run, Rejoined, 3)
    assert rejoined.fetched_bytes > 0
    back_to = rejoined.iteration
    tokens = noted_tokens(tmp_path, back_to)
    (lost,) = events_of(job.run, TokensLost, 3)
    chosen = chosen_before_the_fault(job.run, 2, back_to)

    def last_saved(layer: int, expert: int) -> int:
        return saved_at(chosen, "on_peers" if expert >= 4 else "memory", layer - lost.layers[0], expert, back_to)

    assert lost.lost_by_expert == lost_by_hand(tokens, last_saved, back_to, lost.layers)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_what_peers_have_made_of_gradients_is_what_was_lost(precision: str, tmp_path: Path) -> None:
    training = ("train.iterations=9", *EIGHT, f"precision={precision}")
    setup = functools.partial(_note_updates, tmp_path / "updates")
    with ElasticJob(4, tmp_path, *training, *ALL_EXPERTS["moetion"], ckpt="moetion", setup=setup) as job:
        job.wait_until(3, 6, Phase.FORWARD)
        job.lose_nodes(3)
        result = job.wait()
        assert "got a state with checksum" not in job.said()
    assert outcome_of(job.run, result) == uninterrupted(4, *training)
    (rejoined,) = events_of(job.run, Rejoined, 3)
    assert rejoined.fetched_bytes > 0
    updates = (tmp_path / "updates").read_text().split()
    fetched = [update for update in updates if update.startswith(f"{rejoined.iteration}:3:")]
    assert sorted(fetched) == sorted({*fetched})
    assert len(fetched) == 4, "rank 3 has four experts: all were made of gradients"
    (chosen,) = (event for event in events_of(job.run, ExpertsChosen, 2) if event.iteration == 3)
    assert chosen.by_gradient == [list(range(8))]


def _note_updates(file: Path) -> None:
    """Let every keeper write down which updates it has applied: iteration, owner, unit."""
    apply_update = copy_server.apply_update

    def noted(folder: BlobFolder, key: str, head: bytes, *gradients: Any) -> None:
        apply_update(folder, key, head, *gradients)
        header = update_from_bytes(head).header
        assert header.unit
        with file.open("a") as out:
            out.write(f"{header.iteration}:{header.shard.global_rank}:{header.unit.name.replace(' ', '_')}\n")

    copy_server.apply_update = noted


def test_all_processes_end_and_the_next_start_goes_on_from_storage(tmp_path: Path) -> None:
    settings = ("train.iterations=10", *EIGHT, *MOC)
    with ElasticJob(4, tmp_path, *settings, ckpt="moc") as job:
        job.wait_until(0, 7, Phase.FORWARD)
    with ElasticJob(4, tmp_path, *settings, ckpt="moc") as job:
        job.wait()
    committed = [event.iteration for event in events_of(job.run, IterationCommitted, 0)]
    assert committed[-1] == 10
    assert committed.count(1) == 1, "not from the start again"
    assert [event.plt > 0 for event in events_of(job.run, TokensLost, 0)] == [True]


def test_experts_are_doubled_where_faults_cost_too_much(tmp_path: Path) -> None:
    with ElasticJob(4, tmp_path, "train.iterations=12", *EIGHT, *MOC, "ckpt.dynamic_k=true", ckpt="moc") as job:
        BACKWARD_6.order(job)
        Death(rank=1, phase=Phase.BACKWARD, iteration=10).order(job)
        job.wait()
    chosen = {event.iteration: event for event in events_of(job.run, ExpertsChosen, 0)}
    sizes = [len(chosen[iteration].memory[0]) for iteration in (4, 8, 11)]
    assert sizes == [2, 4, 8], "what was known before a fault still counts"


LIMITED = ("model.moe_capacity_factor=1.0", "train.sequence_length=64")


def test_experts_make_up_for_lost_tokens_with_more_capacity(tmp_path: Path) -> None:
    settings = ("train.iterations=30", *EIGHT, *LIMITED, "ckpt.experts=2", "ckpt.remote_experts=1")
    with ElasticJob(4, tmp_path, *settings, ckpt="moetion") as job:
        BACKWARD_6.order(job)
        job.wait()
    for rank in range(4):
        (lost,) = events_of(job.run, TokensLost, rank)
        boosted = events_of(job.run, CapacityBoosted, rank)
        assert boosted[0].iteration == 6
        left = [sum(map(sum, event.deficit)) for event in boosted]
        assert left[0] < sum(lost.lost_by_layer)
        assert all(later <= earlier for earlier, later in itertools.pairwise(left))
        base = min(boosted[-1].capacity[0])
        assert max(boosted[0].capacity[0]) > base
    stages = [[event.deficit for event in events_of(job.run, CapacityBoosted, rank)] for rank in range(4)]
    assert stages[0] == stages[1]
    assert stages[2] == stages[3], "all ranks of a stage agree on what is left"


def test_what_is_left_to_make_up_survives_the_next_fault(tmp_path: Path) -> None:
    settings = ("train.iterations=12", *EIGHT, *LIMITED, "ckpt.experts=2", "ckpt.remote_experts=1")
    with ElasticJob(4, tmp_path, *settings, ckpt="moetion") as job:
        BACKWARD_6.order(job)
        Death(rank=1, phase=Phase.BACKWARD, iteration=9).order(job)
        job.wait()
    boosted = {event.iteration: event for event in events_of(job.run, CapacityBoosted, 0)}
    again = events_of(job.run, TokensLost, 0)[-1]
    left = sum(map(sum, boosted[again.iteration].deficit))
    assert left > 0
    assert sum(map(sum, boosted[again.iteration + 1].deficit)) > sum(again.lost_by_layer), "some of the first fault"


def test_a_capacity_that_nothing_was_lost_from_is_as_without_checkpoints(tmp_path: Path) -> None:
    training = ("train.iterations=8", *EIGHT, *LIMITED)
    with ElasticJob(4, tmp_path, *training, *MOETION, ckpt="moetion") as job:
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(4, *training)


@pytest.mark.parametrize("waits", [True, False])
def test_copies_that_wait_for_bubbles_change_nothing(waits: bool, tmp_path: Path) -> None:
    training = ("train.iterations=12", *EIGHT)
    with ElasticJob(4, tmp_path, *training, *MOETION, f"ckpt.bubble_copies={waits}", ckpt="moetion") as job:
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(4, *training)
    taken = [event for rank in range(4) for event in events_of(job.run, SnapshotTaken, rank)]
    assert any(event.bubble_bytes for event in taken) == waits
    assert all(event.bubble_bytes <= event.size_bytes for event in taken)


@pytest.mark.parametrize(("policy", "k"), [("moc", 2), ("moetion", 3)])
def test_bytes_are_those_of_the_papers_equations(policy: str, k: int, tmp_path: Path) -> None:
    """MoC, equation (6), and MoEtion, equation (5), with 12 bytes a parameter: master weights and two moments."""
    wide = (*EIGHT, "model.hidden_size=256", "model.moe_ffn_hidden_size=256")
    settings = MOC if policy == "moc" else MOETION
    with ElasticJob(4, tmp_path, "train.iterations=4", *wide, *settings, ckpt=policy) as job:
        job.wait()
    composed = compose_settings(fast(*wide))
    total, active = count_parameters(composed.model, 256, composed.train.sequence_length)  # bytes
    of_an_expert = (total - active) // (composed.model.num_layers * (8 - composed.model.moe_topk))
    of_experts = composed.model.num_layers * 8 * of_an_expert
    wanted = 12 * (total - of_experts + of_experts * k / 8)
    taken = [events_of(job.run, SnapshotTaken, rank)[2].size_bytes for rank in range(4)]
    assert sum(taken) == pytest.approx(wanted, rel=0.01)


def test_a_checkpoint_begins_a_line_that_nothing_on_disks_is_of(tmp_path: Path) -> None:
    """Rank 3's disk is lost with all memory: iterations that others' disks have will come again, and differ."""
    settings = ("train.iterations=10", *EIGHT, *MOC, "ckpt.durable_every_iters=4", "ckpt.async_save=false")
    with ElasticJob(4, tmp_path, *settings, ckpt="moc") as job:
        job.wait_until(0, 7, Phase.FORWARD)
    shutil.rmtree(job.run / "snapshots" / "rank0003")
    with ElasticJob(4, tmp_path, *settings, ckpt="moc") as job:
        job.wait()
    (resumed,) = events_of(job.run, StateResumed, 0)
    assert resumed.iteration == 4
    units = read_units(BlobFolder(job.run / "snapshots" / "rank0000")).values()
    newest = max(unit.header.version for unit in units if name_of(unit) == CORE)
    assert newest.lineage == 1
    assert newest.iteration > 4
