"""``check``: whether codec and collectives deliver the very bits here; exit status 1 where they do not.

By itself it codes hostile bits on every device, compares the codec with its specification in NumPy, and
starts ranks for the collectives: over gloo, and over NCCL where there is a GPU for each. Under torchrun it
checks the collectives of those ranks. What each call must deliver is computed from all ranks' inputs, which
every rank can make.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from .. import collectives
from ..codec import decode, encode
from ..config import Policy, is_rank
from ..counters import reset_stats, stats
from ..cuda import launch
from ..errors import ZipcclError
from ..format import DTYPES, TILE, Mode
from ..ops import SUM_DTYPES
from ..ops import encode as encode_payload
from . import ranks

CODED = [getattr(torch, d.name) for d in DTYPES.values() if d.exponent_bits]
STORED = [getattr(torch, d.name) for d in DTYPES.values() if not d.exponent_bits]
MODES = ("fast", "dense", "raw")
NUMELS = (0, 1, TILE - 1, TILE, 9 * TILE + 77)  # the last: two groups of tiles and a tail
CALL_NUMELS = (1, TILE + 1, 99_991)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    if is_rank():
        with ranks.joined() as lead:
            good = _report(_collectives(), lead)
        return int(lead and not good)
    good = _report(_codec(), True)
    transports = ["gloo"] + (["nvlink"] if torch.cuda.device_count() >= args.ranks > 1 else [])
    for name in transports:
        good &= ranks.start(["-m", "zipccl_hooks", "check"], args.ranks, ranks.TRANSPORTS[name]) == 0
    print("all bits are right" if good else "SOMETHING IS WRONG")
    return int(not good)


Group = tuple[str, int, list[str]]  # what was checked, how often, what was wrong or is worth saying


def _report(groups: Iterator[Group], lead: bool) -> bool:
    """Prints a line a group as it comes; whether all were right."""
    good = True
    for what, count, wrong in groups:
        good &= not wrong
        if lead:
            verdict = f"WRONG: {len(wrong)}, first {wrong[0]}" if wrong else "ok"
            print(f"{what:<56}{count:>5} cases  {verdict}", flush=True)
    return good


def hostile(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """By turns of 300 elements: Gaussian, random bits (NaN payloads, infinities), zeros of either sign."""
    generator = torch.Generator().manual_seed(seed)
    octets = torch.randint(256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    if dtype == torch.bool:
        return octets % 2 == 1
    bits = octets.view(dtype)
    if dtype not in CODED:
        return bits
    turn = torch.arange(numel) // 300 % 3
    normal = torch.randn(numel, generator=generator)
    # As bytes, since torch.where does not take fp8.
    choices = (normal.to(dtype), bits, (normal.sign() * 0.0).to(dtype))
    octets_of = [choice.view(torch.uint8).view(numel, dtype.itemsize) for choice in choices]
    chosen = torch.stack(octets_of, 1)[torch.arange(numel), turn] if numel else octets
    return chosen.reshape(-1).view(dtype)


def equal_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


# The codec


def _codec() -> Iterator[Group]:
    devices = [torch.device("cpu")]
    if launch.missing() is None:
        devices += [torch.device("cuda", k) for k in range(torch.cuda.device_count())]
    for device in devices:
        for dtype in CODED:
            yield _round_trips(device, [dtype], MODES)
        yield _round_trips(device, STORED, ("auto",))
        yield _specification(device)


def _round_trips(device: torch.device, dtypes: list[torch.dtype], modes: tuple[str, ...]) -> Group:
    wrong, count = [], 0
    for dtype in dtypes:
        for numel in NUMELS:
            x = hostile(numel, dtype).to(device)
            for mode in modes:
                count += 1
                try:
                    good = equal_bits(decode(encode(x, mode=mode)), x)
                    why = "other bits"
                except (ZipcclError, RuntimeError) as error:
                    good, why = False, str(error)
                if not good:
                    wrong.append(f"{dtype}, {numel} elements, {mode}: {why}")
    names = _name(dtypes[0]) if len(dtypes) == 1 else f"{len(dtypes)} dtypes that are stored"
    return f"codec on {device}, {names}", count, wrong


def _specification(device: torch.device) -> Group:
    """Payloads must be those of reference.py, byte for byte."""
    from .. import reference

    wrong, count = [], 0
    for dtype in CODED:
        x = hostile(3 * TILE + 77, dtype)
        known = DTYPES[_name(dtype)]
        for mode in (Mode.FAST, Mode.DENSE):
            count += 1
            bits = x.view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[known.itemsize]).numpy()
            expected = reference.encode(bits, known, mode)
            got = encode_payload(x.to(device), mode)[: len(expected)].cpu().numpy().tobytes()
            if got != expected:
                wrong.append(f"{dtype}, {mode.name.lower()}")
    return f"codec on {device}, bytes of the specification", count, wrong


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The collectives


Check = Callable[
    [list[Tensor], Policy], tuple[Tensor, Tensor]
]  # (all ranks' inputs, policy) -> (got, expected)


def _all_gather_into_tensor(xs: list[Tensor], policy: Policy) -> tuple[Tensor, Tensor]:
    expected = torch.cat(xs)
    got = torch.empty_like(expected)
    collectives.all_gather_into_tensor(got, xs[dist.get_rank()], policy=policy)
    return got, expected


def _all_to_all_single(xs: list[Tensor], policy: Policy) -> tuple[Tensor, Tensor]:
    rank, size, mine = dist.get_rank(), len(xs), xs[dist.get_rank()].repeat(len(xs))
    got = torch.empty_like(mine)
    sends = [len(xs[0])] * size
    collectives.all_to_all_single(got, mine, sends, sends, policy=policy)
    return got, torch.cat([x.repeat(size).view(size, -1)[rank] for x in xs])


def _broadcast(xs: list[Tensor], policy: Policy) -> tuple[Tensor, Tensor]:
    got = xs[dist.get_rank()].clone()
    collectives.broadcast(got, len(xs) - 1, policy=policy)
    return got, xs[-1]


def _messages(xs: list[Tensor], policy: Policy) -> tuple[Tensor, Tensor]:
    """A ring: to the next rank, from the one before."""
    rank, size = dist.get_rank(), len(xs)
    got = torch.empty_like(xs[rank])
    ends = [
        dist.P2POp(dist.isend, xs[rank], (rank + 1) % size),
        dist.P2POp(dist.irecv, got, (rank - 1) % size),
    ]
    for work in collectives.batch_isend_irecv(ends, policy=policy):
        work.wait()
    return got, xs[rank - 1]


def _reduce_scatter_tensor(xs: list[Tensor], policy: Policy) -> tuple[Tensor, Tensor]:
    rank, size = dist.get_rank(), len(xs)
    got = torch.empty_like(xs[rank])
    collectives.reduce_scatter_tensor(got, xs[rank].repeat(size), policy=policy)
    return got, _sum(xs)


def _all_reduce(xs: list[Tensor], policy: Policy) -> tuple[Tensor, Tensor]:
    got = xs[dist.get_rank()].clone()
    collectives.all_reduce(got, policy=policy)
    return got, _sum(xs)


def _sum(xs: list[Tensor]) -> Tensor:
    return torch.stack([x.float() for x in xs]).sum(0).to(xs[0].dtype)


def _summands(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Of two ranks any floats; of more, integers whose sums are exact in every order."""
    generator = torch.Generator().manual_seed(seed)
    if dist.get_world_size() == 2:
        return torch.randn(numel, generator=generator).to(dtype)
    most = max(1, 255 // dist.get_world_size())
    return torch.randint(-most, most + 1, (numel,), generator=generator).to(dtype)


MOVES: dict[str, Check] = {
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_to_all_single": _all_to_all_single,
    "broadcast": _broadcast,
    "batch_isend_irecv": _messages,
}
SUMS: dict[str, Check] = {"reduce_scatter_tensor": _reduce_scatter_tensor, "all_reduce": _all_reduce}


def _collectives() -> Iterator[Group]:
    if dist.get_world_size() == 1:
        return
    for name, check in MOVES.items():
        yield _calls(name, check, CODED, hostile)
    for name, check in SUMS.items():
        yield _calls(name, check, list(SUM_DTYPES), _summands)


def _calls(name: str, check: Check, dtypes: list[torch.dtype], data: Callable[..., Tensor]) -> Group:
    wrong, count = [], 0
    reset_stats()
    for dtype in dtypes:
        for numel in CALL_NUMELS:
            xs = [data(numel, dtype, seed).to(ranks.DEVICE) for seed in range(dist.get_world_size())]
            for mode in ("fast", "dense"):
                got, expected = check(
                    xs, Policy(mode=mode, min_bytes=0, adaptive=False, enabled=True, reduce="fp32")
                )
                count += 1
                others = torch.tensor(int(not equal_bits(got, expected)), device=ranks.DEVICE)
                dist.all_reduce(others)
                if others.item():
                    wrong.append(f"{_name(dtype)}, {numel} elements, {mode}, on {int(others)} ranks")
    plain = sorted({reason for call in stats().calls.values() for reason in call.native_calls})
    how = f"plain ({', '.join(plain)})" if plain else "compressed"
    return f"{name} over {dist.get_backend()}, {dist.get_world_size()} ranks, {how}", count, wrong
