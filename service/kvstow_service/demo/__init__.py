"""The demo: `python -m kvstow_service.demo`, or `make demo`."""
