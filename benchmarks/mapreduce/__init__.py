"""Maps over workers: rate, overhead, balance and meta-steps beside calls for each task."""
