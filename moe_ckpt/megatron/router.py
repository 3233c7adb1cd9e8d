"""Counts the tokens that routers of this rank's stage give to each expert.

MoEvement, section 3.5 and Appendix B.

Owns: forward hooks on Megatron's routers, and the counts of the running iteration. Must
not: rank experts, or sum over ranks.

Recomputed forwards are not counted again. Soft counts sum the gate's probabilities of
all experts. The probabilities that a router returns are zero outside the top k;
for k=1 the sums of these probabilities would equal hard counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.transformer.moe.router import Router

from moe_ckpt.megatron.operator_names import bare_model, locate
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.snapshot.host_transfers import TRANSFERS
from moe_ckpt.types import (
    ExpertCounts,
    IntArray,
    OperatorId,
    OperatorKind,
    OperatorTable,
)

_Layer = tuple[int | None, int | None]
"""A layer's number, and the depth of its module of multi-token prediction.

The depth is None for a layer in no such module.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _LayerExperts:
    """The experts of one layer that a table has."""

    positions: IntArray
    """Positions among the experts of all layers, int64 [experts].

    Positions are in the table's order.
    """

    numbers: IntArray
    """Numbers in the layer, as routers count the experts, int64 [experts]."""


class RouterCounts:
    """Counts the tokens on this rank for each expert of a stage's table.

    Args:
        state: This rank's training state.
        table: The operators of the stage. Counts are in the order of the table's
            experts.
        soft: Whether to compute soft counts, which take another pass over the gate's
            scores. If not, soft counts are zero.
    """

    def __init__(
        self, state: TrainingState, table: OperatorTable, *, soft: bool
    ) -> None:
        self._hard: dict[OperatorId, torch.Tensor] = {}
        self._soft: dict[OperatorId, torch.Tensor] = {}
        experts = [
            operator
            for operator in table.operators
            if operator.kind is OperatorKind.EXPERT
        ]
        self._num_experts = len(experts)
        self._layers = _by_layer(experts)
        self._counting = False
        for gate, router in routers_of(state):
            router.register_forward_hook(partial(self._count_routed, gate))
            if soft:
                self._watch_scores(gate, router)

    def begin(self) -> None:
        """Count from zero."""
        self._hard.clear()
        self._soft.clear()
        self._counting = True

    def end(self) -> ExpertCounts:
        """Stop counting and return the counts."""
        self._counting = False
        # one transfer to the host in each iteration
        fetched = TRANSFERS.fetch([*self._hard.values(), *self._soft.values()])
        hard = dict(zip(self._hard, fetched, strict=False))
        soft = dict(zip(self._soft, fetched[len(hard) :], strict=True))
        return ExpertCounts(
            hard=self._in_table_order(hard), soft=self._in_table_order(soft)
        )

    def _count_routed(
        self,
        gate: OperatorId,
        _: Any,
        __: Any,
        routed: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._count(self._hard, gate, lambda: routed[1])

    def _watch_scores(self, gate: OperatorId, router: Router) -> None:
        """Count the gate's scores before the router takes the top k.

        Megatron has no hook that sees these scores.
        """
        gating: Callable[[torch.Tensor], torch.Tensor] = router.gating

        def watched(hidden: torch.Tensor) -> torch.Tensor:
            scores = gating(hidden)
            self._count(
                self._soft, gate, lambda: _probabilities(scores.detach(), router)
            )
            return scores

        cast("Any", router).gating = watched

    def _count(
        self,
        counts: dict[OperatorId, torch.Tensor],
        gate: OperatorId,
        values: Callable[[], torch.Tensor],
    ) -> None:
        # activations are recomputed in backward
        if not self._counting or torch._C._current_graph_task_id() != -1:
            return
        # float64 adds counts exactly: sums over ranks are the same in any order
        total = values().sum(dim=0, dtype=torch.float64)
        counts[gate] = counts[gate] + total if gate in counts else total

    def _in_table_order(
        self, counts: dict[OperatorId, torch.Tensor]
    ) -> npt.NDArray[np.float64]:
        found = np.zeros(self._num_experts)
        for gate, total in counts.items():
            experts = self._layers[gate.layer, gate.mtp_depth]
            found[experts.positions] = total.numpy()[experts.numbers]
        return found


def _by_layer(experts: Sequence[OperatorId]) -> dict[_Layer, _LayerExperts]:
    """Group the experts of all layers by their layers."""
    positions = defaultdict[_Layer, list[int]](list)
    for position, expert in enumerate(experts):
        positions[expert.layer, expert.mtp_depth].append(position)
    numbers = np.array([expert.expert for expert in experts])
    return {
        layer: _LayerExperts(positions=np.array(of_layer), numbers=numbers[of_layer])
        for layer, of_layer in positions.items()
    }


def _probabilities(scores: torch.Tensor, router: Router) -> torch.Tensor:
    """Return the gate's probability of every expert, float32 [tokens, experts].

    The probabilities of a token sum to 1.
    """
    flat = scores.reshape(-1, scores.shape[-1]).float()
    if cast("Any", router).config.moe_router_score_function == "softmax":
        return torch.softmax(flat, dim=-1)
    activated = torch.sigmoid(flat)
    return activated / activated.sum(dim=-1, keepdim=True)


def router_top_k(state: TrainingState) -> int:
    """Return the number of experts of a layer to which a token is routed."""
    return int(cast("Any", state.model[0]).config.moe_router_topk)


def routers_of(state: TrainingState) -> Iterator[tuple[OperatorId, Router]]:
    """Yield the gates of this rank's MoE layers with their routers, front to back."""
    for chunk in state.model:
        model = bare_model(chunk)
        for name, module in model.named_modules():
            if isinstance(module, Router):
                yield locate(model, f"{name}.weight"), module
