"""The parts that outlive a service: the keeper, and what it holds for the next service."""
