"""Communicators of a library: creating, splitting, growing and destroying them."""
