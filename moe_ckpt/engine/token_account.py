"""The tokens of a stage's experts: received, and lost by recoveries.

Each rank keeps one account of its stage. Owns: the ledger along the run's epoch, the
totals of lost tokens, and their form in a snapshot. Must not: count, communicate, or
decide anything. MoC, equation (7); MoEtion, equation (6).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from moe_ckpt.policies.lost_tokens import (
    IntArray,
    TokenLedger,
    TokenLoss,
    moementary_lost_tokens,
    proportion_of_lost_tokens,
)
from moe_ckpt.types import OperatorId, OperatorKind, OperatorTable


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRate:
    """The tokens that enter each MoE layer of the job in an iteration."""

    tokens: int
    """Tokens that enter each MoE layer in an iteration, over all ranks."""

    top_k: int
    """Experts to which the router sends each token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LostShares:
    """Tokens lost to faults so far, as shares of all tokens of the experts."""

    plt: float
    """Proportion of lost tokens (PLT): mean over MoE layers. MoC, equation (7)."""

    mlt: float
    """MLT: sum over MoE layers in place of the mean. MoEtion, equation (6)."""


class TokenAccount:
    """The account of one stage's experts, equal on all ranks of the stage.

    Counts are int64 [MoE layers of the stage, experts].

    Attributes:
        experts: The experts of the stage, in the order of the table.
        layers: The MoE layers of the stage: depth of multi-token prediction or -1, and
            number of the layer.
        ledger: Tokens that each expert has processed, and tokens that its state has
            been trained with.
        lost: Lost tokens by layer, over all faults, int64 [MoE layers of the stage].
        deficit: Lost tokens that higher capacity has not made up yet.
    """

    def __init__(self, table: OperatorTable) -> None:
        self.experts = [
            operator
            for operator in table.operators
            if operator.kind is OperatorKind.EXPERT
        ]
        self.layers = sorted({position_of(expert)[:2] for expert in self.experts})
        assert not self.layers or len(self.experts) % len(self.layers) == 0, (
            self.experts
        )
        self._shape = (len(self.layers), len(self.experts) // max(1, len(self.layers)))
        self.begin()

    def begin(self) -> None:
        """Begin the run: no expert has received a token."""
        self.ledger = TokenLedger.at_start(*self._shape)
        self.lost: IntArray = np.zeros(len(self.layers), np.int64)
        self.deficit: IntArray = np.zeros(self._shape, np.int64)

    def count(self, tokens: npt.NDArray[np.float64]) -> None:
        """Add the tokens of one iteration.

        Args:
            tokens: Tokens over all ranks of the stage, in the order of the table's
                experts.
        """
        # exact: float64 holds whole numbers up to 2 ** 53
        whole = tokens.astype(np.int64)
        assert np.array_equal(whole, tokens), tokens
        self.ledger = self.ledger.after(whole.reshape(self._shape))

    def seen(self) -> dict[str, int]:
        """Return the tokens that each expert's state has been trained with, by name."""
        counts = self.ledger.seen.reshape(-1).tolist()
        return {
            str(expert): count
            for expert, count in zip(self.experts, counts, strict=True)
        }

    def restore(
        self, saved: Mapping[str, torch.Tensor], seen: Mapping[str, int]
    ) -> TokenLoss:
        """Restore a saved account for experts of different snapshots.

        Args:
            saved: A result of `as_tensors`.
            seen: By expert, the tokens with which the restored state has been trained.

        Returns:
            The lost tokens.
        """
        ledger = TokenLedger.from_array(saved["ledger"].numpy().copy())
        counts = np.array(
            [seen[str(expert)] for expert in self.experts], np.int64
        ).reshape(self._shape)
        self.ledger, loss = ledger.restored(counts)
        self.lost = saved["lost"].numpy() + loss.lost.sum(axis=1)
        self.deficit = saved["deficit"].numpy() + loss.lost
        return loss

    def as_tensors(self) -> dict[str, torch.Tensor]:
        """Return the account as named tensors, for a snapshot."""
        arrays = {
            "ledger": self.ledger.as_array(),
            "lost": self.lost,
            "deficit": self.deficit,
        }
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def lost_shares(
    lost_of_stages: Sequence[IntArray], iteration: int, rate: TokenRate
) -> LostShares:
    """Return the shares that the job has lost by `iteration`.

    Args:
        lost_of_stages: Lost tokens over all faults, by stage and MoE layer.
        iteration: Number of iterations trained so far.
        rate: Tokens of one iteration.
    """
    lost = np.concatenate(list(lost_of_stages))
    tokens = np.full(len(lost), iteration * rate.tokens, np.int64)
    if not lost.size or iteration == 0:
        return LostShares(plt=0.0, mlt=0.0)
    return LostShares(
        plt=proportion_of_lost_tokens(lost, tokens, rate.top_k),
        mlt=moementary_lost_tokens(lost, tokens, rate.top_k),
    )


def position_of(expert: OperatorId) -> tuple[int, int, int]:
    """Return the position of an expert: depth of multi-token prediction, layer, expert.

    The depth is -1 outside of multi-token prediction. Sorted by position, layers of
    multi-token prediction come last, as in a table.
    """
    return (
        -1 if expert.mtp_depth is None else expert.mtp_depth,
        expert.layer or 0,
        expert.expert or 0,
    )
