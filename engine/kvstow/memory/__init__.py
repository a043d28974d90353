"""Host memory: reserved address space, paced pinning, the pool of slots."""
