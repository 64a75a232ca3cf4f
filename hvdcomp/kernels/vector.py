"""Operations on a block of 64 floats as LLVM vectors: numba's own loops over such blocks run at half their speed.

Each takes a contiguous float32 array and the index at which the block begins; the caller sees to it that it fits. Sums
are taken pairwise, in float32. LLVM splits the vectors into what the processor has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending
from numba.core import cgutils, types

BLOCK = 64

_intrinsic: Any = extending.intrinsic
_FLOAT, _INT, _MASK = ir.FloatType(), ir.IntType(32), ir.IntType(BLOCK)
_FLOATS, _INTS = ir.VectorType(_FLOAT, BLOCK), ir.VectorType(_INT, BLOCK)
_INFINITY = ir.Constant(_INT, 0x7F800000)


@_intrinsic
def add_block(typing: Any, r: Any, g: Any, at: Any, factor: Any, bound: Any) -> tuple[Any, Callable[..., Any]]:
    """r += factor * g, unless a sum is not finite.

    Returns (mask of the sums whose magnitude's bits reach ``bound``, the largest such bits, sum of the sums, of their
    magnitudes, of their squares, of the squares of g); bit i of the mask is element ``at + i``.
    """
    results = types.Tuple((types.uint64, types.int32, types.float32, types.float32, types.float32, types.float32))

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        r_array, g_array, index, scale, limit = arguments
        r_pointer = _pointer(context, b, signature.args[0], r_array, index)
        gradient = b.load(_pointer(context, b, signature.args[1], g_array, index), align=4)
        total = b.fadd(b.load(r_pointer, align=4), b.fmul(gradient, _splat(b, scale, _FLOATS)))
        bits = _magnitude_bits(b, total)
        largest = _largest(b, bits)
        with b.if_then(b.icmp_signed("<", largest, _INFINITY), likely=True):
            b.store(total, r_pointer, align=4)
        magnitude = b.bitcast(bits, _FLOATS)
        sums = [_sum(b, v) for v in (total, magnitude, b.fmul(total, total), b.fmul(gradient, gradient))]
        return context.make_tuple(b, signature.return_type, [_as_mask(b, _reach(b, bits, limit)), largest, *sums])

    return results(r, g, types.intp, types.float32, types.int32), generate


@_intrinsic
def reach_block(typing: Any, v: Any, at: Any, bound: Any) -> tuple[Any, Callable[..., Any]]:
    """The mask of the elements whose magnitude's bits reach ``bound``; bit i is element ``at + i``."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        block = b.load(_pointer(context, b, signature.args[0], arguments[0], arguments[1]), align=4)
        return _as_mask(b, _reach(b, _magnitude_bits(b, block), arguments[2]))

    return types.uint64(v, types.intp, types.int32), generate


@_intrinsic
def sum_block(typing: Any, v: Any, at: Any, bound: Any) -> tuple[Any, Callable[..., Any]]:
    """Of the elements whose magnitude's bits reach ``bound``: their mask, and the sum of magnitudes and of squares."""
    results = types.Tuple((types.uint64, types.float32, types.float32))

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        block = b.load(_pointer(context, b, signature.args[0], arguments[0], arguments[1]), align=4)
        bits = _magnitude_bits(b, block)
        chosen = _reach(b, bits, arguments[2])
        magnitude = b.select(chosen, b.bitcast(bits, _FLOATS), ir.Constant(_FLOATS, [0.0] * BLOCK))
        sums = [_sum(b, magnitude), _sum(b, b.fmul(magnitude, magnitude))]
        return context.make_tuple(b, signature.return_type, [_as_mask(b, chosen), *sums])

    return results(v, types.intp, types.int32), generate


@_intrinsic
def load_word(typing: Any, data: Any, at: Any) -> tuple[Any, Callable[..., Any]]:
    """Eight bytes of a uint8 array, from any index, as a little-endian number."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        pointer = _pointer(context, b, signature.args[0], arguments[0], arguments[1], _MASK)
        return b.load(pointer, align=1)

    return types.uint64(data, types.intp), generate


def _pointer(context: Any, b: ir.IRBuilder, kind: Any, array: Any, index: Any, to: ir.Type = _FLOATS) -> Any:
    data = context.make_array(kind)(context, b, array).data
    return b.bitcast(b.gep(data, [index]), to.as_pointer())


def _splat(b: ir.IRBuilder, scalar: Any, kind: ir.VectorType) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(_INT, 0))
    return b.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * BLOCK))


def _magnitude_bits(b: ir.IRBuilder, floats: Any) -> Any:
    return b.and_(b.bitcast(floats, _INTS), ir.Constant(_INTS, [0x7FFFFFFF] * BLOCK))


def _reach(b: ir.IRBuilder, bits: Any, bound: Any) -> Any:
    return b.icmp_signed(">=", bits, _splat(b, bound, _INTS))


def _as_mask(b: ir.IRBuilder, chosen: Any) -> Any:
    return b.bitcast(chosen, _MASK)


def _sum(b: ir.IRBuilder, floats: Any) -> Any:
    kind = ir.FunctionType(_FLOAT, [_FLOAT, _FLOATS])
    add = cgutils.get_or_insert_function(b.module, kind, f"llvm.vector.reduce.fadd.v{BLOCK}f32")
    return b.call(add, [ir.Constant(_FLOAT, -0.0), floats], fastmath=("reassoc",))


def _largest(b: ir.IRBuilder, integers: Any) -> Any:
    kind = ir.FunctionType(_INT, [_INTS])
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.vector.reduce.smax.v{BLOCK}i32"), [integers])
