"""The operations of a process group by the names that `torch.distributed` calls, and
which tensors they write.
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
    "all_to_all_single",  # these names are newer than those above
)
"""All of them write their first argument, but those of WITHOUT_RESULT."""

WITHOUT_RESULT = frozenset(("send", "barrier"))
WORKS_IN_PLACE = frozenset(("allreduce", "allreduce_coalesced", "reduce", "broadcast"))
"""Operations that read the tensors that they write."""

TRANSFERS = frozenset(("send", "recv", "recv_anysource"))
"""Operations between two ranks."""

# With torch 2.13 their Work waits for a condition that gloo's thread sets. That of a
# transfer closes the connection at a timeout, and that of a reduce-scatter takes none
# (`LambdaWork` of ProcessGroupGloo.cpp)
SURVIVE_TIMEOUTS = frozenset(
    (
        *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier"),
        *("gather", "scatter", "alltoall", "alltoall_base", "all_to_all_single"),
        *("allgather", "_allgather_base", "allgather_coalesced"),
        *("all_gather_single", "allgather_into_tensor_coalesced"),
        "all_gather_single_coalesced",
    )
)
"""Operations of gloo that go on where a wait for them has timed out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendAbilities:
    """The answer of a group to torch's question for its backend: transfers are batched
    if it supports that.
    """

    supports_coalescing: bool
