"""What travels between workers, as bytes: frames and the messages in them. No I/O, no torch."""
