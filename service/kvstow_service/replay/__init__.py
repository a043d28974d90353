"""Replay of request traces through the calls that an inference connector makes. It needs no torch."""
