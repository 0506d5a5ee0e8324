"""What every backend must do: results, order, refusals; and the public API over the CPU backend."""
