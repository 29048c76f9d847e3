"""Tells OpenTelemetry of each call, part of a backward pass and step of an optimizer, as spans.

``spans`` switches that on and off in one worker, and ``tracer`` makes the spans. No other file
imports OpenTelemetry: its API, for which the program brings an SDK and an exporter.
"""
