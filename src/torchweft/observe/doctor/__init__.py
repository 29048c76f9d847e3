"""What ``torchweft doctor`` looks at: facts of each worker, and the checks of them.

Facts are gathered; checks are pure functions of facts, and return findings.
"""

from torchweft.observe.doctor.attaching import examine_group
from torchweft.observe.doctor.examining import examine
from torchweft.observe.doctor.findings import Diagnosis, Finding, Level
from torchweft.protocol.observing.facts import HostFacts, PairFacts
from torchweft.rpc.examining import gather

__all__ = [
    "Diagnosis",
    "Finding",
    "HostFacts",
    "Level",
    "PairFacts",
    "examine",
    "examine_group",
    "gather",
]
