"""The connectors, which run inside the processes of an inference engine: one package for each of them."""
