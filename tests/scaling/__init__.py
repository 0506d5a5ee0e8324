"""Messages, bytes and memory of the collectives of up to thousands of ranks."""
