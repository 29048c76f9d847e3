"""Small calls: latency, throughput and CPU time beside torch RPC and a raw socket."""
