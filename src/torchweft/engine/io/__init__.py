"""Control bytes between two processes: Unix sockets on one host, TCP between hosts."""
