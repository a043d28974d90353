"""The fleet tier of the node service: the node's own transfers between its pools and a store that nodes share."""
