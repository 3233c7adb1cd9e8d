"""The tokens of a stage's experts in one rank's account: tokens received, and tokens
lost by recoveries.

Owns: the ledger along the run's epoch, the totals of lost tokens, and their form in a
snapshot. Must not: count, communicate, or decide anything. MoC, equation (7); MoEtion,
equation (6).
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
    """The tokens that enter each MoE layer of the job in an iteration: `tokens`, each
    routed to `top_k` experts.
    """

    tokens: int
    top_k: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LostShares:
    """Tokens lost to faults so far, as shares of all tokens that experts have received."""

    plt: float
    mlt: float


class TokenAccount:
    """The account of one stage's experts, equal on all its ranks. Counts are int64 [MoE
    layers of the stage, experts].

    `lost` is by layer, over all faults; `deficit` is the part that higher capacity has
    not made up yet.
    """

    def __init__(self, table: OperatorTable) -> None:
        self.experts = [
            operator
            for operator in table.operators
            if operator.kind is OperatorKind.EXPERT
        ]
        self.layers = sorted({place_of(expert)[:2] for expert in self.experts})
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
        """Add the tokens of one iteration, over all ranks of the stage, in the order of
        the table's experts.
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
        """Restore a saved account for experts whose states have `seen` these tokens;
        return the lost tokens.

        `saved` is a result of `as_tensors`.
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
        """Return the account for a snapshot."""
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

    `lost_of_stages`: by stage and MoE layer, over all faults.
    """
    lost = np.concatenate(list(lost_of_stages))
    tokens = np.full(len(lost), iteration * rate.tokens, np.int64)
    if not lost.size or iteration == 0:
        return LostShares(plt=0.0, mlt=0.0)
    return LostShares(
        plt=proportion_of_lost_tokens(lost, tokens, rate.top_k),
        mlt=moementary_lost_tokens(lost, tokens, rate.top_k),
    )


def place_of(expert: OperatorId) -> tuple[int, int, int]:
    """Return an expert's place among the MoE layers. Layers of multi-token prediction
    come last, as in a table.
    """
    return (
        -1 if expert.mtp_depth is None else expert.mtp_depth,
        expert.layer or 0,
        expert.expert or 0,
    )
