"""The switch of calls on CUDA tensors: compressed where that is expected to be faster, else plain.

At the first call of a group its link and the codec are measured (link.py), the same numbers on all ranks.
For each kind of call (name, dtype, size) the cost model (choose.py) then compares the plain collective
with each mode, at first with the ratio that such data have at best, soon with its own: how much room
its calls needed. The choice is looked at again every REVIEW calls of the kind. Where the data compress too
little it becomes the plain collective, and every RETRY calls a few calls are tried compressed again.

What a compressed call saves on the device is worth nothing where the device waits for the host, whom it takes
longer. So where that is little, LOOK plain calls are watched first: if each is complete before the next is
issued, on any rank, the host is the bound, and the kind stays plain until the next look, RETRY calls later.
Two H200 over NVLink, steps of FSDP2 (benchmarks/bench_training.py): 1.00x and 1.02x with this, 0.92x before.

All of this is equal on all ranks, as they make the same calls: the measurements and the rates are agreed,
and everything else counts calls. Calls of whose sizes no rank knows all (all_to_all with split sizes or
lists) are decided alike, as for NOMINAL_BYTES.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from . import cuda_exchange, link, nodes
from .channel import LAG, Channel, channel, opened
from .choose import (
    CROSS,
    LOCAL,
    MARGIN,
    MIB,
    PEERS,
    Link,
    Pieces,
    Prediction,
    Ratio,
    default_ratios,
    explain_text,
    predict,
)
from .codec import resolve_mode
from .cuda import program
from .eligible import resolve_group
from .exchange import Call
from .format import Mode
from .ops import format_dtype

logger = logging.getLogger(__name__)

REVIEW, RETRY, LOOK = 64, 1024, 32  # calls
LITTLE = 4  # times what the smallest exchange takes: what must be saved for a kind not to be watched
SUDDEN = 0.9  # of the ratio that was known
NOMINAL_BYTES = 32 * 1024 * 1024
KIND = {
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_reduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "gather": "all_to_all",  # of which it is one rank's share
    "scatter": "all_to_all",
}
# What fp32 reaches that holds bf16 values, and sums of those: gradients of mixed precision. Unknown fp32 is
# tried as if it did.
FP32_RATIOS = {Mode.FAST: Ratio(2.87, 1.62), Mode.DENSE: Ratio(2.99, 1.65)}
# Where a plain collective moves more than this a second, codec and transfer share memory, which the model
# leaves out, and a link is hard to measure: two H200 over NVLink, predicted / measured ms: all_gather bf16 of
# 256 MiB 0.456 / 0.389, of 1 GiB 1.455 / 1.503; reduce_scatter of fp32 holding bf16, 1 GiB, 1.114 / 0.984;
# all_reduce of it 2.317 / 2.572. Through host memory what is chosen takes within 10% of what is predicted,
# from 64 MiB on.
FAST_LINK, FAST_MARGIN = 100e9, 0.25
PEERS_SIZES = (64 * 1024, MIB, 8 * MIB, 16 * MIB)  # bytes to all others, to measure copies among peers
FLOOR_BATCHES, FLOOR_CALLS, FLOOR_NUMEL = 8, 8, 8192  # to measure what a small exchange takes


@dataclass
class Kind:
    """What is known of one kind of call."""

    mode: Mode | None = None
    calls: int = 0  # until it is looked at again
    ratios: dict[Mode, Ratio] = field(default_factory=dict)
    retrying: bool = False
    watched: bool = False  # its plain calls are, now
    seen: int = 0  # how often another call came after a watched one
    idle: int = 0  # and that was complete by then
    reviews: int = 0  # for which the last look stands
    host_bound: bool = False  # what it found

    def take(self, mode: Mode | None) -> bool:
        """Counts a call, if it is settled that it goes in this mode (None: plain)."""
        if self.mode is not mode or self.calls == 0 or self.watched:
            return False
        self.calls -= 1
        return True

    def learn(self, call: Call) -> None:
        """Takes over what a call's exchanges showed; much less than before is looked at again at once."""
        found, before = Ratio(call.ratios[0], call.ratios[-1]), self.ratios.get(call.mode)
        if before is not None and min(found.parts / before.parts, found.sums / before.sums) < SUDDEN:
            self.calls = 0
        self.ratios[call.mode] = found


class Switch:
    """Chooses for the calls of one channel. Making one is collective."""

    def __init__(self, channel: Channel) -> None:
        device = channel.device
        agree = link.native_agree(channel.backend, device)
        self.backend = link.measure_backend(channel.backend, device)
        self.flat = _with_peers(self.backend, channel, agree)
        self.link = _with_nodes(self.flat, channel, agree)
        self.speeds = link.agree_codec(link.measure_codec(device), agree)
        (self.least_seconds,) = agree([_least_seconds(channel)])
        self._kinds: dict[Any, Kind] = {}
        self._comm, self._decoding = channel.comm, channel.decoding
        self._last: Callable[[], bool] | None = None  # whether the last watched call is complete
        logger.info(
            "ranks %s: %s, %s, %.0f us an exchange",
            list(channel.comm.members), self.link, self.speeds, 1e6 * self.least_seconds,
        )  # fmt: skip

    def predict(
        self, name: str, num_bytes: int | None, dtype: torch.dtype, mode: str, ratios: dict[Mode, Ratio]
    ) -> Prediction:
        known = format_dtype(dtype)
        modes = self.speeds if mode == "auto" else [resolve_mode(mode, dtype)]
        hoped = FP32_RATIOS if dtype == torch.float32 else default_ratios(known.name)
        # A mode whose ratio is not known yet: as far below what is hoped for as the other turned out.
        found, ratio = next(iter(ratios.items()), (Mode.DENSE, hoped[Mode.DENSE]))
        parts, sums = ratio.parts / hoped[found].parts, ratio.sums / hoped[found].sums
        expected = {m: Ratio(h.parts * parts, h.sums * sums) for m, h in hoped.items()} | ratios
        unknown = num_bytes is None and self.link.world > 2  # then no copies among peers
        if num_bytes is not None and name in ("gather", "scatter"):
            num_bytes *= self.link.world
        received = cuda_exchange.piece_bytes(self.link.world) * (self.link.world - 1)
        pieces = Pieces(
            received, received, least_seconds=self.least_seconds, least_piece_seconds=self.least_seconds / 2
        )
        fast = self.link.costs[KIND[name]].bandwidth > FAST_LINK
        return predict(
            KIND[name], NOMINAL_BYTES if num_bytes is None else num_bytes, known.itemsize,
            self.backend if unknown else self.link if dtype in nodes.DTYPES else self.flat,
            {m: self.speeds[m] for m in modes}, expected, pieces, FAST_MARGIN if fast else MARGIN,
        )  # fmt: skip

    def choose(self, name: str, num_bytes: int | None, dtype: torch.dtype, mode: str) -> Mode | None:
        """The mode of a call; None for the plain collective."""
        kind = self.kind(name, num_bytes, dtype, mode)
        if kind.calls == 0:
            self._review(kind, (name, num_bytes, dtype, mode))
        kind.calls -= 1
        return kind.mode

    def kind(self, name: str, num_bytes: int | None, dtype: torch.dtype, mode: str) -> Kind:
        """What is known of a kind of call."""
        key = (name, num_bytes, dtype, mode)
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = Kind()
        return found

    def _review(self, kind: Kind, key: tuple[str, int | None, torch.dtype, str]) -> None:
        before = kind.mode
        if kind.watched:
            self._end_look(kind, key)
        prediction = self.predict(*key, kind.ratios)
        plan = prediction.plan
        if plan is not None and prediction.native - plan.seconds < LITTLE * self.least_seconds:
            if kind.reviews == 0:
                kind.mode, kind.calls, kind.watched = None, LOOK, True
                return
            if kind.host_bound:
                kind.mode, kind.calls, kind.reviews = None, RETRY, 0
                return
            kind.reviews -= 1
        # Of a kind that stays plain there is nothing new to know; looking takes as long as 50 such calls.
        kind.mode, kind.calls = (plan.mode, REVIEW) if plan else (None, RETRY)
        if plan is None and kind.ratios:
            # Its data do not compress enough, or no data would.
            hoped = self.predict(*key, {}).plan
            if hoped is not None and not kind.retrying:
                kind.retrying = True
            elif hoped is not None:
                # So many that a flow has forgotten what it needed before.
                kind.mode, kind.calls, kind.retrying = hoped.mode, 2 * LAG + 1, False
        elif plan is not None and plan.mode not in kind.ratios:
            kind.calls = LAG + 1
        if kind.mode != before or not kind.ratios:
            logger.info("%s of %s bytes, %s: %s", *key[:3], kind.mode.name.lower() if kind.mode else "plain")

    def issuing(self, kind: Kind) -> None:
        """Before a plain call that is watched."""
        if self._last is not None:
            kind.seen += 1
            kind.idle += self._last() and self._decoding.query()  # compressed calls end on this stream
            self._last = None

    def issued(self, work: Any) -> None:
        """Behind it: ``work`` is that of an asynchronous call, else None."""
        if isinstance(work, dist.Work):
            self._last = work.is_completed
        else:
            event = torch.cuda.Event()
            event.record()  # the call was enqueued on this stream
            self._last = event.query

    def _end_look(self, kind: Kind, key: tuple[str, int | None, torch.dtype, str]) -> None:
        """Agrees on what ranks saw. Collective."""
        rows = self._comm.gather_in_turn([kind.idle, kind.seen])
        kind.host_bound = any(2 * idle > seen for idle, seen in rows)
        logger.info("%s of %s bytes, %s: watched %d calls, idle before %s", *key[:3], LOOK, rows)
        kind.watched, kind.seen, kind.idle, kind.reviews = False, 0, 0, RETRY // REVIEW
        self._last = None

    def _ratios(self, *key: Any) -> dict[Mode, Ratio]:
        return self._kinds.get(key, Kind()).ratios

    def expected(self, name: str, num_bytes: int | None, dtype: torch.dtype, mode: str) -> Prediction:
        """What a call would take by each path, with the ratios that calls of its kind showed."""
        return self.predict(name, num_bytes, dtype, mode, self._ratios(name, num_bytes, dtype, mode))

    def explain(self, name: str, numel: int, dtype: torch.dtype, mode: str) -> str:
        key = (name, numel * dtype.itemsize, dtype, mode)
        measured = "measured" if self._ratios(*key) else "assumed, none measured yet"
        text = f"{explain_text(self.expected(*key))}\nRatios: {measured}."
        kind = self._kinds.get(key, Kind())
        if kind.host_bound:
            return f"{text}\nPlain nevertheless: the device waits for the host."
        return text


def _with_peers(flat: Link, channel: Channel, agree: link.Agree) -> Link:
    """Adds what copies among peers take, where the channel has them. Collective.

    Where they are no faster than the backend's all-gather, it does without.
    """
    found = channel.reserve(max(PEERS_SIZES) // (flat.world - 1))
    if found is None:
        return flat
    source = torch.arange(found.region // 4, dtype=torch.float32, device=channel.device).view(torch.uint8)
    meet = link.meeting(channel.backend, channel.device)

    def run(kind: str, num_bytes: int) -> float:
        part = source[: num_bytes // (flat.world - 1)]
        others = [peer for peer in range(flat.world) if peer != channel.comm.rank]
        stream, steps = torch._C._cuda_getCurrentRawStream(channel.index), program.Program()
        found.exchange(steps, 0, [(peer, part) for peer in others], others, stream)
        found.release(steps, 0, stream)
        return link.timed(steps.run, channel.device, meet)

    cost = link.measure(run, agree, flat.world, 1, [PEERS], PEERS_SIZES).costs[PEERS]
    largest, others = max(PEERS_SIZES), flat.world - 1
    if cost.seconds(largest) > flat.costs["all_gather"].seconds(largest / others):
        channel.drop_peers()
        return flat
    return replace(flat, costs={**flat.costs, PEERS: cost})


def _with_nodes(flat: Link, channel: Channel, agree: link.Agree) -> Link:
    """Adds what reductions by nodes take, where the group has them. Collective."""
    found = nodes.tree(channel.comm, channel)
    if found is None or found.channel is None:
        return flat
    num_local, num_nodes = len(found.columns), len(found.columns[0])
    inside = link.backend_run(found.inside, found.local, num_local, channel.device)
    between = link.backend_run(found.channel.backend, found.node, num_nodes, channel.device)
    costs = {
        LOCAL: link.measure(inside, agree, num_local, 1, ["reduce_scatter"]).costs["reduce_scatter"],
        CROSS: link.measure(between, agree, num_nodes, num_nodes, ["all_to_all"]).costs["all_to_all"],
    }
    return Link(flat.world, num_nodes, {**flat.costs, **costs})


def _least_seconds(channel: Channel) -> float:
    """What an exchange of next to nothing takes, one behind the other: mostly the host's time. Collective."""
    comm = channel.comm
    x = torch.zeros(FLOOR_NUMEL, dtype=torch.bfloat16, device=channel.device)
    outs = list(x.new_empty(comm.size, FLOOR_NUMEL))
    sizes = [FLOOR_NUMEL] * comm.size

    def call() -> None:
        one = Call(comm, "all_gather", x.dtype, Mode.FAST, channel=channel)
        caller = channel.begin()
        try:
            cuda_exchange.agree(one, 0.0, sizes, sizes)
            cuda_exchange.all_gather(one, x, outs)
            channel.join(caller, channel.decoding)
        finally:
            channel.leave(caller)

    for _ in range(LAG + 2):
        call()
    batches = []
    for _ in range(FLOOR_BATCHES):
        # Not the whole device, where kernels may wait for ranks that wait for this one.
        channel.decoding.synchronize()
        start = time.perf_counter()
        for _ in range(FLOOR_CALLS):
            call()
        channel.decoding.synchronize()
        batches.append((time.perf_counter() - start) / FLOOR_CALLS)
    # Hosts of virtual machines are interrupted: means of 20 calls were 107, 129, 234 and 402 us in four runs.
    return min(batches)


_switches: weakref.WeakKeyDictionary[Channel, Switch] = weakref.WeakKeyDictionary()


def switch(channel: Channel) -> Switch:
    """The switch of a channel; the first call for one is collective."""
    found = _switches.get(channel)
    if found is None:
        found = _switches[channel] = Switch(channel)
    return found


def known_switch(group: dist.ProcessGroup, device: torch.device) -> Switch | None:
    """The switch of a group on a device, if it has been measured."""
    found = opened(group, device)
    return None if found is None else _switches.get(found)


def explain(
    op: str, numel: int, dtype: torch.dtype, group: dist.ProcessGroup | None = None, *, mode: str = "auto"
) -> str:
    """What would be done with a call on CUDA tensors and why, with predicted times, as a table.

    Args:
        op: name of a function of ``collectives``.
        numel: elements of the tensor that ``min_bytes`` is about: what a rank contributes to a gather,
            receives from a scatter, reduces or broadcasts, puts into an all_to_all.
        dtype: its dtype.
        group: a group with NCCL; its first use measures its link, so all its ranks must call this then.
        mode: as in Policy.

    Raises:
        ValueError: another op, a group that this rank is not in or that has no NCCL, a dtype not coded.
    """
    if op not in KIND:
        raise ValueError(f"op: expected one of {tuple(KIND)}, got {op!r}")
    if not format_dtype(dtype).exponent_bits:
        raise ValueError(f"dtype: expected one that is compressed, got {dtype}")
    resolved = resolve_group(group)
    if resolved is None or torch.device("cuda") not in resolved._device_types:
        raise ValueError(f"group: expected one of this rank's with NCCL, got {group}")
    found = channel(resolved, torch.device("cuda", torch.cuda.current_device()))
    return switch(found).explain(op, numel, dtype, mode)
