"""Where the project keeps what it makes for itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from gattn_viz.cache import cache_directory


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"GATTN_VIZ_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/gattn-viz"),
        ({"HOME": "/c"}, "/c/.cache/gattn-viz"),
    ],
)
def test_where_the_cache_is(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GATTN_VIZ_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == Path(expected)
