"""Lookups and pushes of embedding tables that are spread over servers."""
