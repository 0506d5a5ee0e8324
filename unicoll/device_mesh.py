"""``unicoll.device_mesh``: torch.distributed's place for DeviceMesh."""

from .mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
