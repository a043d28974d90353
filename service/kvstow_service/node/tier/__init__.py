"""The store below the pools of a node: its view of their memory, and what operators see of it."""
