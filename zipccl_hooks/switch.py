"""The switch of calls on CUDA tensors: compressed where that is expected to be faster, else plain.

At the first call of a group its link and the codec are measured (link.py), the same numbers on all ranks.
For each kind of call (name, dtype, size) the cost model (choose.py) then compares the plain collective
with each mode, at first with the ratio that such data have at best, soon with its own: how much room
its calls needed. The choice is looked at again every REVIEW calls of the kind. Where the data compress too
little it becomes the plain collective, and every RETRY calls a few calls are tried compressed again.

All of this is equal on all ranks, as they make the same calls: the measurements and the rates are agreed,
and everything else counts calls. all_to_all, of whose sizes no rank knows all, is decided for all its
calls alike, as for NOMINAL_BYTES.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from . import cuda_exchange, link
from .channel import LAG, Channel, channel
from .choose import Pieces, Prediction, Ratio, default_ratios, explain_text, predict
from .codec import resolve_mode
from .eligible import resolve_group
from .exchange import Call
from .format import Mode
from .ops import format_dtype

logger = logging.getLogger(__name__)

REVIEW, RETRY = 64, 1024  # calls
NOMINAL_BYTES = 32 * 1024 * 1024
KIND = {
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
# What fp32 reaches that holds bf16 values, and sums of those: gradients of mixed precision. Unknown fp32 is
# tried as if it did.
FP32_RATIOS = {Mode.FAST: Ratio(2.87, 1.62), Mode.DENSE: Ratio(2.99, 1.65)}


@dataclass
class _Kind:
    """What is known of one kind of call."""

    mode: Mode | None = None
    calls: int = 0  # until it is looked at again
    ratios: dict[Mode, Ratio] = field(default_factory=dict)
    retrying: bool = False


class Switch:
    """Chooses for the calls of one channel. Making one is collective."""

    def __init__(self, channel: Channel, group: dist.ProcessGroup) -> None:
        device = channel.device
        self.link = link.measure_group(group, device)
        self.speeds = link.agree_codec(link.measure_codec(device), link.native_agree(group, device))
        self._kinds: dict[Any, _Kind] = {}
        logger.info("group %s: %s, %s", group.group_name, self.link, self.speeds)

    def predict(
        self, name: str, num_bytes: int | None, dtype: torch.dtype, mode: str, ratios: dict[Mode, Ratio]
    ) -> Prediction:
        known = format_dtype(dtype)
        modes = self.speeds if mode == "auto" else [resolve_mode(mode, dtype)]
        expected = FP32_RATIOS if dtype == torch.float32 else default_ratios(known.name)
        received = cuda_exchange.piece_bytes(self.link.world) * (self.link.world - 1)
        pieces = Pieces(received, received)
        return predict(
            KIND[name], NOMINAL_BYTES if num_bytes is None else num_bytes, known.itemsize, self.link,
            {m: self.speeds[m] for m in modes}, expected | ratios, pieces,
        )  # fmt: skip

    def choose(self, name: str, num_bytes: int | None, dtype: torch.dtype, mode: str) -> Mode | None:
        """The mode of a call; None for the plain collective."""
        key = (name, num_bytes, dtype, mode)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind()
        if kind.calls == 0:
            self._review(kind, key)
        kind.calls -= 1
        return kind.mode

    def _review(self, kind: _Kind, key: tuple[str, int | None, torch.dtype, str]) -> None:
        before = kind.mode
        plan = self.predict(*key, kind.ratios).plan
        kind.mode, kind.calls = (plan.mode if plan else None), REVIEW
        if plan is None and kind.ratios:
            # Its data do not compress enough, or no data would.
            hoped = self.predict(*key, {}).plan
            if hoped is not None and not kind.retrying:
                kind.calls, kind.retrying = RETRY, True
            elif hoped is not None:
                # So many that a flow has forgotten what it needed before.
                kind.mode, kind.calls, kind.retrying = hoped.mode, 2 * LAG + 1, False
        elif plan is not None and plan.mode not in kind.ratios:
            kind.calls = LAG + 1
        if kind.mode != before or not kind.ratios:
            logger.info("%s of %s bytes, %s: %s", *key[:3], kind.mode.name.lower() if kind.mode else "plain")

    def learn(self, call: Call, num_bytes: int | None, mode: str) -> None:
        """Takes over what a call's exchanges showed."""
        kind = self._kinds[call.name, num_bytes, call.dtype, mode]
        kind.ratios[call.mode] = Ratio(call.ratios[0], call.ratios[-1])

    def _ratios(self, *key: Any) -> dict[Mode, Ratio]:
        return self._kinds.get(key, _Kind()).ratios

    def expected(self, name: str, num_bytes: int | None, dtype: torch.dtype, mode: str) -> Prediction:
        """What a call would take by each path, with the ratios that calls of its kind showed."""
        return self.predict(name, num_bytes, dtype, mode, self._ratios(name, num_bytes, dtype, mode))

    def explain(self, name: str, numel: int, dtype: torch.dtype, mode: str) -> str:
        key = (name, numel * dtype.itemsize, dtype, mode)
        measured = "measured" if self._ratios(*key) else "assumed, none measured yet"
        return f"{explain_text(self.expected(*key))}\nRatios: {measured}."


_switches: weakref.WeakKeyDictionary[Channel, Switch] = weakref.WeakKeyDictionary()


def switch(group: dist.ProcessGroup, channel: Channel) -> Switch:
    """The switch of a channel; the first call for a group is collective."""
    found = _switches.get(channel)
    if found is None:
        found = _switches[channel] = Switch(channel, group)
    return found


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
    return switch(resolved, found).explain(op, numel, dtype, mode)
