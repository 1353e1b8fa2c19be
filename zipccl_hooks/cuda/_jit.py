"""The only file that imports Numba for CUDA: compilation, PTX instructions, launches.

Kernels take addresses and numbers, never arrays: torch tensors hand over ``data_ptr()``, and a launch
packs a dozen scalars instead of building seven-field array structs. Memory is read and written by the
instructions below, which say how wide an access is and how it is cached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

# numba-cuda up to 0.30 uses this name at import; NumPy 2.5 removed it.
if not hasattr(np, "row_stack"):
    np.row_stack = np.vstack

from llvmlite import ir
from numba import cuda, types
from numba.cuda.extending import intrinsic

u32, u64 = types.uint32, types.uint64
_LLVM = {u32: ir.IntType(32), u64: ir.IntType(64)}
_REGISTER = {u32: "r", u64: "l"}


def ptx(text: str, arguments: tuple[Any, ...], *results: Any, memory: bool = False) -> Any:
    """A device function that is one PTX instruction.

    ``$0``.. in ``text`` are the results, then the arguments. Several results come as a tuple.
    ``memory`` keeps the compiler from moving, merging or dropping it.
    """
    constraints = [f"={_REGISTER[r]}" for r in results] + [_REGISTER[a] for a in arguments]
    if memory:
        constraints.append("~{memory}")
    returned = [_LLVM[r] for r in results]
    if len(returned) > 1:
        llvm_result: Any = ir.LiteralStructType(returned)
    else:
        llvm_result = returned[0] if returned else ir.VoidType()
    if len(results) > 1:
        numba_result: Any = (
            types.Tuple(results) if len(set(results)) > 1 else types.UniTuple(results[0], len(results))
        )
    else:
        numba_result = results[0] if results else types.void

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        function_type = ir.FunctionType(llvm_result, [_LLVM[a] for a in arguments])
        assembly = ir.InlineAsm(function_type, text, ",".join(constraints), side_effect=memory)
        result = builder.call(assembly, values)
        if not results:
            return context.get_dummy_value()
        if len(results) == 1:
            return result
        parts = [builder.extract_value(result, k) for k in range(len(results))]
        return context.make_tuple(builder, numba_result, parts)

    # Numba wants the number of parameters written out.
    names = ", ".join(f"a{k}" for k in range(len(arguments)))
    scope: dict[str, Any] = {"signature": numba_result(*arguments), "generate": generate}
    exec(f"def instruction(context, {names}): return signature, generate", scope)
    return intrinsic(scope["instruction"])


device = cuda.jit(device=True, inline="always")

# Arithmetic
prmt = ptx("prmt.b32 $0, $1, $2, $3;", (u32, u32, u32), u32)
dp4a = ptx("dp4a.u32.u32 $0, $1, $2, $3;", (u32, u32, u32), u32)
select_bits = ptx("lop3.b32 $0, $1, $2, $3, 0xCA;", (u32, u32, u32), u32)  # mask ? b : c
divide = ptx("div.u32 $0, $1, $2;", (u32, u32), u32)
popc = ptx("popc.b32 $0, $1;", (u32,), u32)
lowest = ptx("{ .reg .b32 t; brev.b32 t, $1; clz.b32 $0, t; }", (u32,), u32)  # index of the lowest set bit
reverse = ptx("brev.b32 $0, $1;", (u32,), u32)
leading_zeros = ptx("bfind.shiftamt.u32 $0, $1;", (u32,), u32)  # of a number that is not 0
shift_pair = ptx(
    "shf.r.wrap.b32 $0, $1, $2, $3;", (u32, u32, u32), u32
)  # 32 bits of (low, high), from bit $3 % 32


def _float_op(instruction: str, num_arguments: int) -> Any:
    """An fp32 instruction on registers that hold the bits."""
    names = [f"f{k}" for k in range(num_arguments + 1)]
    moves = "".join(f" mov.b32 f{k}, ${k};" for k in range(1, num_arguments + 1))
    text = f"{{ .reg .f32 {', '.join(names)};{moves} {instruction} {', '.join(names)}; mov.b32 $0, f0; }}"
    return ptx(text, (u32,) * num_arguments, u32)


# Floating point: fp32 as u32, pairs of 16-bit floats as they stand in memory.
add_f32, multiply_f32 = _float_op("add.rn.f32", 2), _float_op("mul.rn.f32", 2)
pack_bf16 = ptx(  # (low, high), rounded to nearest even
    "{ .reg .f32 a, b; mov.b32 a, $1; mov.b32 b, $2; cvt.rn.bf16x2.f32 $0, b, a; }", (u32, u32), u32
)
pack_f16 = ptx(
    "{ .reg .f32 a, b; mov.b32 a, $1; mov.b32 b, $2; cvt.rn.f16x2.f32 $0, b, a; }", (u32, u32), u32
)
unpack_f16 = ptx(
    "{ .reg .b16 a, b; .reg .f32 x, y; mov.b32 {a, b}, $2; "
    "cvt.f32.f16 x, a; cvt.f32.f16 y, b; mov.b32 $0, x; mov.b32 $1, y; }",
    (u32,),
    u32,
    u32,
)

# Warps
warp_sum = ptx("redux.sync.add.u32 $0, $1, 0xffffffff;", (u32,), u32, memory=True)
scan_1, scan_2, scan_4, scan_8, scan_16 = (  # one step of a prefix sum: adds the value of k lanes below
    ptx(
        "{ .reg .b32 t; .reg .pred p; mov.b32 $0, $1; "
        f"shfl.sync.up.b32 t|p, $1, {k}, 0, 0xffffffff; @p add.u32 $0, $0, t; }}",
        (u32,),
        u32,
        memory=True,
    )
    for k in (1, 2, 4, 8, 16)
)
shuffle = ptx("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", (u32, u32), u32, memory=True)
shuffle_pair = ptx("shfl.sync.bfly.b32 $0, $1, 1, 31, 0xffffffff;", (u32,), u32, memory=True)  # of lane ^ 1
ballot = ptx(
    "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
    (u32,),
    u32,
    memory=True,
)

# Global memory, by address. Tensors are read once, so they need no room in L1; "stream" likewise in L2.
load_2 = ptx("ld.global.nc.L1::no_allocate.v2.u32 {$0,$1}, [$2];", (u64,), u32, u32)
load_4_cached = ptx("ld.global.nc.v4.u32 {$0,$1,$2,$3}, [$4];", (u64,), u32, u32, u32, u32)
load_1 = ptx("ld.global.nc.u32 $0, [$1];", (u64,), u32)
load_byte = ptx("ld.global.nc.u8 $0, [$1];", (u64,), u32)
# Issued where they stand, and not through the read-only cache: also of tensors that the kernel writes.
load_4_ordered = ptx("ld.global.v4.u32 {$0,$1,$2,$3}, [$4];", (u64,), u32, u32, u32, u32, memory=True)
load_2_ordered = ptx("ld.global.L1::no_allocate.v2.u32 {$0,$1}, [$2];", (u64,), u32, u32, memory=True)
load_1_ordered = ptx("ld.global.u32 $0, [$1];", (u64,), u32, memory=True)
load_half_ordered = ptx("ld.global.u16 $0, [$1];", (u64,), u32, memory=True)
store_4 = ptx("st.global.v4.u32 [$0], {$1,$2,$3,$4};", (u64, u32, u32, u32, u32), memory=True)
store_2 = ptx("st.global.v2.u32 [$0], {$1,$2};", (u64, u32, u32), memory=True)
store_1 = ptx("st.global.u32 [$0], $1;", (u64, u32), memory=True)
store_byte = ptx("st.global.u8 [$0], $1;", (u64, u32), memory=True)
store_half = ptx("st.global.u16 [$0], $1;", (u64, u32), memory=True)
load_state = ptx("ld.relaxed.gpu.global.u64 $0, [$1];", (u64,), u64, memory=True)
store_state = ptx("st.relaxed.gpu.global.u64 [$0], $1;", (u64, u64), memory=True)
take = ptx("atom.relaxed.gpu.global.add.u32 $0, [$1], $2;", (u64, u32), u32, memory=True)
increment = ptx(
    "atom.relaxed.gpu.global.inc.u32 $0, [$1], $2;", (u64, u32), u32, memory=True
)  # wraps after $2

prefetch = ptx("prefetch.global.L2 [$0];", (u64,), memory=True)

# Host memory that the device sees, shared with a thread of the host.
load_system = ptx("ld.relaxed.sys.global.u64 $0, [$1];", (u64,), u64, memory=True)
load_system_1 = ptx("ld.relaxed.sys.global.u32 $0, [$1];", (u64,), u32, memory=True)
store_system = ptx("st.relaxed.sys.global.u64 [$0], $1;", (u64, u64), memory=True)
fence_system = ptx("fence.acq_rel.sys;", (), memory=True)
nanosleep = ptx("nanosleep.u32 $0;", (u32,), memory=True)

# Shared memory, by its own 32-bit addresses.
shared_load = ptx("ld.shared.u32 $0, [$1];", (u32,), u32, memory=True)
shared_load_2 = ptx("ld.shared.v2.u32 {$0,$1}, [$2];", (u32,), u32, u32, memory=True)
shared_load_byte = ptx("ld.shared.u8 $0, [$1];", (u32,), u32, memory=True)
shared_load_4 = ptx("ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", (u32,), u32, u32, u32, u32, memory=True)
shared_store_4 = ptx("st.shared.v4.u32 [$0], {$1,$2,$3,$4};", (u32, u32, u32, u32, u32), memory=True)
shared_store = ptx("st.shared.u32 [$0], $1;", (u32, u32), memory=True)
shared_load_half = ptx("ld.shared.u16 $0, [$1];", (u32,), u32, memory=True)
shared_store_half = ptx("st.shared.u16 [$0], $1;", (u32, u32), memory=True)
shared_store_byte = ptx("st.shared.u8 [$0], $1;", (u32, u32), memory=True)
shared_max = ptx("red.shared.max.u32 [$0], $1;", (u32, u32), memory=True)
shared_or = ptx("red.shared.or.b32 [$0], $1;", (u32, u32), memory=True)
# 16 bytes from global memory, without a register in between; groups of them are awaited in order.
copy_async = ptx("cp.async.cg.shared.global [$0], [$1], 16;", (u32, u64), memory=True)
end_group = ptx("cp.async.commit_group;", (), memory=True)
wait_all, wait_all_but_1, wait_all_but_2 = (
    ptx(f"cp.async.wait_group {k};", (), memory=True) for k in (0, 1, 2)
)
_to_shared = ptx("{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }", (u64,), u32)


@intrinsic
def _generic_address(context, array):
    def generate(context, builder, signature, values):
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return u64(array), generate


@cuda.jit(device=True, inline="always")
def shared_address(array):
    """Where a shared array starts, for the instructions above."""
    return _to_shared(_generic_address(array))


def compile_ptx(function: Callable[..., Any], num_arguments: int, capability: tuple[int, int]) -> str:
    """PTX of a kernel of 64-bit arguments, also on a machine without a GPU."""
    signature = types.void(*[u64] * num_arguments)
    text, _ = cuda.compile_ptx(function, signature, cc=capability)
    return text
