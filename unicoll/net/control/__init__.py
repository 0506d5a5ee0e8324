"""The control plane: liveness of the ranks, failures of groups, and reports of what each rank is
doing."""
