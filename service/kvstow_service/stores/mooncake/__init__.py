"""Blocks in Mooncake Store.

Its library can end or hang the process that it runs in. So it runs in child processes that map the pool's memory:
`storechild` is their program, `childprocess` one of them, `childchannel` keeps one running, and `mooncakestore` is the
store that a tier uses.
"""
