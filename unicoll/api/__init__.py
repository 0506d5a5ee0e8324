"""The public functions, with torch.distributed's names. Each finds its group and calls a method of
it."""
