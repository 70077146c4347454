"""The bytes: where they come from, and how they reach the devices."""
