"""Exact counts of the tokens that experts have lost, and the papers' shares of them.

The module owns the arithmetic along the iterations of a run. The caller counts tokens
and stores the arrays. Pure, int64 [layers, experts]. MoC, section 3.1.2 and equation
(7): PLT. MoEtion, section 4.1 and equation (6): MLT.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_ckpt.types import IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenLoss:
    """The change of each expert's tokens by a recovery."""

    lost: IntArray
    """Tokens that the state before the fault had seen and the restored state has not
    seen, int64 [layers, experts], at least 0.
    """

    repeated: IntArray
    """Tokens that the restored state has seen and will process again, int64 [layers,
    experts], at least 0. An expert repeats tokens if its snapshot is newer than the
    snapshot of the rest of the model.
    """


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenLedger:
    """The tokens of each expert after an iteration; arrays are read-only.

    `processed` and `seen` are equal as long as no token is lost.
    """

    processed: IntArray
    """Tokens of each expert in the iterations that led to this iteration, without
    rolled-back iterations, int64 [layers, experts].
    """

    seen: IntArray
    """Tokens that the present state of each expert has been trained with, int64
    [layers, experts].
    """

    def __post_init__(self) -> None:
        assert self.processed.shape == self.seen.shape, (
            self.processed.shape,
            self.seen.shape,
        )
        assert self.processed.dtype == self.seen.dtype == np.int64, (
            self.processed.dtype,
            self.seen.dtype,
        )

    @classmethod
    def at_start(cls, num_layers: int, num_experts: int) -> TokenLedger:
        """Return the ledger at the start of a run."""
        return cls.from_array(np.zeros((2, num_layers, num_experts), np.int64))

    @classmethod
    def from_array(cls, array: IntArray) -> TokenLedger:
        """Return the ledger of an array that `as_array` returned."""
        processed, seen = array
        return cls(processed=processed, seen=seen)

    def as_array(self) -> IntArray:
        """Return both counts in one array for storing, int64 [2, layers, experts]."""
        return np.stack([self.processed, self.seen])

    def after(self, tokens: IntArray) -> TokenLedger:
        """Return the ledger after one more iteration.

        Args:
            tokens: The tokens that each expert was trained with in the iteration, int64
                [layers, experts].
        """
        return TokenLedger(processed=self.processed + tokens, seen=self.seen + tokens)

    def restored(self, seen_in_state: IntArray) -> tuple[TokenLedger, TokenLoss]:
        """Return the ledger and the loss of a run that continues from a restored state.

        The present ledger must be the ledger of the iteration to which the run rolls
        back. An expert that had seen 40 tokens by that iteration and is restored from a
        snapshot taken at 25 tokens loses 15. Tokens that an expert lost earlier stay
        lost and are not counted again.

        Counts cannot tell apart the tokens of different histories: the counts are exact
        unless a recovery uses a snapshot that an earlier recovery passed over for an
        older one.

        Args:
            seen_in_state: The tokens that each expert's restored state had seen when
                the snapshot was taken, which is the ledger's `seen` of that time, int64
                [layers, experts].
        """
        # the difference to `seen`: a difference to `processed` would count the losses
        # of earlier faults again
        missing = self.seen - seen_in_state
        loss = TokenLoss(lost=np.maximum(missing, 0), repeated=np.maximum(-missing, 0))
        return TokenLedger(processed=self.processed, seen=seen_in_state), loss


def proportion_of_lost_tokens(lost: IntArray, tokens: IntArray, top_k: int) -> float:
    """Return PLT: the mean over MoE layers of the share of lost tokens.

    The share divides the lost tokens of a layer by all tokens that a router may send to
    experts. 2 layers of 100 tokens with top-2 that lost 10 and 30 tokens give 0.1. As
    printed in the paper, `tokens * top_k` includes tokens that a capacity drops. With
    drops, PLT is below the share of the tokens that experts processed. MoC, equation
    (7).

    Args:
        lost: The lost tokens of all faults, int64 [layers].
        tokens: The tokens that entered the layer in training, int64 [layers].
        top_k: The number of experts that a router chooses for a token.
    """
    return float(np.mean(_by_layer(lost, tokens, top_k)))


def moementary_lost_tokens(lost: IntArray, tokens: IntArray, top_k: int) -> float:
    """Return MLT: as PLT, but the sum over MoE layers instead of the mean.

    As printed in the paper, MLT is PLT times the number of MoE layers and may exceed 1.
    MoEtion, equation (6). Arguments as for `proportion_of_lost_tokens`.
    """
    return float(np.sum(_by_layer(lost, tokens, top_k)))


def _by_layer(lost: IntArray, tokens: IntArray, top_k: int) -> npt.NDArray[np.float64]:
    assert lost.shape == tokens.shape, (lost.shape, tokens.shape)
    assert not np.any(lost[tokens == 0]), (lost, tokens)
    return lost / np.maximum(tokens * top_k, 1)
