"""What scripts/fuzz.py feeds, and how."""
