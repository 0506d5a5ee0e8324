"""Device meshes: the ranks as a grid with named dimensions, and a group for each row of each
dimension.

:mod:`unicoll.device_mesh` has torch's module name. Start with ``device_mesh.py``.
"""
