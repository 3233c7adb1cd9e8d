"""A pipeline of small expert layers, which ranks that are threads train.

The model implements the engine's interfaces. The model has everything that a recovery
must restore: sharded masters and moments of a real Adam, rounded compute weights,
dropout from a generator, buffers that forward changes, a loss scale that skips steps, a
learning-rate schedule, a norm over all ranks, gradients reduced over a stage, and, if
`tied`, a gradient that first and last stage share. After a wrong input, the digest of
the model never again equals the digest in the job without faults.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from moe_ckpt.collectives import Ranks
from moe_ckpt.errors import CheckpointLoadError, DataError
from moe_ckpt.megatron.kept_batches import KeptBatches
from moe_ckpt.snapshot.adam_update import AdamStep, Gradients
from moe_ckpt.snapshot.boundary_log import BoundaryLog, Direction, LoggedEnds
from moe_ckpt.snapshot.bubbles import PipelineBubbles
from moe_ckpt.snapshot.capture import Piece
from moe_ckpt.snapshot.codec import (
    BUFFER,
    COMPUTE,
    EXP_AVG,
    EXP_AVG_SQ,
    GRADIENT,
    MASTER,
    PartKey,
)
from moe_ckpt.snapshot.step_log import StepRecord
from moe_ckpt.types import (
    ExpertCounts,
    OperatorId,
    OperatorKind,
    OperatorTable,
    ParallelLayout,
    ReadyGradients,
)

HIDDEN, TOKENS, MICRO_BATCHES = 6, 3, 2
BOUNDARY_BYTES = 2 * HIDDEN * TOKENS


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of the model and of the job."""

    pp: int = 2
    """Number of pipeline stages."""

    dp: int = 2
    """Number of ranks of each stage."""

    ep: int = 1
    """Above 1: each rank of a stage has some of the experts, not a piece of each."""

    experts: int = 3
    """Number of experts of each stage."""

    tied: bool = False
    """Whether embedding and output share one weight."""

    skips: int = 0
    """Number of steps at the beginning that overflow and are skipped."""

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(pp=self.pp, dp=self.dp, ep=self.ep, tp=1)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp

    def stage_of(self, rank: int) -> int:
        return rank // self.dp


PAIR, PIPE = Shape(pp=2, dp=1), Shape(pp=3, dp=1)


class Weight:
    """One operator's weight on one rank.

    Attributes:
        values: The whole compute weight, for forward.
        owned: Range of the weight whose optimizer state this rank owns.
        master: Master weight of the owned range.
    """

    def __init__(
        self, operator: OperatorId, size: int, owned: range, seed: str
    ) -> None:
        self.operator = operator
        self.name = f"{operator}.weight"
        self.owned = slice(owned.start, owned.stop)
        initial = torch.rand(size, generator=generator(seed)) + 0.5
        self.master = torch.nn.Parameter(initial[self.owned].clone())
        self.values = initial.bfloat16()
        self.gradient = torch.zeros(size)
        self.is_frozen = False

    @property
    def is_sharded(self) -> bool:
        return self.master.numel() < self.values.numel()

    @property
    def range(self) -> tuple[int, int]:
        return self.owned.start, self.owned.stop

    def key(self, role: str) -> PartKey:
        return PartKey(operator=str(self.operator), tensor=self.name, role=role)

    def accumulate(self, gradient: torch.Tensor) -> None:
        if not self.is_frozen:
            self.gradient += gradient.reshape(-1)

    def derive(self) -> None:
        self.values[self.owned] = self.master.detach().bfloat16()


def generator(seed: str) -> torch.Generator:
    return torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7])
    )


def inputs_of(iteration: int, micro_batch: int, dp_rank: int) -> torch.Tensor:
    return torch.randn(
        TOKENS, HIDDEN, generator=generator(f"{iteration} {micro_batch} {dp_rank}")
    )


class Pipe:
    """Implements `interfaces.Communicator`.

    The pipe logs tensors and carries the tensors to neighbour stages, or replays a log.
    """

    def __init__(
        self, ranks: Ranks, previous_rank: int | None, next_rank: int | None
    ) -> None:
        self.log: BoundaryLog | None = None
        self.bubbles: PipelineBubbles | None = None
        self._ranks = ranks
        self._neighbour = {
            Direction.ACTIVATION: next_rank,
            Direction.GRADIENT: previous_rank,
        }
        self._source = {
            Direction.ACTIVATION: previous_rank,
            Direction.GRADIENT: next_rank,
        }
        self.replayed: dict[Direction, list[torch.Tensor] | None] = dict.fromkeys(
            Direction
        )

    def send(self, direction: Direction, tensor: torch.Tensor) -> None:
        sent = tensor.bfloat16()
        if self.log is not None:
            self.log.record(direction, sent)
        target, opposite = self._neighbour[direction], _OPPOSITE[direction]
        if target is not None and self.replayed[opposite] is None:
            self._ranks.send(sent, target)

    def receive(self, direction: Direction) -> torch.Tensor:
        received = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
        logged, source = self.replayed[direction], self._source[direction]
        if logged is not None:
            received.view(-1).view(torch.uint8).copy_(logged.pop(0))
        else:
            assert source is not None
            self._ranks.receive(received, source)
        return received.float()


_OPPOSITE = {
    Direction.ACTIVATION: Direction.GRADIENT,
    Direction.GRADIENT: Direction.ACTIVATION,
}


@dataclass
class _Pass:
    """Tensors of a micro-batch's forward that backward needs."""

    inputs: torch.Tensor
    block_in: torch.Tensor
    block_out: torch.Tensor
    keep: torch.Tensor
    gate_in: torch.Tensor
    probabilities: torch.Tensor
    choices: torch.Tensor
    expert_out: torch.Tensor
    out: torch.Tensor
    loss: float = 0.0


class Model:
    """One rank's stage.

    Implements the engine's `Stage`, `Operators` and `FaultInjector`. `TokenCounts`
    implements `Counts`.
    """

    def __init__(
        self, shape: Shape, rank: int, ranks: Ranks, stage_ranks: Ranks
    ) -> None:
        self.shape, self.rank = shape, rank
        self.stage, self.dp_rank = shape.stage_of(rank), rank % shape.dp
        self._ranks, self._stage_ranks = ranks, stage_ranks
        # called after each replayed update, as a kernel that is not deterministic
        self.on_replay: Callable[[int], object] = lambda _: None
        # whether replays read other samples, as from a file that has changed
        self.reads_others = False
        self.previous_rank = rank - shape.dp if self.stage > 0 else None
        self.next_rank = rank + shape.dp if self.stage < shape.pp - 1 else None
        # the inputs; None: the number of an iteration gives the inputs
        self.data: KeptBatches | None = None
        self.communicator = Pipe(ranks, self.previous_rank, self.next_rank)
        self.operators = operators_of(shape, self.stage)
        self.weights = {
            operator: weight
            for operator in self.operators
            if (weight := self._weight(operator))
        }
        self.buffers = {
            "tokens": torch.zeros(shape.experts),
            "bias": torch.zeros(shape.experts),
        }
        self.generator = generator(f"dropout {rank}")
        self.loss_scale = torch.tensor(2.0**shape.skips)
        self.schedule = torch.tensor(0)
        self.owned = [
            weight for weight in self.weights.values() if weight.master.numel()
        ]
        self.adam = torch.optim.Adam([weight.master for weight in self.owned], lr=0.05)
        for weight in self.owned:
            zeros = {
                "exp_avg": torch.zeros_like(weight.master),
                "exp_avg_sq": torch.zeros_like(weight.master),
            }
            self.adam.state[weight.master] = {"step": torch.tensor(0.0), **zeros}
        self.table = self._table([self._owned_bytes()] * shape.dp)
        self._remembered: tuple[int, dict[str, torch.Tensor]] | None = None
        self._tied_gradient: torch.Tensor | None = None
        self._stepped: tuple[int, Mapping[str, float]] | None = None
        self._clip = 1.0
        self._counted = np.zeros(shape.experts)
        # callbacks by phase, each called once, in the middle of a pass
        self._armed: dict[str, Callable[[], None]] = {}
        self.on_reduced: Callable[[], None] = lambda: None

    def _weight(self, operator: OperatorId) -> Weight | None:
        size = HIDDEN * (
            self.shape.experts if operator.kind is OperatorKind.GATE else 1
        )
        of_rank = range(
            size * self.dp_rank // self.shape.dp,
            size * (self.dp_rank + 1) // self.shape.dp,
        )
        if operator.kind is OperatorKind.EXPERT and self.shape.ep > 1:
            assert operator.expert is not None
            if operator.expert % self.shape.dp != self.dp_rank:
                return None
            of_rank = range(size)
        is_tied = self.shape.tied and operator.kind in (
            OperatorKind.EMBEDDING,
            OperatorKind.OUTPUT,
        )
        return Weight(operator, size, of_rank, "tied" if is_tied else str(operator))

    # Iterations

    def train_on(
        self, iteration: int, on_backward: Callable[[], None] = lambda: None
    ) -> list[float]:
        """Compute the gradients of the iteration's batch.

        Args:
            iteration: The iteration.
            on_backward: Called between forward and backward.

        Returns:
            The loss of each micro-batch on the last stage; nothing on other stages.
        """
        passes = [
            self._forward(iteration, micro_batch)
            for micro_batch in range(MICRO_BATCHES)
        ]
        self._armed.pop("backward", lambda: None)()
        on_backward()
        for micro_batch, each in enumerate(passes):
            self._backward(iteration, micro_batch, each)
        return [each.loss for each in passes] if self.next_rank is None else []

    def clear_gradients(self) -> None:
        for weight in self.weights.values():
            weight.gradient.zero_()

    def _forward(self, iteration: int, micro_batch: int) -> _Pass:
        self._armed.pop("forward", lambda: None)()
        data = (
            next(self.data)
            if self.data
            else inputs_of(iteration, micro_batch, self.dp_rank)
        )
        hidden = (
            data * self._values(OperatorKind.EMBEDDING)
            if self.stage == 0
            else self.communicator.receive(Direction.ACTIVATION)
        )
        keep = (torch.rand(TOKENS, HIDDEN, generator=self.generator) > 0.1).float()
        block = torch.tanh(hidden * self._values(OperatorKind.BLOCK))
        gate_in = hidden + keep * block
        scores = gate_in @ self._values(OperatorKind.GATE).view(-1, HIDDEN).T
        probabilities = torch.softmax(scores, dim=1)
        choices = (probabilities + self.buffers["bias"]).argmax(1)
        counts = torch.bincount(choices, minlength=self.shape.experts).float()
        self.buffers["tokens"] += counts
        self._counted += counts.numpy()
        expert_out = self._experts_forward(gate_in, choices)
        out = gate_in + probabilities.gather(1, choices[:, None]) * expert_out
        each = _Pass(
            data, hidden, block, keep, gate_in, probabilities, choices, expert_out, out
        )
        if self.next_rank is None:
            each.loss = float(self._error(each).square().mean())
        else:
            self.communicator.send(Direction.ACTIVATION, out)
        return each

    def _backward(self, iteration: int, micro_batch: int, each: _Pass) -> None:
        if self.next_rank is None:
            error = self._error(each) * 2 * self.loss_scale / each.out.numel()
            self._accumulate(OperatorKind.OUTPUT, (error * each.out).sum(0))
            gradient = error * self._values(OperatorKind.OUTPUT)
        else:
            gradient = self.communicator.receive(Direction.GRADIENT)
        chosen = each.probabilities.gather(1, each.choices[:, None])
        of_chosen = (gradient * each.expert_out).sum(1, keepdim=True) * chosen
        one_hot = torch.nn.functional.one_hot(each.choices, self.shape.experts).float()
        of_scores = of_chosen * (one_hot - each.probabilities)
        self._accumulate(OperatorKind.GATE, of_scores.T @ each.gate_in)
        gate_weight = self._values(OperatorKind.GATE).view(-1, HIDDEN)
        gradient = (
            gradient
            + of_scores @ gate_weight
            + self._experts_backward(each, gradient * chosen)
        )
        of_block = gradient * each.keep * (1 - each.block_out.square())
        self._accumulate(OperatorKind.BLOCK, (of_block * each.block_in).sum(0))
        gradient = gradient + of_block * self._values(OperatorKind.BLOCK)
        if self.stage == 0:
            self._accumulate(OperatorKind.EMBEDDING, (gradient * each.inputs).sum(0))
        else:
            self.communicator.send(Direction.GRADIENT, gradient)

    def _experts_forward(
        self, tokens: torch.Tensor, choices: torch.Tensor
    ) -> torch.Tensor:
        """Return the experts' outputs. Tokens visit the rank of their expert."""
        if self.shape.ep == 1:
            return self._apply_experts(tokens, choices)
        everywhere = self._stage_ranks.gather((tokens, choices))
        computed = self._stage_ranks.gather(
            [self._apply_experts(*of_rank) for of_rank in everywhere]
        )
        return torch.stack([of_rank[self.dp_rank] for of_rank in computed]).sum(0)

    def _apply_experts(
        self, tokens: torch.Tensor, choices: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        for weight in self._experts():
            mine = choices == weight.operator.expert
            out[mine] = torch.tanh(tokens[mine] * weight.values.float())
        return out

    def _experts_backward(self, each: _Pass, gradient: torch.Tensor) -> torch.Tensor:
        job = (each.gate_in, each.choices, each.expert_out, gradient)
        if self.shape.ep == 1:
            return self._experts_gradient(*job)
        everywhere = self._stage_ranks.gather(job)
        computed = self._stage_ranks.gather(
            [self._experts_gradient(*of_rank) for of_rank in everywhere]
        )
        return torch.stack([of_rank[self.dp_rank] for of_rank in computed]).sum(0)

    def _experts_gradient(
        self,
        tokens: torch.Tensor,
        choices: torch.Tensor,
        out: torch.Tensor,
        gradient: torch.Tensor,
    ) -> torch.Tensor:
        of_tokens = torch.zeros_like(tokens)
        inner = gradient * (1 - out.square())
        for weight in self._experts():
            mine = choices == weight.operator.expert
            weight.accumulate((inner[mine] * tokens[mine]).sum(0))
            of_tokens[mine] = inner[mine] * weight.values.float()
        return of_tokens

    def _experts(self) -> Iterable[Weight]:
        return (
            weight
            for weight in self.weights.values()
            if weight.operator.kind is OperatorKind.EXPERT
        )

    def _error(self, each: _Pass) -> torch.Tensor:
        return each.out * self._values(OperatorKind.OUTPUT) - each.inputs.flip(1)

    def _values(self, kind: OperatorKind) -> torch.Tensor:
        return next(
            weight.values
            for weight in self.weights.values()
            if weight.operator.kind is kind
        ).float()

    def _accumulate(self, kind: OperatorKind, gradient: torch.Tensor) -> None:
        next(
            weight for weight in self.weights.values() if weight.operator.kind is kind
        ).accumulate(gradient)

    def finish_gradients(self) -> ReadyGradients:
        """Reduce gradients over the stage, and compute their norm over all ranks."""
        self._reduce_gradients(None)
        total = torch.zeros((), dtype=torch.float64)
        for weight in self.owned:
            total += weight.gradient[weight.owned].double().square().sum()
        self._ranks.reduce(total, "sum")
        scale = float(self.loss_scale)
        return ReadyGradients(
            overflows=(scale > 1,), total_norm=float(total.sqrt()), loss_scale=scale
        )

    def _reduce_gradients(self, tied: torch.Tensor | None) -> None:
        sharded = [weight for weight in self.weights.values() if weight.is_sharded]
        flat = torch.cat(
            [*(weight.gradient for weight in sharded), self.buffers["tokens"]]
        )
        self._stage_ranks.reduce(flat, "sum")
        *gradients, tokens = flat.split(
            [*(weight.gradient.numel() for weight in sharded), self.shape.experts]
        )
        for weight, gradient in zip(sharded, gradients, strict=True):
            weight.gradient.copy_(gradient)
        self._share_tied_gradient(tied)
        for weight in self.weights.values():
            weight.gradient /= self.loss_scale * self.shape.dp * MICRO_BATCHES
        self.buffers["bias"] += 0.01 * torch.sign(tokens.mean() - tokens)
        self.buffers["tokens"].zero_()
        self.on_reduced()

    def _share_tied_gradient(self, logged: torch.Tensor | None) -> None:
        weight = self.tied_weight()
        if weight is None:
            return
        if logged is None:
            other = (
                self.dp_rank
                if self.stage
                else (self.shape.pp - 1) * self.shape.dp + self.dp_rank
            )
            theirs = torch.empty_like(weight.gradient)
            self._ranks.send(weight.gradient, other)
            self._ranks.receive(theirs, other)
            weight.gradient += theirs
        else:
            weight.gradient[weight.owned] = logged
        self._tied_gradient = weight.gradient[weight.owned].clone()

    def tied_weight(self) -> Weight | None:
        ends = (OperatorKind.EMBEDDING, OperatorKind.OUTPUT)
        is_tied = self.shape.tied and self.shape.pp > 1
        return next(
            (w for w in self.weights.values() if is_tied and w.operator.kind in ends),
            None,
        )

    # Stage

    def begin(self, iteration: int) -> Mapping[str, torch.Tensor]:
        self._remembered = (
            iteration,
            {name: buffer.clone() for name, buffer in self.buffers.items()},
        )
        return self._small_state()

    def _small_state(self) -> dict[str, torch.Tensor]:
        return {
            "generator": self.generator.get_state(),
            "loss_scale": self.loss_scale.clone(),
            "schedule": self.schedule.clone(),
            **(
                {f"data.{name}": tensor for name, tensor in self.data.saved().items()}
                if self.data
                else {}
            ),
        }

    def restore_start(
        self, start: Mapping[str, torch.Tensor], *, undo: int | None = None
    ) -> None:
        self.generator.set_state(start["generator"].clone())
        self.loss_scale.copy_(start["loss_scale"])
        self.schedule.copy_(start["schedule"])
        if self.data:
            self.data.restore(
                {
                    name.removeprefix("data."): start[name]
                    for name in start
                    if name.startswith("data.")
                }
            )
        if undo is not None:
            assert self._remembered is not None
            iteration, buffers = self._remembered
            assert iteration == undo, (
                f"asked for the buffers before iteration {undo}, got those of"
                f" {iteration}"
            )
            for name, buffer in buffers.items():
                self.buffers[name].copy_(buffer)

    def record(self, iteration: int, gradients: ReadyGradients) -> StepRecord:
        return StepRecord(
            iteration=iteration, gradients=gradients, tied_gradient=self._tied_gradient
        )

    def replay(
        self,
        record: StepRecord,
        start: Mapping[str, torch.Tensor],
        ends: LoggedEnds,
        *,
        whole_model: bool,
        before_update: Callable[[], None],
    ) -> None:
        self.restore_start(start)
        self.clear_gradients()
        logged = {
            Direction.ACTIVATION: ends.from_previous,
            Direction.GRADIENT: ends.from_next,
        }
        self.communicator.replayed = {
            way: None if end is None else list(end) for way, end in logged.items()
        }
        try:
            self.train_on(record.iteration)
            assert not any(self.communicator.replayed.values()), (
                "logged tensors were not asked for"
            )
        finally:
            self.communicator.replayed = dict.fromkeys(Direction)
        self._reduce_gradients(None if whole_model else record.tied_gradient)
        before_update()
        self.update(record.gradients)
        self.on_replay(record.iteration)
        self.gather()

    def after_pass(self) -> Mapping[str, torch.Tensor]:
        return {
            **self._small_state(),
            **{f"buffer.{name}": each.clone() for name, each in self.buffers.items()},
        }

    def step_again(self, record: StepRecord) -> None:
        assert record.after_pass is not None
        self.restore_start(record.after_pass)
        self.update(record.gradients)

    def restore_buffers(self, record: StepRecord) -> None:
        assert record.after_pass is not None
        for name, buffer in self.buffers.items():
            buffer.copy_(record.after_pass[f"buffer.{name}"])

    def require_same_samples(self) -> None:
        if self.reads_others:
            raise DataError("data: other samples")

    def abandon_pass(self) -> None:
        self._armed.clear()

    def update(self, gradients: ReadyGradients) -> None:
        assert gradients.total_norm is not None
        if gradients.overflow:
            self.loss_scale /= 2
        else:
            self.adam.param_groups[0]["lr"] = 0.05 / (1 + 0.1 * float(self.schedule))
            for weight in self.owned:
                weight.master.grad = weight.gradient[weight.owned] * _clip(gradients)
            self.adam.step()
            for weight in self.owned:
                weight.derive()
        self.schedule += 1

    def gather(self) -> None:
        """Gather the sharded weights. Collective in the stage."""
        sharded = [weight for weight in self.weights.values() if weight.is_sharded]
        for of_rank in self._stage_ranks.gather(
            [(w.range, w.values[w.owned]) for w in sharded]
        ):
            for weight, ((start, end), values) in zip(sharded, of_rank, strict=True):
                weight.values[start:end] = values

    # Operators

    def meet(self) -> None:
        self.table = self._table(self._stage_ranks.gather(self._owned_bytes()))

    def pieces(self, full: Collection[int], compute: Collection[int]) -> list[Piece]:
        found: list[Piece] = []
        for weight in self._at(full):
            found += [
                (weight.key(role), tensor, weight.range)
                for role, tensor in self._state(weight).items()
            ]
        for weight in self._at(compute):
            found.append(
                (weight.key(COMPUTE), weight.values[weight.owned], weight.range)
            )
        return found

    def buffer_pieces(self, positions: Collection[int]) -> list[Piece]:
        gates = [
            op
            for op in self.operators
            if op.kind is OperatorKind.GATE and self.operators.index(op) in positions
        ]
        return [
            (
                PartKey(operator=str(gate), tensor=name, role=BUFFER),
                buffer,
                (0, buffer.numel()),
            )
            for gate in gates
            for name, buffer in self.buffers.items()
        ]

    def log_step(self, iteration: int, gradients: ReadyGradients) -> None:
        numbers = {
            "lr": 0.05 / (1 + 0.1 * float(self.schedule)),
            "steps": self.adam_steps()[0],
        }
        self._stepped = None if gradients.overflow else (iteration, numbers)
        self._clip = _clip(gradients)

    def gradients(self, full: Collection[int], iteration: int) -> Gradients | None:
        if self._stepped is None or self._stepped[0] != iteration:
            return None
        numbers = self._stepped[1]
        adam: dict[str, Any] = {
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-8,
            "weight_decay": 0.0,
            "decoupled": False,
        }
        step = AdamStep(learning_rate=numbers["lr"], steps=numbers["steps"], **adam)
        masters = [(weight.key(MASTER), weight.master) for weight in self._at(full)]
        return {
            key: (master.grad, step)
            for key, master in masters
            if master.grad is not None
        }

    def reduced_gradients(self) -> Mapping[PartKey, torch.Tensor]:
        return {
            weight.key(MASTER): weight.gradient[weight.owned] for weight in self.owned
        }

    def steps_taken(self, iteration: int) -> Mapping[PartKey, AdamStep]:
        taken = self.gradients(range(len(self.operators)), iteration) or {}
        return {
            key: replace(step, scale=self._clip) for key, (_, step) in taken.items()
        }

    def adam_steps(self) -> tuple[float, ...]:
        return (
            (float(self.adam.state[self.owned[0].master]["step"]),)
            if self.owned
            else (0.0,)
        )

    def load(
        self,
        parts: Mapping[PartKey, torch.Tensor],
        full: Collection[str],
        compute: Collection[str],
        adam_steps: Sequence[float],
    ) -> None:
        self._load(parts, full, compute, adam_steps)
        self.gather()

    def _load(
        self,
        parts: Mapping[PartKey, torch.Tensor],
        full: Collection[str],
        compute: Collection[str],
        adam_steps: Sequence[float],
    ) -> None:
        for weight in self.owned:
            if str(weight.operator) in full:
                for role, tensor in self._state(weight).items():
                    tensor.data.copy_(_found(parts, weight.key(role)))
                self.adam.state[weight.master]["step"].fill_(adam_steps[0])
                weight.derive()
            elif str(weight.operator) in compute:
                weight.values[weight.owned] = _found(parts, weight.key(COMPUTE))
        for gate in (
            op
            for op in self.operators
            if op.kind is OperatorKind.GATE and str(op) in {*full, *compute}
        ):
            for name, buffer in self.buffers.items():
                buffer.copy_(
                    _found(parts, PartKey(operator=str(gate), tensor=name, role=BUFFER))
                )

    def gradient_pieces(self) -> list[Piece]:
        return [
            (weight.key(GRADIENT), weight.gradient[weight.owned], weight.range)
            for weight in self.owned
        ]

    def set_gradients(
        self, gradients: Mapping[PartKey, torch.Tensor], updated: Collection[str]
    ) -> None:
        for weight in self.owned:
            weight.gradient.zero_()
            if str(weight.operator) in updated:
                logged = _found(gradients, weight.key(GRADIENT))
                weight.gradient[weight.owned] = logged

    def load_own(
        self,
        parts: Mapping[PartKey, torch.Tensor],
        full: Collection[str],
        adam_steps: Sequence[float],
    ) -> None:
        self._load(parts, full, (), adam_steps)

    def make_whole(self) -> None:
        """Do nothing: all shared weights are sharded."""

    def digests(self) -> Mapping[str, str]:
        state_of = lambda weight: (  # noqa: E731
            self._state(weight).values() if weight in self.owned else ()
        )
        return {
            str(each.operator): hash_of([each.values, *state_of(each)])
            for each in self.weights.values()
        }

    def freeze(self, frozen: Collection[str]) -> None:
        for weight in self.weights.values():
            weight.is_frozen = str(weight.operator) in frozen

    # Counts

    def begin_counts(self) -> None:
        self._counted = np.zeros(self.shape.experts)

    def counts(self) -> ExpertCounts:
        return ExpertCounts(hard=self._counted.copy(), soft=self._counted / 2)

    # FaultInjector

    def wipe(self) -> None:
        noise = torch.Generator()
        for tensor in self.all_tensors():
            tensor.data.copy_(torch.randn(tensor.shape, generator=noise) * 0.1)
        self.generator.manual_seed(noise.seed())

    def arm(self, phase: str, callback: Callable[[], None]) -> None:
        self._armed[phase] = callback

    # State that tests compare

    def all_tensors(self) -> list[torch.Tensor]:
        states = [
            tensor for weight in self.owned for tensor in self._state(weight).values()
        ]
        steps = [self.adam.state[weight.master]["step"] for weight in self.owned]
        values = [weight.values for weight in self.weights.values()]
        return [
            *states,
            *steps,
            *values,
            *self.buffers.values(),
            self.loss_scale,
            self.schedule,
        ]

    def digest(self) -> str:
        tensors = [*self.all_tensors(), self.generator.get_state()]
        return hash_of(tensors)

    def _state(self, weight: Weight) -> dict[str, torch.Tensor]:
        moments = self.adam.state[weight.master]
        return {
            MASTER: weight.master.data,
            EXP_AVG: moments["exp_avg"],
            EXP_AVG_SQ: moments["exp_avg_sq"],
        }

    def _at(self, positions: Collection[int]) -> list[Weight]:
        operators = {self.operators[position] for position in positions}
        return [weight for weight in self.owned if weight.operator in operators]

    def _owned_bytes(self) -> tuple[list[int], list[int]]:
        """Return the bytes that a snapshot of this rank takes of each operator.

        Returns:
            Bytes of each operator's whole state, and bytes of the compute weights. Both
            include buffers.
        """
        of = {weight.operator: weight.master.numel() for weight in self.owned}
        buffers = sum(buffer.nbytes for buffer in self.buffers.values())
        extra = [
            buffers if operator.kind is OperatorKind.GATE else 0
            for operator in self.operators
        ]
        full = [
            12 * of.get(operator, 0) + more
            for operator, more in zip(self.operators, extra, strict=True)
        ]
        compute = [
            2 * of.get(operator, 0) + more
            for operator, more in zip(self.operators, extra, strict=True)
        ]
        return full, compute

    def _table(self, of_ranks: Sequence[tuple[list[int], list[int]]]) -> OperatorTable:
        full, compute = (
            np.array([of_rank[kind] for of_rank in of_ranks], np.int64)
            for kind in (0, 1)
        )
        return OperatorTable(
            operators=self.operators, full_bytes=full, compute_bytes=compute
        )


class TokenCounts:
    def __init__(self, model: Model) -> None:
        self._model = model

    def begin(self) -> None:
        self._model.begin_counts()

    def end(self) -> ExpertCounts:
        return self._model.counts()


def _clip(gradients: ReadyGradients) -> float:
    """Return the factor by which gradients are multiplied before a step."""
    return 1.0 / max(1.0, gradients.total_norm or 0.0)


def operators_of(shape: Shape, stage: int) -> list[OperatorId]:
    edges = [OperatorId(kind=OperatorKind.EMBEDDING)] if stage == 0 else []
    inside = [
        OperatorId(kind=kind, layer=stage)
        for kind in (OperatorKind.BLOCK, OperatorKind.GATE)
    ]
    experts = [
        OperatorId(kind=OperatorKind.EXPERT, layer=stage, expert=expert)
        for expert in range(shape.experts)
    ]
    return [
        *edges,
        *inside,
        *experts,
        *([OperatorId(kind=OperatorKind.OUTPUT)] if stage == shape.pp - 1 else []),
    ]


def _found(parts: Mapping[PartKey, torch.Tensor], key: PartKey) -> torch.Tensor:
    if key not in parts:
        raise CheckpointLoadError(f"no {key}")
    return parts[key]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def hash_of(tensors: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(map(bytes_of, tensors))).hexdigest()[:16]
