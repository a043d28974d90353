"""What can be wrong with a server, in one table: cause, whom it concerns, and the command that mends it."""
