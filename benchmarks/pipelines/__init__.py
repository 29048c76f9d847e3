"""Steps of pipelines on two workers, beside torch.distributed.pipelining."""
