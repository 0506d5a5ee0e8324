"""Helpers shared by several test directories."""
