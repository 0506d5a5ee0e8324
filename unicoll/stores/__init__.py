"""Key-value stores: how the processes of a job find each other."""
