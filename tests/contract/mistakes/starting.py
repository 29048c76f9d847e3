"""Mistakes that are made before a group exists."""

from __future__ import annotations

from tests.contract.mistakes.mistake import PROGRAM, Mistake

_TWO = ("RANK=0 python program.py", "RANK=1 python program.py")
_AT_PORT = "MASTER_ADDR=127.0.0.1 MASTER_PORT=PORT WORLD_SIZE=2"

STARTING = (
    Mistake(
        "A call before `init_rpc`",
        """
        import torch
        from torchweft import rpc

        rpc.rpc_sync("worker1", torch.add, args=(1, 2))  # <-
        """,
        r"NotInitialized: ",
        is_quick=True,
    ),
    Mistake(
        "`init_rpc` twice",
        """
        from torchweft import rpc

        options = rpc.RpcBackendOptions(init_method="tcp://127.0.0.1:0")
        rpc.init_rpc("trainer", rank=0, world_size=1, rpc_backend_options=options)
        try:
            rpc.init_rpc("trainer", rank=0, world_size=1)  # <-
        finally:
            rpc.shutdown()
        """,
        r"AlreadyInitialized: ",
        is_quick=True,
    ),
    Mistake(
        "No rank, and no launcher that gives one",
        """
        from torchweft import rpc

        rpc.init_rpc("trainer")  # <-
        """,
        r"ConfigurationError: ",
        is_quick=True,
    ),
    Mistake(
        "A name that no worker can have",
        """
        from torchweft import rpc

        rpc.init_rpc("my trainer", rank=0, world_size=1)  # <-
        """,
        r"ConfigurationError: ",
        is_quick=True,
    ),
    Mistake(
        "A rank in quotes",
        """
        from torchweft import rpc

        rpc.init_rpc("trainer", rank="0", world_size=1)  # <-
        """,
        r"ArgumentTypeError: ",
        is_quick=True,
    ),
    Mistake(
        "Two workers with one name",
        """
        from torchweft import rpc

        rpc.init_rpc("trainer")  # <-
        """,
        r"DuplicateName: ",
        starts=tuple(f"{_AT_PORT} {start}" for start in _TWO),
    ),
    Mistake(
        "A worker that never comes",
        """
        from torchweft import rpc

        options = rpc.RpcBackendOptions(init_timeout=3)
        rpc.init_rpc("trainer", rank=0, world_size=2, rpc_backend_options=options)  # <-
        """,
        r"RendezvousTimeout: ",
        starts=(f"{_AT_PORT} {PROGRAM}",),
    ),
    Mistake(
        "A port that is in use",
        """
        import os
        import socket
        from torchweft import rpc

        other = socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        rpc.init_rpc("trainer", rank=0, world_size=2)  # <-
        """,
        r"RendezvousError: ",
        starts=(f"{_AT_PORT} {PROGRAM}",),
    ),
    Mistake(
        "A variable that is spelt wrong",
        """
        from torchweft import rpc

        rpc.init_rpc("trainer", rank=0, world_size=1)  # <-
        """,
        r"ConfigurationError: ",
        starts=(f"{_AT_PORT} WEFT_RPC_TIMEOUT=5 {PROGRAM}",),
        shown="WEFT_RPC_TIMEOUT=5 python program.py",
    ),
    Mistake(
        "A size that cannot be read",
        """
        from torchweft import rpc

        rpc.init_rpc("trainer", rank=0, world_size=1)  # <-
        """,
        r"ConfigurationError: ",
        starts=(f"{_AT_PORT} WEFT_POOL_LIMIT_BYTES=1GBit {PROGRAM}",),
        shown="WEFT_POOL_LIMIT_BYTES=1GBit python program.py",
    ),
    Mistake(
        "Other hosts, but no secret",
        """
        from torchweft import rpc

        options = rpc.RpcBackendOptions(listen="0.0.0.0")
        rpc.init_rpc("trainer", rank=0, world_size=2, rpc_backend_options=options)  # <-
        """,
        r"ConfigurationError: ",
        is_quick=True,
        shown='rpc.RpcBackendOptions(listen="0.0.0.0")',
    ),
    Mistake(
        "Workers with different secrets",
        """
        import os
        from torchweft import rpc

        options = rpc.RpcBackendOptions(init_timeout=5)
        rpc.init_rpc("worker" + os.environ["RANK"], rpc_backend_options=options)  # <-
        """,
        r"RendezvousError: ",
        starts=tuple(
            f"{_AT_PORT} WEFT_SECRET={secret * 16} {start}"
            for secret, start in zip(("0123", "4567"), _TWO, strict=True)
        ),
        shown="WEFT_SECRET=..., not the same for both",
    ),
    Mistake(
        'No `if __name__ == "__main__":` around what starts processes',
        """
        import torch.multiprocessing as mp
        import torchweft as weft

        def run(rank):
            weft.init_rpc(f"worker{rank}", rank=rank, world_size=2)
            weft.shutdown()

        mp.spawn(run, nprocs=2)  # <-
        """,
        r"RuntimeError: *$|An attempt has been made",
        starts=(f"{_AT_PORT} {PROGRAM}",),
    ),
)
