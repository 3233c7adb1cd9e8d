"""`moe-ckpt check -- COMMAND`: whether a user's own run under faults keeps what its `run.exactness` promises.

The command runs three times on this machine: plain, without supervisors; as given, with kills and, where the policy
recovers that, a loss of state in living processes; and once as a control, with one ingredient of a recovery left out.
With `bitwise`, the run under faults must have the digests of the plain run after each iteration, on each rank. With
`state`, each rank must have after each recovery the digests that it had logged after that iteration. The control must
not, or the comparison could not have found anything.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.check.commands import MOMENTS, CheckedCommand, Variation, parse_command
from launcher.check.compare import Difference, Digests, first_changed, first_difference, read_digests
from launcher.faults.carry_out import carry_out
from launcher.output_folder import log_of, make_output_folder
from launcher.proc import end_job
from moe_ckpt.arguments import Parser, parse_before_program
from moe_ckpt.config import require
from moe_ckpt.door import VARIABLE
from moe_ckpt.errors import ConfigError, MoeCkptError, exit_status
from moe_ckpt.exactness import STATE
from moe_ckpt.faults.schedule import Kill, StateLoss

Execute = Callable[[Sequence[str], Path, Sequence[Kill]], None]
EXACT, DIFFERENT, NOT_CHECKED = 0, 1, 2
_FEWEST_ITERS = 6
_EPILOG = """exit status: 0 exact; 1 different; 2 not checked: a run failed, or the control was not noticed
examples:
  moe-ckpt check -- torchrun --nproc-per-node=4 -m moe_ckpt.run --ckpt moevement -- pretrain_gpt.py ARGUMENTS
  moe-ckpt check -- moe-ckpt train --nproc-per-node=4 +ckpt=moevement train.iterations=20"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """The faults of one run."""

    kills: tuple[Kill, ...] = ()
    losses: tuple[StateLoss, ...] = ()

    def __str__(self) -> str:
        return ", ".join(
            [
                *(f"rank {kill.rank} killed in {kill.phase} of iteration {kill.iteration}" for kill in self.kills),
                *(f"stage {loss.stage} lost in {loss.phase} of iteration {loss.iteration}" for loss in self.losses),
            ]
        )


class RunFailedError(MoeCkptError):
    """A run of the command did not come to its end, or not all of its faults could be carried out."""


def main(arguments: Sequence[str]) -> int:
    """Check the command that follows the options; print a few lines and return the exit status."""

    def check() -> int:
        options, words = parse_before_program(_parser(), arguments)
        command = parse_command(words, os.environ.get(VARIABLE, ""))
        folder = make_output_folder(options.output, "check")
        require(not any(folder.iterdir()), "-o", str(folder), "an empty folder")
        return Check(command, folder, functools.partial(run_job, limit_s=options.limit_s)).run()

    return exit_status(check, failed=NOT_CHECKED)


@dataclass(frozen=True)
class Check:
    """The runs of one command, each in a folder of its own below `folder`; `execute` runs one to its end."""

    command: CheckedCommand
    folder: Path
    execute: Execute

    def run(self) -> int:
        """Run and compare; print a line for each run and one for the outcome. Raises MoeCkptError."""
        plain = self._digests("plain", Faults(), is_plain=True)
        faults = plan_faults(plain, loses_state=self.command.loses_state)
        faulty = self._digests("faults", faults)
        different = self._difference(plain, faulty)
        if different:
            return self._tell_difference(plain, different, faulty.exactness)
        count, wanted = len(plain.states), "those of the plain run"
        if faulty.exactness == STATE:
            count, wanted = len(faulty.returns), "those that the ranks had before"
        if not count:
            print("not checked: no rank came back to an iteration whose digests it had logged")
            return NOT_CHECKED
        control = self._digests("control", Faults(kills=faults.kills[:1]), leave_out=MOMENTS)
        if not self._difference(plain, control):
            print(f"not checked: a recovery without Adam's first moments had digests that were {wanted}, too")
            return NOT_CHECKED
        print(f"exact: all {count} digests under faults are {wanted}; the control's are not")
        return EXACT

    def _difference(self, plain: Digests, got: Digests) -> Difference | None:
        """Return where a run has not kept its promise."""
        if got.exactness == STATE:
            return first_changed(got, may_be_older=self.command.loses_tokens)
        return first_difference(plain, got)

    def _tell_difference(self, plain: Digests, different: Difference, exactness: str) -> int:
        """Print a difference; with `bitwise`, run the plain command again, which may differ without any fault."""
        print(f"different: {different}")
        if exactness == STATE:  # plain runs may differ
            print(f"the rank had another one before; logs and events: {self.folder}")
            return DIFFERENT
        # only now: a third full run is the price of a verdict that an exact recovery does not need
        own = first_difference(plain, self._digests("plain-again", Faults(), is_plain=True))
        if own:
            print(f"the command is not deterministic: two plain runs differ {own}")
            return NOT_CHECKED
        print(f"two plain runs are equal, so the recovery is not exact; logs and events: {self.folder}")
        return DIFFERENT

    def _digests(self, name: str, faults: Faults, **options: bool | str) -> Digests:
        """Run the command once, print a line, and return its digests. Raises RunFailedError."""
        variation = Variation(run=self.folder / name, losses=faults.losses, **options)  # type: ignore[arg-type]
        print(f"{name}: {faults}" if str(faults) else f"{name}:", end=" ", flush=True)
        started_s = time.monotonic()
        self.execute(self.command.varied(variation), variation.run, faults.kills)
        try:
            digests = read_digests(variation.run)
        except FileNotFoundError as error:
            raise RunFailedError(f"{name}: got no events ({error}); log: {log_of(variation.run)}") from error
        seconds, count = time.monotonic() - started_s, len(digests.iterations)
        print(f"({count} iterations, {digests.num_ranks} ranks, {seconds:.0f} s)", flush=True)
        if count < _FEWEST_ITERS:
            wanted = f"at least {_FEWEST_ITERS}, so that faults have iterations before and after them"
            raise ConfigError(f"COMMAND: got {count} iterations, wanted {wanted}; log: {log_of(variation.run)}")
        return digests


def plan_faults(plain: Digests, *, loses_state: bool) -> Faults:
    """Return a kill in forward and one in backward, on two ranks, and later a loss of state where that is recovered."""
    iterations = plain.iterations
    third, half, late = (iterations[len(iterations) * part // 12] for part in (4, 6, 9))
    kills = (
        Kill(rank=plain.num_ranks - 1, iteration=third, phase="forward"),
        Kill(rank=0, iteration=half, phase="backward"),
    )
    # after all kills: a worker that comes later would lose its state again, and the others would not
    return Faults(kills=kills, losses=(StateLoss(iteration=late, stage=0, phase="step"),) if loses_state else ())


def run_job(command: Sequence[str], run: Path, kills: Sequence[Kill], *, limit_s: float) -> None:
    """Run a job with its kills to its end. Raises RunFailedError with the last line of its log."""
    log = log_of(run)
    until_s = time.monotonic() + limit_s
    carried: list[str] = []
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            done = not kills or carry_out(kills, run, ranks_per_node=1, say=carried.append, patience_s=limit_s)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until_s - time.monotonic()))
        finally:
            is_late = process.poll() is None
            end_job(process)
    if is_late:
        raise RunFailedError(f"--limit-s: got {limit_s:g}, wanted more: the run had not ended by then; log: {log}")
    if process.returncode or not done:
        said = [*log.read_text().splitlines(), *carried]
        raise RunFailedError(f"{run.name}: ended with status {process.returncode}; log: {log}\n{''.join(said[-1:])}")


def _parser() -> Parser:
    parser = Parser(
        prog="moe-ckpt check",
        description="Check that a training command keeps what its run.exactness promises under faults.",
        epilog=_EPILOG,
    )
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="folder of all runs (outputs/DATE/TIME-check)")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="seconds after which a run is stopped (3600)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
