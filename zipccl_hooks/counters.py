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


# What ``Stats.flat`` tells of every kind of call.
FLAT = ("calls", "compressed_calls", "raw_bytes", "sent_bytes", "native_bytes", "overflows", "ratio")


@dataclass
class Stats:
    """Counters of one process group by kind of call; ``print`` it for a table."""

    group: str
    calls: dict[str, CallStats] = field(default_factory=dict)

    @property
    def raw_bytes(self) -> int:
        return self.total.raw_bytes

    @property
    def sent_bytes(self) -> int:
        return self.total.sent_bytes

    @property
    def total(self) -> CallStats:
        """All kinds of call together."""
        total = CallStats()
        for one in self.calls.values():
            total.add(one)
        return total

    def flat(self) -> dict[str, float]:
        """Numbers for TensorBoard, W&B or Lightning's ``log_dict``, this rank's.

        "zipccl/<counter>" is the total, "zipccl/<call>/<counter>" that of a kind of call, from its first call
        on; counters are those of FLAT.
        """
        rows = {"zipccl": self.total, **{f"zipccl/{name}": one for name, one in sorted(self.calls.items())}}
        return {f"{prefix}/{name}": getattr(one, name) for prefix, one in rows.items() for name in FLAT}

    def summary(self) -> str:
        """One line."""
        total = self.total
        sizes = f"{total.raw_bytes / 1e6:.1f} MB as {total.sent_bytes / 1e6:.1f} MB, ratio {total.ratio:.3f}"
        compressed = f"{total.compressed_calls} of {total.calls} calls compressed"
        return f"zipccl, group {self.group}: {compressed}, {sizes}"

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
        self._counted = 0  # calls since ``log_every``

    def _due(self) -> str | None:
        """Counts a call; the summary, if it is time for one. With the lock held."""
        if not _every:
            return None
        self._counted = (self._counted + 1) % _every
        return None if self._counted else self._stats.summary()

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
            due = self._due()
        if due:
            logger.info(due)
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
            for mode, payloads in modes.items():
                call.modes[mode] += payloads
            due = self._due()
        if due:
            logger.info(due)

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


_every = 0


def log_every(calls: int) -> None:
    """Logs ``Stats.summary`` of a group after each so many of its calls; 0, as at first: never.

    The level is INFO, the logger zipccl_hooks.counters: ``TORCH_LOGS=zipccl_hooks`` or the logging module
    shows it. Raises ValueError for anything but an integer of at least 0.
    """
    global _every
    if not isinstance(calls, int) or calls < 0:
        raise ValueError(f"calls: expected an integer of at least 0, got {calls!r}")
    _every = calls


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
