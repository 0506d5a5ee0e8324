"""unicoll: collective communication over NumPy, CuPy and PyTorch arrays, with torch.distributed's API.

    import unicoll as dist

    dist.init_process_group()
    x = numpy.ones(4)
    dist.all_reduce(x)
    dist.destroy_process_group()

Start it with ``python -m unicoll.run --nproc-per-node 4 script.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .backend import Registration
from .collectives import (
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_gather_into_tensor_coalesced,
    all_gather_single,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_coalesced,
    gather,
    monitored_barrier,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
    reduce_scatter_tensor_coalesced,
    scatter,
)
from .errors import (
    AuthenticationError,
    BackendUnavailableError,
    CollectiveMismatchError,
    DistArgumentError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    DistTypeError,
    GroupAbortedError,
    MessageMismatchError,
    NotInitializedError,
    OperationTimeoutError,
    PickleRefusedError,
    QueueEmptyError,
    RankLostError,
    StoreTimeoutError,
)
from .group import ProcessGroup
from .objects import all_gather_object, broadcast_object_list, gather_object, scatter_object_list
from .ops import supported_reductions
from .options import CallOptions, Options
from .p2p import P2POp, batch_isend_irecv, irecv, isend, recv, recv_object_list, send, send_object_list
from .registry import Backend
from .rendezvous import register_rendezvous_handler
from .stores import FileStore, HashStore, PrefixStore, Store, TCPStore
from .subgroups import (
    grow_group,
    new_group,
    new_subgroups,
    new_subgroups_by_enumeration,
    shrink_group,
    split_group,
)
from .types import ReduceOp, default_pg_timeout, reduce_op
from .work import Work
from .world import (
    GroupMember,
    destroy_process_group,
    explain,
    get_backend,
    get_backend_config,
    get_default_backend_for_device,
    get_global_rank,
    get_group_rank,
    get_node_local_rank,
    get_pg_count,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    group,
    init_process_group,
    is_available,
    is_backend_available,
    is_gloo_available,
    is_initialized,
    is_mpi_available,
    is_nccl_available,
    is_torchelastic_launched,
    is_ucc_available,
    is_xccl_available,
)

if TYPE_CHECKING:
    from . import device_mesh
    from .mesh import DeviceMesh, init_device_mesh
    from .spawning import SpawnError, spawn

__version__ = "0.1.0"

_LAZY = {
    "DeviceMesh": "mesh",
    "init_device_mesh": "mesh",
    "SpawnError": "spawning",
    "spawn": "spawning",
    "device_mesh": "device_mesh",
    "parallel": "parallel",
}


def __getattr__(name: str) -> Any:
    """What a program may never use is imported when it is asked for."""
    import importlib

    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_LAZY[name]}", __name__)
    value = module if name == _LAZY[name] else getattr(module, name)
    globals()[name] = value
    return value


__all__ = [
    "AuthenticationError",
    "Backend",
    "BackendUnavailableError",
    "CallOptions",
    "CollectiveMismatchError",
    "DeviceMesh",
    "DistArgumentError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "DistTypeError",
    "FileStore",
    "GroupAbortedError",
    "GroupMember",
    "HashStore",
    "MessageMismatchError",
    "NotInitializedError",
    "OperationTimeoutError",
    "Options",
    "P2POp",
    "PickleRefusedError",
    "PrefixStore",
    "ProcessGroup",
    "QueueEmptyError",
    "RankLostError",
    "ReduceOp",
    "Registration",
    "SpawnError",
    "Store",
    "StoreTimeoutError",
    "TCPStore",
    "Work",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object_list",
    "default_pg_timeout",
    "destroy_process_group",
    "device_mesh",
    "explain",
    "gather",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "grow_group",
    "init_device_mesh",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "register_rendezvous_handler",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "spawn",
    "shrink_group",
    "split_group",
    "supported_reductions",
]
