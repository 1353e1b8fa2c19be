"""The CUDA codec on a device: the bytes of the reference, on any stream, in graphs, from damaged input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from corpus import CODED, STORED, bits, corpus, known, name_of
from torch import Tensor

from zipccl_hooks import decode, encode, ops, reference, rests
from zipccl_hooks.cuda import ENTRY_BYTES, launch, program
from zipccl_hooks.errors import CorruptPayload
from zipccl_hooks.format import TILE, Header, Mode

pytestmark = pytest.mark.gpu
MODES = pytest.mark.parametrize("mode", [Mode.FAST, Mode.DENSE], ids=["fast", "dense"])
DTYPES = pytest.mark.parametrize("dtype", CODED, ids=name_of)


def poisoned(num_bytes: int) -> Tensor:
    return torch.full((num_bytes,), 0xA5, dtype=torch.uint8, device="cuda")


def gaussian(numel: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(numel, generator=generator, device="cuda") * 0.02).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@DTYPES
@MODES
@pytest.mark.parametrize("numel", [0, 5, TILE, 9 * TILE + 77, 24 * TILE + 5, 64 * TILE])
def test_bytes_of_the_reference(dtype: torch.dtype, mode: Mode, numel: int) -> None:
    for name, x in corpus(dtype, numel).items():
        expected = reference.encode(bits(x), known(dtype), mode)
        buffer = poisoned(ops.payload_capacity(numel, dtype, mode) + 64)
        ops.encode_out(x.cuda(), mode, payload=buffer)
        got = buffer.cpu().numpy().tobytes()
        assert got[: len(expected)] == expected, name
        assert set(got[len(expected) :]) <= {0xA5}, name
        payload = torch.frombuffer(bytearray(expected), dtype=torch.uint8).cuda()
        for wire_mode in (-1, int(mode)):
            out = poisoned(numel * dtype.itemsize).view(dtype)
            ops.decode_out(payload, wire_mode=wire_mode, out=out)
            assert np.array_equal(bits(out.cpu()), bits(x)), name


@pytest.mark.parametrize("dtype", [*CODED, *STORED], ids=name_of)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5, 1031)], ids=str)
def test_public_functions(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.randn(shape) * 3).to(dtype).cuda()
    payload = encode(x)
    assert payload.is_cuda and same(payload.cpu(), encode(x.cpu()))
    decoded = decode(payload)
    assert decoded.is_cuda and decoded.shape == x.shape and same(decoded, x)
    assert same(decode(payload.cpu()), x.cpu())


@pytest.mark.parametrize("dtype", CODED, ids=name_of)
def test_any_alignment(dtype: torch.dtype) -> None:
    x = gaussian(20_001, dtype)[1:]
    payload = encode(x)
    assert same(payload.cpu(), encode(x.cpu()))
    shifted = torch.cat([poisoned(3), payload])[3:]
    out = poisoned(20_001 * dtype.itemsize).view(dtype)
    ops.decode_out(shifted, out=out[1:])
    assert same(out[1:], x)


@MODES
def test_the_same_bytes_every_time(mode: Mode) -> None:
    """Blocks end in another order each time."""
    x = gaussian(5000 * TILE + 3)
    first = ops.encode(x, mode)
    buffer = torch.zeros_like(first)
    for _ in range(30):
        ops.encode_out(x, mode, payload=buffer)
        assert torch.equal(buffer, first)


def terms(numel: int, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Numbers of every kind but NaN and infinity, whose sums have bits of their own on every device."""
    kinds = [
        gaussian(numel, dtype, 1),
        gaussian(numel, torch.bfloat16, 2).to(dtype),
        sum(gaussian(numel, torch.bfloat16, seed).float() for seed in range(8)).to(dtype),
        gaussian(numel, dtype, 3) * (torch.arange(numel, device="cuda") % 3 == 0),
        torch.where(torch.arange(numel, device="cuda") % 97 == 0, gaussian(numel, dtype, 4), 2.0**-9),
        torch.full((numel,), -0.0, dtype=dtype, device="cuda"),
        torch.randint(0, 2**12, (numel,), device="cuda").mul(1e-40).to(dtype),
    ]
    return [kinds[k % len(kinds)].to(dtype) for k in range(count)]


@MODES
@pytest.mark.parametrize("dtype", ops.SUM_DTYPES, ids=name_of)
@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 17])
def test_decode_sum(dtype: torch.dtype, mode: Mode, count: int) -> None:
    for numel in (0, 77, 11 * TILE + 301):
        plain = terms(numel, dtype, count)
        own = count // 2
        sources = [t if k == own and count > 1 else ops.encode(t, mode) for k, t in enumerate(plain)]
        for scale in (1.0, 0.25, 1 / 3):
            for accumulate in (False, True):
                out, expected = plain[-1].clone(), plain[-1].cpu()
                ops.decode_sum_out([t.cpu() for t in plain], scale=scale, accumulate=accumulate, out=expected)
                for wire_mode in (-1, int(mode)):
                    out.copy_(plain[-1])
                    ops.decode_sum_out(
                        sources, scale=scale, accumulate=accumulate, wire_mode=wire_mode, out=out
                    )
                    assert same(out.cpu(), expected), (numel, scale, accumulate, wire_mode)


@pytest.mark.parametrize("dtype", ops.SUM_DTYPES, ids=name_of)
def test_decode_sum_in_place_and_anywhere(dtype: torch.dtype) -> None:
    numel = 5 * TILE + 9
    plain = terms(numel, dtype, 10)
    expected = torch.empty(numel, dtype=dtype)
    ops.decode_sum_out([t.cpu() for t in plain], out=expected)
    mixed = [Mode.FAST, Mode.RAW, Mode.DENSE]
    payloads = [ops.encode(t, mixed[k % 3]) for k, t in enumerate(plain)]
    for own in (0, 4, 9):
        out = plain[own].clone()
        sources = [*payloads[:own], out, *payloads[own + 1 :]]
        ops.decode_sum_out(sources, out=out)
        assert same(out.cpu(), expected)
    shifted = [torch.cat([poisoned(5), p])[5:] for p in payloads]
    shifted[3] = torch.cat([plain[3][:1], plain[3]])[1:]
    out = torch.cat([plain[0][:1], plain[0]])
    ops.decode_sum_out(shifted, out=out[1:])
    assert same(out[1:].cpu(), expected) and same(out[:1], plain[0][:1])
    ops.decode_sum_out([ops.encode(plain[0], Mode.RAW), plain[1]], wire_mode=Mode.RAW, out=out[1:])
    ops.decode_sum_out([plain[0].cpu(), plain[1].cpu()], out=expected)
    assert same(out[1:].cpu(), expected)


def test_decode_sum_names_the_corrupt_source() -> None:
    plain = terms(40 * TILE, torch.bfloat16, 11)
    sources = [ops.encode(t, Mode.FAST) for t in plain]
    sources[9] = sources[9].clone()
    sources[9][128 + 3] ^= 0x01  # meta of the first tile: flag RAW, for which its bytes do not suffice
    sources[9][16:20] = 0
    out = torch.empty_like(plain[0])
    with pytest.raises(CorruptPayload) as raised:
        ops.decode_sum_out(sources, out=out)
    assert raised.value.peer == 9
    with pytest.raises(CorruptPayload) as raised:
        ops.decode_sum_out([*sources[:2], sources[2][:500]], wire_mode=Mode.FAST, out=out)
    assert raised.value.peer == 2


def start(kernel: launch.Launch) -> None:
    steps = program.Program()
    steps.launch(kernel, torch.cuda.current_stream().cuda_stream)
    steps.run()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
def test_what_found_no_room_follows(dtype: torch.dtype) -> None:
    """stamp and rest beside an exchange that carried half of the dynamic part; this test is the peer."""
    x = torch.randint(256, (64 * TILE * dtype.itemsize,), dtype=torch.uint8, device="cuda").view(dtype)
    payload = ops.encode(x, Mode.FAST)
    header = Header.read(payload)
    lay, size = header.layout, header.dynamic_bytes
    carried, stage = size // 8 * 4, size // 32 * 4
    exchanged = lay.static_bytes + carried
    spill = poisoned(lay.max_dynamic_bytes)
    table = torch.zeros(ENTRY_BYTES // 8, dtype=torch.int64).pin_memory()
    words = torch.zeros(8, dtype=torch.int64).pin_memory()  # control (4), rate (1), wants (2)
    staging = torch.zeros(2, stage, dtype=torch.uint8).pin_memory()
    control = words.numpy()
    table[:4] = torch.tensor([payload.data_ptr(), lay.static_bytes, exchanged, lay.num_tiles])
    start(launch.stamping(0, table.data_ptr(), 1))
    received = payload[:exchanged].clone()
    table[4:] = torch.tensor(
        [received.data_ptr(), lay.static_bytes, exchanged, lay.num_tiles, spill.data_ptr(), len(spill)]
    )
    at = words.data_ptr()
    start(launch.resting(0, table.data_ptr(), 1, at, at + 32, at + 40, staging.data_ptr(), stage, 7, 1))
    rounds = -(-(size - carried) // stage)
    for turn in range(1, rounds + 1):
        while control[rests.REQUEST] != 7 << 16 | turn:
            pass
        staging[1] = staging[0]
        control[rests.REPLY] = 7 << 16 | turn
    torch.cuda.synchronize()
    assert control[rests.DONE] == 7 and words[4] == -(-16 * size // lay.num_tiles)
    assert words[5:7].tolist() == [size - carried] * 2
    assert torch.equal(spill[:size], payload[lay.static_bytes :])
    out = torch.empty_like(x)
    flag, moved = launch.corrupt_flag(0).data_ptr(), spill.data_ptr()
    start(launch.decoding(lay, 0, received.data_ptr(), exchanged, out.data_ptr(), flag, moved))
    assert same(out, x)
    own = gaussian(x.numel(), dtype)
    expected = torch.empty_like(own)
    ops.decode_sum_out([own, payload], wire_mode=1, out=expected)
    terms = [(own.data_ptr(), 0), (received.data_ptr(), exchanged)]
    for kernel in launch.summing(lay, 0, terms, [0, moved], 1.0, 0, out.data_ptr(), 0, flag, 0):
        start(kernel)
    assert same(out, expected) and not launch.corrupt_flag(0).item()


@MODES
def test_streams(mode: Mode) -> None:
    """Work is ordered with torch's current stream, and streams do not share scratch."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    inputs, buffers, outs = [], [], []
    for k, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            x = gaussian((500 + 100 * k) * TILE + k, seed=k)
            buffer = torch.zeros(
                ops.payload_capacity(x.numel(), x.dtype, mode), dtype=torch.uint8, device="cuda"
            )
            out = torch.zeros_like(x)
            for _ in range(3):
                ops.encode_out(x, mode, payload=buffer)
                ops.decode_out(buffer, wire_mode=mode, out=out)
            inputs.append(x), buffers.append(buffer), outs.append(out)
    torch.cuda.synchronize()
    for x, buffer, out in zip(inputs, buffers, outs, strict=True):
        assert same(out, x)
        assert torch.equal(buffer, ops.encode(x, mode))


@MODES
def test_graph_capture_and_replay(mode: Mode) -> None:
    x = gaussian(300 * TILE + 9)
    buffer = torch.zeros(ops.payload_capacity(x.numel(), x.dtype, mode), dtype=torch.uint8, device="cuda")
    out = torch.zeros_like(x)
    ops.decode_out(ops.encode(x, mode), wire_mode=mode, out=out)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.encode_out(x, mode, payload=buffer)
        ops.decode_out(buffer, wire_mode=mode, out=out)
    for seed in range(1, 5):
        x.copy_(gaussian(x.numel(), seed=seed))
        buffer.zero_(), out.zero_()
        graph.replay()
        assert same(out, x)
        assert torch.equal(buffer, ops.encode(x, mode))  # an eager call between replays


def test_more_than_two_to_the_31_bytes() -> None:
    x = gaussian(1_200_000_007)
    out = torch.zeros_like(x)
    buffer = torch.empty(
        ops.payload_capacity(x.numel(), x.dtype, Mode.FAST), dtype=torch.uint8, device="cuda"
    )
    ops.encode_out(x, Mode.FAST, payload=buffer)
    ops.decode_out(buffer, wire_mode=Mode.FAST, out=out)
    assert torch.equal(out.view(torch.int16), x.view(torch.int16))


@DTYPES
@MODES
def test_damaged_payloads_end(dtype: torch.dtype, mode: Mode) -> None:
    """An error or other values, within the buffers (compute-sanitizer watches the same test)."""
    x = gaussian(17 * TILE + 5, dtype)
    payload = ops.encode(x, mode)
    payload = payload[
        : reference.Header.unpack(payload[:128].cpu().numpy().tobytes(), len(payload)).payload_bytes
    ]
    generator = torch.Generator().manual_seed(1)
    out = torch.empty_like(x)
    for position in torch.randint(len(payload), (300,), generator=generator).tolist():
        damaged = payload.clone()
        damaged[position] ^= 1 << position % 8
        try:
            ops.decode_out(damaged, out=out)
        except CorruptPayload:
            continue
    with pytest.raises(CorruptPayload):
        ops.decode_out(payload[:-200], out=out)
    ops.decode_out(payload, out=out)
    assert same(out, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
def test_opcheck(dtype: torch.dtype) -> None:
    x = gaussian(9001, dtype)
    payload = ops.encode(x, 1)
    zipccl = torch.ops.zipccl
    torch.library.opcheck(zipccl.encode.default, (x, 1))
    torch.library.opcheck(zipccl.encode.out, (x, 1), {"payload": torch.zeros_like(payload)})
    torch.library.opcheck(zipccl.decode.default, (payload, 9001, dtype))
    torch.library.opcheck(zipccl.decode.out, (payload,), {"wire_mode": 1, "out": torch.empty_like(x)})
    torch.library.opcheck(zipccl.decode_sum.out, ([payload, x], 0.5), {"out": torch.empty_like(x)})
    torch.library.opcheck(zipccl.checksum.default, (x,))
