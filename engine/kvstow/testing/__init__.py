"""Test doubles for users of the engine: a manual clock, latches, a device whose copies complete on command."""
