"""The MPI backend under mpirun."""
