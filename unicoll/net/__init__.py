"""Connections between processes: authentication, framing, interfaces, stores, control plane; environment and logs."""
