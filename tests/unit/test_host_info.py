"""The host information that the ranks of a group exchange, with stand-ins for their connections."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest

from gloo_fallback.transport.topology import HostInfo, TransportPreference, _exchange_host_info
from unicoll.errors import DistError, DistNetworkError


def connections_of(preference: int) -> Any:
    """The connections of a group of global ranks 4 and 7; the second sends ``preference``."""

    def fail(error: DistError) -> NoReturn:
        raise error

    mine = np.zeros(5, np.uint64)
    context = SimpleNamespace(name="pair", ranks=(4, 7), who=lambda r: f"rank {(4, 7)[r]} (host b)")
    return SimpleNamespace(
        rank=0,
        size=2,
        deterministic=False,
        context=context,
        plan=lambda sizes, dtype: SimpleNamespace(mine=mine),
        exchange=lambda plan: [plan.mine, np.array([9, preference, 1, 1, 0], np.uint64)],
        fail=fail,
    )


def test_the_information_of_each_rank_is_found() -> None:
    infos = _exchange_host_info(connections_of(TransportPreference.SHM))
    assert infos[1] == HostInfo(9, TransportPreference.SHM)


def test_the_error_names_the_rank_whose_information_is_invalid() -> None:
    with pytest.raises(
        DistNetworkError, match=r"^rank 7 \(host b\) sent invalid host information$"
    ) as caught:
        _exchange_host_info(connections_of(99))
    assert (caught.value.group, caught.value.rank) == ("pair", 7)
