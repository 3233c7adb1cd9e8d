"""One rank's logs of iterations, from the oldest window in host memory on.

The logs hold the starts of iterations, facts of steps, and tensors sent between stages.
Owns: the entries at each hook of the loop, and the time at which entries are dropped.
Must not: decide when a window is complete. MoEvement, section 3.3.
"""

from __future__ import annotations

from dataclasses import replace

from moe_ckpt.config import InMemoryConfig
from moe_ckpt.engine.rank_parts import RankParts
from moe_ckpt.types import ReadyGradients, SlotPlan


class IterationLogs:
    """The logs of one generation.

    Unless ranks recover locally, only starts after snapshots are logged.
    """

    def __init__(self, config: InMemoryConfig, parts: RankParts) -> None:
        self._config = config
        self._stage = parts.adapter.stage
        self._operators = parts.adapter.operators
        self._memory = parts.memory
        self._noted: int | None = None
        self._branch = 0
        self.branch_of_state = 0
        """Branch of the run in which the last iteration was trained."""

        self._longest_iters = 0

    def begin_branch(self, branch: int, of_state: int) -> None:
        """Note the branch in which the next iterations are trained.

        Args:
            branch: The branch that begins.
            of_state: The branch in which the iteration of the present state was
                trained.
        """
        self._branch, self.branch_of_state = branch, of_state

    def committed(self) -> None:
        """Note that an iteration of the present branch has taken its step."""
        self.branch_of_state = self._branch

    def begin(self, iteration: int) -> None:
        """Log the start of the iteration, and begin to log tensors for neighbours.

        Logs that no recovery needs are dropped.
        """
        if self._noted != iteration:
            self.log_start(iteration)
        # logs of this age are dropped even if no window is ever complete: no recovery
        # needs older logs
        kept = (
            window.snapshots[0].header.num_slots
            for window in self._memory.snapshots.windows()
        )
        longest_iters = max([self._longest_iters, *kept])
        most_iters = 2 * (
            (self._config.keep_windows + 1) * longest_iters + self._config.profile_iters
        )
        # an audit needs the logs since the audit before
        most_iters += self._config.audit_every_iters
        self._drop_up_to(iteration - most_iters)
        if self._memory.boundary:
            self._memory.boundary.begin(iteration)

    def note_start(self, iteration: int) -> None:
        """Log the current state as the start of `iteration`, in this process.

        The start is kept for this process and for the iteration's record.
        """
        self._memory.steps.log_start(iteration, self._stage.begin(iteration))
        self._noted = iteration

    def log_start(self, iteration: int) -> None:
        """Log the current state as the start of `iteration`, and publish the start.

        Later processes of this rank find a published start.
        """
        self.note_start(iteration)
        self._memory.steps.publish_start(iteration)

    def add(self, iteration: int, gradients: ReadyGradients) -> None:
        """Log the facts that the step of the iteration needs, and its gradients."""
        record = self._stage.record(iteration, gradients)
        log = self._memory.gradients
        if log is not None:
            checksum = None
            if not gradients.overflow:
                # before the vote: a rank that dies after the vote has to reach the
                # iteration
                checksum = log.add(iteration, self._operators.gradient_pieces())
            record = replace(
                record,
                after_pass=self._stage.after_pass(),
                gradients_checksum=checksum,
                branch=self._branch,
                follows=self.branch_of_state,
            )
        self._memory.steps.add(record)

    def end_pass(self) -> None:
        """Stop logging.

        Later transfers, of evaluations, do not belong to the iteration.
        """
        if self._memory.boundary:
            self._memory.boundary.end()

    def lose_boundary(self) -> None:
        """Drop the boundary log, which dies with the lost state."""
        if self._memory.boundary:
            self._memory.boundary.clear()

    def took(self, plan: SlotPlan) -> None:
        """Keep the logs that the window needs from the snapshot of this plan on."""
        self.window_takes(plan.period_iters)
        following = plan.iteration + 1
        # a core contains this start; the start of iteration 1 is logged anyway, for a
        # run that begins anew without any core
        if plan.has_start and following != 1:
            return
        if self._noted != following:
            self.note_start(following)
        # with more slots, the replay of the window leads to this start
        if plan.num_slots == 1:
            self._memory.steps.publish_start(following)

    def window_takes(self, iters: int) -> None:
        """Keep logs for windows of `iters` iterations, or of the longest so far."""
        self._longest_iters = max(self._longest_iters, iters)

    def drop_old(self) -> None:
        """Drop the logs that no window needs any more."""
        oldest = self._memory.snapshots.oldest_needed_iteration()
        assert oldest is not None
        self._drop_up_to(oldest)

    def _drop_up_to(self, iteration: int) -> None:
        self._memory.steps.drop_up_to(iteration)
        if self._memory.gradients is not None:
            self._memory.gradients.drop(lambda logged: logged <= iteration)
        if self._memory.boundary:
            self._memory.boundary.drop_up_to(iteration)
