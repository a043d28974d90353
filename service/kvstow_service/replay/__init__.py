"""Replay of request traces through the calls that an inference connector makes.

Only `cudacache` imports torch: a replay on the CPU does without.
"""
