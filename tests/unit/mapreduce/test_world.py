from __future__ import annotations

from tests.tables import cases
from torchweft.mapreduce import world

NAMES_OF_TORCHOPT = """auto_init_rpc barrier default_worker_name_format get_local_rank
get_local_world_size get_rank get_worker_id get_world_info get_world_rank get_world_size not_on_rank
on_rank rank_all rank_non_zero_only rank_zero_only WorldInfo""".split()


def test_the_names_are_those_of_torchopt() -> None:
    assert sorted(world.__all__) == sorted(NAMES_OF_TORCHOPT)


@cases("name", NAMES_OF_TORCHOPT)
def test_each_is_defined_there(name: str) -> None:
    assert getattr(world, name).__module__ == world.__name__
