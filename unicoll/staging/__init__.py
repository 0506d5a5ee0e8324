"""Device arrays over backends of host arrays: copies through pinned memory, or device pointers if
MPI takes them."""
