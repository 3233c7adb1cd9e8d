"""The vote by which the members of an idle process group go on with the group in the
next generation.

Owns: the vote, in a part of the store that belongs to one group in one generation. Must
not: know when a group is idle (`elastic.process_groups` does).

    position   the generation that formed the group, and the number of operations begun since
    kept       decided once: yes by the member whose vote makes the positions unanimous, no by a
               member without an idle group, or by the last one to vote
"""

from __future__ import annotations

from moe_ckpt.elastic.rendezvous_store import PollingStore

_KEPT, _YES, _NO = "kept", "yes", "no"


def agree_to_keep(store: PollingStore, size: int, position: str | None) -> bool:
    """Return whether all members have an idle group in the same position. Collective.

    Equal numbers of operations, all of which have ended on each member, leave no byte
    under way between two members.

    Args:
        store: The part for this group in this generation.
        size: The number of members.
        position: Of this member's idle group; None if this member has none, which ends
            the vote without waiting.

    Returns:
        The same on all members.

    Raises:
        PeersLostError: The generation has ended, or a member has not voted in time.
    """
    if position is None:
        store.compare_set(_KEPT, "", _NO)
        return False
    if store.add(f"idle/{position}", 1) == size:
        store.compare_set(_KEPT, "", _YES)
    # after that: a unanimous vote is decided before all votes are in
    if store.add("voted", 1) == size:
        store.compare_set(_KEPT, "", _NO)
    return store.get(_KEPT) == _YES.encode()
