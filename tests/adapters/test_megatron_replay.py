"""An iteration that is run again, by one stage alone or by some together, leaves the very bits that it once left."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from launcher.loop import StageRunner, Trainer
from moe_ckpt.adapters.megatron_operators import RankOperators
from moe_ckpt.adapters.megatron_replay import StageReplay, require_replayable
from moe_ckpt.adapters.megatron_state import TrainingState, digest_of, named_state, small_state
from moe_ckpt.adapters.megatron_step import clear_gradients, finish_gradients
from moe_ckpt.adapters.megatron_wipe import StateWiper
from moe_ckpt.errors import ConfigError
from moe_ckpt.store.boundary import BoundaryLog, Direction, LoggedEnds
from moe_ckpt.store.codec import PartKey
from moe_ckpt.store.copier import HostCopier
from moe_ckpt.store.memory import HostBuffers, PrivateMemory
from moe_ckpt.store.steps import StepRecord
from moe_ckpt.types import ReadyGradients
from tests.adapters.stage import build_stage
from tests.ranks import run_ranks

LAST = 3
BIAS = ("model.moe_balancing=bias", "model.moe_score_function=sigmoid")
OVERFLOWING = ("precision=fp16", "precision.initial_loss_scale=1.0e+15", "precision.loss_scale_hysteresis=1")
CLIPPED = "train.clip_grad=0.1"

Sent = dict[Direction, list[torch.Tensor]]


class _Job:
    """Hooks that note what a replay of the last iteration needs, and the state before it."""

    def __init__(self, overrides: tuple[str, ...]) -> None:
        self.state, trainer = build_stage(*overrides)
        self.runner = cast("StageRunner", trainer._runner)
        self.operators = RankOperators(self.state)
        self.replay = StageReplay(self.state, self.operators, self.runner.communicator, self.runner.train_on)
        self.boundary = BoundaryLog(HostCopier(), HostBuffers(PrivateMemory(pinned=False)))
        self.runner.communicator.log = self.boundary
        self.starts: dict[int, Mapping[str, torch.Tensor]] = {}
        self.records: dict[int, StepRecord] = {}
        self.trainer = Trainer(self.runner, self)
        self._before: dict[PartKey, torch.Tensor] = {}
        self._adam_steps: tuple[float, ...] = ()

    @property
    def stage(self) -> int:
        return parallel_state.get_pipeline_model_parallel_rank()

    def iteration_started(self, iteration: int) -> None:
        if iteration == LAST:
            everything = range(len(self.operators.table.operators))
            pieces = [*self.operators.pieces(everything, ()), *self.operators.buffer_pieces(everything)]
            self._before = {key: tensor.detach().clone() for key, tensor, _ in pieces}
            self._adam_steps = self.operators.adam_steps()
        self.starts[iteration] = self.replay.begin(iteration)
        self.boundary.begin(iteration)

    def loss_known(self, iteration: int, loss: float) -> None:
        pass

    def gradients_ready(self, iteration: int, gradients: ReadyGradients) -> bool:
        self.boundary.end()
        self.records[iteration] = self.replay.record(iteration, gradients)
        return True

    def update_applied(self, iteration: int) -> None:
        pass

    def step_committed(self, iteration: int) -> None:
        self.starts[iteration + 1] = self.replay.begin(iteration + 1)

    def train(self) -> str:
        """Run all iterations; return the digest of what they lead to."""
        for iteration in range(1, LAST + 1):
            self.trainer.run_iteration(iteration)
        return digest_of(self.state)

    def go_back(self) -> None:
        """Lose the state, and put that before the last iteration in its place. Collective in the stage group."""
        live = digest_of(self.state)
        StateWiper(self.state).wipe()
        assert digest_of(self.state) != live
        names = [str(operator) for operator in self.operators.table.operators]
        self.operators.load(self._before, names, (), self._adam_steps)

    def sent(self) -> Sent:
        """Return copies of what this rank sent in the last iteration."""
        return {way: [tensor.clone() for tensor in self.boundary.sent(LAST, way)] for way in Direction}

    def run_again(self, ends: LoggedEnds, *, whole_model: bool = False) -> str:
        """Replay the last iteration and return the digest of what it leads to."""
        self.boundary.begin(LAST)
        self.replay.replay(self.records[LAST], self.starts[LAST], ends, whole_model=whole_model)
        self.boundary.end()
        return digest_of(self.state)


def _ends(job: _Job, sent_by_rank: list[Sent], first: int, last: int) -> LoggedEnds:
    """Return what the ends of a segment of stages get from the logs of the stages around it."""
    communicator: Any = job.runner.communicator
    before = sent_by_rank[communicator.prev_rank][Direction.ACTIVATION]
    after = sent_by_rank[communicator.next_rank][Direction.GRADIENT]
    num_stages = parallel_state.get_pipeline_model_parallel_world_size()
    return LoggedEnds(
        from_previous=before if job.stage == first and first > 0 else None,
        from_next=after if job.stage == last and last < num_stages - 1 else None,
    )


def _exchange(sent: Sent) -> list[Sent]:
    everyone: list[Sent] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, sent)
    return everyone


def _watch_transfers() -> set[str]:
    """Return a set that gathers the kinds of all transfers that reach Megatron's own communicator from now on."""
    seen: set[str] = set()
    original = P2PCommunicator._communicate

    def watched(self: Any, **options: Any) -> Any:
        kinds = ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next")
        seen.update(kind for kind in kinds if options[kind] is not None and options[kind] is not False)
        return original(self, **options)

    P2PCommunicator._communicate = watched
    return seen


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What a rank had and did: whether it replayed, what it exchanged then, and if it sent the same again."""

    stage: int
    live: str
    digest: str
    transfers: set[str]
    sent_the_same: bool
    overflow: bool


def _zeros(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else torch.zeros_like(tensor)


def _replay_segment(overrides: tuple[str, ...], first: int, last: int) -> Replayed:
    job = _Job(overrides)
    live = job.train()
    sent = job.sent()
    ends = _ends(job, _exchange(sent), first, last)
    transfers = _watch_transfers()
    digest = live
    if first <= job.stage <= last:
        job.go_back()
        whole_model = last - first + 1 == parallel_state.get_pipeline_model_parallel_world_size()
        if whole_model:  # then stages exchange it again, and its log does not matter
            job.records[LAST] = replace(job.records[LAST], tied_gradient=_zeros(job.records[LAST].tied_gradient))
        digest = job.run_again(ends, whole_model=whole_model)
    dist.barrier()
    again = job.sent()
    return Replayed(
        stage=job.stage,
        live=live,
        digest=digest_of(job.state),
        transfers=transfers,
        sent_the_same=digest == live
        and all(len(sent[way]) == len(again[way]) and all(map(torch.equal, sent[way], again[way])) for way in sent),
        overflow=job.records[LAST].gradients.overflow,
    )


def _expected_transfers(stage: int, first: int, last: int) -> set[str]:
    with_previous = {"tensor_send_prev", "recv_prev"} if first < stage <= last else set[str]()
    return with_previous | ({"tensor_send_next", "recv_next"} if first <= stage < last else set[str]())


PP2 = ("parallel.pp=2", CLIPPED)
TIED = (*PP2, "model.tied_embeddings=true")
UNSHARDED = "train.distributed_optimizer=false"
PP3 = ("parallel.pp=3", "model.num_layers=3")


@pytest.mark.parametrize(
    ("world_size", "overrides", "first", "last"),
    [
        (2, PP2, 0, 0),
        (2, (*PP2, *BIAS, "train.recompute=full"), 1, 1),
        (2, (*PP2, "precision=fp16", "precision.initial_loss_scale=1024.0"), 0, 0),
        (2, (*PP2, *OVERFLOWING, *BIAS), 1, 1),
        (2, (*PP2, *OVERFLOWING), 0, 1),
        (2, (*TIED, UNSHARDED), 0, 0),
        (2, TIED, 0, 1),
        (4, (*TIED, *BIAS), 0, 0),
        (4, (*TIED, "model.position_embedding=learned"), 1, 1),
        (3, PP3, 0, 1),
        (3, PP3, 1, 1),
        (3, (*PP3, "model.tied_embeddings=true"), 1, 2),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, tuple) else str(value),
)
def test_replayed_stages_end_where_they_were(
    world_size: int, overrides: tuple[str, ...], first: int, last: int
) -> None:
    for rank in run_ranks(world_size, _replay_segment, overrides, first, last):
        assert rank.digest == rank.live
        assert rank.sent_the_same
        assert rank.transfers == _expected_transfers(rank.stage, first, last)
        assert rank.overflow == ("precision.initial_loss_scale=1.0e+15" in overrides)


def _other_activations(ends: LoggedEnds, record: StepRecord) -> tuple[LoggedEnds, StepRecord]:
    logged = ends.from_previous
    assert logged is not None
    return replace(ends, from_previous=[*logged[1:], logged[0]]), record


def _other_norm(ends: LoggedEnds, record: StepRecord) -> tuple[LoggedEnds, StepRecord]:
    return ends, replace(record, gradients=replace(record.gradients, total_norm=1.0))


def _other_tied_gradient(ends: LoggedEnds, record: StepRecord) -> tuple[LoggedEnds, StepRecord]:
    assert record.tied_gradient is not None
    return ends, replace(record, tied_gradient=2 * record.tied_gradient)


def _other_iteration(ends: LoggedEnds, record: StepRecord) -> tuple[LoggedEnds, StepRecord]:
    return ends, replace(record, iteration=record.iteration - 1)


Change = Callable[[LoggedEnds, StepRecord], tuple[LoggedEnds, StepRecord]]


def _replay_changed(change: Change) -> tuple[str, str]:
    """Return the digests of stage 1, live and after a replay from logs that say something else."""
    job = _Job(TIED)
    live = job.train()
    ends = _ends(job, _exchange(job.sent()), 1, 1)
    if job.stage == 0:
        return live, live
    ends, job.records[LAST] = change(ends, job.records[LAST])
    job.go_back()
    return live, job.run_again(ends)


@pytest.mark.parametrize("change", [_other_activations, _other_norm, _other_tied_gradient, _other_iteration])
def test_a_replay_takes_what_the_logs_say(change: Change) -> None:
    _, (live, replayed) = run_ranks(2, _replay_changed, change)
    assert live != replayed


def _replay_with_one_too_many() -> str:
    job = _Job(PP2)
    job.train()
    ends = _ends(job, _exchange(job.sent()), 0, 0)
    if job.stage == 1:
        return ""
    assert ends.from_next is not None
    with pytest.raises(AssertionError) as error:
        job.run_again(replace(ends, from_next=[*ends.from_next, ends.from_next[0]]))
    return str(error.value)


def test_a_logged_tensor_that_is_left_over_is_a_bug() -> None:
    message, _ = run_ranks(2, _replay_with_one_too_many)
    assert message.startswith("[1] logged tensors were not asked for")


def _train_after_a_failed_replay() -> tuple[str, str, set[str]]:
    """Return the digests of the last iteration, live and live again, and what stages exchanged the second time."""
    job = _Job(PP2)
    live = job.train()
    ends = _ends(job, _exchange(job.sent()), 0, 0)
    if job.stage == 0:
        assert ends.from_next is not None
        with pytest.raises(IndexError):
            job.run_again(replace(ends, from_next=ends.from_next[1:]))
    dist.barrier()
    transfers = _watch_transfers()
    job.go_back()
    job.replay.restore_start(job.starts[LAST])
    job.trainer.run_iteration(LAST)
    return live, digest_of(job.state), transfers


def test_a_failed_replay_leaves_a_live_communicator() -> None:
    for stage, (live, again, transfers) in enumerate(run_ranks(2, _train_after_a_failed_replay)):
        assert live == again
        assert transfers == _expected_transfers(stage, 0, 1)


@dataclass(frozen=True, kw_only=True)
class Undone:
    """Digests before an aborted pass, after it, with all of its start but buffers put back, and with all of it."""

    before: str
    aborted: str
    without_buffers: str
    restored: str
    changed: set[str]
    small_state_restored: bool


def _named(state: TrainingState) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in named_state(state)}


def _undo(overrides: tuple[str, ...]) -> Undone:
    job = _Job(overrides)
    job.train()
    before, named, small = digest_of(job.state), _named(job.state), small_state(job.state)
    start = job.replay.begin(LAST + 1)
    clear_gradients(job.state)
    job.runner.train_on(LAST + 1)
    finish_gradients(job.state)
    random.gauss(0, 1)
    np.random.standard_normal()
    after = _named(job.state)
    aborted = digest_of(job.state)
    job.replay.restore_start(start)
    without_buffers = digest_of(job.state)
    job.replay.restore_start(start, undo=LAST + 1)
    again = small_state(job.state)
    return Undone(
        before=before,
        aborted=aborted,
        without_buffers=without_buffers,
        restored=digest_of(job.state),
        changed={name.rpartition(".")[2] for name in named if not torch.equal(named[name], after[name])},
        small_state_restored=small.keys() == again.keys()
        and all(torch.equal(small[name], again[name]) for name in small),
    )


@pytest.mark.parametrize("overrides", [PP2, (*PP2, *OVERFLOWING), (*PP2, *BIAS)], ids=", ".join)
def test_an_aborted_pass_can_be_undone(overrides: tuple[str, ...]) -> None:
    for rank in run_ranks(2, _undo, overrides):
        assert rank.before != rank.aborted
        assert rank.before == rank.restored
        assert (rank.before == rank.without_buffers) == ("model.moe_balancing=bias" not in overrides)
        assert rank.small_state_restored
        assert "cpu" in rank.changed
        assert ("scale" in rank.changed) == ("precision=fp16" in overrides)
        assert ("expert_bias" in rank.changed) == ("model.moe_balancing=bias" in overrides)


def _refusals() -> list[str]:
    state, _ = build_stage()
    require_replayable(state)
    config: Any = cast("Any", state.model[0]).config
    optimizer: Any = state.inner_optimizers[-1].config
    found: list[str] = []
    for owner, name in ((config, "calculate_per_token_loss"), (optimizer, "use_precision_aware_optimizer")):
        setattr(owner, name, True)
        with pytest.raises(ConfigError) as error:
            require_replayable(state)
        setattr(owner, name, False)
        found.append(str(error.value))
    require_replayable(state)
    return found


def test_what_no_log_covers_is_refused() -> None:
    ((per_token, precision_aware),) = run_ranks(1, _refusals)
    assert "calculate_per_token_loss: got True, wanted False" in per_token
    assert "use_precision_aware_optimizer: got True, wanted False" in precision_aware
