"""Options of layers."""

from __future__ import annotations

import pytest

from mmgate.errors import ConfigError
from mmgate.layers.parts.options import check_option


def test_an_unknown_value_is_refused_with_the_known_ones() -> None:
    check_option('init', 'paper', ('identity', 'paper'))
    with pytest.raises(ConfigError, match=r"^init='papre' is unknown; choose one of identity, paper\.$"):
        check_option('init', 'papre', ('identity', 'paper'))
