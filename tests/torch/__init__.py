"""torch tensors and the torch.distributed plug-in."""
