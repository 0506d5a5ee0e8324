"""Element types, devices and reductions.

``DType`` and ``ReduceOp`` have stable one-byte codes. The codes are part of the signature that
ranks compare before a collective moves data, so a code is never reused.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, ClassVar, NoReturn

import numpy as np

default_pg_timeout = timedelta(minutes=30)
"""Timeout of an operation if neither the call nor the group has one. torch.distributed has 10
minutes for NCCL."""


class DType:
    """One element type.

    Attributes:
        name: torch's spelling, for example ``"float32"`` or ``"bfloat16"``.
        code: its number in signatures.
        itemsize: bytes per element.
        storage: the NumPy dtype that its elements are stored in; for types that NumPy lacks, an
            unsigned integer of the same width that holds the bits.
        kind: ``"b"`` bool, ``"u"`` unsigned, ``"i"`` signed, ``"f"`` float, ``"c"`` complex,
            ``"x"`` moved as bytes and not reduced.
        native: True if NumPy has this type (``storage`` is then the type, not its bits).
    """

    __slots__ = ("code", "itemsize", "kind", "name", "native", "storage")

    def __init__(self, code: int, name: str, kind: str, storage: str, native: bool = True) -> None:
        self.code = code
        self.name = name
        self.kind = kind
        self.storage = np.dtype(storage)
        self.itemsize = self.storage.itemsize
        self.native = native

    @property
    def half(self) -> bool:
        """True if sums are accumulated in float32, because the type's precision is too low."""
        return self.kind == "f" and self.itemsize <= 2

    def __repr__(self) -> str:
        return self.name


DTYPES: tuple[DType, ...] = (
    DType(1, "bool", "b", "?"),
    DType(2, "uint8", "u", "u1"),
    DType(3, "int8", "i", "i1"),
    DType(4, "uint16", "u", "u2"),
    DType(5, "int16", "i", "i2"),
    DType(6, "uint32", "u", "u4"),
    DType(7, "int32", "i", "i4"),
    DType(8, "uint64", "u", "u8"),
    DType(9, "int64", "i", "i8"),
    DType(10, "float16", "f", "f2"),
    DType(11, "float32", "f", "f4"),
    DType(12, "float64", "f", "f8"),
    DType(13, "bfloat16", "f", "u2", native=False),
    DType(14, "complex64", "c", "c8"),
    DType(15, "complex128", "c", "c16"),
    DType(16, "float8_e4m3fn", "f", "u1", native=False),
    DType(17, "float8_e5m2", "f", "u1", native=False),
)
# The order gives the codes, which are never reused: new types come last.
_MOVED = """
float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 float8_e4m3b11fnuz float8_e3m4 float8_e4m3 float6_e2m3fn
float6_e3m2fn float4_e2m1fn int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7
bits8 bits1x8 bits2x4 bits4x2 qint8 quint8 bits16 complex32 qint32 bcomplex32
"""
_WIDTHS = {"bits16": "u2", "complex32": "u4", "qint32": "u4", "bcomplex32": "u4"}
MOVED: tuple[DType, ...] = tuple(
    DType(code, name, "x", _WIDTHS.get(name, "u1"), native=False)
    for code, name in enumerate(_MOVED.split(), 18)
)
"""Types of torch and ml_dtypes that are moved, and not reduced."""
QUANTIZED = ("qint8", "quint8", "qint32")
"""Of these the integers that a tensor's memory has; its scale and zero point are not
communicated."""
ALL_DTYPES: tuple[DType, ...] = (*DTYPES, *MOVED)
BY_NAME: dict[str, DType] = {d.name: d for d in ALL_DTYPES}

COMPRESSIONS = {"bfloat16": 1, "int8": 2}
"""The compressions (:mod:`unicoll.arrays.compression`), with their codes."""
COMPRESSED = ("float32", "float64")
"""Names of the element types that can be compressed."""


_count = count()
_numbers: dict[tuple[str, int], int] = {}


@dataclass(frozen=True, slots=True)
class Device:
    """Device of an array.

    Attributes:
        type: ``"cpu"``, ``"cuda"`` or ``"xpu"``.
        index: the device's ordinal; -1 for the CPU.
        number: a number that no other device has in this process, for keys: it is hashed faster.
    """

    type: str
    index: int = -1
    number: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Two threads may each take a number for one device; all get the one that is kept.
        kept = _numbers.setdefault((self.type, self.index), next(_count))
        object.__setattr__(self, "number", kept)

    def __str__(self) -> str:
        return self.type if self.index < 0 else f"{self.type}:{self.index}"


CPU = Device("cpu")


class Reduction:
    """A reduction; PREMUL_SUM has a factor, the others are singletons.

    Attributes:
        name: torch.distributed's name.
        code: its number in signatures.
        factor: the factor of PREMUL_SUM; else None.
        key: equal for equal reductions; factors are compared by their bits. Hashes faster than the
            object.
    """

    __slots__ = ("code", "factor", "key", "name")

    SUM: ClassVar[Reduction]
    AVG: ClassVar[Reduction]
    PRODUCT: ClassVar[Reduction]
    MIN: ClassVar[Reduction]
    MAX: ClassVar[Reduction]
    BAND: ClassVar[Reduction]
    BOR: ClassVar[Reduction]
    BXOR: ClassVar[Reduction]
    EXACT_SUM: ClassVar[Reduction]
    EXACT_AVG: ClassVar[Reduction]

    def __init__(self, name: str, code: int, factor: Any = None) -> None:
        self.name = name
        self.code = code
        self.factor = factor
        self.key: Any = code if factor is None else (code, *_bits(factor))

    def __repr__(self) -> str:
        if self.factor is not None:
            return f"ReduceOp.{self.name}({self.factor!r})"
        return f"ReduceOp.{self.name}"

    def __str__(self) -> str:
        return self.name if self.factor is None else f"{self.name}({self.factor})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reduction) and self.key == other.key

    def __hash__(self) -> int:
        return self.code

    def __reduce__(self) -> tuple[Any, ...]:
        return (Reduction, (self.name, self.code, self.factor))


def _bits(factor: Any) -> tuple[int, ...]:
    """A number as 32-bit words, equal only for numbers of equal value, sign of zero and NaN
    included.

    Python's hash cannot tell -1.0 from -2.0, nor 0.0 from -0.0, and that of a NaN differs between
    processes.
    """
    words = struct.unpack("<4I", struct.pack("<2d", factor.real, factor.imag))
    # An integer may have more bits than a double can hold.
    rest = factor - int(float(factor)) if isinstance(factor, int) else 0
    return (*words, rest & 0xFFFF_FFFF) if rest else words


_OF_MPI = {
    **dict.fromkeys(("LAND", "LOR", "LXOR"), "MIN, MAX or BXOR of bool arrays"),
    **dict.fromkeys(
        ("MAXLOC", "MINLOC"), "all_gather_into_tensor of the values, then argmax or argmin"
    ),
    "PROD": "PRODUCT",
}
"""MPI's reductions with other names or none, and what serves in their place (docs/hpc.md)."""


class _Names(type):
    """Explains names that do not exist."""

    def __getattr__(cls, name: str) -> NoReturn:
        there = (
            f"; in place of MPI's {name}: {_OF_MPI[name]} (docs/hpc.md)" if name in _OF_MPI else ""
        )
        raise AttributeError(f"{cls.__name__} has no {name!r}{there}", name=name, obj=cls)


class ReduceOp(metaclass=_Names):
    """The reductions, with torch.distributed's names.

    ``SUM``, ``PRODUCT``, ``MIN``, ``MAX`` (NaN wins over numbers), ``BAND``, ``BOR``, ``BXOR``
    (integers and bool), ``AVG`` (the sum divided by the number of ranks; of integers the exact sum,
    divided and rounded towards zero, which fits the type even if the sum does not), and
    ``PREMUL_SUM``: call it with a factor, ``ReduceOp.PREMUL_SUM(0.5)``; each rank's input is
    multiplied before the sum (NCCL's ``ncclRedOpCreatePreMulSum``). float16, bfloat16 and float8
    accumulate in float32. For bool, SUM and MAX are "or", PRODUCT and MIN are "and". ``EXACT_SUM``
    and ``EXACT_AVG`` are the sum of exact arithmetic, rounded once, for float16, bfloat16, float32,
    float64 and complex numbers: the same bits in every order
    (:mod:`unicoll.arrays.exact_arithmetic`).

    NCCL has its own arithmetic (docs/gpu.md): a NaN is dropped by MIN and MAX, and float16,
    bfloat16 and float8 are rounded after every addition.
    """

    RedOpType = Reduction
    SUM = Reduction("SUM", 1)
    AVG = Reduction("AVG", 2)
    PRODUCT = Reduction("PRODUCT", 3)
    MIN = Reduction("MIN", 4)
    MAX = Reduction("MAX", 5)
    BAND = Reduction("BAND", 6)
    BOR = Reduction("BOR", 7)
    BXOR = Reduction("BXOR", 8)
    EXACT_SUM = Reduction("EXACT_SUM", 10)
    EXACT_AVG = Reduction("EXACT_AVG", 11)

    @staticmethod
    def PREMUL_SUM(factor: Any) -> Reduction:
        """The sum of the inputs, each multiplied by ``factor`` (a number) first."""
        return Reduction("PREMUL_SUM", 9, factor.item() if hasattr(factor, "item") else factor)


for _reduction in list(vars(ReduceOp).values()):
    if isinstance(_reduction, Reduction):
        setattr(Reduction, _reduction.name, _reduction)

EXACT = {"SUM": ReduceOp.EXACT_SUM, "AVG": ReduceOp.EXACT_AVG}
"""The exact reductions, by the names of those that round every addition."""


class reduce_op:
    """The old spelling of :class:`ReduceOp`, kept because torch.distributed keeps it."""

    SUM = ReduceOp.SUM
    PRODUCT = ReduceOp.PRODUCT
    MIN = ReduceOp.MIN
    MAX = ReduceOp.MAX
