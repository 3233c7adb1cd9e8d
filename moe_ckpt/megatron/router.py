"""Counts the tokens that the routers of this rank's stage give to each expert (MoEvement, section 3.5 and Appendix B).

Owns: forward hooks on Megatron's routers and the counts of the running iteration. Must not: rank experts, or sum over
ranks. Recomputed forwards are not counted again. Soft counts sum the gate's probabilities of all experts: those that a
router returns are zero outside the top k, and with k = 1 would equal hard counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.transformer.moe.router import Router

from moe_ckpt.megatron.places import bare_model, locate
from moe_ckpt.megatron.state import TrainingState
from moe_ckpt.snapshot.host_transfers import TRANSFERS
from moe_ckpt.types import ExpertCounts, IntArray, OperatorId, OperatorKind, OperatorTable

_Places = Mapping[tuple[int | None, int | None], IntArray]
"""By layer and MTP depth: int64 [2, experts of the layer], places among all experts, and expert numbers."""


class RouterCounts:
    """Counts of the experts of a stage's table, in the table's order, from the tokens on this rank.

    Soft counts are zero unless requested: they take another pass over the gate's scores.
    """

    def __init__(self, state: TrainingState, table: OperatorTable, *, soft: bool) -> None:
        self._hard: dict[OperatorId, torch.Tensor] = {}
        self._soft: dict[OperatorId, torch.Tensor] = {}
        kinds = [operator.kind for operator in table.operators]
        self._num_experts = kinds.count(OperatorKind.EXPERT)
        self._places = _places_by_layer(table)
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
        fetched = TRANSFERS.fetch([*self._hard.values(), *self._soft.values()])  # one transfer an iteration
        hard = dict(zip(self._hard, fetched, strict=False))
        soft = dict(zip(self._soft, fetched[len(hard) :], strict=True))
        return ExpertCounts(hard=self._in_table_order(hard), soft=self._in_table_order(soft))

    def _count_routed(self, gate: OperatorId, _: Any, __: Any, routed: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._count(self._hard, gate, lambda: routed[1])

    def _watch_scores(self, gate: OperatorId, router: Router) -> None:
        """Count the gate's scores before the router takes the top k: no hook of Megatron's sees them."""
        gating: Callable[[torch.Tensor], torch.Tensor] = router.gating

        def watched(hidden: torch.Tensor) -> torch.Tensor:
            scores = gating(hidden)
            self._count(self._soft, gate, lambda: _probabilities(scores.detach(), router))
            return scores

        cast("Any", router).gating = watched

    def _count(
        self, counts: dict[OperatorId, torch.Tensor], gate: OperatorId, values: Callable[[], torch.Tensor]
    ) -> None:
        if not self._counting or torch._C._current_graph_task_id() != -1:  # in backward: activations are recomputed
            return
        # float64 adds counts exactly: their sums over ranks are the same in any order
        total = values().sum(dim=0, dtype=torch.float64)
        counts[gate] = counts[gate] + total if gate in counts else total

    def _in_table_order(self, counts: dict[OperatorId, torch.Tensor]) -> npt.NDArray[np.float64]:
        found = np.zeros(self._num_experts)
        for gate, total in counts.items():
            positions, experts = self._places[gate.layer, gate.mtp_depth]
            found[positions] = total.numpy()[experts]
        return found


def _places_by_layer(table: OperatorTable) -> _Places:
    """Return the experts of each layer, and their places among all experts of the table."""
    found: dict[tuple[int | None, int | None], list[tuple[int, int]]] = defaultdict(list)
    experts = (each for each in table.operators if each.kind is OperatorKind.EXPERT)
    for position, operator in enumerate(experts):
        assert operator.expert is not None, operator
        found[operator.layer, operator.mtp_depth].append((position, operator.expert))
    return {layer: np.array(pairs).T for layer, pairs in found.items()}


def _probabilities(scores: torch.Tensor, router: Router) -> torch.Tensor:
    """Return the gate's probability of every expert, float32 [tokens, experts]; those of a token sum to 1."""
    flat = scores.reshape(-1, scores.shape[-1]).float()
    if cast("Any", router).config.moe_router_score_function == "softmax":
        return torch.softmax(flat, dim=-1)
    activated = torch.sigmoid(flat)
    return activated / activated.sum(dim=-1, keepdim=True)


def router_top_k(state: TrainingState) -> int:
    """Return the number of experts of a layer to which a token is routed."""
    return int(cast("Any", state.model[0]).config.moe_router_topk)


def routers_of(state: TrainingState) -> Iterator[tuple[OperatorId, Router]]:
    """Yield the gates of this rank's MoE layers, from front to back, and their routers."""
    for chunk in state.model:
        model = bare_model(chunk)
        for name, module in model.named_modules():
            if isinstance(module, Router):
                yield locate(model, f"{name}.weight"), module
