"""Replays request traces with the calls that an inference connector makes. It needs no torch."""
