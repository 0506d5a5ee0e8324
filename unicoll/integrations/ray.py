"""unicoll as the backend ``UNICOLL`` of Ray's collective groups (``ray.util.collective``).

Importing this module registers the backend in this process::

    import ray.util.collective as col
    from unicoll.integrations.ray import BACKEND

    col.create_collective_group(actors, 2, [0, 1], backend=BACKEND, group_name="gradients")   # in the driver
    col.init_collective_group(2, rank, backend=BACKEND, group_name="gradients")               # or in each actor
    col.allreduce(array, "gradients")                                                         # in the actors

Ray needs the registration in the driver and in every actor. An actor that receives :data:`BACKEND`,
as an argument or as a global of its class, imports this module by that. With the plain text
``"UNICOLL"`` each actor has to import it.

A group is a job of :func:`unicoll.join`: an actor can be in several, and no default group is used.
Arrays are NumPy's, CuPy's and torch's, and the backend is chosen by their device. If an actor is
killed, calls of the others raise RankLostError; once they have destroyed the group, a restarted
actor can be in a new one of the same name.

:class:`TorchConfig` is Ray Train's, for the backend ``unicoll`` of torch.distributed, with a new
secret for each start of the workers.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import ray
from ray.experimental import internal_kv
from ray.util.collective import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import Backend, BroadcastOptions, ReduceOptions

import unicoll
from unicoll.bootstrap.rendezvous_protocol import (
    StoreLocation,
    refuse_second_rank_0,
    refuse_to_join,
)
from unicoll.errors import DistArgumentError, DistBackendError, DistError, StoreTimeoutError
from unicoll.group.process_group import ProcessGroup
from unicoll.net.objects.received_json import from_store
from unicoll.net.stores import TCPStore
from unicoll.net.stores.base import DEFAULT_TIMEOUT
from unicoll.net.wire import interfaces
from unicoll.net.wire.secret import KeyText, given_secret, new_key_text
from unicoll.process import logs
from unicoll.process.timeouts import backoff, seconds_left

if TYPE_CHECKING:
    from unicoll.integrations.ray_train import TorchConfig

log = logs.logger("ray")

__all__ = ["BACKEND", "TorchConfig", "UnicollGroup"]


class _WritableMemory:
    """The array interface of a NumPy array without its read-only flag; keeps the array alive."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


class _BackendName(str):
    """The name of the backend; a process that unpickles it imports this module, which registers the
    backend."""

    __slots__ = ()


BACKEND = _BackendName("UNICOLL")
"""The backend's name, for Ray's functions."""

_JOIN_S = 300.0
"""How long a rank waits for rank 0's record."""
_PROBE_S = 2.0
"""First timeout for a server that may be another program's; it grows with each try."""
_KEYS = "unicoll"
"""The namespace of the records in Ray's key-value store."""
_UNSET = timedelta(milliseconds=-1)
_used: dict[str, _Record] = {}
"""The last record that this process has used, by key."""


# Ray has no types.
class UnicollGroup(BaseGroup):  # type: ignore[misc]
    """A collective group of Ray over a job of unicoll; Ray makes it, in each actor of the group.

    Results are written in place, also to an array that Ray has passed to the actor, which NumPy
    marks as read-only: then the object in Ray's store changes, for all who read it. Pass a copy if
    others do.

    The methods take lists, as Ray's functions pass them, with the one array of this rank. Of their
    options, ``timeout_ms`` bounds a call; else the limit is 30 minutes.

    Raises:
        RankLostError: an actor of the group has died or has left; ``rank`` is its rank. The group
            is of no further use.
        DistArgumentError: several arrays of one rank (Ray's functions ``*_multigpu``), or arrays
            that do not fit.
        CollectiveMismatchError, OperationTimeoutError: as for :class:`unicoll.ProcessGroup`.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        """Join the group; returns when all ranks have.

        Raises:
            StoreTimeoutError: rank 0 has not made the group in time.
            OperationTimeoutError: other ranks have not joined in time; the message has them.
            DistBackendError: the environment has an invalid value.
        """
        super().__init__(world_size, rank, group_name)
        try:
            self._group, self._store = _join(world_size, rank, group_name)
        except DistArgumentError as error:
            # To Ray a ValueError says that there is no group.
            raise DistBackendError(str(error)) from error

    @classmethod
    def backend(cls) -> str:
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    def destroy_group(self) -> None:
        """Leave the group and close everything; ranks that still use it get RankLostError."""
        try:
            unicoll.destroy_process_group(self._group)
        finally:
            # The other ranks may still use the store, so it goes on until the last of them has
            # closed its own.
            self._store.close(linger=True)

    def allreduce(self, tensor: list[Any], allreduce_options: Any = None) -> None:
        with _outputs(_one(tensor)) as (array,):
            self._group.all_reduce(
                array, _reduction(allreduce_options), timeout=_timeout(allreduce_options)
            )

    def barrier(self, barrier_options: Any = None) -> None:
        self._group.barrier(timeout=_timeout(barrier_options))

    def reduce(self, tensor: list[Any], reduce_options: Any = None) -> None:
        options = reduce_options or ReduceOptions()
        with _outputs(_one(tensor), written=options.root_rank == self.rank) as (array,):
            self._group.reduce(
                array, options.root_rank, _reduction(options), timeout=_timeout(options)
            )

    def allgather(
        self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = None
    ) -> None:
        with _outputs(*_one(tensor_list)) as outputs:
            self._group.all_gather(outputs, _one(tensor), timeout=_timeout(allgather_options))

    def broadcast(self, tensor: list[Any], broadcast_options: Any = None) -> None:
        options = broadcast_options or BroadcastOptions()
        with _outputs(_one(tensor), written=options.root_rank != self.rank) as (array,):
            self._group.broadcast(array, options.root_rank, timeout=_timeout(options))

    def reducescatter(
        self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any = None
    ) -> None:
        op, limit = _reduction(reducescatter_options), _timeout(reducescatter_options)
        with _outputs(_one(tensor)) as (output,):
            self._group.reduce_scatter(output, _one(tensor_list), op, timeout=limit)

    def send(self, tensor: list[Any], send_options: Any) -> None:
        _refuse_device(send_options.dst_gpu_index)
        array = _first(_one(tensor), send_options.n_elements)
        self._group.send(array, send_options.dst_rank, timeout=_timeout(send_options))

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        _refuse_device(recv_options.src_gpu_index)
        with _outputs(_one(tensor)) as (array,):
            part = _first(array, recv_options.n_elements)
            self._group.recv(part, recv_options.src_rank, timeout=_timeout(recv_options))


# --- arguments ------------------------------------------------------------------------------------


def _one(arrays: list[Any]) -> Any:
    if len(arrays) != 1:
        raise DistArgumentError(
            f"{len(arrays)} arrays were passed for one rank: a rank of the backend {BACKEND} has"
            " one device; make an actor for each device"
        )
    return arrays[0]


def _refuse_device(index: int) -> None:
    if index:
        raise DistArgumentError(
            f"GPU {index} of the other rank: a rank of the backend {BACKEND} has one device"
        )


@contextmanager
def _outputs(*arrays: Any, written: bool = True) -> Iterator[list[Any]]:
    """Arrays for the results; if ``written`` is False the call only reads them.

    Those that Ray has passed to this actor are copied before the call, and written to after it:
    other actors of the node may have the same memory in the same call.
    """
    used = [array.copy() if written and _is_rays(array) else array for array in arrays]
    yield used
    for array, result in zip(arrays, used, strict=True):
        if result is not array:
            np.asarray(_WritableMemory(array)).view(array.dtype)[...] = result


def _is_rays(array: Any) -> bool:
    """True if it is an array that is read-only because its memory is Ray's."""
    if not isinstance(array, np.ndarray) or array.flags.writeable:
        return False
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return type(owner).__module__.partition(".")[0] == "ray"


def _first(array: Any, count: int) -> Any:
    """The first ``count`` elements of an array; all for 0."""
    if not count:
        return array
    flags = getattr(array, "flags", None)
    contiguous = flags.c_contiguous if flags is not None else array.is_contiguous()
    flat = array.reshape(-1)
    if not contiguous or count > len(flat):
        raise DistArgumentError(
            f"n_elements={count}: the array must be contiguous, and have so many elements; it has"
            f" {len(flat)}"
        )
    return flat[:count]


def _reduction(options: Any) -> Any:
    return (
        unicoll.ReduceOp.SUM
        if options is None
        else getattr(unicoll.ReduceOp, options.reduceOp.name)
    )


def _timeout(options: Any) -> timedelta | None:
    limit = getattr(options, "timeout_ms", _UNSET)
    if isinstance(limit, int | float):
        limit = timedelta(milliseconds=limit)
    return None if limit == _UNSET else limit


# --- joining --------------------------------------------------------------------------------------


class _Record(NamedTuple):
    """What rank 0 publishes: the address of the group's store, and the group's secret."""

    host: str
    port: int
    secret: KeyText


def _join(world_size: int, rank: int, group_name: str) -> tuple[ProcessGroup, TCPStore]:
    """Join a group: its job, and the store that has to be closed after it.

    Rank 0 serves a store of its own for each group, with a new secret, and publishes both under a
    key of the group's name and of Ray's job in Ray's key-value store, until all ranks have joined.
    The record of a group that rank 0 could not finish names a server that has ended or does not
    have the record's secret, so the others wait for the next one.
    """
    key = f"{ray.get_runtime_context().get_job_id()}/{group_name}"
    name = _job_name(group_name)
    while True:
        store, record = _serve(key, name) if rank == 0 else _connect(key, rank, group_name)
        # It counts as used also if joining fails, so that the next attempt waits for another
        # record.
        _used[key] = record
        try:
            group = unicoll.join(
                name=name, rank=rank, world_size=world_size, store=store, secret=record.secret
            )
        except BaseException as error:
            replaced = False
            if rank != 0 and isinstance(error, DistError):
                with suppress(Exception):
                    # Another record shows that rank 0 has begun another group meanwhile.
                    replaced = _read(key) not in (None, record)
                    if not replaced:
                        _refuse(store, name, record, rank, error)
            store.close(linger=not replaced)
            if not replaced:
                raise
        else:
            return group, store
        finally:
            # All ranks have joined, or rank 0 has failed: no rank needs the record any more.
            if rank == 0:
                _remove(key, record)


def _job_name(group_name: str) -> str:
    """The name for unicoll of a group, whose name may have any characters and any length."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", group_name)
    if safe == group_name and len(safe) <= 48:
        return f"ray-{safe}"
    return f"ray-{safe[:48]}-{hashlib.blake2s(group_name.encode(), digest_size=4).hexdigest()}"


def _serve(key: str, name: str) -> tuple[TCPStore, _Record]:
    host = ray.util.get_node_ip_address()
    secret = new_key_text()
    # If the address is not one of this host, the server listens on all interfaces.
    bind = host if interfaces.is_local_address(host) else None
    store = TCPStore(host, 0, is_master=True, secret=given_secret(secret), bind=bind)
    try:
        record = _Record(host, store.port, secret)
        # If there is a value already, it stays, and the result is True.
        while internal_kv._internal_kv_put(
            key, json.dumps(record), overwrite=False, namespace=_KEYS
        ):
            if (other := _read(key)) is not None:
                # A record that this process has used before is that of an earlier group.
                if other != _used.get(key):
                    _refuse_if_alive(other, name)
                _remove(key, other)
    except BaseException:
        store.close()
        raise
    return store, record


def _refuse_if_alive(other: _Record, name: str) -> None:
    """Raise DistStoreError, there and here, if the rank 0 that has published a record waits for the
    others."""
    try:
        socket.create_connection((other.host, other.port), _PROBE_S).close()
        store = TCPStore(
            other.host, other.port, timeout=_PROBE_S, secret=given_secret(other.secret)
        )
    except (DistError, OSError):
        return
    with closing(store):
        namespace = f"{StoreLocation.namespace}/{name}"
        raise refuse_second_rank_0(namespace, store, given_secret(other.secret).key)


def _connect(key: str, rank: int, group_name: str) -> tuple[TCPStore, _Record]:
    """Connect to rank 0's store, with a record that this process has not used: it may not be
    removed yet."""
    last_error: Exception | None = None
    deadline = time.monotonic() + _JOIN_S
    pauses, timeouts = backoff(0.01, 0.2), backoff(_PROBE_S, 15.0, 1.5)
    while True:
        record = _read(key)
        if record is not None and record != _used.get(key):
            timeout = seconds_left(min(deadline, time.monotonic() + next(timeouts)), 0.001)
            try:
                # A plain socket shows a refused connection without the store's retries.
                socket.create_connection((record.host, record.port), timeout).close()
                secret = given_secret(record.secret)
                store = TCPStore(record.host, record.port, timeout=timeout, secret=secret)
                store.set_timeout(DEFAULT_TIMEOUT)
                return store, record
            except (DistError, OSError) as error:
                last_error = error
        if time.monotonic() >= deadline:
            found = f"the last record gave: {last_error}" if last_error else "there was none"
            raise StoreTimeoutError(
                f"rank {rank} of the group {group_name!r} waited {_JOIN_S:g} s for rank 0's record"
                f" in Ray's key-value store; {found}. Is the actor with rank 0 alive, of the same"
                " Ray job, and has it made the group?",
                rank=0,
            )
        time.sleep(next(pauses))


def _refuse(store: TCPStore, name: str, record: _Record, rank: int, error: DistError) -> None:
    """Let rank 0 know that this rank cannot join, for example because a process that had this rank
    died while joining.

    unicoll publishes only errors that come after the rendezvous.
    """
    namespace = f"{StoreLocation.namespace}/{name}"
    refuse_to_join(namespace, store, given_secret(record.secret).key, rank, error)


def _read(key: str) -> _Record | None:
    text = internal_kv._internal_kv_get(key, namespace=_KEYS)
    if text is None:
        return None
    host, port, secret = from_store(f"record of {key}", text, (str, int, str))
    # Tracebacks that show local variables do not show the secret.
    text = None
    return _Record(host, port, KeyText(secret))


def _remove(key: str, record: _Record) -> None:
    """Remove rank 0's record, unless another process has rank 0 meanwhile. A record that stays does
    no harm."""
    try:
        if _read(key) == record:
            internal_kv._internal_kv_del(key, namespace=_KEYS)
    except Exception as error:
        # The key-value store may raise errors of any type.
        log.warning("the record of a group in Ray's key-value store was not removed: %s", error)


# --- registration ---------------------------------------------------------------------------------


def __getattr__(name: str) -> Any:
    # Ray Train needs packages that collective groups do not need.
    if name == "TorchConfig":
        from unicoll.integrations.ray_train import TorchConfig

        return TorchConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Ray's functions pass this to the actors. It is set before the registration, which would set a
# plain text.
Backend.UNICOLL = BACKEND
register_collective_backend(BACKEND, UnicollGroup)
