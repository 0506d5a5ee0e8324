"""unicoll: collective communication over NumPy, CuPy and PyTorch arrays, with torch.distributed's
API.

    import unicoll as dist

    dist.init_process_group()
    x = numpy.ones(4)
    dist.all_reduce(x)
    dist.destroy_process_group()

Start it with ``unirun --nproc-per-node 4 script.py``.

The packages:

* api, group, backend, calls, arrays, devices, in the order in which a call passes them: the
  functions; one group's dispatch; what backends share; what a call is; arrays of all families; the
  devices' memory and streams.
* process, net/{objects, wire, stores, control}, bootstrap, the lowest first: this process; how
  processes connect; how they join a job.
* gloo_fallback, mpi_comm, nccl_comm, xccl_comm: the backends; device_collectives is what the last
  two share, staging takes device arrays to the first two.
* diagnosis: what waits and why. run: the launcher. mesh, parallel, torch_plugin, torch_watch,
  integrations: for training. bench, doctor, trace, testing: tools.
* Read docs/architecture.md first.
"""

from __future__ import annotations

from _thread import RLock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unicoll import device_mesh as device_mesh
    from unicoll import group as group
    from unicoll.api import metrics
    from unicoll.api.collectives import (
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
        exscan,
        gather,
        monitored_barrier,
        reduce,
        reduce_scatter,
        reduce_scatter_single,
        reduce_scatter_tensor,
        reduce_scatter_tensor_coalesced,
        scan,
        scatter,
    )
    from unicoll.api.debugger import breakpoint
    from unicoll.api.hooks import add_hook, annotate, check_finite
    from unicoll.api.init import destroy_process_group, explain, init_process_group, join
    from unicoll.api.objects import (
        all_gather_object,
        broadcast_object_list,
        gather_object,
        scatter_object_list,
    )
    from unicoll.api.p2p import (
        P2POp,
        batch_isend_irecv,
        iprobe,
        irecv,
        isend,
        probe,
        recv,
        recv_object_list,
        send,
        send_object_list,
        sendrecv,
        waitany,
    )
    from unicoll.api.spawn import SpawnError, spawn
    from unicoll.api.subgroups import (
        grow_group,
        new_group,
        new_subgroups,
        new_subgroups_by_enumeration,
        shrink_group,
        split_group,
    )
    from unicoll.api.world import (
        GroupMember,
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
    from unicoll.arrays.types import ReduceOp, default_pg_timeout, reduce_op
    from unicoll.backend.contract import Registration
    from unicoll.bootstrap.store_locations import register_rendezvous_handler
    from unicoll.calls.options import CallOptions, Options, ProcessGroupNCCL
    from unicoll.calls.reduce_ops import supported_reductions
    from unicoll.calls.status import NO_RANK, Status
    from unicoll.calls.work import Work
    from unicoll.diagnosis.flight_dump import dump_flight_recorder
    from unicoll.errors import (
        AuthenticationError,
        BackendUnavailableError,
        CollectiveMismatchError,
        DeadlockError,
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
    from unicoll.group.call_hooks import Hook, HookedCall
    from unicoll.group.process_group import ProcessGroup
    from unicoll.group.registry import BackendName as Backend
    from unicoll.mesh.device_mesh import DeviceMesh, dims_create, init_device_mesh
    from unicoll.net.stores import FileStore, HashStore, PrefixStore, Store, TCPStore
    from unicoll.parallel.exact_sum import ExactSum
    from unicoll.parallel.recovery import recover
    from unicoll.process.debug_level import (
        DebugLevel,
        get_debug_level,
        set_debug_level,
        set_debug_level_from_env,
    )
    from unicoll.trace.profile import profile

__version__ = "0.3.0"

_LAZY = {
    "DeviceMesh": "mesh.device_mesh",
    "init_device_mesh": "mesh.device_mesh",
    "dims_create": "mesh.layout",
    "device_mesh": "device_mesh",
    "SpawnError": "api.spawn",
    "breakpoint": "api.debugger",
    "dump_flight_recorder": "diagnosis.flight_dump",
    "spawn": "api.spawn",
    "metrics": "api.metrics",
    "profile": "trace.profile",
    "parallel": "parallel",
    "ExactSum": "parallel.exact_sum",
    "recover": "parallel.recovery",
    "Backend": "group.registry:BackendName",
    **{name: name for name in ("api", "arrays", "backend", "errors", "group", "net")},
    "ProcessGroup": "group.process_group",
    "Work": "calls.work",
    "register_rendezvous_handler": "bootstrap.store_locations",
    **dict.fromkeys(("add_hook", "annotate", "check_finite"), "api.hooks"),
    **dict.fromkeys(("Hook", "HookedCall"), "group.call_hooks"),
    **dict.fromkeys(("grow_group", "new_group", "shrink_group", "split_group"), "api.subgroups"),
    **dict.fromkeys(("new_subgroups", "new_subgroups_by_enumeration"), "api.subgroups"),
    **dict.fromkeys(("DebugLevel", "get_debug_level"), "process.debug_level"),
    **dict.fromkeys(("set_debug_level", "set_debug_level_from_env"), "process.debug_level"),
    **dict.fromkeys(("FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"), "net.stores"),
}
_LAZY_MODULES = {
    "api",
    "arrays",
    "backend",
    "device_mesh",
    "errors",
    "group",
    "metrics",
    "net",
    "parallel",
}
_OTHERS = (
    "api.collectives",
    "api.init",
    "api.objects",
    "api.p2p",
    "api.world",
    "arrays.types",
    "backend.contract",
    "calls.options",
    "calls.reduce_ops",
    "calls.status",
    "errors",
)
"""The modules that have the other names, which are imported together, so that no call imports
anything."""
_importing = RLock()
"""Two threads that import modules of one package at the same time could see them half imported."""


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: the launcher and torch import the package, and use none.

    So modules of the package do not use its names while they are imported.
    """
    import importlib

    if name not in _LAZY and name not in __all__:
        import sys

        from unicoll.api.mpi_names import hint

        text = f"module {__name__!r} has no attribute {name!r}{hint(name)}"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])
    with _importing:
        if name in _LAZY:
            path, _, inner = _LAZY[name].partition(":")
            module = importlib.import_module(f".{path}", __name__)
            globals()[name] = module if name in _LAZY_MODULES else getattr(module, inner or name)
        else:
            modules = [importlib.import_module(f".{each}", __name__) for each in _OTHERS]
            for other in {*__all__} - _LAZY.keys():
                found = next(vars(module)[other] for module in modules if other in vars(module))
                # The program may have set the name itself, which stays.
                globals().setdefault(other, found)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AuthenticationError",
    "Backend",
    "BackendUnavailableError",
    "CallOptions",
    "CollectiveMismatchError",
    "DeadlockError",
    "DebugLevel",
    "DeviceMesh",
    "DistArgumentError",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "DistTypeError",
    "ExactSum",
    "FileStore",
    "GroupAbortedError",
    "GroupMember",
    "HashStore",
    "Hook",
    "HookedCall",
    "MessageMismatchError",
    "NO_RANK",
    "NotInitializedError",
    "OperationTimeoutError",
    "Options",
    "P2POp",
    "PickleRefusedError",
    "PrefixStore",
    "ProcessGroup",
    "ProcessGroupNCCL",
    "QueueEmptyError",
    "RankLostError",
    "ReduceOp",
    "Registration",
    "SpawnError",
    "Status",
    "Store",
    "StoreTimeoutError",
    "TCPStore",
    "Work",
    "add_hook",
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
    "annotate",
    "barrier",
    "batch_isend_irecv",
    "breakpoint",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object_list",
    "check_finite",
    "default_pg_timeout",
    "destroy_process_group",
    "device_mesh",
    "dims_create",
    "dump_flight_recorder",
    "explain",
    "exscan",
    "gather",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_debug_level",
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
    "iprobe",
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
    "join",
    "metrics",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "probe",
    "profile",
    "recover",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "register_rendezvous_handler",
    "scan",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "sendrecv",
    "set_debug_level",
    "set_debug_level_from_env",
    "shrink_group",
    "spawn",
    "split_group",
    "supported_reductions",
    "waitany",
]
