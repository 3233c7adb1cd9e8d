"""A replay of an iteration, by one stage or several, leaves the bits of training."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from moe_ckpt.errors import ConfigError, DataError, PeersLostError
from moe_ckpt.megatron.operators import RankOperators
from moe_ckpt.megatron.replay import StageReplay, forget_shared_experts
from moe_ckpt.megatron.replayable import require_replayable
from moe_ckpt.megatron.state import TrainingState, digest_of, named_state, small_state
from moe_ckpt.megatron.state_wiper import StateWiper
from moe_ckpt.megatron.step import clear_gradients, finish_gradients
from moe_ckpt.snapshot.boundary_log import BoundaryLog, Direction, LoggedEnds
from moe_ckpt.snapshot.copier import HostCopier
from moe_ckpt.snapshot.step_log import StepRecord
from moe_ckpt.snapshot.windows import HostBuffers, PrivateMemory
from moe_ckpt.types import ReadyGradients
from tests.harness.gloo.ranks import run_ranks
from tests.megatron.stage import (
    FP16,
    NoHooks,
    Parts,
    Tensors,
    build_stage,
    differing,
    full_parts,
    names_of,
    stage_number,
)
from tests.scenarios import BIAS, TIED, UNSHARDED

LAST = 3
OVERFLOWING = (
    "precision=fp16",
    "precision.initial_loss_scale=1.0e+15",
    "precision.loss_scale_hysteresis=1",
)

Sent = dict[Direction, list[torch.Tensor]]


class _Job(NoHooks):
    """Hooks that keep the inputs of a replay of the last iteration.

    The inputs include the state before the iteration.
    """

    def __init__(self, *overrides: str) -> None:
        self.state, self.loop = build_stage(*overrides)
        self.loop.iteration.hooks = self
        self.communicator = self.loop.iteration.communicator
        self.operators = RankOperators(self.state)
        self.replay = StageReplay(
            self.state,
            self.operators,
            self.communicator,
            self.loop.passes.train_on,
            self.loop.iteration.batches,
        )
        self.boundary = BoundaryLog(
            HostCopier(), HostBuffers(PrivateMemory(pinned=False))
        )
        self.communicator.log = self.boundary
        self.starts: dict[int, Mapping[str, torch.Tensor]] = {}
        self.records: dict[int, StepRecord] = {}
        self.stage = stage_number()
        self._before: Parts = {}
        self._adam_steps: tuple[float, ...] = ()

    def iteration_started(self, iteration: int) -> None:
        if iteration == LAST:
            self._before, self._adam_steps = (
                full_parts(self.operators),
                self.operators.adam_steps(),
            )
        self.starts[iteration] = self.replay.begin(iteration)
        self.boundary.begin(iteration)

    def gradients_ready(self, iteration: int, gradients: ReadyGradients) -> bool:
        self.boundary.end()
        self.records[iteration] = self.replay.record(iteration, gradients)
        return True

    def step_committed(self, iteration: int) -> None:
        self.starts[iteration + 1] = self.replay.begin(iteration + 1)

    def train(self, first: int, last: int) -> tuple[str, LoggedEnds]:
        """Run all iterations.

        Args:
            first: The first stage of the segment that will replay.
            last: The last stage of the segment.

        Returns:
            The digest of the final state, and the neighbours' logs from which this
            stage replays.
        """
        for iteration in range(1, LAST + 1):
            self.loop.run_iteration(iteration)
        sent_by_rank: list[Sent] = [{}] * dist.get_world_size()
        dist.all_gather_object(sent_by_rank, self.sent())
        communicator: Any = self.communicator
        before = sent_by_rank[communicator.prev_rank][Direction.ACTIVATION]
        after = sent_by_rank[communicator.next_rank][Direction.GRADIENT]
        ends = LoggedEnds(
            from_previous=before if self.stage == first and first > 0 else None,
            from_next=after
            if self.stage == last and last < _num_stages() - 1
            else None,
        )
        return digest_of(self.state), ends

    def go_back(self) -> None:
        """Lose the state, and load the state before the last iteration.

        Collective in the stage group.
        """
        live = digest_of(self.state)
        StateWiper(self.state).wipe()
        assert digest_of(self.state) != live
        self.operators.load(
            self._before, names_of(self.operators), (), self._adam_steps
        )

    def sent(self) -> Sent:
        """Return copies of the tensors that this rank sent in the last iteration."""
        return {
            way: [tensor.clone() for tensor in self.boundary.sent(LAST, way)]
            for way in Direction
        }

    def run_again(
        self,
        ends: LoggedEnds,
        record: StepRecord | None = None,
        *,
        whole_model: bool = False,
        before_update: Callable[[], None] = lambda: None,
    ) -> str:
        """Replay the last iteration and return the digest of the resulting state."""
        self.boundary.begin(LAST)
        record = record or self.records[LAST]
        self.replay.replay(
            record,
            self.starts[LAST],
            ends,
            whole_model=whole_model,
            before_update=before_update,
        )
        self.boundary.end()
        return digest_of(self.state)

    def cut_off_and_undo(
        self, ends: LoggedEnds, record: StepRecord, *, whole_model: bool
    ) -> None:
        """Replay the last iteration until gradients are complete; undo the replay.

        Afterwards the state is as before the replay.
        """

        def lose_peers() -> None:
            raise PeersLostError("a rank of another stage died")

        self.replay.begin(LAST)
        before = digest_of(self.state)
        with pytest.raises(PeersLostError):
            self.run_again(
                ends, record, whole_model=whole_model, before_update=lose_peers
            )
        assert digest_of(self.state) != before
        self.replay.abandon_pass()
        self.replay.restore_start(self.starts[LAST], undo=LAST)


def _num_stages() -> int:
    return parallel_state.get_pipeline_model_parallel_world_size()


def _watch_transfers() -> set[str]:
    """Return a set that collects the kinds of all transfers from now on.

    Only transfers that reach Megatron's own communicator count.
    """
    seen: set[str] = set()
    original = P2PCommunicator._communicate

    def watched(self: Any, **options: Any) -> Any:
        kinds = ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next")
        seen.update(
            kind
            for kind in kinds
            if options[kind] is not None and options[kind] is not False
        )
        return original(self, **options)

    P2PCommunicator._communicate = watched
    return seen


def _without_tied_gradient(record: StepRecord) -> StepRecord:
    gradient = record.tied_gradient
    return replace(
        record, tied_gradient=None if gradient is None else torch.zeros_like(gradient)
    )


def _replay_segment(overrides: tuple[str, ...], first: int, last: int) -> None:
    """Replay the last iteration on these stages; check every rank's state and sends."""
    job = _Job(*overrides)
    live, ends = job.train(first, last)
    sent, record = job.sent(), job.records[LAST]
    assert record.gradients.overflow == (
        "precision.initial_loss_scale=1.0e+15" in overrides
    )
    transfers = _watch_transfers()
    if first <= job.stage <= last:
        job.go_back()
        whole_model = last - first + 1 == _num_stages()
        # stages exchange the tied gradient again, and the logged gradient has no effect
        if whole_model:
            record = _without_tied_gradient(record)
        job.cut_off_and_undo(ends, record, whole_model=whole_model)
        job.run_again(ends, record, whole_model=whole_model)
    dist.barrier()
    assert digest_of(job.state) == live
    assert transfers == _expected_transfers(job.stage, first, last)
    again = job.sent()
    assert all(
        len(sent[way]) == len(again[way])
        and all(map(torch.equal, sent[way], again[way]))
        for way in Direction
    )


def _expected_transfers(stage: int, first: int, last: int) -> set[str]:
    with_previous = (
        {"tensor_send_prev", "recv_prev"} if first < stage <= last else set[str]()
    )
    return with_previous | (
        {"tensor_send_next", "recv_next"} if first <= stage < last else set[str]()
    )


PP2 = ("parallel.pp=2", "train.clip_grad=0.1")
PP3 = ("parallel.pp=3", "model.num_layers=3")


@pytest.mark.parametrize(
    ("world_size", "overrides", "first", "last"),
    [
        (2, (*PP2, *BIAS, "train.recompute=full"), 1, 1),
        (2, (*PP2, *FP16), 0, 0),
        (2, (*PP2, *OVERFLOWING, *BIAS), 1, 1),
        pytest.param(2, (*PP2, *OVERFLOWING), 0, 1, marks=pytest.mark.full),
        (2, (*PP2, *TIED, *UNSHARDED), 0, 0),
        (2, (*PP2, *TIED), 0, 1),
        (4, (*PP2, *TIED, *BIAS), 0, 0),
        (2, (*PP2, *TIED, "model.position_embedding=learned"), 1, 1),
        pytest.param(3, PP3, 0, 1, marks=pytest.mark.full),
        (3, PP3, 1, 1),
        (3, (*PP3, *TIED), 1, 2),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, tuple) else str(value),
)
def test_replayed_stages_end_as_they_were(
    world_size: int, overrides: tuple[str, ...], first: int, last: int
) -> None:
    run_ranks(world_size, _replay_segment, overrides, first, last)


CHANGES: dict[
    str, Callable[[LoggedEnds, StepRecord], tuple[LoggedEnds, StepRecord]]
] = {
    "activations": lambda ends, record: (
        replace(ends, from_previous=(ends.from_previous or [])[::-1]),
        record,
    ),
    "norm": lambda ends, record: (
        ends,
        replace(record, gradients=replace(record.gradients, total_norm=1.0)),
    ),
    "tied gradient": lambda ends, record: (ends, _without_tied_gradient(record)),
    "iteration": lambda ends, record: (
        ends,
        replace(record, iteration=record.iteration - 1, batches=None),
    ),
    "nothing": lambda ends, record: (ends, record),
}


def _replay_changed() -> set[str]:
    """Return the changes of logs that led stage 1 to another state than training."""
    job = _Job(*PP2, *TIED)
    live, ends = job.train(1, 1)
    seen = set[str]()
    for name, change in CHANGES.items() if job.stage == 1 else ():
        job.go_back()
        if job.run_again(*change(ends, job.records[LAST])) != live:
            seen.add(name)
    return seen


def test_a_replay_follows_its_logs() -> None:
    assert run_ranks(2, _replay_changed) == [set(), CHANGES.keys() - {"nothing"}]


def _replay_over_other_samples() -> None:
    job = _Job(*PP2)
    _, ends = job.train(1, 1)
    if job.stage == 1:
        job.go_back()
        job.loop.passes.batches = replace(job.loop.passes.batches, consumed=lambda _: 0)
        job.run_again(ends)
        with pytest.raises(
            DataError,
            match=rf"^data: the replay of iterations \[{LAST}\] has read other samples",
        ):
            job.replay.require_same_samples()
        job.replay.require_same_samples()  # raised only once
    dist.barrier()


def test_a_replay_over_other_samples_is_an_error() -> None:
    run_ranks(2, _replay_over_other_samples)


def _train_after_failed_replays() -> None:
    """Fail to replay stage 0, and train both stages live again."""
    job = _Job(*PP2)
    live, ends = job.train(0, 0)
    if job.stage == 0:
        logged = ends.from_next
        assert logged is not None
        with pytest.raises(
            AssertionError, match=r"^\[1\] logged tensors were not asked for"
        ):
            job.run_again(replace(ends, from_next=[*logged, logged[0]]))
        with pytest.raises(IndexError):
            job.run_again(replace(ends, from_next=logged[1:]))
    dist.barrier()
    transfers = _watch_transfers()
    job.go_back()
    job.replay.restore_start(job.starts[LAST])
    job.loop.run_iteration(LAST)
    assert digest_of(job.state) == live
    assert transfers == _expected_transfers(job.stage, 0, 1), (
        "the communicator is live again"
    )


def test_a_replay_from_too_many_or_too_few_tensors_fails_alone() -> None:
    run_ranks(2, _train_after_failed_replays)


def _named(state: TrainingState) -> Tensors:
    return {name: tensor.clone() for name, tensor in named_state(state)}


def _undo(overrides: tuple[str, ...]) -> None:
    """Abort a pass; restore its start without buffers, and then with buffers."""
    job = _Job(*overrides)
    job.train(0, 0)
    state, has_bias = job.state, "model.moe_balancing=bias" in overrides
    before, named, small = digest_of(state), _named(state), small_state(state)
    start = job.replay.begin(LAST + 1)
    clear_gradients(state)
    job.loop.passes.train_on(LAST + 1)
    finish_gradients(state)
    random.gauss(0, 1)
    np.random.standard_normal()
    changed = {name.rpartition(".")[2] for name in differing(named, _named(state))}
    expected = {
        "cpu": True,
        "scale": "precision=fp16" in overrides,
        "expert_bias": has_bias,
    }
    assert {name: name in changed for name in expected} == expected
    assert digest_of(state) != before
    job.replay.restore_start(start)
    assert (digest_of(state) != before) == has_bias
    job.replay.restore_start(start, undo=LAST + 1)
    assert digest_of(state) == before
    assert not differing(small, small_state(state))


@pytest.mark.parametrize(
    "overrides", [(*PP2, *OVERFLOWING), (*PP2, *BIAS)], ids=", ".join
)
def test_an_aborted_pass_can_be_undone(overrides: tuple[str, ...]) -> None:
    run_ranks(2, _undo, overrides)


def _refusals() -> None:
    state, _ = build_stage()
    require_replayable(state)
    chunk, optimizer = (
        cast("Any", state.model[0]),
        cast("Any", state.inner_optimizers[-1]).config,
    )
    for owner, name in (
        (chunk.config, "variable_seq_lengths"),
        (chunk.config, "fp4"),
        (chunk.config, "use_transformer_engine_op_fuser"),
        (chunk.config, "tp_comm_overlap"),  # buffers that belong to one communicator
        (chunk.config, "mtp_detach_heads"),
        (chunk.config, "moe_input_jitter_eps"),
        (chunk.config, "moe_router_force_load_balancing"),
        (chunk.config, "moe_router_force_biased"),
        (chunk.config, "defer_embedding_wgrad_compute"),
        (chunk.ddp_config, "nccl_ub"),  # user buffers, too
        (optimizer, "optimizer_cpu_offload"),
    ):
        setattr(owner, name, True)
        with pytest.raises(ConfigError, match=f"{name}: got True, wanted False"):
            require_replayable(state)
        setattr(owner, name, False)
    optimizer.optimizer = "sgd"
    with pytest.raises(ConfigError, match="optimizer: got 'sgd', wanted adam"):
        require_replayable(state)
    optimizer.optimizer = "adam"
    chunk.config.moe_token_dispatcher_type = "flex"
    with pytest.raises(
        ConfigError,
        match="moe_token_dispatcher_type: got 'flex', wanted alltoall or allgather",
    ):
        require_replayable(state)
    chunk.config.moe_token_dispatcher_type = "alltoall"
    _refuse_a_quantized_weight(state)
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    states = tracker.get_states()
    tracker.set_states({**states, "graph-safe": torch.Generator()})
    with pytest.raises(
        ConfigError,
        match="generators for captured graphs: got 'graph-safe', wanted none",
    ):
        require_replayable(state)
    tracker.set_states(states)
    require_replayable(state)


class _QuantizedWeight(torch.Tensor):
    """Stands in for Transformer Engine's FP8 weights.

    Such a subclass reports as its dtype the dtype of computations.
    """


def _refuse_a_quantized_weight(state: TrainingState) -> None:
    norm: Any = next(
        module for module in state.model[0].modules() if "weight" in module._parameters
    )
    plain = norm.weight
    norm.weight = torch.nn.Parameter(plain.detach().as_subclass(_QuantizedWeight))
    with pytest.raises(
        ConfigError, match="weight: got '_QuantizedWeight', wanted plain tensors"
    ):
        require_replayable(state)
    norm.weight = plain


def test_options_that_no_log_covers_are_refused() -> None:
    run_ranks(1, _refusals)


class Stages(Enum):
    """Stages of a pass through shared experts, named as in Megatron-Core."""

    IDLE = 0
    FC1_FORWARD_DONE = 2


def test_shared_experts_begin_anew_after_a_pass_that_was_cut_off_in_them() -> None:
    """The experts are made without their constructor, which needs a GPU's streams."""
    experts: Any = SharedExpertMLP.__new__(SharedExpertMLP)
    torch.nn.Module.__init__(experts)
    experts.cached_fc2_input, experts.cached_output = torch.ones(1), None
    experts._overlap_state = Stages.FC1_FORWARD_DONE
    forget_shared_experts([torch.nn.ModuleList([torch.nn.Linear(1, 1), experts])])
    assert (
        experts.cached_fc2_input,
        experts.cached_output,
        experts._overlap_state,
    ) == (None, None, Stages.IDLE)
