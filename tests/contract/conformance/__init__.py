"""PyTorch's own tests of ``torch.distributed.rpc``, run on Weft; see ``CONTRIBUTING.md``."""
