"""The benchmark and the doctor."""
