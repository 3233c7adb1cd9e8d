"""The vote of an idle process group's members on keeping the group.

The members of a kept group use the group in the next generation.

Owns: the vote, in a part of the store that belongs to one group in one generation. Must
not: know when a group is idle (`elastic.process_groups` does).

    position   the generation that formed the group, and the number of operations
               that the member has begun since
    kept       the decision. The first of these writes wins:
               yes, by the member whose vote makes the positions unanimous
               no, by a member without an idle group
               no, by the member that completes the vote: a `yes` would have been
               written before, so the positions differ
"""

from __future__ import annotations

from moe_ckpt.elastic.rendezvous_store import PollingStore

_KEPT, _YES, _NO = "kept", "yes", "no"


def agree_to_keep(store: PollingStore, size: int, position: str | None) -> bool:
    """Vote on keeping an idle group. Collective over the group's members.

    If all members have begun equally many operations, and all these have ended on each
    member, no byte is under way between two members.

    Args:
        store: The part of the store for this group in this generation.
        size: The number of members.
        position: The position of this member's idle group. None: this member has no
            idle group, and ends the vote without waiting.

    Returns:
        Whether all members have an idle group in the same position; the same on all
        members.

    Raises:
        PeersLostError: The generation has ended, or a member has not voted in time.
    """
    if position is None:
        store.compare_set(_KEPT, "", _NO)
        return False
    if store.add(f"idle/{position}", 1) == size:
        store.compare_set(_KEPT, "", _YES)
    # after the `yes`: a unanimous vote is decided before all votes are counted
    if store.add("voted", 1) == size:
        store.compare_set(_KEPT, "", _NO)
    return store.get(_KEPT) == _YES.encode()
