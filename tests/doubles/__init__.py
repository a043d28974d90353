"""Doubles for tests of KVStow and of its hosts, under control: a clock, a fence, a registrar, a device, a store."""
