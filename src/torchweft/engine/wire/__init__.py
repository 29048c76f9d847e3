"""The wire format: frames, and the messages in them, as bytes. No I/O, no torch."""
