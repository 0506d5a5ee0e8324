"""C functions without a C compiler: parsed declarations, and stand-in libraries with C entry points.

A :class:`StandIn` is a library of Python functions behind C entry points that are made from declarations. Its calls
use C's calling convention, so a wrong order, width or structure of arguments gives a wrong value.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Mapping
from ctypes import c_int, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POINTER, WORD, INT, UNSIGNED, BY_VALUE = "pointer", "word", "int", "unsigned", "by value"

_HANDLES = {
    "ncclComm_t",
    "ncclWindow_t",
    "cudaStream_t",
    "CUcontext",
    "CUstream",
    "CUevent",
    "hipStream_t",
    "hipEvent_t",
    "hipDeviceptr_t",
}
_WORDS = {"size_t", "CUdeviceptr"}
_INTS = {
    "int",
    "ncclResult_t",
    "ncclDataType_t",
    "ncclRedOp_t",
    "ncclScalarResidence_t",
    "CUresult",
    "CUdevice",
    "CUdevice_attribute",
    "CUdevice_P2PAttribute",
    "CUpointer_attribute",
    "hipError_t",
    "hipDevice_t",
    "hipDeviceAttribute_t",
    "hipDeviceP2PAttr",
    "hipMemcpyKind",
}
_CTYPES: dict[str, Any] = {POINTER: c_void_p, WORD: c_uint64, INT: c_int, UNSIGNED: c_uint}
_DECLARATION = re.compile(
    r"(?<![\w(])([A-Za-z_][\w ]*?[\w*] *\*?) *\b((?:nccl|cu|hip)[A-Z]\w*) *\(([^()]*)\) *;"
)


@dataclass(frozen=True)
class Declared:
    """One function: its result type and argument types, as in C, and its argument names."""

    result: str
    types: tuple[str, ...]
    names: tuple[str, ...]


def parse(text: str) -> dict[str, Declared]:
    """The functions that C source text declares."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*|^ *#[^\n]*", " ", text, flags=re.S | re.M)
    found = {}
    for result, name, arguments in _DECLARATION.findall(" ".join(text.split())):
        pairs = [_argument(a) for a in arguments.split(",") if a.strip() not in ("", "void")]
        declared = Declared(_type(result), tuple(t for t, _ in pairs), tuple(n for _, n in pairs))
        found.setdefault(name, declared)  # cuda.h repeats some at its end, for old and special variants
    return found


def _argument(text: str) -> tuple[str, str]:
    match = re.fullmatch(r"\s*(.*?)(\w+)\s*", text, flags=re.S)
    assert match is not None, text
    return _type(match[1]), match[2]


def _type(text: str) -> str:
    words = re.sub(r"\bconst\b|\bCUDAAPI\b|\bextern\b|\bstruct\b", " ", text)
    return re.sub(r"\s*\*", "*", " ".join(words.split()))


def kind(c_type: str) -> str:
    """How a type is passed."""
    if c_type.endswith("*") or c_type in _HANDLES:
        return POINTER
    if c_type in _WORDS:
        return WORD
    if c_type in _INTS:
        return INT
    if c_type in ("unsigned int", "unsigned"):
        return UNSIGNED
    assert c_type == "ncclUniqueId", f"{c_type!r} is not known to these tests"
    return BY_VALUE


def alike(argument: Any, c_type: str) -> bool:
    """Whether ctypes passes an argument of a type as C does; addresses may be pointers or numbers of their size."""
    ours, theirs = kind_of_ctypes(argument), kind(c_type)
    return ours == theirs or (argument is c_void_p and c_type == "CUdeviceptr")


def kind_of_ctypes(argument: Any) -> str:
    """How ctypes passes an argument of a type."""
    if argument in (c_void_p, ctypes.c_char_p) or hasattr(argument, "contents"):
        return POINTER
    if issubclass(argument, ctypes.Structure):
        return BY_VALUE
    by_size = {(8, False): WORD, (4, True): INT, (4, False): UNSIGNED}
    return by_size[ctypes.sizeof(argument), argument(-1).value < 0]


class Id(ctypes.Structure):
    """128 bytes that are passed by value."""

    _fields_ = [("bytes", ctypes.c_ubyte * 128)]


class StandIn:
    """A library of the declared functions; ``without`` names those that it lacks.

    Attributes:
        calls: name and arguments of each call: integers, and bytes for what came by value.
        answers: by name, what to do: called with the arguments, returns the result. Without one the result is 0.
    """

    def __init__(self, declared: Mapping[str, Declared], without: Iterable[str] = ()) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, Callable[..., Any]] = {}
        self._entries = {n: self._entry(n, d) for n, d in declared.items() if n not in set(without)}

    def __getattr__(self, name: str) -> Any:
        entries = self.__dict__.get("_entries", {})
        if name not in entries:
            raise AttributeError(f"stand-in: undefined symbol: {name}")
        # A function of this address alone, as ctypes.CDLL makes it: nothing of the declaration is known to it.
        found = ctypes.CFUNCTYPE(None)(ctypes.cast(entries[name], c_void_p).value)
        setattr(self, name, found)
        return found

    def last(self, name: str) -> tuple[Any, ...]:
        """The arguments of the last call of a function."""
        return next(arguments for called, arguments in reversed(self.calls) if called == name)

    def _entry(self, name: str, declared: Declared) -> Any:
        kinds = [kind(t) for t in declared.types]
        result = _CTYPES[kind(declared.result)]

        def called(*arguments: Any) -> Any:
            plain = tuple(bytes(a.bytes) if isinstance(a, Id) else a or 0 for a in arguments)
            self.calls.append((name, plain))
            answer = self.answers.get(name)
            return 0 if answer is None else answer(*plain)

        return ctypes.CFUNCTYPE(result, *(_CTYPES.get(k, Id) for k in kinds))(called)


def put(address: int, value: int, c_type: Any) -> None:
    """Write a number where a pointer points."""
    assert address, "a place to write to was expected"
    c_type.from_address(address).value = value


def putting(index: int, value: int, c_type: Any, result: int = 0) -> Callable[..., int]:
    """An answer that writes a number through one of the arguments."""

    def answer(*arguments: Any) -> int:
        put(arguments[index], value, c_type)
        return result

    return answer


def header(*places: str) -> Path | None:
    """A header of the environment's NVIDIA wheels, or of a CUDA toolkit."""
    import importlib.util

    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec is not None else []
    for folder in [*folders, Path("/usr/local/cuda/include"), Path("/usr/include")]:
        for place in places:
            if (folder / place).is_file():
                return folder / place
    return None
