"""moc and moetion under faults: with all experts nothing is lost, with some exactly the tokens since they were saved.

After each lossy recovery every expert is in the state of the iteration in which its snapshot was taken, bit for bit,
and all else in that of the iteration that all ranks go back to. Independent witnesses note states and tokens.
"""

from __future__ import annotations

import functools
import itertools
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.config import compose_settings
from launcher.parameters import count_parameters
from moe_ckpt.events import CapacityBoosted, ExpertsChosen, SnapshotTaken, StateResumed, TokensLost
from moe_ckpt.replication import copy_server
from moe_ckpt.replication.publisher import Publisher, read_units
from moe_ckpt.snapshot.adam_update import update_from_bytes
from moe_ckpt.snapshot.blobs import BlobFolder
from moe_ckpt.snapshot.codec import Snapshot
from moe_ckpt.snapshot.units import name_of
from moe_ckpt.types import CORE, Phase
from tests.campaign import Fault, Point, Stretch, all_go_back, call_is_a_point, lose_nodes, stretches_of, survive
from tests.elastic_job import ElasticJob
from tests.restarts import Restarts
from tests.scenarios import BIAS, EIGHT, FP16_SKIPPING, PP4, TIED, UNSHARDED
from tests.training import events_of, fast, train
from tests.witness import lost_by_hand, note_states, note_tokens, states_of, tokens_in

RANKS = range(4)
EXPERTS = range(4)
ALL_EXPERTS = {
    "moc": ("ckpt.k_snapshot=4", "ckpt.k_persist=4"),
    "moetion": ("ckpt.experts=4", "ckpt.remote_experts=4"),
}
EVERY_3 = ("ckpt.every_iters=3", "ckpt.disk_every_iters=3")
LIMITED = ("model.moe_capacity_factor=1.0", "train.sequence_length=64")


def publishing_is_a_point() -> None:
    """Let a rank enter DONE in the copier's thread when the core of iteration 18 is published, and no expert of it."""

    def is_torn(publisher: Publisher, snapshot: Snapshot, *_: Any) -> bool:
        return snapshot.header.iteration == 18 and name_of(snapshot) == CORE

    call_is_a_point(Publisher, "add_snapshot", Phase.DONE, is_after=True, when=is_torn)


def lossless(*, copies: bool) -> list[Fault]:
    """Return faults of a job that snapshots every iteration, or every second one; `copies`: peers have all of it."""
    return [
        all_go_back("in the first iteration", 0, Point(1, Phase.BACKWARD, 1), replaying=()),
        all_go_back("in backward", range(1, 5), Point(2, Phase.BACKWARD, 5)),
        all_go_back("between update and gather", range(4, 8), Point(0, Phase.STEP, 8, skip=1)),
        all_go_back("again while all go back", range(8, 12), Point(2, Phase.BACKWARD, 12), Point(2, Phase.RECOVERY)),
        all_go_back("a node", range(11, 16), Point(0, Phase.REDUCE, 16), kills=[3], then=lose_nodes, fetched=copies),
        all_go_back("torn while it is published", range(15, 18), Point(1, Phase.DONE)),
        all_go_back("two of a stage", range(18, 22), Point(2, Phase.REDUCE, 22), kills=[2, 3]),
    ]


@pytest.mark.full
def test_moc_with_all_experts_loses_nothing(tmp_path: Path) -> None:
    training = ("train.iterations=24", *FP16_SKIPPING, *TIED)
    settings = (*ALL_EXPERTS["moc"], "ckpt.every_iters=2", "ckpt.partial=moments")
    job = survive(
        tmp_path, lossless(copies=False), *training, ckpt="moc", settings=settings, setup=publishing_is_a_point
    )
    assert all(event.plt == 0.0 for rank in RANKS for event in events_of(job.run, TokensLost, rank))


def test_moetion_with_all_experts_loses_nothing(tmp_path: Path) -> None:
    """Peers make the snapshots of experts from gradients: a node's state comes from these."""
    setup = functools.partial(_note_updates, tmp_path / "updates")
    settings = (*ALL_EXPERTS["moetion"], "ckpt.bubble_copies=false")
    faults = lossless(copies=True)
    job = survive(
        tmp_path, faults, "train.iterations=24", "precision=fp32", ckpt="moetion", settings=settings, setup=setup
    )
    assert all(event.plt == 0.0 for rank in RANKS for event in events_of(job.run, TokensLost, rank))
    assert "got a state with checksum" not in job.said()
    (fetching,) = (each.rejoined for each in stretches_of(job.run, 3) if each.rejoined and each.rejoined.fetched_bytes)
    updates = [line.split(" ", 2) for line in (tmp_path / "updates").read_text().splitlines()]
    made = [unit for iteration, rank, unit in updates if (int(iteration), rank) == (fetching.iteration, "3")]
    assert len(made) == len(set(made)) == 2, "rank 3 has two experts: both were made of gradients"
    chosen = events_of(job.run, ExpertsChosen, 2)
    assert any(event.by_gradient == [list(EXPERTS)] for event in chosen)
    assert not any(event.bubble_bytes for rank in RANKS for event in events_of(job.run, SnapshotTaken, rank))


def _note_updates(file: Path) -> None:
    """Let every replica daemon write which updates it has applied: iteration, owner, unit."""
    publishing_is_a_point()
    apply_update = copy_server.apply_update

    def noted(folder: BlobFolder, key: str, head: bytes, *gradients: Any) -> None:
        apply_update(folder, key, head, *gradients)
        header = update_from_bytes(head).header
        assert header.unit
        with file.open("a") as out:
            out.write(f"{header.iteration} {header.shard.global_rank} {header.unit.name}\n")

    copy_server.apply_update = noted


def note_all(folder: Path) -> None:
    note_tokens(folder)
    note_states(folder)


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One rank between two recoveries: what it trained, chose and noted before the second one, which went `back_to`."""

    global_rank: int
    generation: int
    first: int
    back_to: int
    chosen: list[ExpertsChosen]
    lost: TokensLost
    folder: Path

    def saved_at(self, place: str, layer: int, expert: int) -> int:
        """Return when an expert was last saved in a place, no later than the iteration gone back to."""
        index = self.lost.layers.index(layer)
        return max(event.iteration for event in self.chosen if expert in getattr(event, place)[index])

    def states(self) -> dict[int, dict[str, str]]:
        return states_of(self.folder, self.global_rank, self.generation, max(1, self.first))

    def state_after(self) -> dict[str, str]:
        return states_of(self.folder, self.global_rank, self.generation + 1, self.back_to)[self.back_to]


def legs_of(run: Path, global_rank: int, folder: Path) -> list[Leg]:
    """Return a rank's way from recovery to recovery. Both ranks of a stage choose alike; its first one tells."""
    of_stage = stretches_of(run, global_rank // 2 * 2)
    legs = []
    for before, after in itertools.pairwise(stretches_of(run, global_rank)):
        assert after.rejoined
        assert after.generation == before.generation + 1
        (lost,) = (event for event in after.recovery if isinstance(event, TokensLost))
        (told,) = (stretch for stretch in of_stage if stretch.generation == before.generation)
        back_to, chosen = after.rejoined.iteration, _chosen(told)
        legs.append(
            Leg(
                global_rank=global_rank,
                generation=before.generation,
                first=before.rejoined.iteration if before.rejoined else 0,
                back_to=back_to,
                chosen=[event for event in chosen if event.iteration <= back_to],
                lost=lost,
                folder=folder,
            )
        )
    return legs


def _chosen(stretch: Stretch) -> list[ExpertsChosen]:
    return [event for event in stretch.events if isinstance(event, ExpertsChosen)]


def check_composition(leg: Leg, saved_at: Callable[[int, int], int]) -> None:
    """Every expert is as it was saved, all else as it was after the iteration gone back to."""
    before, after = leg.states(), leg.state_after()
    num_experts = 0
    for name, state in after.items():
        found = re.fullmatch(r"layer (\d+) expert (\d+)", name)
        iteration = saved_at(int(found[1]), int(found[2])) if found else leg.back_to
        num_experts += bool(found)
        if iteration:  # of the state at the start nothing is noted
            assert state == before[iteration][name], (leg.global_rank, leg.generation, name, iteration)
    assert num_experts == 2


def check_lost_tokens(leg: Leg, saved_at: Callable[[int, int], int]) -> None:
    tokens = tokens_in(leg.folder, leg.generation, range(leg.first + 1, leg.back_to + 1))
    by_hand = lost_by_hand(tokens, saved_at, leg.back_to, leg.lost.layers, len(EXPERTS))
    assert leg.lost.lost_by_expert == by_hand, (leg.global_rank, leg.generation)


def check_leg(leg: Leg, place: str = "memory", experts: Collection[int] = EXPERTS) -> None:
    """These experts of the stage come from a place, the others from memory."""

    def saved_at(layer: int, expert: int) -> int:
        return leg.saved_at(place if expert in experts else "memory", layer, expert)

    check_composition(leg, saved_at)
    check_lost_tokens(leg, saved_at)


def test_moc_loses_what_came_since_experts_were_saved(tmp_path: Path) -> None:
    """Two levels: a rank that loses its memory has its experts from storage, all others from memory.

    As faults cost too much, the experts of a snapshot double: what was known before a fault still counts.
    """
    faults = [
        all_go_back("a process", 6, Point(2, Phase.BACKWARD, 9)),
        all_go_back("again, with twice the experts", 12, Point(0, Phase.REDUCE, 15)),
        all_go_back("a node", (12, 15, 18), Point(0, Phase.REDUCE, 21), kills=[3], then=lose_nodes),
    ]
    settings = ("ckpt.k_snapshot=1", "ckpt.k_persist=1", *EVERY_3)
    setup = functools.partial(note_all, tmp_path)
    job = survive(tmp_path, faults, "train.iterations=24", ckpt="moc", settings=settings, setup=setup, is_exact=False)
    for rank in RANKS:
        first, second, third = legs_of(job.run, rank, tmp_path)
        check_leg(first)
        check_leg(second)
        check_leg(third, "on_disk", (2, 3) if rank >= 2 else ())
        assert [len(leg.chosen[-1].memory[0]) for leg in (first, second)] == [1, 2]
        assert max(len(event.memory[0]) for event in _chosen(stretches_of(job.run, rank)[-1])[1:]) == 4
    of_first_fault = [legs_of(job.run, rank, tmp_path)[0].lost for rank in (0, 2)]
    assert all(sum(lost.lost_by_layer) for lost in of_first_fault)
    check_shares(of_first_fault, tmp_path, back_to=6)
    sizes = [event.size_bytes for event in events_of(job.run, SnapshotTaken, 0)]
    assert max(sizes[1:3]) < sizes[0], "partial"


def check_shares(lost: list[TokensLost], folder: Path, back_to: int) -> None:
    """PLT and MLT are the mean and the sum over layers of the share of its tokens that each layer has lost.

    Dropless: all that routers may send arrives.
    """
    tokens = tokens_in(folder, 1, range(1, back_to + 1))
    by_layer = {
        layer: num for of_stage in lost for layer, num in zip(of_stage.layers, of_stage.lost_by_layer, strict=True)
    }
    shares = [
        num / sum(sum(tokens[i][layer]) for i in range(1, back_to + 1)) for layer, num in sorted(by_layer.items())
    ]
    assert lost[0].plt == lost[1].plt == pytest.approx(sum(shares) / len(shares), rel=1e-12)
    assert lost[0].mlt == lost[1].mlt == pytest.approx(sum(shares), rel=1e-12)


@pytest.mark.full
def test_moc_selects_experts_by_load(tmp_path: Path) -> None:
    settings = ("ckpt.k_snapshot=2", "ckpt.k_persist=1", "ckpt.selection=load", *EVERY_3)
    faults = [all_go_back("a process", 6, Point(2, Phase.BACKWARD, 9))]
    setup = functools.partial(note_all, tmp_path)
    job = survive(tmp_path, faults, "train.iterations=12", ckpt="moc", settings=settings, setup=setup, is_exact=False)
    for rank in RANKS:
        (leg,) = legs_of(job.run, rank, tmp_path)
        check_leg(leg)


def test_moetion_makes_up_for_lost_tokens_with_capacity(tmp_path: Path) -> None:
    """Peers bring back the experts that a lost node had sent them; what is left to make up survives the next fault."""
    faults = [
        all_go_back("a process", 6, Point(2, Phase.BACKWARD, 9)),
        all_go_back("before all is made up", 12, Point(1, Phase.BACKWARD, 15)),
        all_go_back("a node", (15, 18), Point(0, Phase.REDUCE, 21), kills=[3], then=lose_nodes, fetched=True),
    ]
    settings = ("ckpt.experts=2", "ckpt.remote_experts=1", "ckpt.every_iters=3")
    setup = functools.partial(note_all, tmp_path)
    job = survive(
        tmp_path,
        faults,
        "train.iterations=24",
        *LIMITED,
        ckpt="moetion",
        settings=settings,
        setup=setup,
        is_exact=False,
    )
    for rank in RANKS:
        first, second, third = legs_of(job.run, rank, tmp_path)
        check_leg(first)
        check_leg(second)
        check_leg(third, "on_peers", (2, 3) if rank >= 2 else ())
        check_boost(job.run, rank)
    stages = [[event.deficit for event in events_of(job.run, CapacityBoosted, rank)] for rank in RANKS]
    assert stages[0] == stages[1]
    assert stages[2] == stages[3], "all ranks of a stage agree on what is left"
    assert any(event.bubble_bytes for rank in RANKS for event in events_of(job.run, SnapshotTaken, rank))
    assert all(event.bubble_bytes <= event.size_bytes for event in events_of(job.run, SnapshotTaken, 0))


def check_boost(run: Path, global_rank: int) -> None:
    """Experts that have lost tokens get more capacity from the next iteration on, until all is made up."""
    _, first, second, _ = stretches_of(run, global_rank)
    for stretch in (first, second):
        assert stretch.rejoined
        (lost,) = (event for event in stretch.recovery if isinstance(event, TokensLost))
        boosted = [event for event in stretch.events if isinstance(event, CapacityBoosted)]
        left = [sum(map(sum, event.deficit)) for event in boosted]
        assert boosted[0].iteration == stretch.rejoined.iteration + 1
        assert all(later <= earlier for earlier, later in itertools.pairwise(left))
        assert max(boosted[0].capacity[0]) > min(boosted[0].capacity[0])
        if stretch is first:
            assert 0 < left[0] < sum(lost.lost_by_layer)
            before = {event.iteration: sum(map(sum, event.deficit)) for event in boosted}[12]
            assert before > 0
        else:
            assert left[0] > sum(lost.lost_by_layer), "some of the first fault"


def test_moc_goes_on_from_storage_and_lines_do_not_mix(tmp_path: Path) -> None:
    """With rank 3's disk gone only the checkpoint is left: iterations that others' disks have run again, and differ."""
    settings = ("ckpt.k_snapshot=2", "ckpt.k_persist=1", "ckpt.durable_every_iters=4", "ckpt.async_save=false")
    restarts = Restarts(tmp_path, "train.iterations=24", ckpt="moc", settings=settings)

    def far_enough(job: ElasticJob) -> None:
        job.wait_until(0, 7, Phase.FORWARD)

    assert restarts.start(until=far_enough).resumed is None
    shutil.rmtree(restarts.snapshots(3))
    again = restarts.start(until=lambda job: wait_for_core(job, line=1, iteration=6))
    assert again.resumed == ("iter_0000004", 4)
    third = restarts.start("ckpt.durable_every_iters=0", until=far_enough_after_load, is_exact=False)
    assert third.resumed
    assert third.resumed[0] == "local disk"
    assert third.resumed[1] >= 6
    assert [event.plt > 0 for event in third.of(TokensLost)] == [True]


def far_enough_after_load(job: ElasticJob) -> None:
    job.wait_for(lambda: len(events_of(job.run, StateResumed, 0)) == 2 or None, "the load")
    job.wait_until(0, job.page(0).iteration + 1)


def wait_for_core(job: ElasticJob, *, line: int, iteration: int) -> None:
    """Wait until all disks have the core of this iteration or a later one on this line."""

    def newest(rank: int) -> tuple[int, int]:
        units = read_units(BlobFolder(job.run / "snapshots" / f"rank{rank:04d}")).values()
        versions = [unit.header.version for unit in units if name_of(unit) == CORE]
        return max(((version.lineage, version.iteration) for version in versions), default=(0, 0))

    for rank in RANKS:
        job.wait_for(lambda rank=rank: newest(rank) >= (line, iteration) or None, f"a core on the disk of rank {rank}")


@pytest.mark.parametrize(
    ("settings", "k"),
    [
        (("ckpt=moc", "ckpt.k_snapshot=2", "ckpt.k_persist=1"), 2),
        pytest.param(("ckpt=moetion", "ckpt.experts=3", "ckpt.remote_experts=2"), 3, marks=pytest.mark.full),
    ],
)
def test_bytes_are_those_of_the_papers_equations(settings: tuple[str, ...], k: int, tmp_path: Path) -> None:
    """MoC, equation (6), and MoEtion, equation (5), with 12 bytes a parameter: master weights and two moments.

    The equations leave out what a snapshot holds beside the model: generators, token counts.
    """
    wide = (*EIGHT, "model.hidden_size=256", "model.moe_ffn_hidden_size=256")
    train(2, tmp_path, "train.iterations=4", *wide, *settings, "runtime.guard=false")
    composed = compose_settings(fast(*wide))
    total, active = count_parameters(composed.model, 256, composed.train.sequence_length)  # bytes
    of_an_expert = (total - active) // (composed.model.num_layers * (8 - composed.model.moe_topk))
    of_experts = composed.model.num_layers * 8 * of_an_expert
    wanted = 12 * (total - of_experts + of_experts * k / 8)
    taken = [events_of(tmp_path, SnapshotTaken, rank)[2].size_bytes for rank in range(2)]
    assert sum(taken) == pytest.approx(wanted, rel=0.01)


VARIANTS = {
    "PP 4": (4, PP4),
    "experts on two ranks": (8, ("train.global_batch_size=16",)),
    "aux-loss-free bias": (4, (*BIAS, "train.eval_every_iters=2")),
    "tied embeddings, optimizer not sharded": (4, (*TIED, *UNSHARDED)),
}


@pytest.mark.full
@pytest.mark.parametrize("policy", ALL_EXPERTS)
@pytest.mark.parametrize("name", VARIANTS)
def test_with_all_experts_nothing_is_lost_in_every_layout(policy: str, name: str, tmp_path: Path) -> None:
    world_size, layout = VARIANTS[name]
    faults = [
        all_go_back("a process", range(2, 6), Point(1, Phase.BACKWARD, 6), world_size=world_size),
        all_go_back("another", range(4, 9), Point(0, Phase.STEP, 9, skip=1), world_size=world_size),
    ]
    training = ("train.iterations=10", *layout)
    survive(tmp_path, faults, *training, world_size=world_size, ckpt=policy, settings=ALL_EXPERTS[policy])


@pytest.mark.full
def test_with_all_weights_in_part_nothing_is_lost(tmp_path: Path) -> None:
    faults = [all_go_back("a process", range(2, 6), Point(2, Phase.BACKWARD, 6))]
    settings = (*ALL_EXPERTS["moc"], "ckpt.partial=weights")
    survive(tmp_path, faults, "train.iterations=10", ckpt="moc", settings=settings)
