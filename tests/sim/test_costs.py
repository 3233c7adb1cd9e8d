"""Seconds of iterations, replays and copies: worked numbers and properties."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_ckpt.config import NO_CAPS, MaxBytesPerS
from moe_ckpt.errors import ConfigError
from moe_ckpt.sim.costs import CopyRates, TimingConfig, estimate, stall_s
from moe_ckpt.snapshot.token_bucket import BURST_S
from tests.sim.setups import cluster, job, setup


def test_a_pipeline_takes_micro_batches_and_bubbles() -> None:
    costs = estimate(job(), cluster(), TimingConfig(iteration_s=None, interleave=1))
    slowest = costs.micro_batch_s.max()
    assert costs.pipeline_s(range(4)) == pytest.approx((8 + 3) * slowest)
    assert costs.pipeline_s(range(1, 3)) == pytest.approx(
        (8 + 1) * costs.micro_batch_s[1:3].max()
    )
    assert costs.iteration_s == pytest.approx(
        costs.pipeline_s(range(4)) + costs.sync_s + costs.update_s
    )


def test_computation_is_three_forwards_at_the_speed_of_the_gpu() -> None:
    of = job(pp=1, dp=1, ep=1)
    costs = estimate(
        of,
        cluster(nodes=1, gpus_per_node=1),
        TimingConfig(iteration_s=None, interleave=1),
    )
    flops = 3 * 2 * float(of.work.sum()) * 8
    assert costs.micro_batch_s[0] == pytest.approx(flops / (1e9 * 0.5))


def test_more_chunks_a_stage_make_smaller_bubbles() -> None:
    one, two = (
        estimate(job(), cluster(), TimingConfig(iteration_s=None, interleave=chunks))
        for chunks in (1, 2)
    )
    assert two.pipeline_s(range(4)) == pytest.approx(
        (8 + 1.5) * one.micro_batch_s.max()
    )


def test_all_parts_are_scaled_to_a_measured_iteration() -> None:
    slow_update = cluster(
        gpu_bytes_per_s=1e5, sync_overlap=0.5, network_bytes_per_s=1e7
    )
    derived = estimate(job(), slow_update, TimingConfig(iteration_s=None, interleave=1))
    given = estimate(
        job(),
        slow_update,
        TimingConfig(iteration_s=3 * derived.iteration_s, interleave=1),
    )
    assert given.iteration_s == 3 * derived.iteration_s
    assert given.update_s == pytest.approx(3 * derived.update_s)
    assert given.sync_s == pytest.approx(3 * derived.sync_s)
    assert given.pipeline_s(range(4)) == pytest.approx(3 * derived.pipeline_s(range(4)))
    assert derived.update_s > 0
    assert derived.sync_s > 0


def test_replay_of_one_stage_has_no_bubbles_and_frozen_operators_cost_less() -> None:
    costs = setup().costs
    whole, alone = costs.replay_s(range(4), 1.0), costs.replay_s(range(1, 2), 1.0)
    assert whole == pytest.approx(10.0)
    assert alone < whole
    fixed = costs.sync_s + costs.update_s + costs.log_s[1]
    assert costs.replay_s(range(1, 2), 0.0) - fixed == pytest.approx(
        (alone - fixed) * 2 / 3
    )


def test_stages_alone_have_the_processors_of_all_where_these_are_shared() -> None:
    timing, machines = (
        TimingConfig(iteration_s=10.0, interleave=1),
        cluster(gpu_bytes_per_s=1e5),
    )
    costs = estimate(job(), replace(machines, compute_share="job"), timing)
    whole_s = costs.pipeline_s(range(4))
    assert whole_s == estimate(job(), machines, timing).pipeline_s(range(4))
    assert sum(
        costs.pipeline_s(range(stage, stage + 1)) for stage in range(4)
    ) == pytest.approx(whole_s)
    assert costs.pipeline_s(range(2)) == pytest.approx(
        whole_s * costs.micro_batch_s[:2].sum() / costs.micro_batch_s.sum()
    )
    replayed_s = sum(
        costs.replay_s(range(stage, stage + 1), 1.0) - costs.log_s[stage]
        for stage in range(4)
    )
    assert replayed_s == pytest.approx(costs.iteration_s), "their updates, too"
    assert costs.update_s > 1.0


def test_a_replay_is_as_much_faster_as_iterations_that_run_again() -> None:
    costs = setup(machines=cluster(rerun_ratio=0.8)).costs
    assert costs.replay_s(range(4), 1.0) == pytest.approx(8.0)
    received_s = costs.log_s[1]
    assert costs.replay_s(range(1, 2), 0.5) - received_s == pytest.approx(
        0.8 * (setup().costs.replay_s(range(1, 2), 0.5) - received_s)
    )


def test_a_stage_alone_waits_for_its_neighbours_logs() -> None:
    of = job()
    costs = estimate(
        of,
        cluster(network_bytes_per_s=100.0),
        TimingConfig(iteration_s=10.0, interleave=1),
    )
    fixed = costs.sync_s + costs.update_s
    received_s = of.boundary_log_bytes(1) / 50.0  # two ranks share a node's network
    assert costs.replay_s(range(1, 2), 1.0) == pytest.approx(
        costs.pipeline_s(range(1, 2)) + fixed + received_s
    )
    assert costs.replay_s(range(4), 1.0) == pytest.approx(
        costs.pipeline_s(range(4)) + fixed
    )


@pytest.mark.parametrize(
    ("copy_s", "awaited_s", "interference", "expected"),
    [
        *(
            (0.0, 0.0, 0.1, 0.0),
            (1.0, 1.0, 0.0, 0.0),
            (1.0, 1.0, 0.1, 0.1),
            (5.0, 5.0, 0.0, 3.0),
        ),
        # the update is 3 s late; 0.2 s of that come from the slower iteration
        (5.0, 5.0, 0.1, 3.0),
        (5.0, 2.1, 0.1, 0.5),  # the copy goes on after the update
        (5.0, 3.0, 0.1, 1.2),  # and the update waited for 1 s
    ],
)
def test_what_does_not_fit_into_an_iteration_of_2_s_stalls(
    copy_s: float, awaited_s: float, interference: float, expected: float
) -> None:
    found = stall_s(
        copy_s=copy_s, awaited_s=awaited_s, overlap_s=2.0, interference=interference
    )
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("share", "replicas", "rate"),
    [("rank", 0, 1e6), ("rank", 1, 1e4), ("rank", 2, 5e3), ("job", 2, 1e6)],
)
def test_copies_go_at_the_rate_of_the_narrowest_link(
    share: str, replicas: int, rate: float
) -> None:
    machines = cluster(copies_share=share, network_bytes_per_s=2e4)
    assert CopyRates(cluster=machines, caps=NO_CAPS, num_ranks=8).kept(replicas) == rate


@pytest.mark.parametrize(
    ("share", "caps", "kept", "disk"),
    [
        pytest.param("rank", (3e3, None, None), 3e3, 1e7, id="host"),
        pytest.param("rank", (None, 4e3, None), 2e3, 1e7, id="peers share theirs"),
        pytest.param("rank", (None, None, 1e3), 5e3, 8e3, id="every rank has a disk"),
        pytest.param("rank", (1e9, 1e9, 1e9), 5e3, 1e7, id="wider than the links"),
        pytest.param(
            "job",
            (3e3, None, None),
            2.4e4,
            1e7,
            id="one link for the host copies of all ranks",
        ),
        pytest.param(
            "job",
            (None, 4e3, None),
            1.6e4,
            1e7,
            id="one link for the copies of all ranks to peers",
        ),
    ],
)
def test_caps_are_those_of_a_rank(
    share: str,
    caps: tuple[float | None, float | None, float | None],
    kept: float,
    disk: float,
) -> None:
    host, peers, to_disk = caps
    machines = cluster(copies_share=share, network_bytes_per_s=2e4)
    rates = CopyRates(
        cluster=machines,
        caps=MaxBytesPerS(host=host, peers=peers, disk=to_disk),
        num_ranks=8,
    )
    assert (rates.kept(2), rates.disk()) == (kept, disk)
    bursts_s = [rates.burst_s(bytes_per_s) for bytes_per_s in (1e3, 1e6)]
    assert bursts_s == [
        0.0,
        BURST_S
        if (share == "rank" and host == 3e3) or (share == "job" and host)
        else 0.0,
    ]


@pytest.mark.parametrize(
    ("iteration_s", "interleave", "names"),
    [(0.0, 1, "timing.iteration_s: got 0.0"), (None, 0, "timing.interleave: got 0")],
)
def test_impossible_timing_is_named(
    iteration_s: float | None, interleave: int, names: str
) -> None:
    with pytest.raises(ConfigError, match=names):
        TimingConfig(iteration_s=iteration_s, interleave=interleave)
