"""Pipeline parallelism: a model cut into stages, micro-batches on their way through them."""
