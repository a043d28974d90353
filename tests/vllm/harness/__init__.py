"""A vLLM engine in which all is real but the forward, the sampler and the speed of copies.

vLLM's own scheduler, KV cache manager, block pool and output aggregator drive both halves of the connector, with
everything pickled that crosses processes in a deployment. Each KV value names the token prefix, the layer and the
rank that it belongs to; every forward reads what a model would read and compares. All chance comes from the seed.
"""
