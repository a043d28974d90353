"""What outlives the service: the keeper, and what it holds."""
