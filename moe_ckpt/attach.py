"""The composition root: puts a checkpoint session together for a Megatron-Core training
loop.

loop = TrainingLoop(communicator=StageCommunicator(...), forward_backward=..., ...)
session = attach(ckpt=..., identity=..., folder=..., state=TrainingState(...),
loop=loop, events=..., ...) first = session.resume(None) + 1 ... per iteration:
session.iteration_started, loss_known, gradients_ready, update_applied, step_committed
                   (when each is due: `moe_ckpt.ports.TrainingHooks`)
session.finish()
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from moe_ckpt.collectives import TorchRanks
from moe_ckpt.config import (
    CKPT_CONFIGS,
    DIVERGENCES,
    CkptConfig,
    InMemoryConfig,
    require,
)
from moe_ckpt.durable.checkpoint_folder import CheckpointFolder
from moe_ckpt.durable.course import RunCourse
from moe_ckpt.durable.tier import DurableTier
from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.elastic.process_groups import CPU_BACKEND
from moe_ckpt.engine.assembly import InMemoryAssembly
from moe_ckpt.engine.inputs import Inputs
from moe_ckpt.engine.interfaces import RankAdapter, StagePlace
from moe_ckpt.engine.session import LeftState, Session
from moe_ckpt.engine.token_account import TokenRate
from moe_ckpt.events import CourseChanged, EventLog
from moe_ckpt.faults.schedule import StateLoss
from moe_ckpt.megatron.capacity_boost import CapacityBoost
from moe_ckpt.megatron.durable import MegatronDurableState
from moe_ckpt.megatron.groups import shard_identity, stage_group
from moe_ckpt.megatron.mirror import GradientMirror
from moe_ckpt.megatron.operators import RankOperators
from moe_ckpt.megatron.pipeline import StageCommunicator
from moe_ckpt.megatron.read_batches import ReadBatches
from moe_ckpt.megatron.replay import StageReplay, require_replayable
from moe_ckpt.megatron.router import RouterCounts, router_top_k
from moe_ckpt.megatron.schedule import lengths_of, settle_lengths
from moe_ckpt.megatron.state import TrainingState, allocate_optimizer_state, small_state
from moe_ckpt.megatron.state_wiper import StateWiper
from moe_ckpt.megatron.transformer_engine import allocate_scaling, forget_noted
from moe_ckpt.policies.dense import make_policy
from moe_ckpt.types import RunIdentity

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingLoop:
    """The parts of a training loop that a replay uses.

    `forward_backward(iteration)` clears nothing and updates nothing: it runs Megatron's
    schedule over the iteration's batch, with `communicator` as its `p2p_communicator`.
    `batches` sees the micro-batches that it reads. An iteration has at most
    `num_micro_batches` of `micro_batch_size` sequences, of which every rank sees
    `sequence_length` tokens.
    """

    communicator: StageCommunicator
    forward_backward: Callable[[int], object]
    batches: ReadBatches
    num_micro_batches: int
    micro_batch_size: int
    sequence_length: int


def attach(
    *,
    ckpt: CkptConfig,
    identity: RunIdentity,
    folder: Path,
    state: TrainingState,
    loop: TrainingLoop,
    events: EventLog,
    last_iteration: int,
    losses: Sequence[StateLoss] = (),
    elastic: ElasticContext | None = None,
    suspect_iters: int = 2,
    on_divergence: str = DIVERGENCES[0],
    inputs: Inputs | None = None,
    course: RunCourse | None = None,
    asked_lengths: Mapping[str, str] | None = None,
    left: frozenset[LeftState] = frozenset(),
) -> Session:
    """Return the session that checkpoints `state` under the policy `ckpt`, in `folder`.
    Call on every rank.

    A loaded state is put into quarantine if the loss is not finite in one of the first
    `suspect_iters` iterations after the load. `losses` are losses of state on purpose;
    `on_divergence` is one of `config.DIVERGENCES`. With `elastic` the session outlives
    the loss of ranks; a rank may then attach by itself, and the caller enters the
    session once all ranks are together. All ranks must have read the same `inputs`. A
    run that has saved states goes on with the settings of its `course` only; lengths of
    its schedule stay as it began, but for `asked_lengths`: the names of settings that
    ask for another, by the name of the length (`megatron.schedule.LENGTHS`). What
    earlier processes of this rank have `left` must be there when a state is looked for.
    Raises ConfigError for settings that cannot work.
    """
    built = lengths_of(state.scheduler)

    def loaded(iteration: int, changes: Sequence[str]) -> None:
        used = settle_lengths(state.scheduler, built, asked_lengths or {})
        changed = [*changes, *used.changed]
        if changed or used.kept:
            events.append(
                CourseChanged(
                    iteration=iteration, changed=changed, kept=list(used.kept)
                )
            )
            if ranks.rank == 0:
                kept = (
                    [f"the schedule stays as the run began: {', '.join(used.kept)}"]
                    if used.kept
                    else []
                )
                _log.warning(
                    "from iteration %d on: %s",
                    iteration + 1,
                    "; ".join([*changed, *kept]),
                )

    # Megatron neither saves nor loads an Adam of torch that has taken no step
    allocate_optimizer_state(state)
    # else the first forward pass makes scales, after the first snapshot was taken
    allocate_scaling(state.model)
    ranks = TorchRanks()
    # groups of the first are formed anew after a fault
    cpu_backend = CPU_BACKEND if elastic else "gloo"
    durable_state = MegatronDurableState(
        state, asynchronous=ckpt.async_save, cpu_backend=cpu_backend
    )
    durable = DurableTier(
        durable_state,
        CheckpointFolder(folder),
        identity,
        ranks,
        events,
        keep=ckpt.keep,
        course=course,
    )
    local = ", ".join(
        name for name, kind in CKPT_CONFIGS.items() if kind.recovers_locally
    )
    wanted = f"none: only ckpt={local} recovers state that a living process lost"
    require(
        ckpt.recovers_locally or not losses,
        "fault.at",
        [str(loss) for loss in losses],
        wanted,
    )
    if in_memory := ckpt.in_memory:
        if len(state.model) > 1 and in_memory.boundary_log:
            # the last stage sends to the first one, too
            in_memory = replace(in_memory, boundary_log=False)
        adapter = _rank_adapter(in_memory, identity, state, loop, cpu_backend)
        assembly = InMemoryAssembly(
            in_memory,
            adapter,
            events,
            elastic,
            folder.with_name("snapshots"),
            losses,
            on_divergence=on_divergence,
        )
        build_generation = assembly.build_generation
    else:
        policy = make_policy(ckpt, last_iteration=last_iteration)
        build_generation = lambda: (policy, None)  # noqa: E731
    session = Session(
        build_generation,
        durable,
        ranks,
        events,
        strict=ckpt.strict,
        suspect_iters=suspect_iters,
        forget_evaluations=lambda: forget_noted(state.modules),
        elastic=elastic,
        inputs=inputs or {},
        course=course,
        loaded=loaded,
        left=left,
    )
    # with `elastic` the caller enters later: a replacement attaches before it meets the
    # other ranks
    if elastic is None:
        session.enter()
    return session


def _rank_adapter(
    ckpt: InMemoryConfig,
    identity: RunIdentity,
    state: TrainingState,
    loop: TrainingLoop,
    cpu_backend: str,
) -> RankAdapter:
    """Return this rank's training behind the engine's seams.

    Raises:
        ConfigError: The training cannot be replayed.
    """
    require_replayable(state, rows=loop.communicator.rows)
    operators = RankOperators(state)
    if ckpt.served:
        # before training: servers cannot repeat the steps of every optimizer, nor
        # derive weights of every format
        operators.require_steps()
    stage = StageReplay(
        state, operators, loop.communicator, loop.forward_backward, loop.batches
    )
    place = _place(identity, loop.communicator, cpu_backend)
    num_neighbours = sum(
        rank is not None for rank in (place.previous_rank, place.next_rank)
    )
    sent_bytes = loop.communicator.tensor_bytes(
        loop.micro_batch_size * loop.sequence_length
    )
    tokens = (
        loop.num_micro_batches
        * loop.micro_batch_size
        * loop.sequence_length
        * identity.layout.dp
    )
    mirror = (
        GradientMirror(state, operators)
        if ckpt.served and ckpt.served.mirrors
        else None
    )
    boost = None
    if ckpt.capacity_boost:
        boost = CapacityBoost(
            state, num_micro_batches=loop.num_micro_batches, factor=ckpt.capacity_boost
        )
    return RankAdapter(
        place=place,
        stage=stage,
        operators=operators,
        communicator=loop.communicator,
        injector=StateWiper(state),
        counts=lambda: RouterCounts(
            state, operators.table, soft=ckpt.popularity == "soft"
        ),
        tokens=TokenRate(tokens=tokens, top_k=router_top_k(state)),
        num_micro_batches=loop.num_micro_batches,
        boundary_log_bytes=num_neighbours * loop.num_micro_batches * sent_bytes,
        step_log_bytes=sum(tensor.nbytes for tensor in small_state(state).values())
        + stage.tied_gradient_bytes,
        tied_gradient_bytes=stage.tied_gradient_bytes,
        boost=boost,
        mirror=mirror,
        notes=[
            *([boost.note] if boost else []),
            *([mirror.note()] if mirror else []),
            *_notes(ckpt, state),
        ],
    )


def _notes(ckpt: InMemoryConfig, state: TrainingState) -> Iterator[str]:
    """Yield notes on servers that compute on another device than training, and on
    virtual stages.
    """
    if ckpt.served and torch.cuda.is_available():
        states = "after a fault all ranks have their states, not the GPUs' bits"
        yield f"servers take the optimizer's steps on CPUs: {states}"
    if len(state.model) > 1:
        yield (
            "virtual stages: no boundary log, after a fault all stages go back together"
        )


def _place(
    identity: RunIdentity, communicator: StageCommunicator, cpu_backend: str
) -> StagePlace:
    shard, layout = shard_identity(), identity.layout
    return StagePlace(
        identity=identity,
        shard=shard,
        ranks=TorchRanks(),
        stage_ranks=TorchRanks(stage_group()),
        # a group of its own: logs neither cross a device nor take turns with the job's
        # other operations
        host_ranks=TorchRanks(
            cast("dist.ProcessGroup", dist.new_group(backend=cpu_backend))
        ),
        previous_rank=communicator.prev_rank if shard.pp_rank > 0 else None,
        next_rank=communicator.next_rank if shard.pp_rank < layout.pp - 1 else None,
        device=torch.device(torch.cuda.current_device()),
    )
