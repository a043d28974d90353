"""The fleet tier: blocks in a store that several nodes share. `store` is the protocol of such a store."""
