"""Calls of many shapes, as a user's program makes them, beside torch RPC."""
