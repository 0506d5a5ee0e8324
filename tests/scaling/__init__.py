"""Messages, bytes and memory against the formulas of docs/scaling.md."""
