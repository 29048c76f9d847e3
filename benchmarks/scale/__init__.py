"""Groups of 2 to 64 workers: start-up, shutdown, cost of an idle worker, calls to many peers."""
