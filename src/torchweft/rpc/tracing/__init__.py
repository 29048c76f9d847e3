"""Records what one worker does while it is traced; see ``docs/protocols/tracing.md``.

``recorder`` switches it on and off. ``calls``, ``links`` and ``passes`` derive the types that note,
and ``rows`` keeps the records. ``heads`` reads the kept part of a message, and ``profiling`` takes
what ``torch.profiler`` has recorded. Other workers reach all of it by ``service``.
"""
