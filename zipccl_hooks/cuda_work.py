"""Handles of collectives on CUDA tensors, and the frame in which one is enqueued."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .channel import Channel


class CudaWork(dist.Work):
    """Handle of a compressed collective on CUDA tensors: ``wait`` makes the current stream wait.

    The host does not, so it raises what went wrong in an earlier call of the group; what goes wrong in this
    one is known later only, as with a plain collective.
    """

    def __init__(self, channel: Channel, outputs: list[Tensor]) -> None:
        super().__init__()
        self._channel, self._outputs = channel, outputs
        self._end = torch.cuda.Event()
        self._end.record(channel.decoding)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._channel.check()
        torch.cuda.current_stream(self._channel.device).wait_event(self._end)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._end.query()

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[self._channel.device])
        with torch.cuda.stream(self._channel.decoding):  # what uses its value waits for this stream
            future.set_result(self._outputs)
        return future


def enqueue(
    channel: Channel,
    body: Callable[[], None],
    put_back: Callable[[], None],
    tensors: list[Tensor],
    outputs: list[Tensor],
    async_op: bool,
) -> CudaWork | None:
    """Enqueues a call: ``body``, then ``put_back`` behind its last decoding.

    ``body`` begins on the caller's stream; what it puts there comes before the first encoding. It adds to
    ``tensors`` what it makes for streams to use. If the call is not async, the caller's stream waits for its
    end.
    """
    work, grad = None, torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    caller = channel.begin()
    try:
        body()
        channel.use(channel.decoding)
        put_back()
        if async_op:
            work = CudaWork(channel, outputs)
            for tensor in tensors:  # the caller may drop them before it waits; nothing comes after decoding
                tensor.record_stream(channel.decoding)
        else:
            channel.join(caller, channel.decoding)
    finally:
        channel.leave(caller)
        torch._C._set_grad_enabled(grad)
    return work
