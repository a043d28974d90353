"""What an engine and the node service say to each other over a Unix socket. Standard library and numpy only."""
