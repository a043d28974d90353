"""The table of all that can be wrong with a server: the cause, what is affected, and the command that fixes it."""

from kvstow_api.conditions import disks, hosts, pools

__all__ = ["disks", "hosts", "pools"]  # importing these modules fills the table
