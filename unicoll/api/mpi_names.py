"""What functions of mpi4py are called here, for errors about names that do not exist; docs/hpc.md
has all of them."""

from __future__ import annotations

_ARRAYS = {
    "Allgather": "all_gather_into_tensor",
    "Allgatherv": "all_gather",
    "Allreduce": "all_reduce",
    "Alltoall": "all_to_all_single",
    "Alltoallv": "all_to_all_single",
    "Alltoallw": "all_to_all",
    "Barrier": "barrier",
    "Bcast": "broadcast",
    "Exscan": "exscan",
    "Gather": "gather",
    "Gatherv": "gather",
    "Iprobe": "iprobe",
    "Irecv": "irecv",
    "Isend": "isend",
    "Probe": "probe",
    "Recv": "recv",
    "Reduce": "reduce",
    "Reduce_scatter": "reduce_scatter",
    "Reduce_scatter_block": "reduce_scatter_tensor",
    "Scan": "scan",
    "Scatter": "scatter",
    "Scatterv": "scatter",
    "Send": "send",
    "Sendrecv": "sendrecv",
}
_OTHERS = {
    "ANY_SOURCE": "src=None",
    "ANY_TAG": "tag=None",
    "COMM_WORLD": "the default group, which the functions use",
    "Compute_dims": "dims_create",
    "Get_rank": "get_rank",
    "Get_size": "get_world_size",
    "PROC_NULL": "NO_RANK",
    "Split": "split_group",
    "allgather": "all_gather_object",
    "allreduce": "all_reduce for arrays, all_gather_object for objects",
    "alltoall": "all_to_all for arrays, all_gather_object for objects",
    "bcast": "broadcast for arrays, broadcast_object_list for objects",
}


def hint(name: str) -> str:
    """The end of an error about a name that does not exist; "" if it is none of mpi4py's."""
    blocking = name[1:].capitalize() if name.startswith("I") and name not in _ARRAYS else name
    here = _OTHERS.get(name) or _ARRAYS.get(blocking)
    if here is None:
        return ""
    background = " with async_op=True" if blocking != name else ""
    return f"; mpi4py's {name} is here: {here}{background} (docs/hpc.md)"
