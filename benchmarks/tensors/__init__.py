"""Large tensors: throughput beside torch RPC, a plain copy and raw sockets."""
