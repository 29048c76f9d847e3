"""Groups of 2 to 64 workers: start-up, shutdown, what an idle worker takes, calls to many peers."""
