"""Replay of request traces through the calls that an inference connector makes.

Only `pattern` and `ranks` import torch: a replay of the control plane alone does without.
"""
