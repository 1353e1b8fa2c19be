"""What a process group needs to run compressed collectives: a communicator of its own, one thread, buffers.

A compressed collective is several messages with work in between, and ``async_op=True`` must not wait
for it. So each group gets, at its first compressed call, a second communicator over the same ranks and
a thread that carries out its compressed calls in the order in which they were issued. Native calls stay
on the group itself: the two never share a message stream, so their order does not matter.

    caller     all_reduce(a) --.   all_reduce(b) --.    wait(a)      wait(b)
    thread                      [ a: encode, send, decode ][ b: ...         ]
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .counters import Recorder, recorder
from .errors import FormatMismatch
from .format import VERSION


class Work(dist.Work):
    """Handle of a compressed collective, as torch.distributed returns for ``async_op=True``.

    ``wait`` raises what the collective raised, with its type. ``get_future`` gives a future of the list
    of output tensors, for code that chains.
    """

    def __init__(self, outputs: list[Tensor]) -> None:
        super().__init__()
        self._outputs = outputs
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        # A Python exception on a future reaches C++ waiters only through a callback that raises it.
        self._checked = self._future.then(lambda future: future.value())

    def _finish(self, error: BaseException | None) -> None:
        self._error = error
        self._done.set()
        if error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(error)  # type: ignore[arg-type]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the outputs are complete; raises TimeoutError after ``timeout``, if one is given."""
        seconds = timeout.total_seconds() if timeout else None
        if not self._done.wait(seconds):
            raise TimeoutError(f"compressed collective: not complete after {seconds} s")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._checked


class Works(dist.Work):
    """Handle of several calls as one; ``result`` are the outputs of all."""

    def __init__(self, outputs: list[Tensor]) -> None:
        super().__init__()
        self._outputs = outputs
        self._works: list[dist.Work] = []

    def add(self, work: dist.Work | None) -> None:
        if work is not None:
            self._works.append(work)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for all; ``timeout`` is that of each."""
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        outputs, futures = self._outputs, [work.get_future() for work in self._works]

        def gathered(collected: torch.futures.Future[list[Any]]) -> list[Tensor]:
            for future in collected.value():
                future.value()  # raises what went wrong
            return outputs

        return torch.futures.collect_all(futures).then(gathered)


def group_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend that carries out a group's collectives on a device."""
    native: Any = group._get_backend(device)
    return getattr(native, "wrapped_pg", native)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    return group_backend(group, group._device_types[0]).options._timeout


def bare_backend(kind: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A backend object by itself, below the dispatcher, so that nothing intercepts our messages.

    ``kind`` is "gloo" or "nccl". Not dist.new_group: that needs every rank of the world, or else
    (use_local_synchronization) names the group by the number of groups each member has, and members with
    different numbers never meet.
    """
    if kind == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


class Communicator:
    """Runs the compressed collectives of one process group, or of some of its ranks, on this rank.

    ``store`` is for these ranks alone, ``members`` are their ranks in the group: errors name those, all else
    counts from 0. Its first call but ``submit`` is ``connect``. It holds no reference to the group.
    """

    def __init__(
        self, store: dist.Store, rank: int, members: Sequence[int], timeout: timedelta, recorder: Recorder
    ) -> None:
        self.store, self.rank, self.members, self.timeout = store, rank, members, timeout
        self.size, self.group_rank = len(members), members[rank]
        self.recorder = recorder
        self.backend: Any = None
        self.calls: Counter[str] = Counter()  # that are verified, by name
        self.trees: dict[str, Any] = {}  # nodes.Tree by kind of device
        self.closers: list[Callable[[], None]] = []  # of what lives as long
        self._buffers: dict[str, Tensor] = {}
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Work] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run, args=(self._calls,), name="zipccl-collectives", daemon=True
        )
        self._thread.start()

    def connect(self) -> None:
        """Connects the ranks, unless they are already. Collective."""
        if self.backend is None:
            store = dist.PrefixStore("gloo", self.store)
            self.backend = bare_backend("gloo", store, self.rank, self.size, self.timeout)
            try:
                self._check_versions()
            except RuntimeError:
                self.backend = None
                raise

    def _check_versions(self) -> None:
        versions = self.gather_row([VERSION])
        for peer, (version,) in zip(self.members, versions, strict=True):
            if version != VERSION:
                message = f"wire format version: expected {VERSION}, got {version}"
                raise FormatMismatch(message, rank=self.group_rank, peer=peer)

    def gather_row(self, row: list[int]) -> list[list[int]]:
        """Every rank's ``row``, rows of equal length."""
        mine = torch.tensor(row, dtype=torch.int64)
        rows = torch.empty(self.size * len(row), dtype=torch.int64)
        self.backend._allgather_base(rows, mine).wait()
        return rows.view(self.size, len(row)).tolist()

    def buffer(self, name: str, num_bytes: int) -> Tensor:
        """uint8[num_bytes], kept from call to call: touching fresh pages costs as much as encoding."""
        held = self._buffers.get(name)
        if held is None or held.numel() < num_bytes:
            held = self._buffers[name] = torch.empty(num_bytes, dtype=torch.uint8)
        return held[:num_bytes]

    def submit(self, call: Callable[[], None], outputs: list[Tensor]) -> Work:
        """Runs ``call`` on the communicator's thread, behind those submitted before."""
        work = Work(outputs)
        self._calls.put((call, work))
        return work

    def in_turn(self, call: Callable[[], None]) -> None:
        """Runs ``call`` behind the calls submitted before, as on all ranks, and waits for it."""
        if threading.current_thread() is self._thread:
            call()
        else:
            self.submit(call, []).wait()

    def gather_in_turn(self, row: list[int]) -> list[list[int]]:
        """``gather_row`` behind the calls submitted before."""
        rows: list[list[int]] = []
        self.in_turn(lambda: rows.extend(self.gather_row(row)))
        return rows

    def close(self) -> None:
        """Ends the thread once its calls are done: when the group goes, and at the latest at exit.

        A thread that the interpreter stops inside gloo would abort the process.
        """
        self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for close in self.closers:
            close()


def _run(calls: queue.SimpleQueue[tuple[Callable[[], None], Work] | None]) -> None:
    """The thread. It knows the queue only, so that a communicator can be collected while it waits."""
    while (item := calls.get()) is not None:
        call, work = item
        error: BaseException | None = None
        try:
            with torch.inference_mode():  # in which all tensors may be written to, also inference tensors
                call()
        except BaseException as raised:
            error = raised  # for whoever waits
        work._finish(error)
        del item, call, work, error  # hold no tensor while waiting for the next call


def make_communicator(group: dist.ProcessGroup, name: str, members: Sequence[int]) -> Communicator:
    """A communicator of ``members``, ranks of a group and this one among them; not connected yet.

    Its client of the store is its own: one client serves one thread at a time, also while that waits for a
    key. Two communicators that two ranks connect in different order would wait for each other.
    """
    shared: Any = dist.distributed_c10d._get_process_group_store(group)
    store = dist.PrefixStore(name, shared.clone())
    return Communicator(store, members.index(group.rank()), members, group_timeout(group), recorder(group))


_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def communicator(group: dist.ProcessGroup) -> Communicator:
    """The communicator of a group; the first call for a group is collective."""
    with _lock:
        found = _communicators.get(group)
        if found is None:
            found = make_communicator(group, "zipccl", range(group.size()))
            try:
                found.connect()
            except BaseException:
                found.close()
                raise
            _communicators[group] = found
            weakref.finalize(group, found.close)
        return found
