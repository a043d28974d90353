"""Hosts of the engine. Importing this package starts nothing and needs none of the extras."""
