"""The switch: native or compressed, in which mode and how many pieces, from a cost model that can be printed.

Everything here is a pure function of numbers that all ranks of a group must hold alike (link.py agrees on
measured ones), so that all ranks come to the same choice.

**Sizes.** ``num_bytes`` is the tensor that a call is about: what a rank contributes to a gather, receives
from a scatter, reduces, broadcasts, or puts into an all_to_all. With W ranks and p = W - 1, a compressed
call is, in bytes of the tensor on one rank::

    kind            encodes    payloads travel by an                      decodes
    all_gather      b          all_gather of b                            p b
    reduce_scatter  p b        all_to_all of W b; W = 2: all_gather of b  W b, added up
    all_reduce      reduce_scatter of b / W, then all_gather of that sum
    all_to_all      p b / W    all_to_all of b; W = 2: all_gather of b/2  p b / W
    broadcast       b, root    broadcast of b                             b, others

Where the link has a cost of PAIRWISE (gloo) or PEERS (peers.py), payloads go from rank to rank instead,
those of a broadcast over PEERS only. Where it has LOCAL and CROSS, reductions add up inside the nodes first,
natively, and exchange compressed among equal local ranks.

**Time.** A native call takes latency + b / bandwidth. A compressed one goes in n equal pieces::

    codec    encode 0 | encode 1   | encode 2, decode 0 | decode 1   | decode 2
    link              | exchange 0 | exchange 1         | exchange 2 |

Both codec steps share a device, so in the middle a piece takes the longer of its exchange and the two
together. Not in the model: what codec and native collective take from each other on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from functools import reduce

from .format import Mode

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
# Further costs that a link may have.
PAIRWISE = "pairwise"  # sends and receives; of the bytes that a rank sends to all others together
PEERS = "copies among peers"  # into each other's memory; of the same bytes
LOCAL = "local reduce_scatter"  # inside each node; of the bytes that a rank receives
CROSS = "cross all_to_all"  # among equal local ranks of all nodes; of the bytes that a rank puts in

MIB = 2**20
# A compressed plan must be this much faster than the plain collective. What is promised is 0.97 of plain at
# the worst, and link and codec are known to a few percent.
MARGIN = 0.03


@dataclass(frozen=True)
class Cost:
    """Of what takes ``latency + num_bytes / bandwidth``; in seconds and bytes per second."""

    latency: float
    bandwidth: float

    def seconds(self, num_bytes: float, calls: int = 1) -> float:
        return calls * self.latency + num_bytes / self.bandwidth


@dataclass(frozen=True)
class Link:
    """What native collectives of a group of ``world`` ranks on ``nodes`` hosts cost, by kind."""

    world: int
    nodes: int
    costs: Mapping[str, Cost]


@dataclass(frozen=True)
class CodecSpeed:
    """What one wire mode costs a device: latency per call, bandwidth in bytes of bf16 tensors."""

    encode: Cost
    decode: Cost
    decode_sum: Cost  # of the tensors of all sources
    batched: bool = False  # one call codes the payloads of all peers


@dataclass(frozen=True)
class Ratio:
    """Tensor bytes over wire bytes, spare space included, above 0: of what ranks contribute, and of sums."""

    parts: float
    sums: float


@dataclass(frozen=True)
class Pieces:
    """How compressed calls may be cut, and what else they cost; seconds and bytes.

    A piece's bytes are those of the tensor that a rank receives from all others in it, as buffers grow
    with these; only calls of less than ``min_bytes`` have smaller ones.
    """

    min_bytes: int = 4 * MIB
    max_bytes: int = 64 * MIB
    seconds: float = 20e-6  # per piece: stream events and one more native call; an estimate
    call_seconds: float = 40e-6  # per exchange: gathered headers, completion; an estimate
    copy_bandwidth: float = math.inf  # payload bytes/s that the processor which codes copies itself
    least_seconds: float = 0.0  # an exchange of one piece, however small: the host's time, on GPUs
    least_piece_seconds: float = 0.0  # each further piece


# exchange.PIECE_BYTES, and what transfer and codec leave unexplained of 24 calls between two processes over
# 1 Gbit/s (veth, a core each): ranks wait for each other piece by piece. TCP on one core copies at 2 GB/s.
GLOO_PIECES = Pieces(2 * MIB, 2 * MIB, 1.5e-3, 2e-3, 2e9)

# theory.expected_ratio of N(0, 0.02^2), of N(0, 1) for the two fp8. fp32 that holds bf16 values has 2.9.
DEFAULT_RATIOS = {
    "bfloat16": {Mode.FAST: 1.439, Mode.DENSE: 1.497},
    "float16": {Mode.FAST: 1.133, Mode.DENSE: 1.170},
    "float32": {Mode.FAST: 1.180, Mode.DENSE: 1.199},
    "float8_e4m3fn": {Mode.FAST: 1.115, Mode.DENSE: 1.208},
    "float8_e5m2": {Mode.FAST: 1.305, Mode.DENSE: 1.417},
}


def default_ratios(dtype: str) -> dict[Mode, Ratio]:
    """Ratios of a Gaussian tensor, by mode, before any was measured; none for a dtype that is not coded."""
    return {mode: Ratio(ratio, ratio) for mode, ratio in DEFAULT_RATIOS.get(dtype, {}).items()}


@dataclass(frozen=True)
class Plan:
    """One way to carry out a call compressed: seconds in all, and of its parts, which overlap."""

    mode: Mode
    pieces: tuple[int, ...]  # of each exchange: all_reduce has two
    seconds: float
    local: float  # native reduction inside the nodes
    encode: float
    exchange: float
    decode: float
    overhead: float
    raw_bytes: float  # what the calls that carry payloads would be given if these were plain
    wire_bytes: float  # what they are given

    def then(self, other: Plan) -> Plan:
        """Both exchanges, one after the other."""
        return Plan(self.mode, *(a + b for a, b in zip(astuple(self)[1:], astuple(other)[1:], strict=True)))


@dataclass(frozen=True)
class Prediction:
    """What a call would take natively and by each plan, in seconds, and the choice."""

    kind: str
    num_bytes: int
    link: Link
    native: float
    plans: tuple[Plan, ...]
    margin: float

    @property
    def best(self) -> Plan | None:
        return min(self.plans, key=lambda plan: plan.seconds, default=None)

    @property
    def gain(self) -> float:
        """How many times as fast as native the best plan is; 1.0 without one."""
        return self.native / self.best.seconds if self.best else 1.0

    @property
    def plan(self) -> Plan | None:
        """The plan to carry out; None: the plain collective."""
        return self.best if self.gain > 1 + self.margin else None

    @property
    def path(self) -> str:
        """What to do: "native", "fast" or "dense"."""
        return self.plan.mode.name.lower() if self.plan else "native"


@dataclass(frozen=True)
class _Exchange:
    """One compressed exchange, in bytes of the tensor on one rank."""

    cost: Cost  # of the call that carries payloads
    carried: float  # what it is given
    received: float  # from all others
    encoded: float
    decoded: float
    encodes: int = 1  # payloads
    decodes: int = 1
    adds: bool = False  # one call decodes all and adds up
    sums: bool = False  # what travels are sums
    local: float = 0.0  # seconds before it, inside the nodes
    two_devices: bool = False  # one rank encodes, others decode


def _carrier(link: Link, key: str, carried: float, sent: float, *others: str) -> tuple[Cost, float]:
    """What carries payloads, one of ``others`` where the link has it, else ``key``; the bytes it is given."""
    for other in others:
        if other in link.costs:
            return link.costs[other], sent
    return link.costs[key], carried


def _gather(link: Link, b: float, sums: bool = False) -> _Exchange:
    p = link.world - 1
    cost, carried = _carrier(link, "all_gather", b, p * b, PEERS, PAIRWISE)
    return _Exchange(cost, carried, p * b, b, p * b, decodes=p, sums=sums)


def _all_to_all(link: Link, part: float) -> _Exchange:
    p = link.world - 1
    key, carried = ("all_gather", part) if p == 1 else ("all_to_all", link.world * part)
    cost, carried = _carrier(link, key, carried, p * part, PEERS, PAIRWISE)
    return _Exchange(cost, carried, p * part, p * part, p * part, p, p)


def _broadcast(link: Link, b: float) -> _Exchange:
    cost, carried = _carrier(link, "broadcast", b, (link.world - 1) * b, PEERS)
    return _Exchange(cost, carried, b, b, b, two_devices=True)


def _reduce_scatter(link: Link, b: float) -> _Exchange:
    n = link.nodes
    if n > 1 and LOCAL in link.costs and CROSS in link.costs:
        local, moved = link.costs[LOCAL].seconds(n * b), (n - 1) * b
        return _Exchange(link.costs[CROSS], n * b, moved, moved, n * b, n - 1, 1, True, True, local)
    return replace(_all_to_all(link, b), decoded=link.world * b, decodes=1, adds=True)


def _exchanges(kind: str, b: float, link: Link) -> list[_Exchange]:
    shard = b / link.world
    return {
        "all_gather": lambda: [_gather(link, b)],
        "reduce_scatter": lambda: [_reduce_scatter(link, b)],
        "all_reduce": lambda: [_reduce_scatter(link, shard), _gather(link, shard, sums=True)],
        "all_to_all": lambda: [_all_to_all(link, shard)],
        "broadcast": lambda: [_broadcast(link, b)],
    }[kind]()


def _counts(e: _Exchange, pieces: Pieces) -> list[int]:
    """Numbers of pieces to try: a few, as the time hardly changes near its least."""
    counts = [max(1, math.ceil(e.received / pieces.max_bytes))]
    while e.received / (2 * counts[-1]) >= pieces.min_bytes:
        counts.append(2 * counts[-1])
    return counts


def _in_pieces(
    e: _Exchange, count: int, mode: Mode, speed: CodecSpeed, ratio: float, slow: float, pieces: Pieces
) -> Plan:
    """One exchange in ``count`` pieces; ``slow`` is what the codec's bandwidth is divided by."""
    encodes, decodes = (1, 1) if speed.batched else (e.encodes, e.decodes)
    decoder, wire = speed.decode_sum if e.adds else speed.decode, e.carried / ratio
    local = e.local / count
    encode = speed.encode.seconds(e.encoded * slow / count, encodes)
    exchange = e.cost.seconds(wire / count)
    decode = decoder.seconds(e.decoded * slow / count, decodes)
    busy = (max(encode, decode) if e.two_devices else encode + decode) + wire / count / pieces.copy_bandwidth
    seconds = local + encode + exchange + decode
    if count > 1:
        seconds += max(exchange, encode, local) - exchange
        seconds += (count - 2) * max(exchange, busy, local) + max(exchange, decode)
    overhead = pieces.call_seconds + count * pieces.seconds
    seconds = max(seconds + overhead, pieces.least_seconds + (count - 1) * pieces.least_piece_seconds)
    return Plan(
        mode, (count,), seconds, e.local, count * encode, count * exchange, count * decode,
        overhead, e.carried, wire,
    )  # fmt: skip


def predict(
    kind: str,
    num_bytes: int,
    itemsize: int,
    link: Link,
    speeds: Mapping[Mode, CodecSpeed],
    ratios: Mapping[Mode, Ratio],
    pieces: Pieces = Pieces(),
    margin: float = MARGIN,
) -> Prediction:
    """What a call would take natively and in each mode that has both a speed and a ratio.

    ``kind`` is one of KINDS, ``num_bytes`` as above, ``itemsize`` the bytes of an element. It takes some
    50 us: callers keep the answer. Raises ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {KINDS}, got {kind!r}")
    if link.world == 1:
        return Prediction(kind, num_bytes, link, 0.0, (), margin)
    # The codec's time goes with elements below bf16 (H200, dense encode: e5m2 681 GB/s, bf16 1246) and with
    # bytes from there on (fp32 of bf16 values 1795).
    slow = max(1.0, 2 / itemsize)

    def fastest(e: _Exchange, mode: Mode) -> Plan:
        ratio = ratios[mode].sums if e.sums else ratios[mode].parts
        tried = [_in_pieces(e, n, mode, speeds[mode], ratio, slow, pieces) for n in _counts(e, pieces)]
        return min(tried, key=lambda plan: plan.seconds)

    exchanges = _exchanges(kind, num_bytes, link)
    modes = [mode for mode in Mode if mode in speeds and mode in ratios]
    plans = tuple(reduce(Plan.then, [fastest(e, mode) for e in exchanges]) for mode in modes)
    return Prediction(kind, num_bytes, link, link.costs[kind].seconds(num_bytes), plans, margin)


def _bytes(n: float) -> str:
    return f"{n / MIB:.1f} MiB" if n >= MIB else f"{n / 1024:.1f} KiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _reason(p: Prediction) -> str:
    best = p.best
    if best is None:
        return "native: one rank, or no compressed mode for this dtype and policy."
    if p.plan:
        moved = f"{_bytes(best.wire_bytes)} travel in place of {_bytes(best.raw_bytes)}"
        return f"{p.path}: {moved}, which saves {_ms(p.native - best.seconds)} ms of {_ms(p.native)}."
    verdict = f"native: {best.mode.name.lower()} would be {p.gain:.2f}x as fast"
    if p.gain > 1:
        return f"{verdict}, and more than {1 + p.margin:.2f}x is asked for."
    rest = best.local + best.encode + best.decode + best.overhead
    return f"{verdict}: its exchange takes {_ms(best.exchange)} ms, and all else {_ms(rest)} ms."


def explain_text(prediction: Prediction) -> str:
    """What would be done and why, with a table. Parts overlap, so they may add up to more than the total."""
    p = prediction
    row = "  {:<7}{:>10}{:>9}{:>9}{:>10}{:>9}{:>10}{:>8}{:>8}{:>8}".format
    lines = [
        f"{p.kind} of {_bytes(p.num_bytes)}, {p.link.world} ranks on {p.link.nodes} node(s)",
        row("ms", "total", "local", "encode", "exchange", "decode", "overhead", "pieces", "ratio", "speed"),
        row("native", _ms(p.native), *[""] * 7, "1.00x"),
    ]
    for plan in p.plans:
        times = (plan.seconds, plan.local, plan.encode, plan.exchange, plan.decode, plan.overhead)
        pieces, ratio = "+".join(map(str, plan.pieces)), plan.raw_bytes / max(plan.wire_bytes, 1)
        end = (pieces, f"{ratio:.3f}", f"{p.native / plan.seconds:.2f}x")
        lines.append(row(plan.mode.name.lower(), *map(_ms, times), *end))
    return "\n".join([*lines, _reason(p)])
