"""Stores that the fleet tier keeps blocks in. Importing this package needs none of them."""
