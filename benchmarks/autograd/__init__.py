"""Distributed autograd: forward and backward through chains and fan-outs of calls."""
