"""The pools of a node: their memory, their namespaces and their sessions."""
