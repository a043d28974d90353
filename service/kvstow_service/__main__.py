"""`python -m kvstow_service` is the `kvstow` command."""

from kvstow_service.cli import main

main()
