from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from torchweft import rpc
from torchweft.engine.worker import current
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.mapreduce import world
from torchweft.mapreduce.world import auto_init_rpc, get_world_info

VARIABLES = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
WEFT_VARIABLES = "WEFT_WORKER_NAME WEFT_INIT_METHOD TORCHELASTIC_RUN_ID".split()


@pytest.fixture(autouse=True)
def at_exit(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Simulates a process without a launcher; yields its exit handlers."""
    for variable in (*VARIABLES, *WEFT_VARIABLES):
        monkeypatch.delenv(variable, raising=False)
    registered: list[tuple[Any, ...]] = []
    patched = SimpleNamespace(register=lambda *given: registered.append(given))
    monkeypatch.setattr(world, "atexit", patched)
    yield registered
    rpc.shutdown()


def own_name() -> str:
    return rpc.get_worker_info().name


@pytest.mark.parametrize(("code", "stays"), [(None, True), (0, True), (3, False), ("bad", False)])
def test_a_program_that_ends_itself_leaves_at_once_where_it_ends_badly(
    code: object, stays: bool
) -> None:
    @auto_init_rpc()
    def main() -> None:
        raise SystemExit(code)

    with pytest.raises(SystemExit):
        main()
    assert current.is_set() == stays


def by_place(rank: int, size: int, local_rank: int, local_size: int) -> str:
    return f"w-{rank}-{size}-{local_rank}-{local_size}"


@pytest.mark.parametrize(
    ("formats", "launched", "expected"),
    [((), None, "worker0"), ((), "trainer", "trainer"), ((by_place,), "trainer", "w-0-1-0-1")],
)
def test_the_format_of_the_program_comes_before_the_name_of_the_launcher(
    formats: tuple[Callable[..., str], ...],
    launched: str | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if launched is not None:
        monkeypatch.setenv("WEFT_WORKER_NAME", launched)
    assert auto_init_rpc(None, *formats)(own_name)() == expected
    assert get_world_info().worker_name == expected


def test_options_are_used_and_not_changed() -> None:
    options = rpc.RpcBackendOptions(num_worker_threads=3)
    assert auto_init_rpc(rpc_backend_options=options, backend="any")(own_name)() == "worker0"
    assert options.store is None
    rpc.shutdown()
    store = HashStore()
    options = rpc.RpcBackendOptions(store=store)
    assert auto_init_rpc(rpc_backend_options=options)(own_name)() == "worker0"
    assert store.check(["round"])


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"RANK": "1"},
            "RANK is 1, but WORLD_SIZE is not set; start the script with 'torchweft run'",
        ),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set"),
        ({"RANK": "0", "WEFT_INIT_METHOD": "weft://x"}, "use '--restart group'"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x', which is no number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, but WORLD_SIZE is 2: ranks go from 0 to 1"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT not set"),
    ],
)
def test_a_launcher_that_says_half(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError) as caught:
        auto_init_rpc()(own_name)()
    assert expected in str(caught.value)


def main_of_nothing() -> None:
    raise AssertionError


def test_a_main_function_in_the_place_of_worker_init_fn() -> None:
    main: Any = auto_init_rpc(main_of_nothing)  # It could be a worker_init_fn.
    for call in (main, lambda: main(5), lambda: main(steps=5)):
        with pytest.raises(ArgumentTypeError, match=r"main_of_nothing.*@auto_init_rpc\(\)"):
            call()
    with pytest.raises(ArgumentTypeError, match="decorates one function"):
        auto_init_rpc()(5)  # type: ignore[arg-type]
