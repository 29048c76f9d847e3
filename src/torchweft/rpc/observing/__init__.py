"""What a worker tells of itself; most of it is imported when somebody first asks."""
