"""Policy(verify=True): what it finds, where, and that it changes nothing else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor

from zipccl_hooks import Policy, collectives, dispatch, exchange, ops, reset_stats, stats
from zipccl_hooks.cli.check import MOVES, SUMS, equal_bits, hostile
from zipccl_hooks.errors import CorruptPayload, PeerMismatch, VerificationFailed

PLAIN = Policy(min_bytes=0, mode="dense")
VERIFIED = Policy(min_bytes=0, mode="dense", verify=True)


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.stop()


class Damaged:
    """While it lasts, rank 1 decodes one bit wrong; it sees no checksum where ``blind``."""

    def __init__(self, blind: bool = False) -> None:
        self.blind = blind

    def __enter__(self) -> None:
        self.before = ops.decode_out, exchange.check_seal
        if dist.get_rank() == 1:
            ops.decode_out = partial(self.decode_out, ops.decode_out)
        if self.blind:
            exchange.check_seal = lambda header, x: None

    def __exit__(self, *_: object) -> None:
        ops.decode_out, exchange.check_seal = self.before

    @staticmethod
    def decode_out(decode: Any, payload: Tensor, *, out: Tensor) -> None:
        decode(payload, out=out)
        out.view(torch.int16)[3] ^= 1


def summands(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.arange(numel).to(dtype) * (seed + 1)


def exact(group: dist.ProcessGroup) -> tuple[dict[str, Any], dict[str, Any]]:
    counted = []
    for policy in (PLAIN, VERIFIED):
        reset_stats()
        for name, check in {**MOVES, **SUMS}.items():
            for numel in (1, 1025, 30_011):
                make = hostile if name in MOVES else summands
                xs = [make(numel, torch.bfloat16, seed) for seed in range(2)]
                got, expected = check(xs, policy)
                assert equal_bits(got, expected), (name, numel)
        counted.append({name: (c.compressed_calls, c.sent_bytes) for name, c in stats().calls.items()})
    return counted[0], counted[1]


def test_verified_calls_deliver_and_send_the_same(pair: Ranks) -> None:
    for plain, verified in pair.run(2, exact):
        assert plain == verified and len(plain) == 7


def caught(call: Any, policy: Policy) -> tuple[str, str, int | None, int | None] | None:
    """What a rank raised."""
    try:
        call(policy)
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "rank", None), getattr(error, "peer", None)
    return None


def gathers(policy: Policy) -> None:
    x = torch.randn(5003)
    collectives.all_gather_into_tensor(x.new_empty(2 * 5003), x, policy=policy)


def sums(policy: Policy) -> None:
    x = torch.randn(2 * 5003)
    collectives.reduce_scatter_tensor(x.new_empty(5003), x, policy=policy)


def broadcasts(policy: Policy) -> None:
    collectives.broadcast(torch.randn(5003), 0, policy=policy)


def damaged(group: dist.ProcessGroup, name: str) -> list[Any]:
    with Damaged():
        return [caught(globals()[name], policy) for policy in (PLAIN, VERIFIED)]


@pytest.mark.parametrize("name", ["gathers", "sums", "broadcasts"])
def test_a_wrong_bit_is_found_and_its_sender_named(pair: Ranks, name: str) -> None:
    zero, one = pair.run(2, damaged, name)
    assert zero == [None, None] and one[0] is None  # without verify nobody sees it
    kind, message, rank, peer = one[1]
    assert kind == CorruptPayload.__name__ and "checksum" in message and (rank, peer) == (1, 0)


def sampled(group: dist.ProcessGroup, name: str) -> list[Any]:
    dispatch.communicator(dist.group.WORLD).calls.clear()
    with Damaged(blind=True):
        return [caught(globals()[name], VERIFIED) for _ in range(dispatch.VERIFY_EVERY + 1)]


@pytest.mark.parametrize("name", ["gathers", "broadcasts"])
def test_every_64th_call_is_repeated_uncompressed(pair: Ranks, name: str) -> None:
    zero, one = pair.run(2, sampled, name)
    assert not any(zero)
    assert [k + 1 for k, found in enumerate(one) if found is not None] == [1, 65]
    kind, message, rank, peer = one[64]
    assert kind == VerificationFailed.__name__ and (rank, peer) == (1, 0)
    assert "call 65 of its kind has other bits than uncompressed" in message


def contradicting(group: dist.ProcessGroup) -> str | None:
    found = caught(gathers, VERIFIED if group.rank() else PLAIN)
    return found and found[0]


def test_ranks_of_which_one_verifies_raise(pair: Ranks) -> None:
    assert pair.run(2, contradicting) == [PeerMismatch.__name__] * 2


def test_cuda_calls_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zipccl_hooks"):
        dispatch._warn_of_verify.__wrapped__()
    assert "none on CUDA tensors" in caplog.text
