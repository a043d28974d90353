"""The messages between an engine and the node service over a Unix socket. Standard library and numpy only."""
