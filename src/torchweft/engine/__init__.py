"""What the public API is made of; private, from the bytes of a message up to the worker.

Imports go down only: worker, channels, io, codec, threads, protocol, wire.
"""
