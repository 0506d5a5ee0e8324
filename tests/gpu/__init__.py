"""scripts/gpu_check and its rehearsal on the simulated device."""
