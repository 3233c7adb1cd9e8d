"""The share of useful time: by a closed formula, and by simulations of several runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from moe_ckpt.sim.saving import Recovery, Saving, Setup
from moe_ckpt.sim.timeline import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Means over simulated runs of one policy in one setup."""

    ettrs: tuple[float, ...]
    """ETTR of each run."""

    formula: float | None
    """ETTR of the closed formula. None: the policy has no formula."""

    overhead: float
    """Time that saving adds to training, as a share of training time."""

    recovery_s: float
    """Seconds that all faults of a run cost."""

    num_faults: float
    """Number of faults in a run."""

    plt: float
    """PLT: share of tokens that experts lost, mean over MoE layers."""

    mlt: float
    """MLT: share of tokens that experts lost, sum over MoE layers."""

    @property
    def ettr(self) -> float:
        """Mean ETTR of the runs."""
        return statistics.fmean(self.ettrs)

    @property
    def spread(self) -> float:
        """Standard deviation of the ETTR of the runs."""
        return statistics.pstdev(self.ettrs)


def predict(setup: Setup, saving: Saving, outcomes: Sequence[Outcome]) -> Prediction:
    """Return the means of the outcomes of some runs."""
    return Prediction(
        ettrs=tuple(outcome.ledger.ettr for outcome in outcomes),
        formula=closed_form(setup, saving),
        overhead=statistics.fmean(_overhead(outcome) for outcome in outcomes),
        recovery_s=statistics.fmean(outcome.recovery_s for outcome in outcomes),
        num_faults=statistics.fmean(outcome.num_faults for outcome in outcomes),
        plt=statistics.fmean(outcome.plt for outcome in outcomes),
        mlt=statistics.fmean(outcome.mlt for outcome in outcomes),
    )


def _overhead(outcome: Outcome) -> float:
    ledger = outcome.ledger
    trained_s = ledger.useful_s + ledger.again_s
    return ledger.stall_s / trained_s if trained_s else 0.0


def closed_form(setup: Setup, saving: Saving) -> float | None:
    """Return the ETTR by MoEvement's formula, or None where the formula does not apply.

    The formula is 1 / (1 + overhead) / (1 + E[R] / MTBF), without terms for detection,
    reload or scope. E[R] is half an interval, or one and a half windows (section 3.6).
    The result is None without an MTBF, and for a policy without checkpoints.
    """
    iteration_s = setup.costs.iteration_s
    if saving.recovery is Recovery.LOCAL:
        redone = 1.5 * saving.settled.repeat[0].num_slots
    elif saving.recovery is Recovery.ROLLBACK:
        redone = saving.settled.interval_iters / 2
    else:
        redone = saving.durable.every_iters / 2 if saving.durable else None
    if redone is None or setup.mtbf_s is None:
        return None
    return (
        1
        / (1 + saving.overhead_s / iteration_s)
        / (1 + redone * iteration_s / setup.mtbf_s)
    )
