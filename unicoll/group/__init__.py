"""One process group: its members, its operations, and the choice of a backend for each array."""
