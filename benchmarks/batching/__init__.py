"""Batched calls: answers of a policy to many callers, beside torch RPC's own pattern."""
