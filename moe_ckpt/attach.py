"""Attaches a checkpoint session to a Megatron-Core training loop.

This module is the composition root: it builds all parts of a session.

    loop = TrainingLoop(communicator=StageCommunicator(...), forward_backward=..., ...)
    session = attach(ckpt=..., identity=..., folder=..., state=TrainingState(...),
                     loop=loop, events=..., ...)
    first = session.resume(None) + 1
    ...
    per iteration: session.iteration_started, loss_known, gradients_ready,
                   update_applied, step_committed
                   (when each is due: `moe_ckpt.ports.TrainingHooks`)
    session.finish()
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
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
    FlowcheckConfig,
    InMemoryConfig,
    MoevementConfig,
    require,
)
from moe_ckpt.durable.checkpoint_folder import CheckpointFolder
from moe_ckpt.durable.course import RunCourse
from moe_ckpt.durable.tier import DurableTier
from moe_ckpt.elastic.context import ElasticContext
from moe_ckpt.elastic.process_groups import ELASTIC_CPU
from moe_ckpt.engine.assembly import InMemoryAssembly
from moe_ckpt.engine.computed_snapshots import NOTHING_COMPUTED
from moe_ckpt.engine.inputs import Inputs
from moe_ckpt.engine.interfaces import RankAdapter, RankPosition
from moe_ckpt.engine.session import LeftState, Session
from moe_ckpt.engine.token_account import TokenRate
from moe_ckpt.events import CourseChanged, EventLog
from moe_ckpt.faults.schedule import StateLoss
from moe_ckpt.flowcheck.attachment import attach_servers
from moe_ckpt.megatron.capacity_boost import CapacityBoost
from moe_ckpt.megatron.durable import MegatronDurableState
from moe_ckpt.megatron.groups import shard_identity, stage_group
from moe_ckpt.megatron.operators import RankOperators
from moe_ckpt.megatron.pipeline import StageCommunicator
from moe_ckpt.megatron.read_batches import ReadBatches
from moe_ckpt.megatron.replay import StageReplay
from moe_ckpt.megatron.replayable import require_replayable
from moe_ckpt.megatron.router import RouterCounts, router_top_k
from moe_ckpt.megatron.schedule import lengths_of, resolve_lengths
from moe_ckpt.megatron.state import TrainingState, allocate_optimizer_state, small_state
from moe_ckpt.megatron.state_wiper import StateWiper
from moe_ckpt.megatron.transformer_engine import allocate_scaling, forget_noted
from moe_ckpt.policies.dense import make_policy
from moe_ckpt.types import RunIdentity

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingLoop:
    """The parts of a training loop that a replay uses."""

    communicator: StageCommunicator
    """Carries tensors between pipeline stages."""

    forward_backward: Callable[[int], object]
    """Runs Megatron's schedule over the batch of an iteration, with the communicator.

    The argument is the iteration, and `communicator` is the schedule's
    `p2p_communicator`. The function clears no gradients and updates no parameters.
    """

    batches: ReadBatches
    """Sees the micro-batches that `forward_backward` reads."""

    num_micro_batches: int
    """Largest number of micro-batches in an iteration."""

    micro_batch_size: int
    """Sequences in a micro-batch."""

    sequence_length: int
    """Tokens of a sequence that every rank sees."""


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
    """Return the session that checkpoints `state` under the policy `ckpt`.

    All ranks call this function.

    Args:
        ckpt: The policy and its settings.
        identity: The facts that a loaded checkpoint must match.
        folder: The folder of whole checkpoints. Snapshots on disk go to `snapshots`
            beside this folder.
        state: This rank's training state.
        loop: The parts of the loop that a replay uses.
        events: The log of this rank's events.
        last_iteration: The last iteration of the run.
        losses: Losses of state on purpose, for tests of recovery.
        elastic: The means to survive the loss of ranks. With these a rank may attach
            before it meets the other ranks, and the caller enters the session once all
            ranks are together.
        suspect_iters: Number of iterations after a load in which a loss that is not
            finite puts the loaded state into quarantine.
        on_divergence: One of `config.DIVERGENCES`.
        inputs: Contents that this process has read; all ranks must have read the same.
        course: Settings that decide the states of the run. A run that has saved states
            continues with these settings only.
        asked_lengths: The settings that ask for another length of the schedule, by the
            length's name (`megatron.schedule.LENGTHS`). Other lengths stay as the run
            began.
        left: States that earlier processes of this rank have left on disks. Each must
            be found when a state is looked for.

    Raises:
        ConfigError: The settings cannot work.
    """
    wanted = "the context of a supervised rank, beside which checkpoint servers run"
    is_servable = elastic is not None or not isinstance(ckpt, FlowcheckConfig)
    require(is_servable, "attach(elastic)", None, wanted)
    built = lengths_of(state.scheduler)

    def loaded(iteration: int, changes: Sequence[str]) -> None:
        used = resolve_lengths(state.scheduler, built, asked_lengths or {})
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

    # Megatron neither saves nor loads the state of a torch Adam that has taken no step
    allocate_optimizer_state(state)
    # otherwise the first forward pass creates scales, after the first snapshot was
    # taken
    allocate_scaling(state.model)
    ranks = TorchRanks()
    # groups of ELASTIC_CPU are formed anew after a fault
    cpu_backend = ELASTIC_CPU if elastic else "gloo"
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
        if len(state.model) > 1 and isinstance(in_memory, MoevementConfig):
            # with virtual stages the last stage also sends to the first one
            in_memory = replace(in_memory, boundary_log=False)
        require_replayable(state, rows=loop.communicator.rows)
        operators = RankOperators(state)
        adapter = _rank_adapter(
            in_memory, identity, state, operators, loop, cpu_backend
        )
        computed = NOTHING_COMPUTED
        if isinstance(in_memory, FlowcheckConfig):
            computed = attach_servers(in_memory, state, operators)
        assembly = InMemoryAssembly(
            in_memory,
            adapter,
            events,
            elastic,
            folder.with_name("snapshots"),
            losses,
            on_divergence=on_divergence,
            computed=computed,
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
    operators: RankOperators,
    loop: TrainingLoop,
    cpu_backend: str,
) -> RankAdapter:
    """Return this rank's training behind the engine's interfaces."""
    stage = StageReplay(
        state, operators, loop.communicator, loop.forward_backward, loop.batches
    )
    position = _position(identity, loop.communicator, cpu_backend)
    num_neighbours = sum(
        rank is not None for rank in (position.previous_rank, position.next_rank)
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
    boost = None
    if ckpt.capacity_boost:
        boost = CapacityBoost(
            state, num_micro_batches=loop.num_micro_batches, factor=ckpt.capacity_boost
        )
    notes = [boost.note] if boost else []
    step_log_bytes = stage.tied_gradient_bytes + sum(
        tensor.nbytes for tensor in small_state(state).values()
    )
    gradient_bytes = 0
    if ckpt.logs_gradients:
        gradient_bytes = operators.gradient_bytes()
        step_log_bytes += sum(tensor.nbytes for tensor in stage.after_pass().values())
    elif len(state.model) > 1:
        notes.append(
            "virtual stages: no boundary log, after a fault all stages go back together"
        )
    return RankAdapter(
        position=position,
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
        step_log_bytes=step_log_bytes,
        gradient_bytes=gradient_bytes,
        tied_gradient_bytes=stage.tied_gradient_bytes,
        boost=boost,
        notes=notes,
    )


def _position(
    identity: RunIdentity, communicator: StageCommunicator, cpu_backend: str
) -> RankPosition:
    shard, layout = shard_identity(), identity.layout
    return RankPosition(
        identity=identity,
        shard=shard,
        ranks=TorchRanks(),
        stage_ranks=TorchRanks(stage_group()),
        # a group of its own: logs do not cross a device, and do not wait for the job's
        # other operations
        host_ranks=TorchRanks(
            cast("dist.ProcessGroup", dist.new_group(backend=cpu_backend))
        ),
        previous_rank=communicator.prev_rank if shard.pp_rank > 0 else None,
        next_rank=communicator.next_rank if shard.pp_rank < layout.pp - 1 else None,
        device=torch.device(torch.cuda.current_device()),
    )
