"""Write vector instructions for functions that numba compiles, keep the machine code on disk, and run it in threads.

Addresses are integers, so that compiled code reads and writes tensors that its caller keeps alive. Importing this needs
numba, and a torch that was imported before and shares its OpenMP threads.
"""

import ctypes
import inspect
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numba
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES: Final = 16
"""Numbers of a vector register, in float32."""

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
WORDS, NUMBERS = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)

REASSOCIATED: Final = {"reassoc", "contract", "nsz"}
"""What LLVM may do to loops: sum in vectors, and fuse multiplications and additions. It does the same for any row."""

LOG2_E, LN_2_HIGH, LN_2_LOW = 1.4426950408889634, 0.693359375, -2.12194440e-4
"""log₂ e, and ln 2 in two parts, the first of which has few bits."""

EXPONENTIAL: Final = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1, 1.0, 1.0
)  # fmt: skip
"""Coefficients of a polynomial close to eˣ between -ln 2 / 2 and ln 2 / 2, the highest power first."""


START: Final = ctypes.CDLL(None).GOMP_parallel
"""Start (a compiled region's address, the address of its numbers, threads, 0): threads are those that torch uses."""
START.argtypes, START.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None

threads_running = types.ExternalFunction("omp_get_num_threads", types.int32())
thread_number = types.ExternalFunction("omp_get_thread_num", types.int32())


def compiled(**options: Any) -> Callable[[Any], Any]:
    """Return a decorator that compiles a function as it was written: type checkers may have wrapped it."""
    # "numpy": divisions that Python would refuse give infinity, so that loops with divisions can be vectors.
    return lambda function: njit(inspect.unwrap(function), nogil=True, error_model="numpy", **options)


def emitted(function: Any) -> Any:
    """Make a function that writes instructions callable from compiled code."""
    return intrinsic(inspect.unwrap(function))


def stamp_of(*files: str | None) -> int:
    """Return a number that changes with the text of any of these files.

    numba's cache on disk notices changes of the file that a function is defined in, not of those it imports. A function
    whose closure has the stamp is compiled again when one of them changes: closures are part of the cache's key.
    """
    return zlib.crc32(b"".join(Path(file).read_bytes() for file in files if file is not None))


def region(body: Any) -> Any:
    """Compile the body of a parallel region, (address of its numbers) -> None, and keep the machine code on disk."""
    return cfunc(types.void(types.voidptr), cache=True)(inspect.unwrap(body))


def _pointer_to(kind: Any) -> Any:
    @emitted
    def pointer(typingctx, address):  # type: ignore[no-untyped-def]
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), codegen

    return pointer


floats, doubles, shorts, words, longs, flags = (
    _pointer_to(kind) for kind in (types.float32, types.float64, types.int16, types.int32, types.int64, types.uint8)
)


@emitted
def address_of(typingctx, pointer):  # type: ignore[no-untyped-def]
    """Return a pointer as an integer."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], ir.IntType(64))

    return types.int64(types.voidptr), codegen


@emitted
def nearest(typingctx, number):  # type: ignore[no-untyped-def]
    """Round a float32 to the nearest whole number, ties to even."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return Emit(builder).call("llvm.nearbyint.f32", F32, *arguments)

    return types.float32(types.float32), codegen


@emitted
def power_of_two(typingctx, exponent):  # type: ignore[no-untyped-def]
    """Return 2 to a whole number from -126 to 127, by writing the bits of a float32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.shl(builder.add(builder.fptosi(arguments[0], I32), I32(127)), I32(23))
        return builder.bitcast(bits, F32)

    return types.float32(types.float32), codegen


@emitted
def request(typingctx, address):  # type: ignore[no-untyped-def]
    """Have the line of an address read from memory into the second-level cache, without waiting for it."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        Emit(builder).request(*arguments)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@compiled()
def request_rows(address: Any, step: Any, count: Any, size: Any) -> None:
    """Have `count` rows of `size` bytes, `step` bytes apart, read ahead."""
    for row in range(count):
        for at in range(0, size, 64):
            request(address + row * step + at)


@compiled(inline="always")
def exponential(x: Any) -> Any:
    """Return eˣ to a relative 2⁻²² or so, clamped outside -87 to 87; loops over the polynomial are vectors."""
    x = min(max(x, numba.float32(-87.0)), numba.float32(87.0))
    whole = nearest(x * numba.float32(LOG2_E))
    rest = x - whole * numba.float32(LN_2_HIGH) - whole * numba.float32(LN_2_LOW)
    result = numba.float32(EXPONENTIAL[0])
    result = result * rest + numba.float32(EXPONENTIAL[1])
    result = result * rest + numba.float32(EXPONENTIAL[2])
    result = result * rest + numba.float32(EXPONENTIAL[3])
    result = result * rest + numba.float32(EXPONENTIAL[4])
    result = result * rest + numba.float32(EXPONENTIAL[5])
    result = result * rest + numba.float32(EXPONENTIAL[6])
    result = result * rest + numba.float32(EXPONENTIAL[7])
    return result * power_of_two(whole)


class Emit:
    """Write vector instructions at the end of a function that numba compiles."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def load(self, kind: Any, address: Any, offset: Any = 0, align: int = 4) -> Any:
        return self.builder.load(self.pointer(kind, address, offset), align=align)

    def store(self, value: Any, address: Any, offset: Any = 0, align: int = 4) -> None:
        self.builder.store(value, self.pointer(value.type, address, offset), align=align)

    def pointer(self, kind: Any, address: Any, offset: Any = 0) -> Any:
        offset = offset if isinstance(offset, ir.Value) else I64(offset)
        return self.builder.inttoptr(self.builder.add(address, offset), kind.as_pointer())

    def all_lanes(self, value: Any) -> Any:
        """Return a vector with this value in every lane."""
        kind = ir.VectorType(value.type, LANES)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        order = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
        return self.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), order)

    def constant(self, value: int) -> Any:
        return ir.Constant(WORDS, [value] * LANES)

    def number(self, value: float) -> Any:
        return ir.Constant(NUMBERS, [value] * LANES)

    def request(self, address: Any, offset: int = 0) -> None:
        """Have the line of an address read from memory into the second-level cache, without waiting for it."""
        place = self.pointer(ir.IntType(8), address, offset)
        self.call("llvm.prefetch.p0i8", ir.VoidType(), place, I32(0), I32(2), I32(1))

    def variable(self, value: Any) -> Any:
        """Return a place for a vector, which LLVM keeps in a register."""
        place = cgutils.alloca_once(self.builder, value.type)
        self.builder.store(value, place)
        return place

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    def fused(self, a: Any, b: Any, total: Any) -> Any:
        """Return a · b + total, rounded once."""
        return self.call("llvm.fma.v16f32", NUMBERS, a, b, total)

    def larger(self, a: Any, b: Any) -> Any:
        return self.call("llvm.maxnum.v16f32", NUMBERS, a, b)

    def nearest(self, values: Any) -> Any:
        """Round to the nearest whole numbers, ties to even."""
        return self.call("llvm.nearbyint.v16f32", NUMBERS, values)

    def exponential(self, x: Any) -> Any:
        """Return eˣ to a relative 2⁻²² or so, for x from -87 to 87 and clamped beyond."""
        builder = self.builder
        x = self.larger(x, self.number(-87.0))
        x = self.call("llvm.minnum.v16f32", NUMBERS, x, self.number(87.0))
        whole = self.nearest(builder.fmul(x, self.number(LOG2_E)))
        rest = self.fused(whole, self.number(-LN_2_HIGH), x)
        rest = self.fused(whole, self.number(-LN_2_LOW), rest)
        result = self.number(EXPONENTIAL[0])
        for coefficient in EXPONENTIAL[1:]:
            result = self.fused(result, rest, self.number(coefficient))
        exponent = builder.shl(builder.add(builder.fptosi(whole, WORDS), self.constant(127)), self.constant(23))
        return builder.fmul(result, builder.bitcast(exponent, NUMBERS))
