"""The costs of each policy in a setup: bytes, stalls, intervals, memory.

Every policy has an entry in the simulator's table of policies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moe_ckpt.config import CKPT_CONFIGS
from moe_ckpt.errors import ConfigError
from moe_ckpt.policies.checkpoint_interval import best_interval
from moe_ckpt.policies.moevement import SparseWindows
from moe_ckpt.policies.window_schedule import paper_window
from moe_ckpt.sim.capture_redundancy import failure_probability
from moe_ckpt.sim.generation import Kept
from moe_ckpt.sim.hardware import JOB
from moe_ckpt.sim.measuring import SETTLED, GenerationStart
from moe_ckpt.sim.policies import plan_saving
from moe_ckpt.sim.recovering import Losses, estimate, plan_after
from moe_ckpt.sim.saving import Recovery, Saving, Switches
from moe_ckpt.sim.snapshot_pattern import SnapshotPattern
from moe_ckpt.snapshot.token_bucket import BURST_S
from moe_ckpt.types import (
    ENOUGH_SNAPSHOTS,
    ENOUGH_WINDOWS,
    IntervalChoice,
    WindowChoice,
)
from tests.sim.setups import EXPERTS, ckpt, cluster, job, setup, shape

MIRROR = ("ckpt.capture=mirror", "ckpt.mirror_interface=e0")
SLOW = cluster(copy_bytes_per_s=1000.0, whole_copy_bytes_per_s=1000.0)


@pytest.mark.parametrize("policy", sorted(CKPT_CONFIGS))
def test_every_policy_can_be_planned(policy: str) -> None:
    saving = plan_saving(ckpt(f"ckpt={policy}"), setup())
    saves_nothing = (saving.recovery, saving.overhead_s, saving.durable) == (
        Recovery.RESTART,
        0.0,
        None,
    )
    assert (saving.name, saves_nothing) == (policy, policy == "none")


def test_a_synchronous_checkpoint_stops_training_until_it_is_written() -> None:
    of = setup(machines=cluster(disk_bytes_per_s=1e4))
    saving = plan_saving(ckpt("ckpt=dense", "ckpt.every_iters=5"), of)
    write_s = of.total_full_bytes / 1e4
    assert saving.durable is not None
    assert (saving.durable.every_iters, saving.durable.stall_s) == (5, write_s)
    assert saving.overhead_s == write_s / 5


def test_an_asynchronous_one_stops_it_for_the_copy_and_for_the_one_before() -> None:
    of = setup(machines=cluster(disk_bytes_per_s=1e4, whole_copy_bytes_per_s=1e5))
    copied = max(
        int(profile.table.full_bytes.sum(axis=1).max()) for profile in of.job.profiles
    )
    write_s = of.total_full_bytes / 1e4
    rare = plan_saving(
        ckpt("ckpt=dense", "ckpt.every_iters=50", "ckpt.async_save=true"), of
    ).durable
    often = plan_saving(
        ckpt("ckpt=dense", "ckpt.every_iters=5", "ckpt.async_save=true"), of
    ).durable
    assert rare is not None
    assert often is not None
    assert rare.stall_s == pytest.approx(copied / 1e5)
    assert often.stall_s == pytest.approx(copied / 1e5 + write_s - 50.0)


@pytest.mark.parametrize("gpu_bytes_per_s", [1e12, 1e7])
def test_an_update_waits_for_a_copy_longer_than_what_comes_before_it(
    gpu_bytes_per_s: float,
) -> None:
    of = setup(
        machines=cluster(whole_copy_bytes_per_s=4000.0, gpu_bytes_per_s=gpu_bytes_per_s)
    )
    saving = plan_saving(ckpt("ckpt=gemini", "ckpt.every_iters=20"), of)
    (snapshot,) = saving.settled.repeat
    assert snapshot.size_bytes == max(
        int(profile.table.full_bytes.sum(axis=1).max()) for profile in of.job.profiles
    )
    assert snapshot.stall_s == pytest.approx(
        snapshot.size_bytes / 4000.0 - (10.0 - of.costs.update_s)
    )
    assert saving.overhead_s == pytest.approx(snapshot.stall_s / 20)


def test_checkfreq_keeps_to_its_cap() -> None:
    of = setup(machines=replace(SLOW, disk_bytes_per_s=1e9))
    saving = plan_saving(ckpt("ckpt=checkfreq"), of)
    assert 0 < saving.overhead_s <= 0.03 * 10.0
    (snapshot,) = saving.settled.repeat
    assert snapshot.stall_s / (saving.settled.period - 1) > 0.03 * 10.0


def test_a_slow_disk_makes_checkfreq_wait_for_what_is_being_written() -> None:
    of = setup(machines=cluster(disk_bytes_per_s=1000.0))
    saving = plan_saving(ckpt("ckpt=checkfreq"), of)
    assert (
        saving.settled.period * 10.0
        >= of.total_full_bytes / 1000.0
        > (saving.settled.period - 1) * 10.0
    )


@pytest.mark.parametrize("share", ["rank", "job"])
def test_a_window_is_the_one_that_loses_the_least_time(share: str) -> None:
    """Where faults are frequent, slots are small enough to cause no stall.

    Where faults are rare, pauses are long.
    """
    rate = 6000.0 if share == "rank" else 20_000.0
    of = setup(
        machines=cluster(copies_share=share, copy_bytes_per_s=rate, interference=0.02)
    )
    roomy = (
        "ckpt=moevement",
        "ckpt.memory_budget_bytes=1000000000",
        "ckpt.overhead=0.03",
    )
    often, rarely = (
        plan_saving(ckpt(*roomy, f"ckpt.mtbf_s={mtbf_s}"), of) for mtbf_s in (300, 1e7)
    )
    first, last = often.settled.repeat[0], rarely.settled.repeat[0]
    assert first.num_slots > 1
    assert first.pause_iters == 0 < 20 < last.pause_iters
    assert 0.0 < rarely.overhead_s < often.overhead_s <= 0.03 * 10.0
    for saving in (often, rarely):
        choice = saving.settled.repeat[0].choice
        assert isinstance(choice, WindowChoice)
        # rel: the simulated overhead is that of the largest stage alone
        assert choice.snapshot_share == pytest.approx(saving.overhead_s / 10.0, rel=0.2)


def test_the_papers_window_is_algorithm_1_over_the_whole_model() -> None:
    of = setup(machines=cluster(copies_share="job", copy_bytes_per_s=20_000.0))
    saving = plan_saving(ckpt("ckpt=moevement", "ckpt.paper_exact=true"), of)
    parameters, num_operators = (
        int(of.job.shape.parameters.sum()),
        len(of.job.shape.operators),
    )
    expected, _ = paper_window(
        num_operators=num_operators,
        compute_bytes=2 * parameters / num_operators,
        master_bytes=12 * parameters / num_operators,
        optimizer_bytes=0.0,
        iteration_s=10.0,
        copy_bytes_per_s=20_000.0,
    )
    assert saving.settled.repeat[0].num_slots == expected > 1


def test_more_is_active_slot_by_slot_and_popular_experts_come_last() -> None:
    of = job(pp=1, dp=2, ep=2, shape=shape(popularity=(0.01, 0.01, 0.08, 0.9)))

    def active(switches: Switches) -> tuple[float, ...]:
        return plan_saving(
            ckpt("ckpt=moevement"), setup(of=of, switches=switches)
        ).active(4)

    ordered, unordered = active(Switches()), active(Switches(order_by_popularity=False))
    assert list(ordered) == sorted(ordered)
    assert ordered[-1] == pytest.approx(1.0)
    assert ordered[0] < unordered[0]
    assert active(Switches(skip_frozen=False)) == (1.0,) * 4


def test_a_window_begins_once_peers_have_the_base() -> None:
    of, roomy = (
        setup(),
        ("ckpt=moevement", "ckpt.replicas=1", "ckpt.memory_budget_bytes=1000000000"),
    )
    saving = plan_saving(ckpt(*roomy, "ckpt.max_bytes_per_s.peers=1000"), of)
    base, first = saving.settled.lead[0], saving.settled.repeat[0]
    assert (base.offset, first.offset) == (0, 1 + base.pause_iters)
    assert base.pause_iters * of.costs.iteration_s >= saving.whole_bytes / 1000.0


def test_a_replay_counts_as_an_iteration_until_one_was_measured() -> None:
    """On processors that all stages share, a stage alone replays faster.

    Windows are rarer once such a replay was measured.
    """
    # a copy of the whole state takes two iterations
    copy_bytes_per_s = plan_saving(ckpt("ckpt=gemini"), setup()).whole_bytes / 20.0
    rates = {
        "copy_bytes_per_s": copy_bytes_per_s,
        "whole_copy_bytes_per_s": copy_bytes_per_s,
    }
    of = setup(machines=cluster(compute_share=JOB, interference=0.3, **rates))
    saving = plan_saving(ckpt("ckpt=moevement", "ckpt.mtbf_s=1000"), of)
    before, after = (
        saving.pattern(replace(SETTLED, replay_length=replayed)).interval_iters
        for replayed in (None, 1.0)
    )
    assert before < after == saving.settled.interval_iters
    assert after < saving.pattern(replace(SETTLED, replay_length=0.25)).interval_iters


def kept(saving: Saving, age_iters: int, num_slots: int) -> SnapshotPattern:
    """Return the snapshots of a generation whose ranks keep a window at the start.

    Args:
        saving: The policy.
        age_iters: Iterations from the start of the window to the start of the
            generation.
        num_slots: Slots of the window.
    """
    return saving.pattern(
        replace(SETTLED, kept_age_iters=age_iters, kept_slots=num_slots)
    )


def test_an_interval_follows_the_iterations_that_were_just_run() -> None:
    """A snapshot takes as long as three iterations of the mean length.

    Iterations first take half of the mean, then twice the mean.
    """
    whole_bytes, update_s = (
        plan_saving(ckpt("ckpt=gemini"), setup()).whole_bytes,
        setup().costs.update_s,
    )
    of = setup(machines=cluster(whole_copy_bytes_per_s=whole_bytes / (30.0 - update_s)))
    saving = plan_saving(ckpt("ckpt=gemini", "ckpt.mtbf_s=2000"), of)
    coming = (*[0.5] * 60, *[2.0] * 60)
    snapshots = list(
        saving.pattern(GenerationStart(coming=coming, warm_up_iters=2)).snapshots(
            0, 400
        )
    )
    assert [snapshot.offset for snapshot in snapshots[:2]] == [0, 5], (
        "nothing is measured at first"
    )
    lasting = {
        best_interval(iteration_s=s, checkpoint_s=30.0 - s, mtbf_s=2000.0)
        for s in (5.0, 10.0, 20.0)
    }
    every = [
        each.choice.every_iters
        for each in snapshots
        if isinstance(each.choice, IntervalChoice)
    ]
    assert lasting < set(every), "and one between, by iterations of both lengths"
    assert sorted({round(each.stall_s, 9) for each in snapshots}) == [10.0, 20.0, 25.0]


def test_a_cost_is_predicted_until_enough_snapshots_were_measured() -> None:
    """Copies that fit into an iteration still slow training."""
    of = setup(machines=cluster(interference=0.5, take_s=1.0))
    saving = plan_saving(ckpt("ckpt=gemini", "ckpt.mtbf_s=1000"), of)
    choices = [
        snapshot.choice
        for snapshot in saving.pattern(GenerationStart(warm_up_iters=2)).snapshots(
            0, 60
        )
    ]
    assert choices[: ENOUGH_SNAPSHOTS + 2] == [None] * 5, (
        "without a wait no interval is chosen"
    )
    assert isinstance(choices[5], IntervalChoice)
    assert choices[5].snapshot_cost_s == pytest.approx(
        1.0 + 0.5 * saving.whole_bytes / saving.host_bytes_per_s
    )


def test_the_first_windows_are_trials() -> None:
    saving = plan_saving(ckpt("ckpt=moevement"), setup())
    choices = [
        snapshot.choice
        for snapshot in saving.pattern(GenerationStart(warm_up_iters=2)).snapshots(
            0, 400
        )
        if isinstance(snapshot.choice, WindowChoice)
    ]
    are_chosen = [choice.snapshot_share is not None for choice in choices]
    assert are_chosen == sorted(are_chosen)
    assert are_chosen.count(False) == ENOUGH_WINDOWS + 1, (
        "the cost of the newest one is not complete"
    )


def test_a_generation_goes_on_from_the_window_that_it_keeps() -> None:
    saving = plan_saving(
        ckpt("ckpt=moevement", "ckpt.pause_iters=2"), setup(machines=SLOW)
    )
    usual = saving.settled.repeat[0]
    period = usual.num_slots + usual.pause_iters
    assert usual.num_slots > 2

    def first(age_iters: int) -> tuple[int, int]:
        snapshot = next(
            kept(saving, age_iters, usual.num_slots).snapshots(0, 2 * period)
        )
        return snapshot.offset, snapshot.num_slots

    assert first(period - 2) == (2, usual.num_slots)
    assert first(2 * period - 2) == (0, 2)
    later = kept(saving, 2 * period - 2, usual.num_slots).repeat
    assert [snapshot.num_slots for snapshot in later] == [
        usual.num_slots
    ] * usual.num_slots


@pytest.mark.parametrize(
    "overrides",
    [("ckpt=gemini", "ckpt.every_iters=4"), ("ckpt=moevement", "ckpt.window=1")],
)
def test_a_state_that_all_ranks_keep_whole_is_not_taken_again(
    overrides: tuple[str, ...],
) -> None:
    saving = plan_saving(ckpt(*overrides), setup())
    everything = [snapshot.offset for snapshot in saving.settled.snapshots(0, 20)]
    for age_iters, num_slots, wanted in [
        (0, 1, everything[1:]),
        (1, 1, everything),
        (0, 2, everything),
    ]:
        pattern = kept(saving, age_iters, num_slots)
        assert [snapshot.offset for snapshot in pattern.snapshots(0, 20)] == wanted


def test_a_state_that_is_to_go_to_disk_is_taken_again() -> None:
    saving = plan_saving(
        ckpt("ckpt=gemini", "ckpt.every_iters=4", "ckpt.disk_every_iters=8"), setup()
    )
    offsets = [
        [each.offset for each in pattern.snapshots(0, 20)]
        for pattern in (kept(saving, 0, 1), saving.settled)
    ]
    assert offsets[0] == offsets[1]


def test_memory_is_that_of_the_policys_own_forecast() -> None:
    of = setup()
    saving = plan_saving(ckpt("ckpt=moevement", "ckpt.window=3", "ckpt.replicas=1"), of)
    config: Any = ckpt("ckpt=moevement", "ckpt.window=3")
    policy = SparseWindows(config, of.job.profiles, 0, 1)
    assert saving.memory == policy.forecast(3)
    assert saving.host_bytes(of) == 2 * policy.forecast(3).total_bytes


def test_a_partial_snapshot_is_all_but_some_experts() -> None:
    of = setup(machines=SLOW)

    def size_bytes(count: int) -> float:
        saving = plan_saving(ckpt("ckpt=moc", f"ckpt.k_snapshot={count}"), of)
        return max(snapshot.size_bytes for snapshot in saving.settled.repeat)

    expert_bytes = 12 * 1000 * 2 * EXPERTS / 2  # of two layers, spread over two ranks
    for count in (2, 4):  # MoC, equation 6
        assert size_bytes(count) == size_bytes(4) - expert_bytes * (1 - count / 4)


@pytest.mark.parametrize(
    ("overrides", "changes", "says"),
    [
        (
            ("ckpt=gemini", "ckpt.replicas=4"),
            {},
            "ckpt.replicas: got 4, wanted less than cluster.nodes=4",
        ),
        (
            ("ckpt=gemini",),
            {"host_memory_bytes": 1000.0},
            "cluster.host_memory_bytes: got 1000.0, wanted at least",
        ),
        (
            ("ckpt=moevement", "ckpt.window=999"),
            {},
            "ckpt.window: got 999, wanted at most",
        ),
    ],
)
def test_what_cannot_be_had_is_named(
    overrides: tuple[str, ...], changes: dict[str, float], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_saving(ckpt(*overrides), setup(machines=cluster(**changes)))
    assert str(caught.value).startswith(says)


def test_gradients_stop_training_for_as_long_as_they_are_copied() -> None:
    of = setup(machines=SLOW)
    saving = plan_saving(ckpt("ckpt=flowcheck"), of)
    (snapshot,) = saving.settled.repeat
    assert (snapshot.size_bytes, saving.settled.period) == (saving.whole_bytes // 3, 1)
    assert saving.overhead_s == pytest.approx(
        snapshot.size_bytes / SLOW.whole_copy_bytes_per_s
    )


@pytest.mark.parametrize("ep", [1, 2])
def test_mirrored_gradients_take_no_time_unless_experts_have_no_traffic(
    ep: int,
) -> None:
    of = setup(machines=SLOW, of=job(ep=ep))
    saving = plan_saving(ckpt("ckpt=flowcheck", *MIRROR), of)
    (snapshot,) = saving.settled.repeat
    experts = 12 * 1000 * 2 * EXPERTS / 2  # of two layers, spread over two ranks
    assert snapshot.size_bytes == (experts / 3 if ep == 2 else 0)
    assert saving.overhead_s == pytest.approx(
        snapshot.size_bytes / SLOW.whole_copy_bytes_per_s, abs=1e-6
    )


def test_each_rank_steps_its_whole_state_where_gradients_are_mirrored() -> None:
    of = setup(
        machines=cluster(gpu_bytes_per_s=1e6, node_bytes_per_s=5e5, sync_overlap=0.0),
        of=job(ep=1),
    )
    tapped, mirrored = (
        plan_saving(ckpt("ckpt=flowcheck", *each), of) for each in ((), MIRROR)
    )
    assert mirrored.whole_bytes == tapped.whole_bytes, "a rank saves its share"
    state_bytes = 2 * tapped.whole_bytes  # of two data-parallel ranks
    update_s = 2 * (state_bytes - tapped.whole_bytes) / 1e6  # 2: read and written
    # ranks gather gradients instead of weights, and each rank has half of the gradients
    gathered_s = (4 - 2) * state_bytes / 12 / 2 / 5e5
    assert mirrored.overhead_s == pytest.approx(update_s + gathered_s)
    small = setup(machines=cluster(gpu_memory_bytes=2 * state_bytes), of=job(ep=1))
    with pytest.raises(
        ConfigError,
        match=r"cluster.gpu_memory_bytes: got .* which ckpt.capture=mirror needs",
    ):
        plan_saving(ckpt("ckpt=flowcheck", *MIRROR), small)
    assert plan_saving(ckpt("ckpt=flowcheck"), small).whole_bytes == tapped.whole_bytes


def test_servers_on_processors_that_are_too_slow_keep_training_waiting() -> None:
    whole_bytes = plan_saving(ckpt("ckpt=flowcheck"), setup()).whole_bytes

    def added_s(**changes: object) -> float:
        changed = cluster(
            whole_copy_bytes_per_s=1e15, server_bytes_per_s=whole_bytes / 4, **changes
        )
        saving = plan_saving(
            ckpt("ckpt=flowcheck", "ckpt.replicas=2"),
            setup(machines=changed, iteration_s=10.0),
        )
        assert saving.served_s == 12.0, "its own state and those of two others"
        return saving.overhead_s

    assert added_s() == pytest.approx(2.0)
    assert added_s(compute_share="job") == pytest.approx(12.0), (
        "training computes on the same processors"
    )


@pytest.mark.parametrize("captures", [2, 3])
def test_an_iteration_that_captures_lack_costs_a_snapshot(captures: int) -> None:
    """With two of four captured ranks, half of the packets are in one capture less.

    With three captured ranks, three quarters of the packets are in one capture less.
    """
    machines = cluster(whole_copy_bytes_per_s=100.0)
    of, settings = (
        setup(machines=machines, of=job(pp=1, dp=4, ep=1)),
        (*MIRROR, f"ckpt.captures={captures}"),
    )
    perfect = plan_saving(ckpt("ckpt=flowcheck", *settings), of)
    lossy = plan_saving(ckpt("ckpt=flowcheck", *settings, "ckpt.capture_loss=1e-3"), of)
    packets = 2 * 4 * of.job.shape.parameters.sum() / 1448  # 4 bytes, two servers
    share = failure_probability(packets=packets, ranks=4, captures=captures, loss=1e-3)
    assert share == pytest.approx(
        packets * captures / 4 * 1e-3 ** (captures - 1), rel=0.2
    )
    whole_s = perfect.whole_bytes / 100.0 - 10.0
    assert lossy.overhead_s - perfect.overhead_s == pytest.approx(share * whole_s)


@pytest.mark.parametrize("capture", [(), MIRROR])
def test_a_lost_node_fetches_whole_states_from_servers(
    capture: tuple[str, ...],
) -> None:
    of = setup(of=job(ep=1))
    saving = plan_saving(ckpt("ckpt=flowcheck", *capture), of)
    kept = Kept(start=5, end=5)
    losses = Losses(
        dead=frozenset({0}),
        bare=frozenset({0}),
        unreplicated=frozenset({0}),
        rolling={},
    )
    plan = plan_after(of, saving, [kept], losses, 6)
    assert [fetch.global_rank for fetch in plan.fetches] == [0]
    assert estimate(of, saving, plan).fetch_s == pytest.approx(
        saving.whole_bytes / of.cluster.peer_bytes_per_s
    )


CAP = 1e4
OFTEN = {
    "gemini": "ckpt.every_iters=30",
    "moc": "ckpt.k_snapshot=1",
    "moevement": "ckpt.window=1",
}


@pytest.mark.parametrize("policy", OFTEN)
def test_a_capped_copy_begins_with_a_burst(policy: str) -> None:
    """A capped copy stalls `BURST_S` less than a copy on a link as slow as the cap.

    The cap is that of a rank, and iterations take 1 s.
    """
    stalls_s = []
    for caps, rate in (((f"ckpt.max_bytes_per_s.host={CAP}",), 1e9), ((), CAP)):
        of = setup(
            machines=cluster(copy_bytes_per_s=rate, whole_copy_bytes_per_s=rate),
            iteration_s=1.0,
        )
        saving = plan_saving(ckpt(f"ckpt={policy}", OFTEN[policy], *caps), of)
        stalls_s.append(next(saving.pattern(SETTLED).snapshots(0, 0)).stall_s)
    assert stalls_s[1] - stalls_s[0] == pytest.approx(BURST_S)
