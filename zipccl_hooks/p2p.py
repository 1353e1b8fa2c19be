"""Messages: send, recv, isend, irecv and batch_isend_irecv. Reached as functions of collectives.py.

Between GPUs see messages.py. On CPU tensors a message is a broadcast among its two ranks, from the sender.
Each direction between two ranks has a communicator of its own, whose thread carries out its messages in the
order of the calls, from making the connections on. So no call waits for another rank, and no direction for
another, whatever the order in which ranks send and receive::

    rank 0   isend(a, 1), irecv(b, 1)     thread "0 to 1"   [ connect | a: agree, encode, send ]
                                          thread "1 to 0"   [ connect | b: agree, receive, decode ]
    rank 1   isend(b, 0), irecv(a, 0)     the same two

Both ends decide alike, from dtype, size, tag and policy, whether a message is compressed. Where they come to
different answers, one end waits here and the other in the plain call until the group's timeout, and both
raise. Where both compress on CPUs, but not tensors of one dtype and size in one mode, both raise at once.
Messages with a tag and receives from any source are never compressed.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from . import exchange
from .arguments import check_tensor, rank_in_group
from .communicator import Work, make_communicator
from .config import Policy, default_policy
from .counters import recorder
from .dispatch import Request, flatten, on_thread, uses_streams
from .eligible import decline_reason, resolve_group
from .errors import ZipcclError
from .exchange import Call
from .messages import Message, Plain, issue, messages, rests

Group = dist.ProcessGroup


class Direction:
    """An end of the messages from ``sender`` to ``receiver``, ranks of a group. Making it sends nothing."""

    def __init__(self, group: Group, sender: int, receiver: int) -> None:
        self.comm = make_communicator(group, f"zipccl {sender} to {receiver}", (sender, receiver))
        self._sends = self.comm.rank == 0

    def message(self, name: str, tensor: Tensor, policy: Policy) -> Work:
        """Issues the next message: ``tensor`` is sent, or receives it."""

        def body(call: Call, flat: list[Tensor]) -> None:
            with self._explained(name):
                self.comm.connect()
                n = tensor.numel()
                call.digest = zlib.crc32(f"{policy.mode} {policy.adaptive} {policy.verify}".encode())
                exchange.agree(call, 0.0, [n, n] if self._sends else [0, 0], [n, 0])
                exchange.broadcast(call, flatten(call, tensor) if self._sends else flat[0], 0)

        request = Request(name, body, [tensor], [] if self._sends else [tensor], tensor.nbytes)
        return on_thread(request, self.comm, policy)

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Says whom a message was for when a connection fails or times out."""
        try:
            yield
        except ZipcclError:
            raise
        except RuntimeError as error:
            message = f"{name}: {error} Does the other end use the same dtype, size, tag and policy?"
            peer = self.comm.members[1 - self.comm.rank]
            raise ZipcclError(message, rank=self.comm.group_rank, peer=peer) from error


_directions: weakref.WeakKeyDictionary[Group, dict[tuple[int, int], Direction]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _direction(group: Group, sender: int, receiver: int) -> Direction:
    with _lock:
        held = _directions.setdefault(group, {})
        found = held.get((sender, receiver))
        if found is None:
            found = held[sender, receiver] = Direction(group, sender, receiver)
            weakref.finalize(group, found.comm.close)
        return found


def _begin(
    name: str, tensor: Tensor, peer: int | None, group: Group | None, tag: int, policy: Policy | None
) -> Work | Message | None:
    """A message to or from rank ``peer`` of the group, None: any. Between GPUs it is not issued yet.

    None where it goes the plain way.
    """
    resolved = resolve_group(group)
    if resolved is None:
        return None
    policy = policy or default_policy()
    if uses_streams(tensor) and rests(name, tensor, peer, resolved, policy):
        return None
    reason = decline_reason(tensor, tensor.nbytes, resolved, policy)
    if reason is None and uses_streams(tensor) and name == "recv" and not tensor.is_contiguous():
        reason = "not contiguous"  # NCCL has its own words for it
    if reason is None and peer is None:
        reason = "any source"
    if reason is None and tag != 0:
        reason = "tag"
    if reason is None and peer == resolved.rank():
        reason = "to itself"
    if reason is not None or peer is None:
        recorder(resolved).native(name, reason or "", tensor.nbytes)
        return None
    ends = (resolved.rank(), peer) if name == "send" else (peer, resolved.rank())
    if uses_streams(tensor):
        return messages(resolved, tensor.device).message(name, tensor, ends, resolved, policy)
    return _direction(resolved, *ends).message(name, tensor, policy)


def _start(
    name: str, tensor: Tensor, peer: int | None, group: Group | None, tag: int, policy: Policy | None
) -> Work | dist.Work | None:
    """Issues a message to or from rank ``peer`` of the group, None: any. None where it goes the plain way."""
    begun = _begin(name, tensor, peer, group, tag, policy)
    if not isinstance(begun, Message):
        return begun
    works = issue([begun], coalesced=False)
    return works[0] if works else None


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    policy: Policy | None = None,
) -> Work | dist.Work | None:
    """torch.distributed.isend; ``dst`` is a global rank, ``group_dst`` one of the group."""
    check_tensor("tensor", tensor)
    peer = rank_in_group("dst", dst, group_dst, resolve_group(group))
    return _start("send", tensor, peer, group, tag, policy) or dist.isend(tensor, dst, group, tag, group_dst)


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    policy: Policy | None = None,
) -> Work | dist.Work | None:
    """torch.distributed.irecv, of the next message that rank ``src`` sends this one."""
    check_tensor("tensor", tensor)
    peer = _source(src, group_src, group)
    return _start("recv", tensor, peer, group, tag, policy) or dist.irecv(tensor, src, group, tag, group_src)


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    policy: Policy | None = None,
) -> None:
    """torch.distributed.send."""
    check_tensor("tensor", tensor)
    peer = rank_in_group("dst", dst, group_dst, resolve_group(group))
    work = _start("send", tensor, peer, group, tag, policy)
    if work is None:
        dist.send(tensor, dst, group, tag, group_dst)
    else:
        work.wait()


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: Group | None = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    policy: Policy | None = None,
) -> int:
    """torch.distributed.recv; returns the sender's global rank, -1 outside the group."""
    check_tensor("tensor", tensor)
    peer = _source(src, group_src, group)
    work = _start("recv", tensor, peer, group, tag, policy)
    if work is None or peer is None:
        return dist.recv(tensor, src, group, tag, group_src)
    work.wait()
    return dist.get_global_rank(group or dist.distributed_c10d._get_default_group(), peer)


def _source(src: int | None, group_src: int | None, group: Group | None) -> int | None:
    """A rank of the group; None: any."""
    anyone = src is None and group_src is None
    return None if anyone else rank_in_group("src", src, group_src, resolve_group(group))


def batch_isend_irecv(
    p2p_op_list: Sequence[dist.P2POp], *, policy: Policy | None = None
) -> list[Work | dist.Work]:
    """torch.distributed.batch_isend_irecv; the works of what is compressed, then those of what goes plain.

    As in torch, the first collective call of an NCCL group may be a batch only if all its ranks have a
    message in it.
    """
    if not isinstance(p2p_op_list, (list, tuple)) or not p2p_op_list:
        raise ValueError(f"p2p_op_list: expected a list of P2POps, got {p2p_op_list!r}")
    for k, op in enumerate(p2p_op_list):
        if not isinstance(op, dist.P2POp):
            raise TypeError(f"p2p_op_list[{k}]: expected a P2POp, got {type(op).__name__}")
    begun = [
        _begin("send" if op.op is dist.isend else "recv", op.tensor, op.group_peer, op.group, op.tag, policy)
        for op in p2p_op_list
    ]
    works: list[Work | dist.Work] = [work for work in begun if isinstance(work, Work)]
    if any(isinstance(one, Message) for one in begun):
        batch = [
            one if isinstance(one, Message) else Plain(op.op is dist.isend, op.tensor, op.group_peer, op.tag)
            for op, one in zip(p2p_op_list, begun, strict=True)
            if not isinstance(one, Work)
        ]
        issued = issue(batch, coalesced=True)
        if issued is not None:
            return works + issued
    plain = [op for op, one in zip(p2p_op_list, begun, strict=True) if not isinstance(one, Work)]
    return works + (dist.batch_isend_irecv(plain) if plain else [])
