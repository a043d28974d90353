"""The engine inside other people's processes, one package per inference engine."""
