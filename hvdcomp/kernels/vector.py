"""Operations on a block of 64 floats as LLVM vectors: numba's own loops over such blocks run at half their speed.

Each takes a contiguous float32 array and the index at which the block begins; the caller sees to it that it fits. Sums
are taken pairwise, in float32. LLVM splits the vectors into what the processor has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

from llvmlite import ir
from numba import extending
from numba.core import cgutils, types

BLOCK = 64
WIDE = 4 * BLOCK
"""What is added up vector by vector before the sum of a vector is taken."""

_intrinsic: Any = extending.intrinsic
_FLOAT, _INT, _MASK = ir.FloatType(), ir.IntType(32), ir.IntType(BLOCK)
_FLOATS, _INTS = ir.VectorType(_FLOAT, BLOCK), ir.VectorType(_INT, BLOCK)
_DOUBLES, _WORDS = ir.VectorType(ir.DoubleType(), BLOCK), ir.VectorType(_MASK, BLOCK // 2)
_BYTES, _QUARTER_BYTES = ir.VectorType(ir.IntType(8), BLOCK), ir.VectorType(ir.IntType(8), BLOCK // 4)
_QUARTER_INTS = ir.VectorType(_INT, BLOCK // 4)
_GOLDEN = 0x9E3779B97F4A7C15
_LARGEST_FLOAT = 3.4028234663852886e38
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
def moments_block(typing: Any, v: Any, at: Any) -> tuple[Any, Callable[..., Any]]:
    """Of 256 elements (sum, sum of magnitudes, sum of squares, the largest magnitude's bits)."""
    results = types.Tuple((types.float32, types.float32, types.float32, types.int32))

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        sums, top = [_floats(0.0)] * 3, _ints(0)
        for block in _load_wide(context, b, signature, arguments):
            bits = _magnitude_bits(b, block)
            terms = (block, b.bitcast(bits, _FLOATS), b.fmul(block, block))
            sums = [b.fadd(total, term) for total, term in zip(sums, terms, strict=True)]
            top = b.select(b.icmp_signed(">", bits, top), bits, top)
        return context.make_tuple(b, signature.return_type, [*(_sum(b, total) for total in sums), _largest(b, top)])

    return results(v, types.intp), generate


@_intrinsic
def momentum_block(
    typing: Any, u: Any, v: Any, g: Any, at: Any, m: Any, rest: Any, ahead: Any, next_u: Any, next_v: Any, bound: Any
) -> tuple[Any, Callable[..., Any]]:
    """next_u = m * u + rest * g, next_v = v + next_u + ahead * g, both saturated at the largest finite number.

    Returns the mask of :func:`reach_block` of next_v.
    """

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        old_u, old_v, gradient = (_load(context, b, signature, arguments, i, 3) for i in range(3))
        weights = [_splat(b, arguments[i], _FLOATS) for i in (4, 5, 6)]
        new_u = _saturated(b, b.fadd(b.fmul(old_u, weights[0]), b.fmul(gradient, weights[1])))
        new_v = _saturated(b, b.fadd(b.fadd(old_v, new_u), b.fmul(gradient, weights[2])))
        _store(context, b, signature, arguments, 7, 3, new_u)
        _store(context, b, signature, arguments, 8, 3, new_v)
        return _as_mask(b, _reach(b, _magnitude_bits(b, new_v), arguments[9]))

    f = types.float32
    return types.uint64(u, v, g, types.intp, f, f, f, next_u, next_v, types.int32), generate


@_intrinsic
def blend_block(typing: Any, old: Any, g: Any, at: Any, m: Any, rest: Any, out: Any) -> tuple[Any, Callable[..., Any]]:
    """out = rest * g + m * old."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        before, gradient = (_load(context, b, signature, arguments, i, 2) for i in range(2))
        past, new = (_splat(b, arguments[i], _FLOATS) for i in (3, 4))
        total = b.fadd(b.fmul(gradient, new), b.fmul(before, past))
        _store(context, b, signature, arguments, 5, 2, total)
        return context.get_dummy_value()

    return types.void(old, g, types.intp, types.float32, types.float32, out), generate


@_intrinsic
def sign_block(typing: Any, v: Any, at: Any) -> tuple[Any, Callable[..., Any]]:
    """(mask of the elements >= 0, their sum, the sum of the others), sums in float64."""
    results = types.Tuple((types.uint64, types.float64, types.float64))

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        block = _load(context, b, signature, arguments, 0, 1)
        upper = b.fcmp_ordered(">=", block, _floats(0.0))
        wide = b.fpext(block, _DOUBLES)
        nothing = ir.Constant(_DOUBLES, [0.0] * BLOCK)
        sums = [_sum(b, b.select(upper, wide, nothing)), _sum(b, b.select(upper, nothing, wide))]
        return context.make_tuple(b, signature.return_type, [_as_mask(b, upper), *sums])

    return results(v, types.intp), generate


@_intrinsic
def square_block(typing: Any, v: Any, at: Any) -> tuple[Any, Callable[..., Any]]:
    """The sum of squares in float64."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        wide = b.fpext(_load(context, b, signature, arguments, 0, 1), _DOUBLES)
        return _sum(b, b.fmul(wide, wide))

    return types.float64(v, types.intp), generate


@_intrinsic
def extremes_block(typing: Any, v: Any, at: Any) -> tuple[Any, Callable[..., Any]]:
    """Of 256 elements (least, greatest); a NaN may be passed over."""
    results = types.Tuple((types.float32, types.float32))

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        blocks = list(_load_wide(context, b, signature, arguments))
        low = reduce(lambda x, y: _least(b, x, y), blocks)
        high = reduce(lambda x, y: _greatest(b, x, y), blocks)
        ends = [_reduced(b, "fmin", _FLOAT, low), _reduced(b, "fmax", _FLOAT, high)]
        return context.make_tuple(b, signature.return_type, ends)

    return results(v, types.intp), generate


@_intrinsic
def step_block(
    typing: Any, v: Any, at: Any, half: Any, low: Any, span: Any, steps: Any, out: Any, to: Any
) -> tuple[Any, Callable[..., Any]]:
    """The bytes out[to + i] = (v * half - low) / span * steps, rounded to the nearest, within 0 to ``steps``."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        half, low, span, steps = (_splat(b, arguments[i], _FLOATS) for i in (2, 3, 4, 5))
        shifted = b.fsub(b.fmul(_load(context, b, signature, arguments, 0, 1), half), low)
        scaled = b.fmul(b.fdiv(shifted, span), steps)
        kind = ir.FunctionType(_FLOATS, [_FLOATS])
        nearest = b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.rint.v{BLOCK}f32"), [scaled])
        code = b.fptosi(_least(b, _greatest(b, nearest, _floats(0.0)), steps), _INTS)
        _store(context, b, signature, arguments, 6, 7, b.trunc(code, _BYTES))
        return context.get_dummy_value()

    f, at_type = types.float32, types.intp
    return types.void(v, at_type, f, f, f, f, out, at_type), generate


@_intrinsic
def natural_block(
    typing: Any, v: Any, at: Any, first: Any, key: Any, lift: Any, bound: Any, least: Any, top: Any, out: Any, to: Any
) -> tuple[Any, Callable[..., Any]]:
    """The bytes out[to + i] = how many powers of two |v| * lift, rounded up or down at random, is below the largest.

    Numbers of which all bits are below ``bound`` become the least power, 1 / ``least``, with the probability
    |v| * lift * least, else zero, which is 127; bit 7 is the sign. ``top`` is the exponent bits of the largest power.
    """

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        block = _load(context, b, signature, arguments, 0, 1)
        bits = _magnitude_bits(b, b.fmul(block, _splat(b, arguments[4], _FLOATS)))
        draws = _draws(b, arguments[3], arguments[2])
        carried = b.lshr(b.add(bits, b.lshr(draws, _ints(9))), _ints(23))  # 23 bits of the mantissa against 23 drawn
        share = b.fmul(b.bitcast(bits, _FLOATS), _splat(b, arguments[6], _FLOATS))
        up = _rounded(b, _least(b, share, _floats(1.0)), draws, 30)
        top = _splat(b, arguments[7], _INTS)
        below = b.icmp_signed("<", bits, _splat(b, arguments[5], _INTS))
        down = b.select(below, b.sub(_ints(127), up), b.sub(top, carried))
        negative = b.shl(b.zext(b.fcmp_ordered("<", block, _floats(0.0)), _INTS), _ints(7))
        code = b.or_(b.select(b.icmp_signed("<", down, _ints(0)), _ints(0), down), negative)
        _store(context, b, signature, arguments, 8, 9, b.trunc(code, _BYTES))
        return context.get_dummy_value()

    f, n = types.float32, types.intp
    return types.void(v, n, n, types.uint64, f, types.int32, f, types.int32, out, n), generate


@_intrinsic
def level_block(
    typing: Any, v: Any, at: Any, first: Any, key: Any, norm: Any, levels: Any, out: Any, to: Any
) -> tuple[Any, Callable[..., Any]]:
    """The bytes out[to + i] = v / norm * levels (127 at most), rounded up or down at random."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        block = _load(context, b, signature, arguments, 0, 1)
        relative = b.fdiv(b.bitcast(_magnitude_bits(b, block), _FLOATS), _splat(b, arguments[4], _FLOATS))
        scaled = b.fmul(_least(b, relative, _floats(1.0)), _splat(b, arguments[5], _FLOATS))
        level = _rounded(b, scaled, _draws(b, arguments[3], arguments[2]), 24)
        signed = b.select(b.fcmp_ordered("<", block, _floats(0.0)), b.neg(level), level)
        _store(context, b, signature, arguments, 6, 7, b.trunc(signed, _BYTES))
        return context.get_dummy_value()

    f, n = types.float32, types.intp
    return types.void(v, n, n, types.uint64, f, f, out, n), generate


@_intrinsic
def ternary_block(
    typing: Any, v: Any, at: Any, first: Any, key: Any, limit: Any, scale: Any, out: Any, to: Any
) -> tuple[Any, Callable[..., Any]]:
    """16 bytes of codes of two bits from out[to] on: 1 or, of a negative, 2 with probability min(|v|, limit) / scale.

    The others are 0; ``limit`` is at most ``scale``.
    """

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        block = _load(context, b, signature, arguments, 0, 1)
        clipped = _least(b, b.bitcast(_magnitude_bits(b, block), _FLOATS), _splat(b, arguments[4], _FLOATS))
        share = _least(b, b.fdiv(clipped, _splat(b, arguments[5], _FLOATS)), _floats(1.0))
        kept = _rounded(b, share, _draws(b, arguments[3], arguments[2]), 30)
        negative = b.zext(b.fcmp_ordered("<", block, _floats(0.0)), _INTS)
        fours = b.bitcast(b.trunc(b.shl(kept, negative), _BYTES), _QUARTER_INTS)
        packed = fours
        for shift in (6, 12, 18):
            packed = b.or_(packed, b.lshr(fours, ir.Constant(_QUARTER_INTS, [shift] * (BLOCK // 4))))
        _store(context, b, signature, arguments, 6, 7, b.trunc(packed, _QUARTER_BYTES))
        return context.get_dummy_value()

    f, n = types.float32, types.intp
    return types.void(v, n, n, types.uint64, f, f, out, n), generate


@_intrinsic
def add_signs_block(typing: Any, out: Any, at: Any, mask: Any, low: Any, high: Any) -> tuple[Any, Callable[..., Any]]:
    """out += ``high`` where the mask has a 1, ``low`` elsewhere."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        chosen = b.bitcast(arguments[2], ir.VectorType(ir.IntType(1), BLOCK))
        low, high = (_splat(b, arguments[i], _FLOATS) for i in (3, 4))
        total = b.fadd(_load(context, b, signature, arguments, 0, 1), b.select(chosen, high, low))
        _store(context, b, signature, arguments, 0, 1, total)
        return context.get_dummy_value()

    return types.void(out, types.intp, types.uint64, types.float32, types.float32), generate


@_intrinsic
def add_ternary_block(
    typing: Any, out: Any, at: Any, data: Any, to: Any, zero: Any, one: Any, two: Any, three: Any
) -> tuple[Any, Callable[..., Any]]:
    """out += ``zero`` to ``three``, as the 64 codes of two bits from data[to] on say."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        packed = b.load(_pointer(context, b, signature.args[2], arguments[2], arguments[3], _QUARTER_BYTES), align=1)
        places = ir.Constant(_INTS, [i // 4 for i in range(BLOCK)])
        spread = b.zext(b.shuffle_vector(packed, ir.Constant(_QUARTER_BYTES, ir.Undefined), places), _INTS)
        code = b.lshr(spread, ir.Constant(_INTS, [2 * (i % 4) for i in range(BLOCK)]))
        zero, one, two, three = (_splat(b, arguments[i], _FLOATS) for i in (4, 5, 6, 7))
        low, high = (b.icmp_signed("!=", b.and_(code, _ints(bit)), _ints(0)) for bit in (1, 2))
        value = b.select(high, b.select(low, three, two), b.select(low, one, zero))
        total = b.fadd(_load(context, b, signature, arguments, 0, 1), value)
        _store(context, b, signature, arguments, 0, 1, total)
        return context.get_dummy_value()

    f, n = types.float32, types.intp
    return types.void(out, n, data, n, f, f, f, f), generate


@_intrinsic
def add_levels_block(
    typing: Any, out: Any, at: Any, levels: Any, to: Any, scale: Any
) -> tuple[Any, Callable[..., Any]]:
    """out[at + i] += levels[to + i] * scale, of int8 levels."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        codes = b.load(_pointer(context, b, signature.args[2], arguments[2], arguments[3], _BYTES), align=1)
        added = b.fmul(b.sitofp(b.sext(codes, _INTS), _FLOATS), _splat(b, arguments[4], _FLOATS))
        _store(context, b, signature, arguments, 0, 1, b.fadd(_load(context, b, signature, arguments, 0, 1), added))
        return context.get_dummy_value()

    return types.void(out, types.intp, levels, types.intp, types.float32), generate


@_intrinsic
def store_word(typing: Any, data: Any, at: Any, word: Any) -> tuple[Any, Callable[..., Any]]:
    """Eight bytes of a uint8 array, from any index, become a little-endian number."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        b.store(arguments[2], _pointer(context, b, signature.args[0], arguments[0], arguments[1], _MASK), align=1)
        return context.get_dummy_value()

    return types.void(data, types.intp, types.uint64), generate


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


def _load(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any, array: int, at: int) -> Any:
    """The block of the argument number ``array`` at the index in argument number ``at``."""
    return b.load(_pointer(context, b, signature.args[array], arguments[array], arguments[at]), align=4)


def _load_wide(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Iterator[Any]:
    """Four blocks in a row, of the first argument from the index in the second on."""
    for i in range(WIDE // BLOCK):
        place = b.add(arguments[1], ir.Constant(_MASK, i * BLOCK))
        yield b.load(_pointer(context, b, signature.args[0], arguments[0], place), align=4)


def _store(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any, array: int, at: int, block: Any) -> None:
    pointer = _pointer(context, b, signature.args[array], arguments[array], arguments[at], block.type)
    b.store(block, pointer, align=4 if block.type == _FLOATS else 1)


def _saturated(b: ir.IRBuilder, floats: Any) -> Any:
    """Within the finite numbers; NaN stays."""
    for comparison, limit in ((">", _LARGEST_FLOAT), ("<", -_LARGEST_FLOAT)):
        floats = b.select(b.fcmp_ordered(comparison, floats, _floats(limit)), _floats(limit), floats)
    return floats


def _floats(value: float) -> Any:
    return ir.Constant(_FLOATS, [value] * BLOCK)


def _ints(value: int) -> Any:
    return ir.Constant(_INTS, [value] * BLOCK)


def _least(b: ir.IRBuilder, floats: Any, limit: Any) -> Any:
    """``limit`` for what is larger, and for NaN."""
    return b.select(b.fcmp_ordered("<", floats, limit), floats, limit)


def _greatest(b: ir.IRBuilder, floats: Any, limit: Any) -> Any:
    """``limit`` for what is smaller, and for NaN."""
    return b.select(b.fcmp_ordered(">", floats, limit), floats, limit)


def _draws(b: ir.IRBuilder, key: Any, first: Any) -> Any:
    """64 times 32 random bits: the halves of numbers ``first`` to ``first`` + 31 of SplitMix64 with the seed ``key``.

    Steele, Lea and Flood 2014, Fast splittable pseudorandom number generators; number i needs none of those before it.
    """
    start = b.add(key, b.mul(first, ir.Constant(_MASK, _GOLDEN)))
    lanes = ir.Constant(_WORDS, [(i + 1) * _GOLDEN % 2**64 for i in range(BLOCK // 2)])
    undefined = ir.Constant(_WORDS, ir.Undefined)
    spread = b.insert_element(undefined, start, ir.Constant(_INT, 0))
    zeros = ir.Constant(ir.VectorType(_INT, BLOCK // 2), [0] * (BLOCK // 2))
    word = b.add(b.shuffle_vector(spread, undefined, zeros), lanes)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = b.mul(b.xor(word, b.lshr(word, _words(shift))), _words(factor))
    return b.bitcast(b.xor(word, b.lshr(word, _words(31))), _INTS)


def _words(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * (BLOCK // 2))


def _rounded(b: ir.IRBuilder, floats: Any, draws: Any, places: int) -> Any:
    """Floats below 2^(31 - ``places``) rounded up with the probability of their fraction, to so many binary places."""
    fixed = b.fptosi(b.fmul(floats, _floats(2.0**places)), _INTS)
    return b.lshr(b.add(fixed, b.lshr(draws, _ints(32 - places))), _ints(places))


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
    element = floats.type.element
    kind = ir.FunctionType(element, [element, floats.type])
    name = f"llvm.vector.reduce.fadd.v{BLOCK}f{32 if element == _FLOAT else 64}"
    add = cgutils.get_or_insert_function(b.module, kind, name)
    return b.call(add, [ir.Constant(element, -0.0), floats], fastmath=("reassoc",))


def _largest(b: ir.IRBuilder, integers: Any) -> Any:
    return _reduced(b, "smax", _INT, integers)


def _reduced(b: ir.IRBuilder, how: str, element: Any, block: Any) -> Any:
    name = f"llvm.vector.reduce.{how}.v{BLOCK}{'i' if element == _INT else 'f'}32"
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(element, [block.type]), name)
    return b.call(function, [block], fastmath=("nnan",) if element == _FLOAT else ())
