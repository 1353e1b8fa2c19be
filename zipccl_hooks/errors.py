"""Typed errors. Bad arguments raise ValueError or TypeError; these are for what arrives from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ZipcclError(RuntimeError):
    """Base of every error that is not the caller's argument.

    ``rank`` is the rank that noticed, ``peer`` the rank whose data is at fault; both are ranks in
    the process group and None outside a collective.
    """

    def __init__(self, message: str, *, rank: int | None = None, peer: int | None = None) -> None:
        where = "" if rank is None else f"rank {rank}: "
        whose = "" if peer is None else f" (peer: rank {peer})"
        super().__init__(f"{where}{message}{whose}")
        self.message = message
        self.rank = rank
        self.peer = peer


class CorruptPayload(ZipcclError):
    """A payload that contradicts itself: damaged in transit, truncated, or not a payload."""


class FormatMismatch(ZipcclError):
    """A payload or a peer that speaks another wire format version."""


class PeerMismatch(ZipcclError):
    """Ranks that called the same collective with contradicting shapes, dtypes or operations.

    Every rank of the group raises it, since every rank sees the same exchanged descriptions.
    """


class VerificationFailed(ZipcclError):
    """A call that ``Policy(verify=True)`` repeated uncompressed, with other bits."""


@contextmanager
def naming_peer(peer: int) -> Iterator[None]:
    """Adds the peer to a ZipcclError raised inside, which had none."""
    try:
        yield
    except ZipcclError as error:
        raise type(error)(error.message, peer=peer) from None
