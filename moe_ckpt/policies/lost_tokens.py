"""The tokens that experts have lost: exact counts along a run's iterations, and the
papers' shares of them.

Owns the arithmetic; the caller counts tokens and stores the arrays. Pure, int64
[layers, experts]. MoC, section 3.1.2 and equation (7): PLT. MoEtion, section 4.1 and
equation (6): MLT.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_ckpt.types import IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenLoss:
    """The change of each expert by a recovery, int64 [layers, experts], nothing below
    zero.

    `lost`: tokens that the state before the fault had seen and the restored one has
    not. `repeated`: tokens that the restored state has seen and will process again, of
    an expert from a later snapshot than the rest of the model.
    """

    lost: IntArray
    repeated: IntArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenLedger:
    """The tokens of each expert after an iteration, int64 [layers, experts]; arrays are
    read-only.

    `processed` are its tokens in the iterations that led here, without rolled-back
    iterations; `seen` are the tokens that its present state has been trained with.
    Without a loss they are equal.
    """

    processed: IntArray
    seen: IntArray

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
        """Return the ledger of an `as_array`."""
        processed, seen = array
        return cls(processed=processed, seen=seen)

    def as_array(self) -> IntArray:
        """Return both counts in one array for storing, int64 [2, layers, experts]."""
        return np.stack([self.processed, self.seen])

    def after(self, tokens: IntArray) -> TokenLedger:
        """Return the ledger after one more iteration, in which each expert was trained
        with its `tokens`.
        """
        return TokenLedger(processed=self.processed + tokens, seen=self.seen + tokens)

    def restored(self, seen_in_state: IntArray) -> tuple[TokenLedger, TokenLoss]:
        """Return the ledger and the loss of a run that goes on from here, the iteration
        rolled back to.

        `seen_in_state` is what each expert's restored state had seen when it was taken:
        the ledger's `seen` of that time. One that had seen 40 tokens by the iteration
        rolled back to and comes back from a snapshot at 25 loses 15; what it lost
        before stays lost and is not counted again. Counts tell tokens apart only along
        one line: they are exact unless a snapshot is used that an earlier recovery has
        passed over for an older one.
        """
        # of `seen`: a difference to `processed` would count the losses of earlier
        # faults again
        missing = self.seen - seen_in_state
        loss = TokenLoss(lost=np.maximum(missing, 0), repeated=np.maximum(-missing, 0))
        return TokenLedger(processed=self.processed, seen=seen_in_state), loss


def proportion_of_lost_tokens(lost: IntArray, tokens: IntArray, top_k: int) -> float:
    """Return PLT, the mean over MoE layers of lost tokens by all that a router may send
    to experts.

    `lost` over all faults and `tokens` that entered the layer in training are int64
    [layers]; 2 layers of 100 tokens and top-2 that lost 10 and 30 make 0.1. As printed,
    `tokens * top_k` counts what a capacity drops, too: with drops PLT is below the
    share of the tokens that experts processed. MoC, equation (7).
    """
    return float(np.mean(_by_layer(lost, tokens, top_k)))


def moementary_lost_tokens(lost: IntArray, tokens: IntArray, top_k: int) -> float:
    """Return MLT, as PLT but with the sum over MoE layers in place of the mean, as
    printed.

    So it is PLT times the number of MoE layers, and may exceed 1. MoEtion, equation
    (6).
    """
    return float(np.sum(_by_layer(lost, tokens, top_k)))


def _by_layer(lost: IntArray, tokens: IntArray, top_k: int) -> npt.NDArray[np.float64]:
    assert lost.shape == tokens.shape, (lost.shape, tokens.shape)
    assert not np.any(lost[tokens == 0]), (lost, tokens)
    return lost / np.maximum(tokens * top_k, 1)
