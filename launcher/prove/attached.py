"""The proof of a command with an attachment.

A run under faults must keep the promise of `run.exactness`.

    plain       without supervisors
    faults      as given, with kills and, where the policy recovers from such a loss, a
                loss of state in living processes
    control     one kill, and a recovery without Adam's first moments, which the
                comparison must notice

With `bitwise`, the run under faults must have the digests of the plain run after each
iteration, on each rank. With `state`, each rank must have after each recovery the
digests that the rank had logged after that iteration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.faults.carry_out import carry_out
from launcher.output_folder import log_of
from launcher.prove.commands import MOMENTS, CheckedCommand, Variation
from launcher.prove.compare import (
    Difference,
    Digests,
    first_changed,
    first_difference,
    read_digests,
)
from launcher.prove.runs import (
    DIFFERENT,
    EXACT,
    NOT_PROVEN,
    RunFailedError,
    print_end,
    run_to_end,
)
from moe_ckpt.exactness import STATE
from moe_ckpt.faults.schedule import Kill, StateLoss

Execute = Callable[[Sequence[str], Path, Sequence[Kill]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """The faults of one run."""

    kills: tuple[Kill, ...] = ()
    """Kills of ranks, at points of iterations."""

    losses: tuple[StateLoss, ...] = ()
    """Losses of state in living processes."""

    def __str__(self) -> str:
        return ", ".join(
            [
                *(
                    f"rank {kill.rank} killed in {kill.phase} of iteration"
                    f" {kill.iteration}"
                    for kill in self.kills
                ),
                *(
                    f"stage {loss.stage} lost in {loss.phase} of iteration"
                    f" {loss.iteration}"
                    for loss in self.losses
                ),
            ]
        )


@dataclass(frozen=True)
class AttachedProof:
    """The proof of one command."""

    command: CheckedCommand
    """The command."""

    folder: Path
    """The folder of all runs; each run has a folder of its own below."""

    execute: Execute
    """Runs a command to its end, given the run folder and the kills."""

    def run(self) -> int:
        """Run and compare; print a line for each run and one for the outcome.

        Returns:
            The exit status.

        Raises:
            ConfigError: The command has too few iterations.
            RunFailedError: A run failed, or has no digests.
        """
        plain = self._digests("plain", Faults(), is_plain=True)
        faults = plan_faults(plain, loses_state=self.command.loses_state)
        faulty = self._digests("faults", faults)
        different = self._difference(plain, faulty)
        if different:
            return self._print_difference(plain, different, faulty.exactness)
        count, wanted = len(plain.states), "those of the plain run"
        if faulty.exactness == STATE:
            count, wanted = len(faulty.returns), "those that the ranks had before"
        if not count:
            print(
                "not proven: no rank came back to an iteration whose digests it had"
                " logged"
            )
            return NOT_PROVEN
        control = self._digests(
            "control", Faults(kills=faults.kills[:1]), leave_out=MOMENTS
        )
        if not self._difference(plain, control):
            print(
                "not proven: a recovery without Adam's first moments had digests that"
                f" were {wanted}, too"
            )
            return NOT_PROVEN
        print(
            f"exact: all {count} digests under faults are {wanted}; the control's"
            " are not"
        )
        return EXACT

    def _difference(self, plain: Digests, got: Digests) -> Difference | None:
        """Return the first state at which a run has broken its promise."""
        if got.exactness == STATE:
            return first_changed(got, may_be_older=self.command.loses_tokens)
        return first_difference(plain, got)

    def _print_difference(
        self, plain: Digests, different: Difference, exactness: str
    ) -> int:
        """Print a difference; with `bitwise`, also run the plain command again.

        A plain command that is not deterministic differs without any fault.
        """
        print(f"different: {different}")
        if exactness == STATE:  # with `state`, plain runs may differ
            print(
                "the rank had logged another digest of this tensor; logs and events:"
                f" {self.folder}"
            )
            return DIFFERENT
        # only now, because a third full run is the price of a verdict that an exact
        # recovery does not need
        own = first_difference(
            plain, self._digests("plain-again", Faults(), is_plain=True)
        )
        if own:
            print(f"the command is not deterministic: two plain runs differ {own}")
            return NOT_PROVEN
        print(
            "two plain runs are equal, so the recovery is not exact; logs and events:"
            f" {self.folder}"
        )
        return DIFFERENT

    def _digests(self, name: str, faults: Faults, **options: bool | str) -> Digests:
        """Run the command once, print a line, and return the digests.

        Raises:
            ConfigError: The command has too few iterations.
            RunFailedError: The run failed, or has no digests.
        """
        variation = Variation(run=self.folder / name, losses=faults.losses, **options)  # type: ignore[arg-type]
        print(f"{name}: {faults}" if str(faults) else f"{name}:", end=" ", flush=True)
        started_s = time.monotonic()
        self.execute(self.command.varied(variation), variation.run, faults.kills)
        try:
            digests = read_digests(variation.run)
        except FileNotFoundError as error:
            raise RunFailedError(
                f"{name}: got no events ({error}); log: {log_of(variation.run)}"
            ) from error
        print_end(digests, started_s, log_of(variation.run))
        return digests


def plan_faults(plain: Digests, *, loses_state: bool) -> Faults:
    """Return a kill in forward, a kill in backward, and a later loss of state.

    The kills are on two ranks, if there are two.

    Args:
        plain: The digests of the plain run.
        loses_state: Whether the policy recovers from a loss of state in living
            processes.
    """
    iterations = plain.iterations
    third, half, late = (iterations[len(iterations) * part // 12] for part in (4, 6, 9))
    kills = (
        Kill(rank=plain.num_ranks - 1, iteration=third, phase="forward"),
        Kill(rank=0, iteration=half, phase="backward"),
    )
    # after all kills: a worker that comes later would lose its state again, and the
    # other workers would not
    return Faults(
        kills=kills,
        losses=(StateLoss(iteration=late, stage=0, phase="step"),)
        if loses_state
        else (),
    )


def run_job(
    command: Sequence[str], run: Path, kills: Sequence[Kill], *, limit_s: float
) -> None:
    """Run a job with its kills to its end.

    Args:
        command: The words of the command.
        run: The run folder.
        kills: The kills to inflict.
        limit_s: The seconds after which the job is ended.

    Raises:
        RunFailedError: The job failed, or not all kills were inflicted. The error has
            the last line of the log.
    """
    carried: list[str] = []
    done: list[bool] = []

    def inflict() -> None:
        done.append(
            not kills
            or carry_out(
                kills, run, ranks_per_node=1, say=carried.append, patience_s=limit_s
            )
        )

    ended = run_to_end(command, log_of(run), limit_s=limit_s, meanwhile=inflict)
    if ended.status or not all(done):
        said = [ended.last_line, *carried][-1]
        raise RunFailedError(
            f"{run.name}: ended with status {ended.status}; log: {ended.log}\n{said}"
        )
