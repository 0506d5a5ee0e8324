"""DeviceMesh in a module of torch.distributed's name: ``from unicoll.device_mesh import
init_device_mesh``."""

from unicoll.mesh.device_mesh import DeviceMesh, current_mesh, dims_create, init_device_mesh

__all__ = ["DeviceMesh", "current_mesh", "dims_create", "init_device_mesh"]
