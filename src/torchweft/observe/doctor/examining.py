"""Examines a group from one of its workers: gathers all facts, and has them checked."""

from __future__ import annotations

from torchweft.observe.doctor.checks import diagnose
from torchweft.observe.doctor.findings import Diagnosis, Finding, Level
from torchweft.protocol.observing.facts import HostFacts, PairFacts, decode_host, decode_pair
from torchweft.rpc import get_worker_infos, rpc_sync
from torchweft.rpc.examining import THOROUGH, tell_host, tell_pair

_TIMEOUT_S = THOROUGH.timeout_s


def examine(timeout: float = _TIMEOUT_S) -> Diagnosis:
    """Examines the group of this worker: each host, and each pair of workers. Blocks.

    Takes about 0.2 s for each pair, one after the other: the pairs would disturb one another.

    Args:
        timeout: Seconds for each worker, and each pair.
    """
    names = [each.name for each in get_worker_infos()]
    facts: list[HostFacts] = []
    failed: list[Finding] = []
    for name in names:
        try:
            facts.append(decode_host(rpc_sync(name, tell_host, timeout=timeout)))
        except Exception as error:
            text = f"does not answer: {type(error).__name__}: {error}"
            failed.append(Finding(Level.ERROR, "worker", name, text))
    answering = [each.worker for each in facts]
    pairs = [
        _measured(one, other, timeout) for one in answering for other in answering if one != other
    ]
    return Diagnosis((*failed, *diagnose(facts, pairs)))


def _measured(caller: str, callee: str, timeout: float) -> PairFacts:
    try:
        return decode_pair(rpc_sync(caller, tell_pair, (callee, timeout), timeout=timeout))
    except Exception as error:
        return PairFacts(caller, callee, f"{type(error).__name__}: {error}")
