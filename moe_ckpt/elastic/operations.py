"""The operations of a process group by the names that `torch.distributed` calls.

The sets below say which tensors an operation writes, and how an operation behaves.
"""

from __future__ import annotations

from dataclasses import dataclass

OPERATIONS = (
    *(
        "allreduce",
        "allreduce_coalesced",
        "reduce",
        "broadcast",
        "barrier",
        "gather",
        "scatter",
        "send",
        "recv",
    ),
    *(
        "allgather",
        "_allgather_base",
        "allgather_coalesced",
        "allgather_into_tensor_coalesced",
        "recv_anysource",
    ),
    *(
        "reduce_scatter",
        "_reduce_scatter_base",
        "reduce_scatter_tensor_coalesced",
        "alltoall",
        "alltoall_base",
    ),
    *(
        "all_gather_single",
        "all_gather_single_coalesced",
        "reduce_scatter_single",
        "reduce_scatter_single_coalesced",
    ),
    "all_to_all_single",  # newer names than those above
)
"""All operations, which write their first argument, except for `WITHOUT_RESULT`."""

WITHOUT_RESULT = frozenset(("send", "barrier"))
"""Operations that write no tensor."""

WORKS_IN_PLACE = frozenset(("allreduce", "allreduce_coalesced", "reduce", "broadcast"))
"""Operations that read the tensors that they write."""

TRANSFERS = frozenset(("send", "recv", "recv_anysource"))
"""Operations between two ranks."""

# In torch 2.13 the Work of these operations waits for a condition that gloo's thread
# sets. The Work of a transfer closes the connection at a timeout, and the Work of a
# reduce-scatter takes no timeout (`LambdaWork` of ProcessGroupGloo.cpp)
SURVIVE_TIMEOUTS = frozenset(
    (
        *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier"),
        *("gather", "scatter", "alltoall", "alltoall_base", "all_to_all_single"),
        *("allgather", "_allgather_base", "allgather_coalesced"),
        *("all_gather_single", "allgather_into_tensor_coalesced"),
        "all_gather_single_coalesced",
    )
)
"""Operations of gloo that continue after a wait for them has timed out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendAbilities:
    """Stand-in for a backend, which a group returns when torch asks for its backend."""

    supports_coalescing: bool
    """Whether the group can batch transfers; torch then batches them."""
