"""Blocks in files on the node's own disks."""
