"""Doubles for tests of KVStow and of its hosts: a clock, a fence, a registrar and a device under control."""
