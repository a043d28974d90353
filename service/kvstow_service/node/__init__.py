"""The node service: it owns the host memory that the engines of a node share."""
