"""What can be wrong with a server, in one table: cause, whom it concerns, and the command that mends it."""

from kvstow_api.conditions import disks, hosts, pools

__all__ = ["disks", "hosts", "pools"]  # which fill the table
