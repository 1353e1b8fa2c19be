"""Do a group's ranks compress alike? Found out before their first call under a policy.

Which calls are compressed follows from the policy, so ranks with different ones would wait for each other
in different collectives. Through the group's store each rank says what it has before any is carried out.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist

from .communicator import group_timeout
from .config import Policy
from .errors import PeerMismatch, ZipcclError
from .format import VERSION

_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Policy]] = weakref.WeakKeyDictionary()


def agreed_on(policy: Policy, group: dist.ProcessGroup) -> bool:
    """Whether ``agree_on`` has succeeded before."""
    found = _agreed.get(group)
    return found is not None and policy in found


def agree_on(policy: Policy, group: dist.ProcessGroup) -> None:
    """Collective, in a group's first call with ``policy``.

    Raises:
        PeerMismatch: ranks have different wire formats or policies; on every rank, naming both.
        ZipcclError: not all ranks came within the group's timeout.
    """
    before = _agreed.setdefault(group, [])
    _compare(f"wire format {VERSION}, {policy}", len(before), group)
    before.append(policy)


def _compare(mine: str, turn: int, group: dist.ProcessGroup) -> None:
    rank, timeout = group.rank(), group_timeout(group)
    store = dist.PrefixStore(f"zipccl policy {turn}", dist.distributed_c10d._get_process_group_store(group))
    keys = [str(peer) for peer in range(group.size())]
    store.set(keys[rank], mine)
    try:
        store.wait(keys, timeout)
    except RuntimeError:  # the kinds of stores have different words for it
        missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
        # split_group names a group by how many its member has; under other names members do not meet.
        raise ZipcclError(
            f"policy of ranks {missing} not known after {timeout.total_seconds()} s: are all ranks enabled, "
            f"and know the group as {group.group_name!r}?",
            rank=rank,
        ) from None
    theirs = [text.decode() for text in store.multi_get(keys)]
    for peer, text in enumerate(theirs):
        if text != theirs[0]:
            raise PeerMismatch(
                f"ranks 0 and {peer} compress differently: {theirs[0]} and {text}", rank=rank, peer=peer
            )
