"""The state of a training job, a nested dict of arrays and plain values: its digest, and its
transfer to a rank."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from unicoll.api import p2p
from unicoll.arrays.conversion import as_buffer, has_only_memory
from unicoll.arrays.families import FAMILIES, kind_of, of_known_library
from unicoll.arrays.types import BY_NAME
from unicoll.errors import DistArgumentError, DistError, DistTypeError
from unicoll.parallel.parameters import arrays_digest

if TYPE_CHECKING:
    from unicoll.group.process_group import ProcessGroup

_Path = tuple[Any, ...]


class _Description(NamedTuple):
    """An array of the sender.

    Attributes:
        path: the keys and indices that lead to it.
        family, dtype: the names of its library and its element type.
        device: ``"cpu"``, ``"cuda"`` or ``"xpu"``.
        digest: of dtype, shape and bytes.
    """

    path: _Path
    family: str
    device: str
    dtype: str
    shape: tuple[int, ...]
    digest: bytes


class State:
    """A state dict of the user.

    Its arrays are those in dicts, lists and tuples, at any depth; all other values are plain ones.
    Arrays are those of NumPy, CuPy, torch and registered families, with DLPack, and memoryviews;
    not what has only the buffer protocol.

    Args:
        state: the dict, which :meth:`receive` changes in place.

    Raises:
        DistTypeError: it is not a dict, or an array has a dtype that cannot be communicated.
    """

    def __init__(self, state: MutableMapping[Any, Any]) -> None:
        if not isinstance(state, MutableMapping):
            raise DistTypeError(f"state: expected a dict, got {type(state).__name__}")
        self._state = state
        self._digests: dict[_Path, bytes] = {}
        for path, array in self._arrays().items():
            try:
                _ = kind_of(of_known_library(array)).element_type
            except DistArgumentError as error:
                raise type(error)(f"state{_text(path)}: {error}") from None

    def digest(self) -> str:
        """SHA-256, in hex, of the arrays with their places in the dict."""
        self._digests = {path: _digest_of(array) for path, array in self._arrays().items()}
        total = hashlib.sha256()
        for path, digest in self._digests.items():
            total.update(repr(path).encode() + digest)
        return total.hexdigest()

    def send(self, group: ProcessGroup, dst: int) -> None:
        """Send the state to member ``dst``, which calls :meth:`receive`; :meth:`digest` has been
        called."""
        arrays: dict[_Path, Any] = {}
        plain = _without_arrays(self._state, (), arrays)
        described = [
            tuple(_described(path, array, self._digests[path])) for path, array in arrays.items()
        ]
        p2p.send_object_list([plain, described], group.global_rank(dst), group)
        for array in arrays.values():
            group.send(_plain(array), dst)

    def receive(self, group: ProcessGroup, src: int) -> None:
        """Make the state that of member ``src``: arrays of the same dtype and shape are
        overwritten, others replaced.

        Keys that ``src`` does not have are removed.

        Raises:
            DistError: a received array does not have the sender's digest; arrays are overwritten by
                then.
        """
        received: list[Any] = [None, None]
        p2p.recv_object_list(received, group.global_rank(src), group)
        plain, described = received
        own, arrays = self._arrays(), {}
        for each in described:
            wanted = _Description(*each)
            # The names are another rank's.
            if wanted.family not in FAMILIES or wanted.dtype not in BY_NAME:
                raise DistError(
                    f"recover: rank {src} sent an array of {wanted.family!r}, {wanted.dtype!r}",
                    rank=src,
                    op="recover",
                )
            array = own.get(wanted.path)
            if array is None or not _fits(of_known_library(array), wanted):
                array = _new_array(wanted)
            group.recv(_plain(array), src)
            if _digest_of(array) != wanted.digest:
                raise DistError(
                    f"recover: state{_text(wanted.path)} received from rank {src} does not have the"
                    " digest of that rank's array",
                    rank=src,
                    op="recover",
                )
            arrays[wanted.path] = array
        # Keys and plain values change only now, when all arrays have arrived and are those of the
        # sender.
        _fill(self._state, plain, (), arrays)

    def _arrays(self) -> dict[_Path, Any]:
        arrays: dict[_Path, Any] = {}
        _without_arrays(self._state, (), arrays)
        return arrays


def _is_array(value: Any) -> bool:
    if isinstance(value, np.generic):
        return False
    with suppress(DistTypeError):
        kind_of(value)
        return True
    try:
        as_buffer(value)
    except DistTypeError:
        # If it is an array, the constructor refuses it, and names its place.
        return isinstance(value, memoryview) or hasattr(type(value), "__dlpack_device__")
    except DistArgumentError:
        return True
    return isinstance(value, memoryview) or not has_only_memory(type(value))


def _without_arrays(value: Any, path: _Path, arrays: dict[_Path, Any]) -> Any:
    """A copy of dicts, lists and tuples in which None is in the place of each array; ``arrays``
    gets the arrays."""
    if isinstance(value, Mapping):
        return {key: _without_arrays(each, (*path, key), arrays) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(
            _without_arrays(each, (*path, i), arrays) for i, each in enumerate(value)
        )
    if _is_array(value):
        arrays[path] = value
        return None
    return value


def _fill(target: Any, plain: Any, path: _Path, arrays: Mapping[_Path, Any]) -> Any:
    """What replaces ``target``: itself if it is a dict or list and ``plain`` is one, too."""
    if path in arrays:
        return arrays[path]
    if isinstance(plain, dict):
        if not isinstance(target, MutableMapping):
            target = {}
        filled = {
            key: _fill(target.get(key), each, (*path, key), arrays) for key, each in plain.items()
        }
        for key in [key for key in target if key not in filled]:
            del target[key]
        target.update(filled)
        return target
    if type(plain) in (list, tuple):
        old = target if type(target) in (list, tuple) else ()
        values = [
            _fill(old[i] if i < len(old) else None, each, (*path, i), arrays)
            for i, each in enumerate(plain)
        ]
        if type(plain) is tuple:
            return tuple(values)
        if type(target) is list:
            target[:] = values
            return target
        return values
    return plain


def _described(path: _Path, array: Any, digest: bytes) -> _Description:
    array = of_known_library(array)
    kind = kind_of(array)
    device, _, _ = kind.device.partition(":")
    return _Description(path, kind.family.name, device, kind.dtype_name, tuple(array.shape), digest)


def _fits(array: Any, wanted: _Description) -> bool:
    """True if the sender's array can be received into ``array``."""
    kind = kind_of(array)
    same = kind.dtype_name == wanted.dtype and tuple(array.shape) == wanted.shape
    return same and kind.family.is_contiguous(array) and not kind.family.is_read_only(array)


def _new_array(wanted: _Description) -> Any:
    """An array of the sender's library, in host memory or on the current device."""
    return FAMILIES[wanted.family].empty(wanted.shape, BY_NAME[wanted.dtype], wanted.device)


def _plain(array: Any) -> Any:
    """The array as one of a known library, without autograd history."""
    array = of_known_library(array)
    return kind_of(array).family.without_history(array)


def _digest_of(array: Any) -> bytes:
    return arrays_digest([""], [of_known_library(array)])


def _text(path: _Path) -> str:
    return "".join(f"[{key!r}]" for key in path)
