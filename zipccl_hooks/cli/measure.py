"""How ``bench`` measures: bits first, then plain and compressed by turns, in times of the slowest rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import switch
from ..channel import LAG, channel
from ..config import Policy
from ..counters import reset_stats, stats
from .cases import SUMS, Case
from .ranks import DEVICE

BATCH_SECONDS = 0.02
WARM_UP = 3 * LAG + 2  # calls, until messages have been timed and the room for payloads is learnt


@dataclass
class Measured:
    """A row of the table: sizes in MiB of the whole tensor, times in seconds, bus bandwidths in GB/s."""

    call: str
    data: str
    mib: float
    plain_seconds: float
    plain_busbw: float
    zipped_seconds: float
    zipped_busbw: float
    model_seconds: float | None  # what the switch expects of its choice, where there is one
    path: str  # "native", or the mode of most payloads
    ratio: float
    # Elements whose bits differ, on all ranks together; None of sums of more than two ranks, whose additions
    # have another order than the plain collective's.
    wrong: int | None

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.zipped_seconds

    @property
    def wrong_text(self) -> str:
        return "-" if self.wrong is None else str(self.wrong)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "speedup": self.speedup}


def slowest(value: float) -> float:
    """The largest of the ranks' values."""
    number = torch.tensor(value, dtype=torch.float64, device=DEVICE)
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return number.item()


def seconds(call: Callable[[], object], calls: int) -> float:
    """Time of one call in a batch of ``calls``, of the slowest rank."""
    dist.barrier()
    if DEVICE == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return slowest((time.perf_counter() - start) / calls)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return slowest(begin.elapsed_time(end) / 1e3 / calls)


def wrong_elements(plain: Tensor, zipped: Tensor) -> int:
    """Whose bits differ, on all ranks together."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[plain.element_size()]
    wrong = (plain.view(bits) != zipped.view(bits)).sum()
    dist.all_reduce(wrong)
    return int(wrong)


def _times(case: Case, repetitions: int) -> tuple[float, float, int]:
    """(plain seconds, compressed seconds, wrong elements)."""
    case.plain()
    case.zipped()
    wrong = wrong_elements(case.plain_out, case.zipped_out)
    calls = 1
    if DEVICE == "cuda":
        lasting = seconds(case.plain, 3)
        # On fast links, where that takes no time, the switch also watches plain calls.
        for _ in range(WARM_UP + switch.LOOK * (lasting < BATCH_SECONDS)):
            case.zipped()
        calls = max(1, min(50, int(BATCH_SECONDS / lasting)))
    reset_stats()
    pairs = [(seconds(case.plain, calls), seconds(case.zipped, calls)) for _ in range(repetitions)]
    plain, zipped = (statistics.median(column) for column in zip(*pairs, strict=True))
    return plain, zipped, wrong


def _expected(name: str, x: Tensor, policy: Policy, native: bool) -> float | None:
    """Seconds that the switch expects, where there is one."""
    if DEVICE == "cpu" or not policy.adaptive or name == "send":  # messages have no link that was measured
        return None
    group = dist.distributed_c10d._get_default_group()
    found = switch.switch(channel(group, x.device))
    shared = "gather" in name or "scatter" in name
    if "all_to_all" in name:
        return None
    num_bytes = x.nbytes // (dist.get_world_size() if shared else 1)
    prediction = found.expected(name, num_bytes, x.dtype, policy.mode)
    plan = None if native else prediction.best
    return plan.seconds if plan else prediction.native


def measure(
    make: Callable[[Tensor, Policy], Case],
    label: str,
    x: Tensor,
    mib: float,
    policy: Policy,
    repetitions: int,
) -> Measured:
    """Times a case on ``x``, this rank's data, which ``label`` describes. Collective."""
    case = make(x, policy)
    reset_stats()
    plain, zipped, wrong = _times(case, repetitions)
    name, counted = max(stats().calls.items())  # of two, send rather than recv
    native = counted.native_calls.total() > counted.compressed_calls
    path = "native" if native else max(counted.modes, key=counted.modes.__getitem__, default="-")
    comparable = make.__name__ not in SUMS or dist.get_world_size() <= 2
    bus = case.bus_factor * x.nbytes / 1e9
    return Measured(
        make.__name__, label, mib, plain, bus / plain, zipped, bus / zipped,
        _expected(name, x, policy, native), path, counted.ratio, wrong if comparable else None,
    )  # fmt: skip
