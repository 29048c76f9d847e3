"""Records what one worker does while it is traced; see ``docs/protocols/tracing.md``.

``recorder`` notes, ``links`` and ``passes`` derive the types that note, ``heads`` reads the kept
part of a message, ``profiling`` takes what ``torch.profiler`` has recorded, and other workers reach
all of it by ``service``.
"""
