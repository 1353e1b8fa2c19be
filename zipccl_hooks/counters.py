"""Counters: what was compressed, what went native, and why. One CallStats per group and kind of call."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)


@dataclass
class CallStats:
    """Counters of one kind of call in one group, on this rank. Sizes in bytes.

    ``raw_bytes`` is what this rank would have sent to other ranks had the compressed calls moved plain
    data in the same pattern, ``sent_bytes`` what it did send for them, sizes and descriptions included.
    ``native_bytes`` counts the tensors of calls that went to the plain collective, once each.
    """

    compressed_calls: int = 0
    raw_bytes: int = 0
    sent_bytes: int = 0
    modes: Counter[str] = field(default_factory=Counter)  # wire mode -> payloads encoded
    native_calls: Counter[str] = field(default_factory=Counter)  # reason -> calls
    native_bytes: int = 0
    overflows: int = 0  # exchanges between GPUs whose dynamic part found no room: the rest followed over gloo

    def add(self, other: CallStats) -> None:
        for f in fields(self):
            mine: Any = getattr(self, f.name)
            setattr(self, f.name, mine + getattr(other, f.name))

    @property
    def calls(self) -> int:
        return self.compressed_calls + self.native_calls.total()

    @property
    def ratio(self) -> float:
        """raw_bytes / sent_bytes of the compressed calls; 1.0 before the first."""
        return self.raw_bytes / self.sent_bytes if self.sent_bytes else 1.0


@dataclass
class Stats:
    """Counters of one process group by kind of call; ``print`` it for a table."""

    group: str
    calls: dict[str, CallStats] = field(default_factory=dict)

    @property
    def raw_bytes(self) -> int:
        return sum(c.raw_bytes for c in self.calls.values())

    @property
    def sent_bytes(self) -> int:
        return sum(c.sent_bytes for c in self.calls.values())

    def __str__(self) -> str:
        row = "{:<24} {:>7} {:>10} {:>12} {:>12} {:>6}  {}"
        lines = [
            f"zipccl statistics of group {self.group}",
            row.format(
                "call", "calls", "compressed", "raw MB", "sent MB", "ratio", "modes; native by reason"
            ),
        ]
        for name, c in sorted(self.calls.items()):
            notes = [", ".join(f"{mode} {n}" for mode, n in c.modes.items())] if c.modes else []
            notes += [f"overflows {c.overflows}"] if c.overflows else []
            notes += [f"{reason} {n}" for reason, n in c.native_calls.items()]
            numbers = (f"{c.raw_bytes / 1e6:.3f}", f"{c.sent_bytes / 1e6:.3f}", f"{c.ratio:.3f}")
            lines.append(row.format(name, c.calls, c.compressed_calls, *numbers, "; ".join(notes)))
        return "\n".join(lines)


class Recorder:
    """Collects Stats for one group. Calls finish on the communicator's thread, so it locks."""

    def __init__(self, group: str) -> None:
        self._lock = threading.Lock()
        self._stats = Stats(group)
        self._logged: set[tuple[str, str]] = set()

    def _call(self, name: str) -> CallStats:
        found = self._stats.calls.get(name)
        if found is None:
            found = self._stats.calls[name] = CallStats()
        return found

    def native(self, name: str, reason: str, num_bytes: int) -> None:
        """Counts a call that went to the plain collective; logs each reason once a kind of call."""
        with self._lock:
            call = self._call(name)
            call.native_calls[reason] += 1
            call.native_bytes += num_bytes
            first = (name, reason) not in self._logged
            if first:
                self._logged.add((name, reason))
        if first:
            logger.info(
                "%s in group %s goes native: %s (%d bytes)", name, self._stats.group, reason, num_bytes
            )

    def compressed(self, name: str, raw_bytes: int, sent_bytes: int, modes: Counter[str]) -> None:
        with self._lock:
            call = self._call(name)
            call.compressed_calls += 1
            call.raw_bytes += raw_bytes
            call.sent_bytes += sent_bytes
            call.modes.update(modes)

    def overflow(self, name: str) -> None:
        with self._lock:
            self._call(name).overflows += 1

    def add_to(self, total: Stats) -> None:
        """Adds these counters to ``total``."""
        with self._lock:
            for name, call in self._stats.calls.items():
                total.calls.setdefault(name, CallStats()).add(call)

    def reset(self) -> None:
        with self._lock:
            self._stats.calls.clear()


_recorders: weakref.WeakKeyDictionary[dist.ProcessGroup, Recorder] = weakref.WeakKeyDictionary()


def recorder(group: dist.ProcessGroup) -> Recorder:
    """The counters of a group, from its first call on."""
    found = _recorders.get(group)
    if found is None:
        found = _recorders.setdefault(group, Recorder(group.group_name))
    return found


def _chosen(group: dist.ProcessGroup | None) -> list[Recorder]:
    return list(_recorders.values()) if group is None else [recorder(group)]


def stats(group: dist.ProcessGroup | None = None) -> Stats:
    """A copy of the counters of ``group``, or the sum over all groups of this process; printable."""
    total = Stats("all" if group is None else group.group_name)
    for one in _chosen(group):
        one.add_to(total)
    return total


def reset_stats(group: dist.ProcessGroup | None = None) -> None:
    """Sets the counters of ``group``, or of all groups, back to zero."""
    for one in _chosen(group):
        one.reset()
