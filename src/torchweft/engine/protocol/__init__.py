"""State machines: events and the time in, actions out. No I/O, clock, thread or torch."""
